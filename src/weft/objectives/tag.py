"""A label for every word."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.data.batch import Batch
from weft.data.collate import framed, framed_room, sentence_lengths, tagged_batch, tagged_example
from weft.data.examples import Examples
from weft.data.table import Kind, Row
from weft.errors import DataError
from weft.evaluate.classification import classified
from weft.models.base import LanguageModel
from weft.objectives.classify import of_like_length, settle_labels
from weft.objectives.losses import given
from weft.objectives.objective import Ending, Tokenizers
from weft.recipe.config import Recipe
from weft.recipe.objective import Tag
from weft.recipe.settle import Choice
from weft.text.tokenizer import Tokenizer


class TagCraft:
    """Two columns with as many entries each: words, and their tags."""

    def __init__(self, goal: Tag):
        self.goal = goal

    def columns(self) -> Mapping[str, Kind]:
        return {self.goal.words: "words", self.goal.tags: "words"}

    def texts(self, values: Mapping[str, Any], side: str) -> Iterator[str]:
        if side == "target":
            yield " ".join(values[self.goal.words])

    def settle(self, recipe: Recipe, rows: Iterable[Row]) -> tuple[Recipe, list[Choice]]:
        return settle_labels(recipe, (tag for row in rows for tag in row.values[self.goal.tags]))

    def examples(self, recipe: Recipe, rows: Iterable[Row], tokenizers: Tokenizers) -> Iterator[dict[str, Any]]:
        places = {name: at for at, name in enumerate(recipe.objective.labels or ())}  # type: ignore[union-attr]
        for row in rows:
            words, tags = row.values[self.goal.words], row.values[self.goal.tags]
            unknown = next((tag for tag in tags if tag not in places), None)
            if unknown is not None:
                known = ", ".join(list(places)[:12])
                raise DataError(
                    f"{row.where}: '{self.goal.tags}' holds {unknown!r}, which no training row has; known: {known}"
                )
            try:
                yield tagged_example(tokenizers.target, words, [places[tag] for tag in tags])
            except DataError as error:
                raise DataError(f"{row.where}: {error}") from None

    def lengths(self, examples: Examples, recipe: Recipe, tokenizers: Tokenizers) -> npt.NDArray[np.int64]:
        return sentence_lengths(examples, tokenizers.target, recipe.batch.length)

    def batch(self, examples: Examples, rows: npt.NDArray[np.int64], recipe: Recipe, tokenizers: Tokenizers) -> Batch:
        return tagged_batch(examples, rows, tokenizers.target, length=recipe.batch.length)

    def figures(self, model: LanguageModel, batches: Iterable[Batch], recipe: Recipe) -> dict[str, float]:
        """Mean −log p of the right tag of a word, accuracy, macro F1, Matthews' correlation."""
        figures, _ = _judge(model, batches, recipe)
        return figures

    def conclude(
        self, model: LanguageModel, examples: Examples, batches: Iterable[Batch], recipe: Recipe, tokenizers: Tokenizers
    ) -> Ending:
        figures, matrix = _judge(model, batches, recipe)
        names = list(recipe.objective.labels or ())  # type: ignore[union-attr]
        return Ending({**figures, "labels": names, "matrix": matrix})


@torch.no_grad()
def _judge(model: LanguageModel, batches: Iterable[Batch], recipe: Recipe) -> tuple[dict[str, float], list[list[int]]]:
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    loss, truth, told = 0.0, [], []
    try:
        for batch in batches:
            there = batch.to(device)
            logits = model.forward(there.tokens, **given(there)).float().cpu()[batch.loss_mask]
            targets = batch.targets[batch.loss_mask]
            loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            truth += targets.tolist()
            told += logits.argmax(-1).tolist()
    finally:
        model.train(was_training)
    found = classified(truth, told, recipe.objective.labels or ())  # type: ignore[union-attr]
    return {"loss": loss / max(1, len(truth))} | found.numbers(), found.matrix.tolist()


# ---- a trained model's answers


@torch.no_grad()
def tag_words(
    model: LanguageModel,
    tokenizer: Tokenizer,
    sentences: Sequence[Sequence[str]],
    *,
    length: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[np.ndarray]:
    """What the head says of each word of each sentence, (words, labels) logits; longer ones are read in pieces.

    `progress` counts words.
    """
    device = next(model.parameters()).device
    found = [np.zeros((len(words), 0), dtype=np.float32) for words in sentences]
    room, before = framed_room(tokenizer, length)
    pieces = [
        (number, *piece)
        for number, words in enumerate(sentences)
        for piece in _pieces(tagged_example(tokenizer, words, range(len(words))), room)
    ]
    for some in of_like_length([len(ids) for _, ids, _ in pieces]):
        tokens, mask, _ = framed([pieces[n][1] for n in some], None, tokenizer, length=length)
        answers = model.forward(tokens.to(device), mask=mask.to(device)).float().cpu().numpy()
        for n, logits in zip(some, answers, strict=True):
            number, _, words = pieces[n]
            if not found[number].shape[1]:
                found[number] = np.zeros((len(sentences[number]), logits.shape[-1]), dtype=np.float32)
            for word, at in words.items():
                found[number][word] = logits[before + at]
        if progress is not None:
            progress(sum(len(pieces[n][2]) for n in some))
    return found


def _pieces(example: Mapping[str, Sequence[int]], room: int | None) -> Iterator[tuple[list[int], dict[int, int]]]:
    """A sentence in pieces of up to `room` tokens, cut between words: their tokens, and each word's first place."""
    ids, marks = list(example["first"]), list(example["tags"])
    begin = 0
    while begin < len(ids):
        end = len(ids) if room is None else min(len(ids), begin + room)
        if end < len(ids):  # a word that is longer than all the room is cut itself
            end = next((at for at in range(end, begin, -1) if marks[at] >= 0), end)
        yield ids[begin:end], {word: at for at, word in enumerate(marks[begin:end]) if word >= 0}
        begin = end
