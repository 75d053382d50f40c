"""What objectives share that learn from rows: each row becomes an example, batched with others of similar length."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.data.batch import Batch
from weft.data.bucket import Buckets
from weft.data.examples import Examples, label_names, write_sides
from weft.data.shards import Side
from weft.data.table import Kind, Row, Skipped, split_rows
from weft.errors import DataError, ModelError, RunError
from weft.models.base import LanguageModel
from weft.objectives.objective import EVALUATED_TOKENS, Objective, Prepared, Results, model_inputs
from weft.progress import Log
from weft.recipe.objective import LabelObjective, ObjectiveConfig
from weft.training.loader import Loader, micro_rows

S = TypeVar("S", bound=ObjectiveConfig)
Numbers = npt.NDArray[np.int64]
CHUNK = 1024  # rows encoded together


class RowObjective(Objective[S]):
    """Rows with named columns."""

    # ---- what each objective knows of its rows

    @abstractmethod
    def columns(self) -> Mapping[str, Kind]:
        """The columns that are read, and what each holds."""

    @abstractmethod
    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        """The text of a row, for a tokenizer to learn from."""

    @abstractmethod
    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        """Some rows as examples, one for each: ids and numbers."""

    def row_labels(self, values: Mapping[str, Any]) -> Iterable[str]:
        """The labels in a row, where there are any."""
        return ()

    @abstractmethod
    def lengths(self, examples: Examples) -> Numbers:
        """Tokens of each example as it is batched: (examples,) or (examples, sides)."""

    @abstractmethod
    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Some examples as one batch."""

    @abstractmethod
    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        """How good a model is; numbers are logged during training, the rest is shown at the end."""

    # ---- before the run

    def amount(self) -> int:
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in self.texts())

    def texts(self, side: Literal["target", "source"] | None = None) -> Iterator[str]:
        """The text of the training rows: of one side, or of both."""
        for where, row in self._rows(Skipped()):
            if where == "train":
                for one in (side,) if side is not None else ("target", "source"):
                    yield from self.row_texts(row.values, one)

    def prepare(self, log: Log) -> Prepared:
        """Examples of both sides in the run's folder. Rows that can't be read are counted, and reported."""
        skipped, amount = Skipped(), Counter[str]()
        self.folder.data.mkdir(parents=True, exist_ok=True)
        notes: dict[str, Any] = {
            "tokenizer": self.tokenizers.target.fingerprint,
            "source_tokenizer": self.tokenizers.source.fingerprint,
        }
        given = getattr(self.settings, "labels", None)
        self.label_ids = LabelIds(given, notes)
        paths = {side: self._file(side) for side in self._sides}
        write_sides(paths, self._examples(skipped, amount), notes=notes)
        if skipped.total:
            log(f"rows that could not be read: {skipped}")
            self.folder.event("skipped", rows=skipped.total, reasons=skipped.counts, first=skipped.first)
        found = self.label_ids.names() if isinstance(self.settings, LabelObjective) and given is None else None
        return Prepared(amount["bytes"], amount["rows"], found)

    def _examples(self, skipped: Skipped, amount: Counter[str]) -> Iterator[tuple[Side, dict[str, Any]]]:
        """Every row as an example, with its side; rows and bytes of the training side are counted on the way."""
        for chunk in _chunks(self._rows(skipped)):
            for side, row in chunk:
                self.label_ids.meet(self.row_labels(row.values), side, row)
                if side == "train":
                    texts = self.row_texts(row.values, "target")
                    amount["rows"] += 1
                    amount["bytes"] += sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
            sides, rows = zip(*chunk, strict=True)
            yield from zip(sides, self.encode(rows), strict=True)

    def ids(self, rows: Sequence[Row], columns: Mapping[str, str]) -> list[dict[str, Any]]:
        """The ids of some columns of text: for each row, field → ids. columns: field → column."""
        encodings = {
            field: self.tokenizer.encode_batch([row.values[column] for row in rows])
            for field, column in columns.items()
        }
        return [{field: ids[at] for field, ids in encodings.items()} for at in range(len(rows))]

    def _rows(self, skipped: Skipped) -> Iterator[tuple[Side, Row]]:
        data = self.recipe.data
        if data.prepared is not None or data.mixture:
            raise DataError(f"data: objective '{self.settings.kind}' reads rows; name their files in data.sources")
        return split_rows(
            data.sources,
            self.columns(),
            data.validation,
            targets=data.targets,
            on_error=data.on_error,
            skipped=skipped,
        )

    # ---- examples

    @property
    def _sides(self) -> tuple[Side, ...]:
        return ("train", "validation") if self.holds_out else ("train",)

    def _file(self, side: Side) -> Path:
        return self.folder.data / f"{side}.safetensors"

    @cached_property
    def examples(self) -> dict[Side, Examples]:
        """The prepared rows of each side."""
        try:
            found = {side: Examples.open(self._file(side)) for side in self._sides}
        except DataError as error:
            raise RunError(f"{self.folder.path}: its rows can't be read: {error}") from None
        self.check_tokenizer(found["train"].notes)
        return found

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return (self.examples["train"].fingerprint,)

    @cached_property
    def loader(self) -> Loader:
        """Rows of similar length, in batches of `batch.size` rows or `batch.tokens` tokens."""
        train, batch = self.examples["train"], self.recipe.batch
        size = batch.size if batch.tokens is None else None
        buckets = Buckets(self.lengths(train), size=size, tokens=batch.tokens, seed=self.recipe.seed)
        return Loader(
            make=lambda step, rank, ranks: self.batch(train, buckets.rows(step - 1, rank, ranks)),
            epochs=buckets.epoch,
            fewest=buckets.smallest,
            row=f"row of up to {self.length} tokens",
            micro=micro_rows(batch, batch.size or len(train)),
        )

    # ---- evaluation

    def evaluate(self, model: LanguageModel) -> dict[str, float]:
        found = self.metrics(model, self.batches("validation", self.recipe.evaluate.tokens))
        return {key: value for key, value in found.items() if isinstance(value, float)}

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        return Results(self.metrics(model, self.batches(side)))

    def batches(self, side: Side, most: int | None = None) -> Iterator[Batch]:
        """All examples of a side, or about `most` tokens of them, the short ones first so that little is padded."""
        examples = self.examples[side]
        lengths = self.lengths(examples).reshape(len(examples), -1)
        chosen = np.arange(len(examples))
        if most is not None:
            total = np.cumsum(lengths.sum(1))
            chosen = chosen[: max(1, int(np.searchsorted(total, most)))]
        order = chosen[np.argsort(lengths[chosen].max(1), kind="stable")]
        begin = 0
        while begin < len(order):
            end = begin + 1
            while (
                end < len(order)
                and (end + 1 - begin) * lengths[order[begin : end + 1]].max(0).sum() <= EVALUATED_TOKENS
            ):
                end += 1
            yield self.batch(examples, order[begin:end])
            begin = end


def _chunks(rows: Iterator[tuple[Side, Row]]) -> Iterator[list[tuple[Side, Row]]]:
    """As many rows at a time as a tokenizer likes to encode together."""
    while chunk := list(islice(rows, CHUNK)):
        yield chunk


class LabelIds(dict[str, int]):
    """An id for each label: its place among the `given` ones, or else the order in which labels are met.

    That order is noted with the examples; `in_order` undoes it. So rows are read once, whatever their labels.
    """

    def __init__(self, given: Sequence[str] | None, notes: dict[str, Any]):
        super().__init__((name, at) for at, name in enumerate(given or ()))
        self._given = given is not None
        self._trained: set[str] = set()
        self._elsewhere: dict[str, str] = {}  # where a label was met first outside the training rows
        self._met: list[str] = []
        if given is None:
            notes["labels"] = self._met  # written once all rows are read

    def meet(self, labels: Iterable[str], side: Side, row: Row) -> None:
        """Take note of a row's labels."""
        for label in labels:
            if label not in self:
                if self._given:
                    raise self._unknown(label, row.where, self)
                self[label] = len(self)
                self._met.append(label)
            if side == "train":
                self._trained.add(label)
            else:
                self._elsewhere.setdefault(label, row.where)

    def names(self) -> tuple[str, ...]:
        """All labels of the training rows, in an order that doesn't depend on the rows'."""
        names = label_names(self._trained)
        for label, where in self._elsewhere.items():
            if label not in self._trained:
                raise self._unknown(label, where, names)
        if len(names) < 2:
            raise DataError(f"the training rows have only the label {', '.join(names)!r}; at least two are needed")
        return tuple(names)

    def _unknown(self, label: str, where: str, known: Iterable[str]) -> DataError:
        return DataError(f"{where}: the label {label!r} is in no training row; known: {', '.join(list(known)[:12])}")


def in_order(ids: npt.NDArray[np.int64], examples: Examples, labels: Sequence[str]) -> npt.NDArray[np.int64]:
    """Ids of labels as their places among `labels`; the examples note in which order they were met."""
    met = examples.notes.get("labels")
    return ids if met is None else np.array([labels.index(name) for name in met])[ids]


# ---- what a head outputs


@torch.no_grad()
def head_outputs(model: LanguageModel, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Batch]]:
    """What the head gives for each batch, in float32 on the host, and the batch."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        for batch in batches:
            there = batch.to(device)
            yield model.forward(there.tokens, **model_inputs(there)).float().cpu(), batch
    finally:
        model.train(was_training)


def by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of all texts, the longest first, as many at a time as may be read at once."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    begin = 0
    while begin < len(order):
        end = begin + max(1, EVALUATED_TOKENS // (lengths[order[begin]] + 3))  # besides special tokens
        yield order[begin:end]
        begin = end


def check_finite(outputs: npt.NDArray[Any], folder: Path) -> None:
    """Refuse outputs that are not finite."""
    if not np.isfinite(outputs).all():
        raise ModelError(f"{folder}: its outputs are not finite; its weights are damaged, or training diverged")
