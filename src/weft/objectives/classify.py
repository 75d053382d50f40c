"""Classification: one of several labels for a text, or for a pair of texts."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.batch import Batch, framed, framed_lengths
from weft.data.examples import Examples
from weft.data.shards import Side
from weft.data.table import Kind, Row, read_texts
from weft.errors import ConfigError
from weft.evaluate.agreement import label_intervals, label_metrics
from weft.models.base import LanguageModel
from weft.objectives.rows import Numbers, RowObjective, head_outputs, read_columns, read_framed
from weft.progress import bar
from weft.recipe import objective as config
from weft.training.objective import Prediction, Results

S = TypeVar("S", bound=config.SequenceObjective)
SHOWN_MISTAKES = 8  # in the report
MAX_NAMED = 5  # labels named in a message


@dataclass(frozen=True)
class ZeroShot:
    """Classification by labels that the model was not trained on: the `template` of a label's hypothesis, with {} for
    the label, and whether several labels may be right."""

    template: str = "This example is {}."
    multi_label: bool = False

    def __post_init__(self) -> None:
        if "{}" not in self.template:
            raise ConfigError(f"--template {self.template!r}: expected a sentence with {{}} for the label")


class SequenceObjective(RowObjective[S]):
    """Predict something about a whole text, or about a pair of texts."""

    usage = "weft classify {run} < lines.txt"
    answer: ClassVar[str]  # the setting that names the column of targets, and an example's field
    answer_kind: ClassVar[Kind]

    def columns(self) -> Mapping[str, Kind]:
        texts: dict[str, Kind] = dict.fromkeys(self.settings.input_columns, "text")
        return {**texts, getattr(self.settings, self.answer): self.answer_kind}

    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        column = getattr(self.settings, self.answer)
        for row, ids in zip(rows, self.ids(rows, self.fields), strict=True):
            value = row.values[column]
            number = self.label_ids.number(value, row) if self.answer_kind == "label" else float(value)
            yield {self.answer: number, **ids}

    @property
    def fields(self) -> dict[str, str]:
        """An example's fields of ids, and the columns that they come from."""
        return dict(zip(("first", "second"), self.settings.input_columns, strict=False))

    def lengths(self, examples: Examples) -> Numbers:
        return framed_lengths(examples, tuple(self.fields), self.frame, length=self.length)

    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        first, second = (
            [examples.ids(field, n).tolist() for n in numbers] if field in examples.fields else None
            for field in ("first", "second")
        )
        tokens, mask, segments = framed(first or [], second, self.frame, length=self.length)
        answers = examples.values(self.answer)[numbers]
        targets = torch.from_numpy(answers.astype(np.int64 if self.answer_kind == "label" else np.float32))
        return Batch(tokens, targets, mask=mask, segments=segments)

    @abstractmethod
    def predict(self, model: LanguageModel, texts: Sequence[str], second: Sequence[str] | None = None) -> Sequence[Any]:
        """Return the prediction for each text, or pair of texts."""

    @abstractmethod
    def present(self, text: str, prediction: Any) -> Prediction:
        """Return a text's prediction for people and programs to read."""

    def predictions(
        self, model: LanguageModel, file: str, column: str | None = None, *, second: str | None = None
    ) -> Iterator[Prediction]:
        first, other, others = column or self.settings.text, second or self.settings.second, None
        if other is None:
            texts = read_texts(file, column, self.settings.text)
        else:
            texts, others = read_columns(file, first, other, expected=f"{self.folder.path}: expects pairs of texts")
        for text, prediction in zip(texts, self.predict(model, texts, others), strict=True):
            yield self.present(text, prediction)

    def outputs(
        self, model: LanguageModel, texts: Sequence[str], second: Sequence[str] | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the head's outputs for each text, or pair of texts: (texts, outputs)."""
        if second is not None and len(second) != len(texts):
            raise ConfigError(f"second: {len(second)} texts for {len(texts)} first ones; each needs a partner")
        first, other = self.settings.text, self.settings.second
        # an imported model may have been trained on pairs: its files don't say
        either = other is None and self.folder.origin.is_dir()
        if not either and (other is None) != (second is None):
            expected = "one text" if other is None else f"two texts, '{first}' and '{other}',"
            raise ConfigError(f"{self.folder.path}: this run expects {expected} at a time")
        ids = self.tokenizer.encode_batch(list(texts))
        return self._read(model, ids, None if second is None else self.tokenizer.encode_batch(list(second)))

    def _read(
        self, model: LanguageModel, ids: Sequence[list[int]], others: Sequence[list[int]] | None
    ) -> npt.NDArray[np.float32]:
        outputs = np.zeros((len(ids), self.settings.outputs() or 1), dtype=np.float32)
        with bar("reading", len(ids)) as advance:
            for numbers, part in read_framed(self, model, ids, others=others):
                outputs[numbers] = part
                advance(len(numbers))
        return outputs


class Classify(SequenceObjective[config.Classify]):
    """−log p of each row's label."""

    answer, answer_kind = "label", "label"

    def output_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs, batch.targets, reduction="sum")

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        outputs = ((logits, batch.targets) for logits, batch in head_outputs(model, batches))
        return classification_metrics(outputs, self.labels)

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        """Return the metrics over all rows of a split, and the mistakes with the highest probabilities."""
        worst: list[tuple[float, int, int, Batch, int]] = []

        def outputs() -> Iterator[tuple[Tensor, Tensor]]:
            for logits, batch in head_outputs(model, self.batches(side)):
                shares, predicted = logits.softmax(-1).max(-1)
                wrong = (predicted != batch.targets).nonzero()[:, 0].tolist()
                mistakes = [(float(shares[n]), int(batch.targets[n]), int(predicted[n]), batch, n) for n in wrong]
                worst[:] = nlargest(SHOWN_MISTAKES, [*worst, *mistakes], key=lambda mistake: mistake[0])
                yield logits, batch.targets

        metrics = classification_metrics(outputs(), self.labels, intervals=True)
        rows = [
            [self._text(batch, n), self.labels[actual], self.labels[predicted], f"{share:.1%}"]
            for share, actual, predicted, batch, n in worst
        ]
        return Results(metrics, table=[["text", "actual", "predicted", "probability"], *rows] if rows else [])

    def _text(self, batch: Batch, row: int) -> str:
        ids, segments = batch.tokens[row], batch.segments
        if segments is None:
            return self.tokenizer.decode(ids.tolist())
        return "\n".join(self.tokenizer.decode(ids[segments[row] == side].tolist()) for side in (0, 1))

    def predict(
        self, model: LanguageModel, texts: Sequence[str], second: Sequence[str] | None = None
    ) -> list[dict[str, float]]:
        """Return the probability of each label for each text, or pair of texts, the likeliest first."""
        shares = torch.from_numpy(self.outputs(model, texts, second)).softmax(-1).tolist()
        return [dict(sorted(zip(self.labels, row, strict=True), key=lambda pair: -pair[1])) for row in shares]

    def zero_shot(
        self, model: LanguageModel, texts: Sequence[str], labels: Sequence[str], *, options: ZeroShot
    ) -> list[dict[str, float]]:
        """Return the probability of each of `labels`, which need no training, for each text, the likeliest first.

        A model of natural-language inference judges whether the text entails the hypothesis made of a label (Yin et al.
        2019). The labels compete, or each has its own probability against contradiction if several may be right.
        """
        entails = next((n for n, name in enumerate(self.labels) if name.lower().startswith("entail")), None)
        if entails is None:
            names = ", ".join(self.labels[:MAX_NAMED])
            needs = "--labels needs a model of natural-language inference, with a label 'entailment'"
            raise ConfigError(f"{self.folder.path}: its labels are {names}; {needs}")
        hypotheses = self.tokenizer.encode_batch([options.template.replace("{}", label) for label in labels])
        encoded = self.tokenizer.encode_batch(list(texts))
        pairs = [(ids, hypothesis) for ids in encoded for hypothesis in hypotheses]
        logits = torch.from_numpy(self._read(model, [ids for ids, _ in pairs], [other for _, other in pairs]))
        if options.multi_label or len(labels) == 1:
            contradicts = -1 if entails == 0 else 0  # as transformers chooses it, by its number
            shares = logits[:, [contradicts, entails]].softmax(-1)[:, 1].view(-1, len(labels))
        else:
            shares = logits[:, entails].view(-1, len(labels)).softmax(-1)
        rows = shares.tolist()
        return [dict(sorted(zip(labels, row, strict=True), key=lambda pair: -pair[1])) for row in rows]

    def present(self, text: str, prediction: dict[str, float]) -> Prediction:
        label, share = next(iter(prediction.items()))
        return Prediction(f"{label}\t{share:.4f}\t{text}", {"text": text, "label": label, "labels": prediction})


def classification_metrics(
    outputs: Iterable[tuple[Tensor, Tensor]], labels: Sequence[str], *, intervals: bool = False
) -> dict[str, Any]:
    """Return the mean −log p of the right label and the metrics of labels, with a baseline and `intervals` on request.

    `outputs` yields logits (N, labels) and targets (N,), or (N, words, labels) and (N, words) with -1 for no target.
    """
    losses, actual, predicted, rows, count = list[float](), list[int](), list[int](), list[int](), 0
    for logits, targets in outputs:
        real = targets >= 0
        losses += F.cross_entropy(logits[real], targets[real], reduction="none").tolist()
        actual += targets[real].tolist()
        predicted += logits[real].argmax(-1).tolist()
        rows += (count + real.nonzero()[:, 0]).tolist()
        count += len(targets)
    metrics = {"loss": sum(losses) / max(1, len(losses)), **label_metrics(actual, predicted, labels)}
    return metrics | (label_intervals(actual, predicted, losses=losses, rows=rows) if intervals else {})
