"""What objectives share that learn from rows: each row becomes an example, batched with others of similar length."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.data.batch import Batch
from weft.data.bucket import Buckets
from weft.data.examples import Examples, label_names, write_examples
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
    def encode(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Rows as examples: ids and numbers."""

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

    def texts(self, side: Literal["target", "source"] = "target") -> Iterator[str]:
        """The text of the training rows."""
        for where, row in self._rows(Skipped()):
            if where == "train":
                yield from self.row_texts(row.values, side)

    def prepare(self, log: Log) -> Prepared:
        """Examples of both sides in the run's folder. Rows that can't be read are counted, and reported."""
        skipped, rows, size, labels = Skipped(), 0, 0, set()
        for side, row in self._rows(Skipped()):
            if side == "train":
                rows += 1
                size += sum(len(text.encode("utf-8", "surrogatepass")) for text in self.row_texts(row.values, "target"))
                labels |= set(self.row_labels(row.values))
        found = None
        if isinstance(self.settings, LabelObjective) and self.settings.labels is None:
            found = tuple(label_names(labels))
            if len(found) < 2:
                raise DataError(f"the training rows have only the label {', '.join(found)!r}; at least two are needed")
            self.settings = self.settings.with_labels(found)
        notes = {
            "tokenizer": self.tokenizers.target.fingerprint,
            "source_tokenizer": self.tokenizers.source.fingerprint,
        }
        self.folder.data.mkdir(parents=True, exist_ok=True)
        for side in self._sides:
            counted = skipped if side == "train" else Skipped()  # both sides come from one reading of all rows
            own = (row for where, row in self._rows(counted) if where == side)
            write_examples(self._file(side), self.encode(own), notes=notes)
        if skipped.total:
            log(f"rows that could not be read: {skipped}")
            self.folder.event("skipped", rows=skipped.total, reasons=skipped.counts, first=skipped.first)
        return Prepared(size, rows, found)

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
