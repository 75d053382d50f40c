"""What objectives share that learn from rows: each row becomes an example, batched with others of similar length."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.data.amount import amount
from weft.data.batch import Batch, Frame, framed
from weft.data.examples import Examples, Labels, encode_rows, verify_files, write_sides
from weft.data.rows import MissingColumnError, RowError
from weft.data.sampler import Buckets
from weft.data.shards import Side
from weft.data.sources import is_plain
from weft.data.split import split_rows
from weft.data.table import Kind, Row, RowSource, SkippedRows, read_rows
from weft.errors import ConfigError, DataError, ModelError, RunError, WeftError
from weft.models.base import LanguageModel, device_of, evaluating, row_rng
from weft.models.transformer import Transformer
from weft.objectives.frame import sentence_frame
from weft.progress import Log
from weft.recipe.objective import LabelObjective, ObjectiveConfig
from weft.recipe.settle import Facts
from weft.storage.files import utf8_size
from weft.training.loader import Loader, micro_rows
from weft.training.objective import EVALUATED_TOKENS, Loss, Objective, Results

S = TypeVar("S", bound=ObjectiveConfig)
Numbers = npt.NDArray[np.int64]
EVEN = "even_batches"  # a note of the examples: an epoch's last batches have one size
SEARCHED_EXAMPLES = 20  # for one to be shown
TEXTUAL = ("text", "words", "messages")  # kinds of columns that hold text


class ExampleObjective(Objective[S]):
    """Data that becomes examples, in a file for each side."""

    read_as: ClassVar[str] = "rows"  # what the examples are, in words

    @property
    def _sides(self) -> tuple[Side, ...]:
        return ("train", "validation") if self.recipe.data.validation.kind != "none" else ("train",)

    def _file(self, side: Side) -> Path:
        return self.folder.data / f"{side}.safetensors"

    @cached_property
    def examples(self) -> dict[Side, Examples]:
        """The examples of each side, verified."""
        try:
            verify_files([self._file(side) for side in self._sides])
            found = {side: Examples.open(self._file(side)) for side in self._sides}
        except DataError as error:
            place = f"{self.folder.path}: its {self.read_as} can't be read"
            raise RunError(f"{place}: {error}; {self.prepared_again}") from None
        self.check_tokenizer(found["train"].notes)
        return found

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return (self.examples["train"].fingerprint,)

    def excerpt(self, side: Side, tokens: int) -> str:
        """What is read of the longest of the first examples that is no longer, or else of the shortest."""
        # not verified: whoever only looks writes no note of it
        examples = Examples.open(self._file(side)) if side in self._sides else ()
        if not examples:
            return ""
        self.check_tokenizer(examples.notes)
        field = next((name for name in ("source", "tokens") if name in examples.fields), examples.fields[0])
        lengths = examples.lengths(field)[:SEARCHED_EXAMPLES]
        best = int(np.argmax(np.where(lengths <= tokens, lengths, -lengths)))
        tokenizer = self.tokenizers.source if field == "source" else self.tokenizer
        return tokenizer.decode(examples.ids(field, best).tolist())


class RowObjective(ExampleObjective[S]):
    """Rows with named columns. With labels, `label_field` is the setting that names their column, and an example's
    field of their ids."""

    label_ids: Labels
    label_field: ClassVar[str] = "label"

    @cached_property
    def frame(self) -> Frame:
        """The special tokens around the texts of a row."""
        return sentence_frame(self.recipe, self.folder, self.tokenizer)

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, in the order of the head's outputs."""
        return getattr(self.settings, "labels", None) or ()

    @abstractmethod
    def columns(self) -> Mapping[str, Kind]:
        """The columns that are read, and what each holds."""

    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        """The text of a row, for a tokenizer to learn from: by default all texts, which one tokenizer reads."""
        if side == "target":
            yield from (values[name] for name, kind in self.columns().items() if kind == "text")

    @abstractmethod
    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        """Some rows as examples, one for each: ids and numbers."""

    @abstractmethod
    def lengths(self, examples: Examples) -> Numbers:
        """Tokens of each example as it is batched: (examples,) or (examples, sides)."""

    @abstractmethod
    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Some examples as one batch."""

    def output_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The sum of the losses of what the head gives for a batch, in float32."""
        raise NotImplementedError

    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        loss = self.output_loss(head_output(model, features, batch), batch)
        return loss, batch.count, {"nll": loss.detach()}

    @abstractmethod
    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        """How good a model is; numbers are logged during training, the rest is shown at the end."""

    def amount(self) -> int:
        columns = [name for name, kind in self.columns().items() if kind in TEXTUAL]
        data = self.recipe.data
        return round(amount(data.sources, columns, data.encoding).bytes * data.training_share)

    def texts(self, side: Literal["target", "source"] | None = None) -> Iterator[str]:
        for row in self._rows(SkippedRows()):
            if row.side == "train":
                for one in (side,) if side is not None else ("target", "source"):
                    yield from self.row_texts(row.values, one)

    def prepare(self, log: Log) -> Facts:
        """Examples of both sides in the run's folder. Rows that can't be read are counted, and reported."""
        skipped, read = SkippedRows(), Counter[str]()
        self.folder.data.mkdir(parents=True, exist_ok=True)
        fields: dict[str, Labels] = {}
        if isinstance(self.settings, LabelObjective):
            self.label_ids = Labels(getattr(self.settings, self.label_field), self.settings.labels)
            fields = {self.label_field: self.label_ids}
        target, source = self.tokenizers.target, self.tokenizers.source
        notes = {"tokenizer": target.fingerprint, "source_tokenizer": source.fingerprint, EVEN: True}

        def counted(rows: Iterable[Row]) -> Iterator[Row]:
            for row in rows:
                if row.side == "train":
                    read["rows"] += 1
                    read["bytes"] += sum(utf8_size(text) for text in self.row_texts(row.values, "target"))
                yield row

        examples = encode_rows(counted(self._rows(skipped)), self.encode)
        write_sides({side: self._file(side) for side in self._sides}, examples, notes=notes, labels=fields)
        if skipped.total:
            log(f"{skipped}")
            self.folder.event("skipped", rows=skipped.total, reasons=skipped.counts, first=skipped.first)
        names = tuple(self.label_ids.names) if fields else None
        if names is not None and len(names) < 2:
            raise DataError(f"the training rows have only the label {', '.join(names)!r}; at least two are needed")
        return self.facts(read["bytes"], read["rows"], names)

    def ids(self, rows: Sequence[Row], columns: Mapping[str, str]) -> list[dict[str, Any]]:
        """The ids of some columns of text: for each row, field → ids. columns: field → column."""
        texts = {field: [row.values[column] for row in rows] for field, column in columns.items()}
        encodings = {field: self.tokenizer.encode_batch(some) for field, some in texts.items()}
        return [{field: ids[at] for field, ids in encodings.items()} for at in range(len(rows))]

    def _rows(self, skipped: SkippedRows) -> Iterator[Row]:
        data = self.recipe.data
        source = RowSource(data.sources, self.columns(), data.targets, data.on_error, data.encoding)
        try:
            yield from split_rows(source, data.validation, skipped)
        except MissingColumnError as error:
            if not data.targets and all(map(is_plain, data.sources)):
                lines = ", or the lines of another file: --targets FILE" if self.settings.kind == "pairs" else ""
                raise DataError(
                    f"{data.sources[0]}: plain text, but objective '{self.settings.kind}' reads columns "
                    f"({', '.join(self.columns())}); give it a .tsv, .csv, .jsonl or .parquet file{lines}"
                ) from None
            keys = (key for key in type(self.settings).model_fields if getattr(self.settings, key) == error.column)
            key = next(keys, "columns")
            raise MissingColumnError(error.line, error.column, f"choose one with objective.{key}=NAME") from None
        except RowError as error:
            raise DataError(f"{error}; data.on_error=skip leaves such rows out") from None

    @cached_property
    def loader(self) -> Loader:
        """Rows of similar length, in batches of `batch.size` rows or `batch.tokens` tokens."""
        train, batch = self.examples["train"], self.recipe.batch
        size = batch.size if batch.tokens is None else None
        even = bool(train.notes.get(EVEN))  # a run that began without goes on without
        buckets = Buckets(self.lengths(train), size=size, tokens=batch.tokens, seed=self.recipe.seed, even=even)
        return Loader(
            make=lambda step, rank, ranks: self.batch(train, buckets.rows(step - 1, rank, ranks)),
            rows=lambda step: buckets.size(step - 1),
            epochs=buckets.epoch,
            fewest=buckets.smallest,
            row=f"row of up to {self.length} tokens",
            micro=micro_rows(batch, batch.size or len(train)),
        )

    def evaluate(self, model: LanguageModel) -> dict[str, float]:
        found = self.metrics(model, self.batches("validation", self.recipe.evaluate.tokens))
        return {key: value for key, value in found.items() if isinstance(value, float)}

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        return Results(self.metrics(model, self.batches(side)))

    def batches(self, side: Side, most: int | None = None) -> Iterator[Batch]:
        """All examples of a side, or about `most` tokens of them, the short ones first so that little is padded."""
        examples = self.examples[side]
        lengths = self.lengths(examples).reshape(len(examples), -1)
        some = None if most is None else max(1, int(np.searchsorted(np.cumsum(lengths.sum(1)), most)))
        chosen = np.arange(len(examples))[:some]
        order = chosen[np.argsort(lengths[chosen].max(1), kind="stable")]
        begin = 0
        for end in range(1, len(order) + 1):
            more = order[begin : end + 1]
            if end == len(order) or len(more) * lengths[more].max(0).sum() > EVALUATED_TOKENS:
                yield self.batch(examples, order[begin:end])
                begin = end


@contextmanager
def named(row: Row) -> Iterator[None]:
    """What is wrong in here is said of this row."""
    try:
        yield
    except WeftError as error:
        raise DataError(f"{row.where}: {error}") from None


def head_output(model: LanguageModel, features: Tensor, batch: Batch) -> Tensor:
    """What the head gives for a batch's features, in float32."""
    assert isinstance(model, Transformer), "others have no such heads"
    return model.head(features, batch.mask, row_rng(batch)).float()


@torch.no_grad()
def head_outputs(model: LanguageModel, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Batch]]:
    """What the head gives for each batch, in float32 on the host, and the batch."""
    with evaluating(model) as device:
        for batch in batches:
            there = batch.to(device)
            yield head_output(model, model.read(there), there).cpu(), batch


@torch.no_grad()
def read_framed(
    objective: RowObjective[Any],
    model: LanguageModel,
    ids: Sequence[list[int]],
    others: Sequence[list[int]] | None = None,
) -> Iterator[tuple[list[int], npt.NDArray[np.float32]]]:
    """Texts, or pairs of texts, in their frames, the longest first and as many at a time as may be read at once: their
    numbers, and what the head gives for them."""
    device = device_of(model)
    lengths = [len(one) + (0 if others is None else len(others[n])) for n, one in enumerate(ids)]
    order = sorted(range(len(ids)), key=lambda n: -lengths[n])
    begin = 0
    while begin < len(order):
        some = order[begin : begin + max(1, EVALUATED_TOKENS // (lengths[order[begin]] + 3))]  # besides special tokens
        begin += len(some)
        second = None if others is None else [others[n] for n in some]
        read = framed([ids[n] for n in some], second, objective.frame, length=objective.length)
        given = {"mask": read.mask, "segments": read.segments}
        there = {key: value.to(device) for key, value in given.items() if value is not None}
        yield some, model.forward(read.tokens.to(device), **there).float().cpu().numpy()


def read_pairs(file: str, one: str, other: str, expected: str) -> tuple[list[str], list[str]]:
    """Two columns of a file's rows. Standard input has none; what was `expected` is said then."""
    if file == "-":
        raise ConfigError(f"{expected}; name a file with the columns '{one}' and '{other}'")
    rows = list(read_rows(RowSource([file], {one: "text", other: "text"})))
    return [row.values[one] for row in rows], [row.values[other] for row in rows]


def check_finite(outputs: npt.NDArray[Any], folder: Path) -> None:
    if not np.isfinite(outputs).all():
        raise ModelError(f"{folder}: its outputs are not finite; its weights are damaged, or training diverged")
