"""`Batch`, the input of a model as one typed value, and functions that make batches from tokens.

Padding is the tokenizer's padding token; if it has none, padded positions hold any token and are masked (`filler`).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.examples import Examples
from weft.data.sampler import Array, Lanes, Mixture
from weft.data.shards import Tokens
from weft.errors import DataError
from weft.text.tokenizer import Ids, Tokenizer


@dataclass(frozen=True)
class _TensorFields:
    """A dataclass of tensors that can be moved, pinned and sliced as one value."""

    def map_tensors(self, change: Any) -> Self:
        """Apply a function to every tensor, those of nested dataclasses included."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        nested = {k: value.map_tensors(change) for k, value in values.items() if isinstance(value, _TensorFields)}
        changed = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **nested, **changed)

    def tensors(self) -> list[Tensor]:
        """All tensors, those of nested dataclasses included."""
        values = [getattr(self, field.name) for field in fields(self)]
        nested = [value.tensors() for value in values if isinstance(value, _TensorFields)]
        return [value for value in values if isinstance(value, Tensor)] + list(chain.from_iterable(nested))

    def to(self, device: torch.device | str) -> Self:
        """Copy to `device`; asynchronous from pinned memory."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> Self:
        """Copy to page-locked memory, from which transfers to a GPU overlap with computation."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())


@dataclass(frozen=True)
class Source(_TensorFields):
    """Input of an encoder: tokens (B, S) int64, and mask (B, S) bool, True at real tokens."""

    tokens: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Batch(_TensorFields):
    """Rows of tokens and their targets.

    The next-sentence loss is a separate mean: its weight is (targets that count) ÷ rows over the whole step, so that
    the sum of both losses, divided by the step's targets, is the sum of both means, however the step is split. If
    processes share rows (`parallel/context.py`), positions, documents and mask are those of whole rows.
    """

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, or one per row (B,): int64 for a class, float32 for a regression target
    loss_mask: Tensor | None = None  # shaped like the targets, bool: where a target counts; None: everywhere
    positions: Tensor | None = None  # (B, T) int64; None: 0 … T-1
    documents: Tensor | None = None  # (B, T) int64: tokens attend only to tokens with the same number
    mask: Tensor | None = None  # (B, T) bool, True at real tokens; None: everywhere
    segments: Tensor | None = None  # (B, T) int64, 0 in the first sentence of a pair and 1 in the second
    source: Source | None = None  # the input of an encoder, or the other text of a pair
    next_sentence: Tensor | None = None  # (B,) int64, 1 if the second sentence follows the first
    next_sentence_weight: Tensor | None = None  # (B,) float32
    keys: Tensor | None = None  # (B,) int32, seeds of each row's dropout (`nn/dropout.py`)
    step_key: Tensor | None = None  # (B,) int32, the seed of dropout that all rows of a step share, repeated
    lanes: Tensor | None = None  # (B,) int64: the lane of each row, if rows continue those of the previous step
    begins: Tensor | None = None  # (B,) bool, True where a row does not continue one
    ranges: tuple[range, ...] = ()  # positions that tokens, targets, loss_mask and segments hold, if rows are shared
    counted: int | None = None  # cached `count`: computed on the host before the batch is moved
    real: int | None = None  # cached `read`: computed before rows are added that repeat others

    @property
    def count(self) -> int:
        """Number of targets that count."""
        if self.counted is not None:
            return self.counted
        return self.targets.numel() if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def read(self) -> int:
        """Number of input tokens, padding excluded."""
        if self.real is not None:
            return self.real
        tokens = self.tokens.numel()
        if self.mask is not None:
            masks = [self.mask[:, part.start : part.stop] for part in self.ranges] or [self.mask]
            tokens = sum(int(mask.sum()) for mask in masks)
        return tokens + (int(self.source.mask.sum()) if self.source is not None else 0)

    def to(self, device: torch.device | str) -> Self:
        """Copy to `device`; asynchronous from pinned memory. The count is computed first, on the host."""
        return replace(super().to(device), counted=self.count)

    def split(self, parts: int) -> list["Batch"]:
        """Split the rows into `parts` micro-batches whose sizes differ by at most one row."""
        size = len(self.tokens)
        assert 1 <= parts <= size, f"{size} rows in {parts} parts"
        assert not self.ranges, "a batch is split before its rows are shared among processes"
        bounds = [part * size // parts for part in range(parts + 1)]
        batch = replace(self, counted=None, real=None)
        return [batch.map_tensors(lambda tensor, a=start, b=stop: tensor[a:b]) for start, stop in pairwise(bounds)]

    def bucketed(self) -> "Batch":
        """Pad the rows of an encoder–decoder's batch, and their times, to one of few sizes. The loss does not change.

        Times become multiples of 8; rows at most an eighth more, repeating the first one without its targets.
        """
        if self.source is None:
            return self
        rows = len(self.tokens)
        unit = max(8, 1 << (rows.bit_length() - 4))
        added = -rows % unit

        def extend(tensor: Tensor) -> Tensor:
            if tensor.dim() > 1:
                tensor = F.pad(tensor, (0, -tensor.shape[1] % 8))
            return torch.cat([tensor, tensor[:1].expand(added, *tensor.shape[1:])]) if added else tensor

        counts = torch.ones_like(self.targets, dtype=torch.bool) if self.loss_mask is None else self.loss_mask
        batch = replace(self, counted=self.count, real=self.read, loss_mask=counts)
        padded = batch.map_tensors(extend)
        assert padded.loss_mask is not None
        padded.loss_mask[rows:] = False
        return padded


def windows_batch(
    texts: Sequence[Tokens], mixture: Mixture, samples: npt.ArrayLike, *, document_mask: bool = False
) -> Batch:
    """Windows (B, length) of these samples (B,) of the run, each from one of the texts."""
    sources, starts = mixture.locate(samples)
    return _cut(texts, sources, starts, length=mixture.windows[0].length, document_mask=document_mask)


def lanes_batch(text: Tokens, lanes: Lanes, step: int, *, rows: Array) -> Batch:
    """Windows (B, length) of the lanes `rows` (B,) of a text at a step, counted from 0."""
    batch = _cut([text], np.zeros_like(rows), lanes.starts(step)[rows], length=lanes.width(step))
    return replace(batch, lanes=torch.from_numpy(rows), begins=torch.full((len(rows),), lanes.begins(step)))


def evaluation_batches(tokens: Tokens, length: int, batch: int, *, document_mask: bool = False) -> Iterator[Batch]:
    """Yield batches in which every token but the first is a target exactly once, in order: full windows, `batch` at a
    time, then one shorter row for the remaining tokens. Nothing is padded."""
    if len(tokens) < 2:
        raise DataError(f"the text has {len(tokens)} tokens; at least 2 are needed to predict one from another")
    full, remainder = divmod(len(tokens) - 1, length)
    for first in range(0, full, batch):
        starts = np.arange(first, min(first + batch, full)) * length
        yield _cut([tokens], np.zeros_like(starts), starts, length=length, document_mask=document_mask)
    if remainder:
        start = np.array([full * length])
        yield _cut([tokens], np.zeros_like(start), start, length=remainder, document_mask=document_mask)


def _cut(texts: Sequence[Tokens], sources: Array, starts: Array, *, length: int, document_mask: bool = False) -> Batch:
    """Cut and stack the windows that begin at `starts` (B,) of the texts with the indices `sources` (B,)."""
    ids = np.empty((len(starts), length + 1), dtype=np.int64)
    for source, text in enumerate(texts):
        rows = sources == source
        ids[rows] = text.windows(starts[rows], length + 1)
    inputs, targets = torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())
    if not document_mask:
        return Batch(inputs, targets)
    windows = zip(sources.tolist(), starts.tolist(), strict=True)
    documents = np.stack([texts[source].documents(start, length + 1) for source, start in windows])
    documents -= documents[:, :1]  # small numbers, from 0 in each row
    inside = documents[:, 1:] == documents[:, :-1]  # the last token of a document has no target
    return Batch(
        inputs,
        targets,
        loss_mask=torch.from_numpy(inside),
        positions=torch.from_numpy(restarting_positions(documents[:, :-1])),
        documents=torch.from_numpy(documents[:, :-1].copy()),
    )


def restarting_positions(documents: Array) -> Array:
    """Positions (B, T) that restart from 0 in each document of a row."""
    positions = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.ones(documents.shape, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return positions - np.maximum.accumulate(np.where(begins, positions, 0), axis=1)


def pad(sequences: Sequence[Sequence[int]], pad_id: int | None) -> tuple[Tensor, Tensor]:
    """Pad sequences with `pad_id` to one (B, T) tensor; also return the bool mask of the real tokens."""
    if pad_id is None:
        raise DataError("this tokenizer has no padding token; give it one (tokenizer.specials.pad), or pack instead")
    length = max((len(sequence) for sequence in sequences), default=0)
    mask = np.arange(length) < np.array([len(sequence) for sequence in sequences], dtype=np.int64)[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(sequences), dtype=np.int64)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def pack(sequences: Sequence[Sequence[int]], length: int, pad_id: int | None) -> Batch:
    """Pack documents into few rows (B, length) by best-fit decreasing; documents do not attend to each other.

    Each token but a document's first is a target exactly once. A document longer than a row continues in another row,
    as a separate document. Document -1 is padding.
    """
    if pad_id is None:
        raise DataError("this tokenizer has no padding token; give it one (tokenizer.specials.pad) to pack documents")
    pieces = [  # `length` inputs and, one token later, `length` targets
        sequence[start : start + length + 1] for sequence in sequences for start in range(0, len(sequence) - 1, length)
    ]
    if not pieces:
        raise DataError("no document has two tokens or more: there is nothing to predict")
    offsets = _best_fit([len(piece) - 1 for piece in pieces], length)
    shape = (max(row for row, _ in offsets) + 1, length)
    tokens, targets, documents = np.full(shape, pad_id), np.full(shape, pad_id), np.full(shape, -1)
    for number, (piece, (row, column)) in enumerate(zip(pieces, offsets, strict=True)):
        span = slice(column, column + len(piece) - 1)
        tokens[row, span], targets[row, span] = piece[:-1], piece[1:]
        documents[row, span] = number
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        loss_mask=torch.from_numpy(documents >= 0),
        positions=torch.from_numpy(restarting_positions(documents)),
        documents=torch.from_numpy(documents),
    )


def _best_fit(sizes: Sequence[int], length: int) -> list[tuple[int, int]]:
    """(row, column) for each size: longest first, into the row with the least space left (best-fit decreasing)."""
    offsets = [(0, 0)] * len(sizes)
    spaces: list[tuple[int, int]] = []  # (free positions, row), sorted
    rows = 0
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        at = bisect_left(spaces, (sizes[item], -1))
        if at < len(spaces):
            free, row = spaces.pop(at)
        else:
            free, row, rows = length, rows, rows + 1
        offsets[item] = (row, length - free)
        insort(spaces, (free - sizes[item], row))
    return offsets


class Framed(NamedTuple):
    """tokens (B, T) int64, mask (B, T) bool, segments (B, T) int64 (None for single sentences)."""

    tokens: Tensor
    mask: Tensor
    segments: Tensor | None


class Frame(NamedTuple):
    """Special tokens `before`, `between` and `after` one or two sentences, and the token to `fill` padding with."""

    before: Ids
    between: Ids
    after: Ids
    fill: int
    segments: bool = True  # whether the second sentence of a pair is segment 1

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Frame":
        """Frame of the tokenizer's file: BERT's [CLS] first [SEP] second [SEP], LLaMA's bos before the first."""
        before, between, after, segments = tokenizer.pair_frame
        return cls(before, between=between, after=after, fill=filler(tokenizer), segments=segments)

    @classmethod
    def usual(cls, tokenizer: Tokenizer) -> "Frame":
        """[CLS] first [SEP] second [SEP]; without [CLS] and with eos for [SEP] if the tokenizer lacks either."""
        if tokenizer.cls_id is not None and tokenizer.sep_id is not None:
            before, between = (tokenizer.cls_id,), (tokenizer.sep_id,)
            return cls(before, between=between, after=between, fill=filler(tokenizer))
        eos = (tokenizer.need("eos"),)
        return cls((), between=eos, after=eos, fill=filler(tokenizer))

    def specials(self, texts: int) -> int:
        """Number of special tokens around one text or two."""
        return len(self.before) + (texts - 1) * len(self.between) + len(self.after)

    def text_length(self, length: int | None, texts: int = 1) -> int | None:
        """Number of tokens of one text, or of two, that fit into a row of `length`."""
        return text_length(length, self.specials(texts))


def filler(tokenizer: Tokenizer) -> int:
    """Token for padded positions: the padding token, or any other if there is none, because they are masked."""
    return next((id for id in (tokenizer.pad_id, tokenizer.eos_id) if id is not None), 0)


def framed(
    first: Sequence[Sequence[int]], second: Sequence[Sequence[int]] | None, frame: Frame, *, length: int | None = None
) -> Framed:
    """Put sentences, or pairs of them, in a frame and pad them. An empty row becomes one filler token. If a pair is too
    long, the longer sentence is truncated first (Devlin et al. 2019)."""
    max_tokens = frame.text_length(length, 1 if second is None else 2)
    if second is None:
        rows = [[*frame.before, *ids[:max_tokens], *frame.after] or [frame.fill] for ids in first]
        return Framed(*pad(rows, frame.fill), None)
    rows, segments = [], []
    for a, b in zip(first, second, strict=True):
        a, b = fit_pair(a, b, max_tokens)
        head, tail = [*frame.before, *a, *frame.between], [*b, *frame.after]
        rows.append(head + tail or [frame.fill])
        segments.append([0] * len(head) + [int(frame.segments)] * len(tail) or [0])
    return Framed(*pad(rows, frame.fill), pad(segments, 0)[0])


def fit_pair(first: Sequence[int], second: Sequence[int], max_tokens: int | None) -> tuple[Sequence[int], ...]:
    """Truncate a pair of sentences to `max_tokens` together."""
    if max_tokens is not None and len(first) + len(second) > max_tokens:
        # the first has the space that the second leaves, or half
        first = first[: max(max_tokens - len(second), (max_tokens + 1) // 2)]
        second = second[: max_tokens - len(first)]
    return first, second


def framed_lengths(examples: Examples, fields: Sequence[str], frame: Frame, *, length: int) -> Array:
    """(examples,): tokens of a framed sentence, or of a framed pair in two fields, clipped to 1 … `length`."""
    text = np.sum([examples.lengths(field) for field in fields], axis=0)
    return np.clip(text + frame.specials(len(fields)), 1, length)


def text_length(length: int | None, specials: int) -> int | None:
    """Number of text tokens that fit into a row of `length` beside its special tokens; None if unlimited."""
    if length is not None and length <= specials:
        raise DataError(f"batch.length = {length} leaves no space for text beside {specials} special tokens; raise it")
    return None if length is None else length - specials
