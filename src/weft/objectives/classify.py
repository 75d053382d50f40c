"""One of several labels for a text, or for a pair of texts."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from weft.objectives.rows import Numbers, RowObjective, check_finite, head_outputs, read_framed, read_pairs
from weft.progress import bar
from weft.recipe import objective as config
from weft.training.objective import Prediction, Results

S = TypeVar("S", bound=config.SequenceObjective)
MISTAKES = 8  # shown in the report


class SequenceObjective(RowObjective[S]):
    """What objectives share that predict something about a whole text, or about a pair of texts."""

    usage = "weft classify {run} < lines.txt"
    answer: ClassVar[str]  # what is predicted: the setting that names its column, and an example's field
    answer_kind: ClassVar[Kind]

    def columns(self) -> Mapping[str, Kind]:
        texts: dict[str, Kind] = dict.fromkeys(self.settings.texts, "text")
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
        return dict(zip(("first", "second"), self.settings.texts, strict=False))

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
        """What the model predicts for each text, or pair of texts."""

    @abstractmethod
    def shown(self, text: str, prediction: Any) -> Prediction:
        """One of these with its text, as people and programs read it."""

    def predictions(
        self, model: LanguageModel, file: str, column: str | None = None, second: str | None = None
    ) -> Iterator[Prediction]:
        one, two, others = column or self.settings.text, second or self.settings.second, None
        if two is None:
            texts = read_texts(file, column, self.settings.text)
        else:
            texts, others = read_pairs(file, one, two, f"{self.folder.path}: expects pairs of texts")
        for text, prediction in zip(texts, self.predict(model, texts, others), strict=True):
            yield self.shown(text, prediction)

    def outputs(
        self, model: LanguageModel, texts: Sequence[str], second: Sequence[str] | None = None
    ) -> npt.NDArray[np.float32]:
        """What the head gives for each text, or pair of texts: (texts, outputs), in the order of the texts."""
        if second is not None and len(second) != len(texts):
            raise ConfigError(f"second: {len(second)} texts for {len(texts)} first ones; each needs a partner")
        first, other = self.settings.text, self.settings.second
        # a model from elsewhere may have been trained on pairs: its files don't say
        either = other is None and self.folder.origin.is_dir()
        if not either and (other is None) != (second is None):
            asked = "one text" if other is None else f"two texts, '{first}' and '{other}',"
            raise ConfigError(f"{self.folder.path}: this run expects {asked} at a time")
        ids = self.tokenizer.encode_batch(list(texts))
        others = None if second is None else self.tokenizer.encode_batch(list(second))
        found = np.zeros((len(texts), self.settings.outputs() or 1), dtype=np.float32)
        with bar("reading", len(texts)) as advance:
            for some, answers in read_framed(self, model, ids, others):
                found[some] = answers
                advance(len(some))
        check_finite(found, self.folder.path)
        return found


class Classify(SequenceObjective[config.Classify]):
    """−log p of each row's label."""

    answer, answer_kind = "label", "label"

    def output_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs, batch.targets, reduction="sum")

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        outputs = ((logits, batch.targets) for logits, batch in head_outputs(model, batches))
        return classification_metrics(outputs, self.labels)

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        """The metrics over all rows of a side, and the mistakes that the model was surest of."""
        worst: list[tuple[float, int, int, Batch, int]] = []

        def outputs() -> Iterator[tuple[Tensor, Tensor]]:
            for logits, batch in head_outputs(model, self.batches(side)):
                shares, predicted = logits.softmax(-1).max(-1)
                wrong = (predicted != batch.targets).nonzero()[:, 0].tolist()
                found = [(float(shares[n]), int(batch.targets[n]), int(predicted[n]), batch, n) for n in wrong]
                worst[:] = nlargest(MISTAKES, [*worst, *found], key=lambda mistake: mistake[0])
                yield logits, batch.targets

        metrics = classification_metrics(outputs(), self.labels, whole=True)
        rows = [
            [self._read(batch, n), self.labels[actual], self.labels[predicted], f"{share:.1%}"]
            for share, actual, predicted, batch, n in worst
        ]
        return Results(metrics, table=[["text", "actual", "predicted", "probability"], *rows] if rows else [])

    def _read(self, batch: Batch, row: int) -> str:
        ids, segments = batch.tokens[row], batch.segments
        if segments is None:
            return self.tokenizer.decode(ids.tolist())
        return "\n".join(self.tokenizer.decode(ids[segments[row] == side].tolist()) for side in (0, 1))

    def predict(
        self, model: LanguageModel, texts: Sequence[str], second: Sequence[str] | None = None
    ) -> list[dict[str, float]]:
        """The probability of each label for each text, or pair of texts, the likeliest first."""
        shares = torch.from_numpy(self.outputs(model, texts, second)).softmax(-1).tolist()
        return [dict(sorted(zip(self.labels, row, strict=True), key=lambda pair: -pair[1])) for row in shares]

    def shown(self, text: str, prediction: dict[str, float]) -> Prediction:
        label, share = next(iter(prediction.items()))
        return Prediction(f"{label}\t{share:.4f}\t{text}", {"text": text, "label": label, "labels": prediction})


def classification_metrics(
    outputs: Iterable[tuple[Tensor, Tensor]], labels: Sequence[str], *, whole: bool = False
) -> dict[str, Any]:
    """Mean −log p of the right label and the metrics of labels, from logits (N, labels) and targets (N,), in parts.

    The baseline and intervals come with the `whole` of what is held out; targets may be (N, words), -1 where no word is
    asked for, and logits (N, words, labels): then a row has several answers.
    """
    losses, actual, predicted, rows, count = list[float](), list[int](), list[int](), list[int](), 0
    for logits, targets in outputs:
        asked = targets >= 0
        losses += F.cross_entropy(logits[asked], targets[asked], reduction="none").tolist()
        actual += targets[asked].tolist()
        predicted += logits[asked].argmax(-1).tolist()
        rows += (count + asked.nonzero()[:, 0]).tolist()
        count += len(targets)
    found = {"loss": sum(losses) / max(1, len(losses)), **label_metrics(actual, predicted, labels)}
    return found | (label_intervals(actual, predicted, losses=losses, rows=rows) if whole else {})
