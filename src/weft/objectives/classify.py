"""An answer for a whole text, or for a pair of texts: one of several labels, or a number."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.data.batch import Batch
from weft.data.collate import framed, labelled_batch, sentence_lengths
from weft.data.examples import Examples, encoded
from weft.data.labels import label_names
from weft.data.table import Kind, Row
from weft.errors import ConfigError, DataError
from weft.evaluate.classification import classified, correlated
from weft.models.base import LanguageModel
from weft.objectives.losses import given
from weft.objectives.objective import Ending, Tokenizers
from weft.recipe.config import Recipe
from weft.recipe.objective import Classify, Score
from weft.recipe.settle import Choice
from weft.text.tokenizer import Tokenizer

READ_TOKENS = 8192  # at once, padding counted


class _Sentences:
    """What both kinds of answer share: the text, or both texts, of a row."""

    goal: Classify | Score
    answer_kind: Kind

    def columns(self) -> Mapping[str, Kind]:
        texts: dict[str, Kind] = dict.fromkeys(self._texts(), "text")
        return {**texts, self.goal.answer: self.answer_kind}

    def texts(self, values: Mapping[str, Any], side: str) -> Iterator[str]:
        if side == "target":
            yield from (values[column] for column in self._texts())

    def lengths(self, examples: Examples, recipe: Recipe, tokenizers: Tokenizers) -> npt.NDArray[np.int64]:
        return sentence_lengths(examples, tokenizers.target, recipe.batch.length)

    def batch(self, examples: Examples, rows: npt.NDArray[np.int64], recipe: Recipe, tokenizers: Tokenizers) -> Batch:
        return labelled_batch(examples, rows, tokenizers.target, length=recipe.batch.length)

    def _texts(self) -> tuple[str, ...]:
        return (self.goal.text,) if self.goal.second is None else (self.goal.text, self.goal.second)

    def _fields(self) -> dict[str, str]:
        return dict(zip(("first", "second"), self._texts(), strict=False))


class LabelCraft(_Sentences):
    """One of several labels."""

    answer_kind = "label"

    def __init__(self, goal: Classify):
        self.goal: Classify = goal

    def settle(self, recipe: Recipe, rows: Iterable[Row]) -> tuple[Recipe, list[Choice]]:
        """All labels of the training rows, and a head with as many answers."""
        return settle_labels(recipe, (row.values[self.goal.label] for row in rows))

    def examples(self, recipe: Recipe, rows: Iterable[Row], tokenizers: Tokenizers) -> Iterator[dict[str, Any]]:
        names = recipe.objective.labels  # type: ignore[union-attr]
        assert names is not None, "settled before"
        label = self.goal.label
        for example in encoded(rows, tokenizers.target, texts=self._fields(), labels={label: names}):
            yield {"label": example.pop(label), **example}

    def figures(self, model: LanguageModel, batches: Iterable[Batch], recipe: Recipe) -> dict[str, float]:
        """Mean −log p of the right label, accuracy, macro F1, Matthews' correlation."""
        loss, truth, told = _answers(model, batches)
        return {"loss": loss} | classified(truth, told, self._names(recipe)).numbers()

    def conclude(
        self, model: LanguageModel, examples: Examples, batches: Iterable[Batch], recipe: Recipe, tokenizers: Tokenizers
    ) -> Ending:
        """The same over all that was held out, with the confusion matrix."""
        loss, truth, told = _answers(model, batches)
        found = classified(truth, told, self._names(recipe))
        figures = {"loss": loss} | found.numbers() | {"labels": list(found.labels), "matrix": found.matrix.tolist()}
        return Ending(figures)

    def _names(self, recipe: Recipe) -> tuple[str, ...]:
        return recipe.objective.labels or ()  # type: ignore[union-attr]


class ScoreCraft(_Sentences):
    """A number."""

    answer_kind = "number"

    def __init__(self, goal: Score):
        self.goal: Score = goal

    def settle(self, recipe: Recipe, rows: Iterable[Row]) -> tuple[Recipe, list[Choice]]:
        return with_labels(recipe, 1), []

    def examples(self, recipe: Recipe, rows: Iterable[Row], tokenizers: Tokenizers) -> Iterator[dict[str, Any]]:
        column = self.goal.score
        for example in encoded(rows, tokenizers.target, texts=self._fields(), numbers=[column]):
            yield {"score": float(example.pop(column)), **example}

    def figures(self, model: LanguageModel, batches: Iterable[Batch], recipe: Recipe) -> dict[str, float]:
        """The mean squared error, and how the told numbers go with the true ones."""
        truth, told = _numbers(model, batches)
        error = float(np.mean((truth - told) ** 2))
        return {"loss": error} | (correlated(truth, told).numbers() if len(truth) > 1 else {})

    def conclude(
        self, model: LanguageModel, examples: Examples, batches: Iterable[Batch], recipe: Recipe, tokenizers: Tokenizers
    ) -> Ending:
        return Ending(dict(self.figures(model, batches, recipe)))


def settle_labels(recipe: Recipe, labels: Iterable[str]) -> tuple[Recipe, list[Choice]]:
    """The recipe with the labels that occur, unless it names them, and a head with as many answers."""
    goal, made = recipe.objective, []
    given = goal.labels  # type: ignore[union-attr]
    if given is not None and (len(given) < 2 or len(set(given)) < len(given)):
        raise ConfigError(f"objective.labels = {list(given)}: expected two or more, each of them once")
    if given is None:
        names = label_names(labels)
        if len(names) < 2:
            raise DataError(f"the training rows have the label {', '.join(names)!r} alone; at least two are needed")
        recipe = recipe.replace(objective={**goal.model_dump(exclude_none=True), "labels": tuple(names)})
        some = ", ".join(names[:8]) + (f" … ({len(names)})" if len(names) > 8 else "")
        made.append(Choice("objective.labels", some, "those of the training rows"))
    return with_labels(recipe, len(recipe.objective.labels)), made  # type: ignore[union-attr,arg-type]


def with_labels(recipe: Recipe, labels: int) -> Recipe:
    """The recipe with a head that tells so many answers apart."""
    model = recipe.model.model_dump(exclude_none=True)
    return recipe.replace(model={**model, "head": {**model["head"], "labels": labels}})


@torch.no_grad()
def _told(model: LanguageModel, batches: Iterable[Batch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the head says (rows, labels), and the targets, batch by batch, on the host."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        for batch in batches:
            there = batch.to(device)
            yield model.forward(there.tokens, **given(there)).float().cpu(), batch.targets
    finally:
        model.train(was_training)


def _answers(model: LanguageModel, batches: Iterable[Batch]) -> tuple[float, list[int], list[int]]:
    loss, truth, told = 0.0, [], []
    for logits, targets in _told(model, batches):
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        truth += targets.tolist()
        told += logits.argmax(-1).tolist()
    return loss / max(1, len(truth)), truth, told


def _numbers(model: LanguageModel, batches: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(targets.double().numpy(), found[:, 0].double().numpy()) for found, targets in _told(model, batches)]
    return np.concatenate([truth for truth, _ in pairs]), np.concatenate([told for _, told in pairs])


# ---- a trained model's answers


@torch.no_grad()
def predict(
    model: LanguageModel,
    tokenizer: Tokenizer,
    first: Sequence[str],
    second: Sequence[str] | None = None,
    *,
    length: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> np.ndarray:
    """What the head says of each text, or pair of texts: (texts, labels) logits, in the order of the texts."""
    device = next(model.parameters()).device
    ids = tokenizer.encode_batch(list(first))
    others = None if second is None else tokenizer.encode_batch(list(second))
    lengths = [len(one) + (0 if others is None else len(others[n])) for n, one in enumerate(ids)]
    found: dict[int, np.ndarray] = {}
    for some in of_like_length(lengths):
        pair = None if others is None else [others[n] for n in some]
        tokens, mask, segments = framed([ids[n] for n in some], pair, tokenizer, length=length)
        asked = {"mask": mask.to(device)} | ({} if segments is None else {"segments": segments.to(device)})
        found |= zip(some, model.forward(tokens.to(device), **asked).float().cpu().numpy(), strict=True)
        if progress is not None:
            progress(len(some))
    return np.stack([found[n] for n in range(len(ids))])


def of_like_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of all texts, the longest first, as many at a time as may be read at once."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    begin = 0
    while begin < len(order):
        end = begin + max(1, READ_TOKENS // (lengths[order[begin]] + 3))  # beside special tokens
        yield order[begin:end]
        begin = end
