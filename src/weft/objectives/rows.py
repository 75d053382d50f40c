"""Objectives over rows of a table: each row becomes an example, batched with others of similar length."""

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
from weft.progress import Log, pause
from weft.recipe.objective import LabelObjective, ObjectiveConfig
from weft.recipe.settle import Facts
from weft.storage.files import utf8_size
from weft.training.loader import Loader, micro_rows
from weft.training.objective import EVALUATION_BATCH_TOKENS, BatchObjective, Loss

S = TypeVar("S", bound=ObjectiveConfig)
Numbers = npt.NDArray[np.int64]
EVEN = "even_batches"  # note of the examples: the last batches of an epoch are of equal size
SEARCHED_EXAMPLES = 20  # first examples among which an excerpt is chosen
TEXTUAL = ("text", "words", "messages")  # kinds of columns that hold text


class ExampleObjective(BatchObjective[S]):
    """Data stored as examples, in one file per split."""

    read_as: ClassVar[str] = "rows"  # name of the examples in messages

    @property
    def _sides(self) -> tuple[Side, ...]:
        return ("train", "validation") if self.recipe.data.validation.kind != "none" else ("train",)

    def _file(self, side: Side) -> Path:
        return self.folder.data / f"{side}.safetensors"

    @cached_property
    def examples(self) -> dict[Side, Examples]:
        """The examples of each split, verified."""
        try:
            verify_files([self._file(side) for side in self._sides])
            examples = {side: Examples.open(self._file(side)) for side in self._sides}
        except DataError as error:
            unreadable = f"{self.folder.path}: its {self.read_as} can't be read"
            raise RunError(f"{unreadable}: {error}; {self.repair_hint}") from None
        self.check_tokenizer(examples["train"].notes)
        return examples

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return (self.examples["train"].fingerprint,)

    def excerpt(self, side: Side, tokens: int) -> str:
        """Return the longest of the first examples of at most `tokens` tokens, or else the shortest."""
        # without verification, which would write a note into the folder
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
    """Rows with named columns."""

    label_ids: Labels
    label_field: ClassVar[str] = "label"  # setting that names the column of labels, and an example's field of their ids

    @cached_property
    def frame(self) -> Frame:
        """The special tokens around the texts of a row."""
        return sentence_frame(self.recipe, self.folder, self.tokenizer)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order of the head's outputs."""
        return getattr(self.settings, "labels", None) or ()

    def open_examples(self, side: Side) -> Examples | None:
        """Return the examples of a split, if it has any; verification would write a note into the folder."""
        return (Examples.open(self._file(side)) or None) if side in self._sides else None

    def input_texts(self, side: Side, rows: int) -> list[tuple[str, ...]]:
        """Return the texts of the first examples of a split, one or two each."""
        if (examples := self.open_examples(side)) is None:
            return []
        fields = [field for field in ("first", "second") if field in examples.fields]
        ids = ([examples.ids(field, row).tolist() for field in fields] for row in range(min(rows, len(examples))))
        return [tuple(map(self.tokenizer.decode, texts)) for texts in ids]

    @abstractmethod
    def columns(self) -> Mapping[str, Kind]:
        """Return the columns that are read, and the kind of each."""

    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        """Yield the texts of a row to train a tokenizer on: by default all, as targets."""
        if side == "target":
            yield from (values[name] for name, kind in self.columns().items() if kind == "text")

    @abstractmethod
    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        """Return an example for each row: ids and numbers by field."""

    @abstractmethod
    def lengths(self, examples: Examples) -> Numbers:
        """Return the tokens of each example in a batch: (examples,) or (examples, sides)."""

    @abstractmethod
    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Return the examples with these numbers as a batch."""

    def output_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the summed loss of the head's outputs for a batch, in float32."""
        raise NotImplementedError

    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        loss = self.output_loss(head_output(model, features, batch), batch)
        return loss, batch.count, {"nll": loss.detach()}

    def amount(self) -> int:
        columns = [name for name, kind in self.columns().items() if kind in TEXTUAL]
        data = self.recipe.data
        return round(amount(data.sources, columns, data.encoding).bytes * data.training_share)

    def texts(self, side: Literal["target", "source"] | None = None) -> Iterator[str]:
        for row in self._rows(SkippedRows()):
            if row.side == "train":
                for part in (side,) if side is not None else ("target", "source"):
                    yield from self.row_texts(row.values, part)

    def prepare(self, log: Log) -> Facts:
        """Write the examples of both splits into the run's folder. Unreadable rows are counted and reported."""
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
            log(str(skipped))
            self.folder.event("skipped", rows=skipped.total, reasons=skipped.counts, first=skipped.first)
        names = tuple(self.label_ids.names) if fields else None
        if names is not None and len(names) < 2:
            raise DataError(f"the training rows have only the label {', '.join(names)!r}; at least two are needed")
        return self.facts(read["bytes"], read["rows"], names)

    def ids(self, rows: Sequence[Row], columns: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return field → ids for each row; `columns` maps fields to columns of text."""
        encode = self.tokenizer.encode_batch
        encoded = {field: encode([row.values[column] for row in rows]) for field, column in columns.items()}
        return [{field: ids[n] for field, ids in encoded.items()} for n in range(len(rows))]

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
        """Batches of rows of similar length, of `batch.size` rows or `batch.tokens` tokens."""
        train, batch = self.examples["train"], self.recipe.batch
        size = batch.size if batch.tokens is None else None
        even = bool(train.notes.get(EVEN))  # runs of 0.1 continue without
        buckets = Buckets(self.lengths(train), size=size, tokens=batch.tokens, seed=self.recipe.seed, even=even)
        return Loader(
            make=lambda step, rank, ranks: self.batch(train, buckets.rows(step - 1, rank, ranks)),
            rows=lambda step: buckets.size(step - 1),
            epochs=buckets.epoch,
            min_rows=buckets.smallest,
            row=f"row of up to {self.length} tokens",
            micro=micro_rows(batch, batch.size or len(train)),
        )

    def batches(self, side: Side, max_tokens: int | None = None) -> Iterator[Batch]:
        """Yield examples sorted by length, to reduce padding."""
        examples = self.examples[side]
        lengths = self.lengths(examples).reshape(len(examples), -1)
        count = len(examples)
        if max_tokens is not None:
            count = max(1, int(np.searchsorted(np.cumsum(lengths.sum(1)), max_tokens)))
        order = np.argsort(lengths[:count].max(1), kind="stable")
        begin = 0
        for end in range(1, len(order) + 1):
            longer = order[begin : end + 1]
            if end == len(order) or len(longer) * lengths[longer].max(0).sum() > EVALUATION_BATCH_TOKENS:
                yield self.batch(examples, order[begin:end])
                begin = end


@contextmanager
def naming_row(row: Row) -> Iterator[None]:
    """Prefix an error in the body with the location of the row."""
    try:
        yield
    except WeftError as error:
        raise DataError(f"{row.where}: {error}") from None


def head_output(model: LanguageModel, features: Tensor, batch: Batch) -> Tensor:
    """Return the head's outputs for a batch's features, in float32."""
    assert isinstance(model, Transformer), "only Transformers have such heads"
    return model.head(features, batch.mask, row_rng(batch)).float()


@torch.no_grad()
def head_outputs(model: LanguageModel, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Batch]]:
    """Yield the head's outputs for each batch, in float32 on the host, and the batch."""
    with evaluating(model) as device:
        for batch in batches:
            local = batch.to(device)
            yield head_output(model, model.read(local), local).cpu(), batch
            pause()


@torch.no_grad()
def read_framed(
    objective: RowObjective[Any],
    model: LanguageModel,
    ids: Sequence[list[int]],
    *,
    others: Sequence[list[int]] | None = None,
) -> Iterator[tuple[list[int], npt.NDArray[np.float32]]]:
    """Read texts, or pairs of texts, the longest first; yield the numbers of each batch's texts, and finite outputs."""
    device = device_of(model)
    lengths = [len(text) + (0 if others is None else len(others[n])) for n, text in enumerate(ids)]
    order = sorted(range(len(ids)), key=lambda n: -lengths[n])
    begin = 0
    while begin < len(order):
        size = max(1, EVALUATION_BATCH_TOKENS // (lengths[order[begin]] + 3))  # with special tokens
        numbers = order[begin : begin + size]
        begin += size
        second = None if others is None else [others[n] for n in numbers]
        batch = framed([ids[n] for n in numbers], second, objective.frame, length=objective.length)
        optional = {"mask": batch.mask, "segments": batch.segments}
        inputs = {key: value.to(device) for key, value in optional.items() if value is not None}
        outputs = model.forward(batch.tokens.to(device), **inputs).float().cpu()
        if not outputs.isfinite().all():
            reason = "its weights are damaged, or training diverged"
            raise ModelError(f"{objective.folder.path}: its outputs are not finite; {reason}")
        yield numbers, outputs.numpy()


def read_columns(file: str, first: str, second: str, *, expected: str) -> tuple[list[str], list[str]]:
    """Return two columns of a file's rows; refuse standard input, which has none, with what was `expected`."""
    if file == "-":
        raise ConfigError(f"{expected}; name a file with the columns '{first}' and '{second}'")
    rows = list(read_rows(RowSource([file], {first: "text", second: "text"})))
    return [row.values[first] for row in rows], [row.values[second] for row in rows]
