"""The batch: what a model is fed, as one typed value; and the ways to make one from tokens.

Padding is whatever the tokenizer says it is; where it says nothing, masked places hold any token (`filler`).
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

from weft.data.examples import Examples
from weft.data.sampler import Array, Lanes, Mixture
from weft.data.shards import Tokens
from weft.errors import DataError
from weft.text.tokenizer import Ids, Tokenizer


@dataclass(frozen=True)
class _Tensors:
    """What a dataclass of tensors can do as a whole."""

    def _each(self, change: Any) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        nested = {name: value._each(change) for name, value in values.items() if isinstance(value, _Tensors)}
        changed = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **nested, **changed)

    def to(self, device: torch.device | str) -> Self:
        """A copy on `device`; from pinned memory the transfer doesn't wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> Self:
        """A copy in page-locked memory, from which transfers to a GPU overlap with work."""
        return self._each(lambda tensor: tensor.pin_memory())


@dataclass(frozen=True)
class Source(_Tensors):
    """What an encoder reads: tokens (B, S) int64, and mask (B, S) bool, True at real tokens."""

    tokens: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Batch(_Tensors):
    """Rows of tokens and what each should predict. None means: nothing special.

    tokens (B, T) int64; targets (B, T) int64, a token or label for each place, or (B,), one for a whole row: int64 for
    a class, float32 for a score; loss_mask, shaped as the targets, bool, True where a target counts (None: everywhere);
    positions (B, T) int64 (None: 0 … T-1); documents (B, T) int64, tokens attend within equal numbers alone;
    mask (B, T) bool, True at real tokens (None: all are); segments (B, T) int64, 0 in the first sentence of a pair and
    1 in the second; source, what an encoder reads first, or the other text of a pair.
    next_sentence (B,) int64, 1 where the second sentence is the first one's successor. Its loss is a mean of its own
    beside the masked words': next_sentence_weight (B,) float32 is (targets that count) ÷ rows over the whole step, so
    that the sum of both, divided by the step's targets, is mean + mean however the step is cut.
    keys (B,) int32, what a row's dropout is drawn from (`nn/dropout.py`).
    ranges: tokens, targets, loss_mask and segments are those of some ranges of places of every row, where processes
    divide rows (`parallel/context.py`); positions, documents and mask are then those of whole rows.
    lanes (B,) int64, where rows continue those of the step before: the number of each; begins (B,) bool, True where it
    continues none.
    """

    tokens: Tensor
    targets: Tensor
    loss_mask: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    mask: Tensor | None = None
    segments: Tensor | None = None
    source: Source | None = None
    next_sentence: Tensor | None = None
    next_sentence_weight: Tensor | None = None
    keys: Tensor | None = None
    lanes: Tensor | None = None
    begins: Tensor | None = None
    ranges: tuple[range, ...] = ()
    counted: int | None = None  # what `count` found while the mask was on the host

    @property
    def count(self) -> int:
        if self.counted is not None:
            return self.counted
        return self.targets.numel() if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def read(self) -> int:
        """How many tokens are read, padding left out."""
        own = self.tokens.numel()
        if self.mask is not None:
            here = [self.mask[:, each.start : each.stop] for each in self.ranges] or [self.mask]
            own = sum(int(real.sum()) for real in here)
        return own + (int(self.source.mask.sum()) if self.source is not None else 0)

    def to(self, device: torch.device | str) -> Self:
        """A copy on `device`; from pinned memory the transfer doesn't wait, and the count is taken along."""
        return replace(super().to(device), counted=self.count)

    def split(self, parts: int) -> list["Batch"]:
        """The rows in `parts` batches for gradient accumulation; sizes differ by one row at most."""
        size = len(self.tokens)
        assert 1 <= parts <= size, f"{size} rows in {parts} parts"
        assert not self.ranges, "rows are divided after the batch"
        borders = [part * size // parts for part in range(parts + 1)]
        whole = replace(self, counted=None)
        return [whole._each(lambda tensor, a=start, b=stop: tensor[a:b]) for start, stop in pairwise(borders)]


def windows_batch(
    texts: Sequence[Tokens], mixture: Mixture, samples: npt.ArrayLike, *, document_mask: bool = False
) -> Batch:
    """The windows (B, length) that these samples (B,) of the run are, each from one of the texts."""
    sources, starts = mixture.locate(samples)
    return _stack(texts, sources, starts, mixture.windows[0].length, document_mask)


def lanes_batch(text: Tokens, lanes: Lanes, step: int, mine: Array) -> Batch:
    """The windows (B, length) of some lanes (B,) of a text at a step, counted from 0."""
    batch = _stack([text], np.zeros_like(mine), lanes.starts(step)[mine], lanes.length, False)
    return replace(batch, lanes=torch.from_numpy(mine), begins=torch.full((len(mine),), lanes.begins(step)))


def evaluation_batches(tokens: Tokens, length: int, batch: int) -> Iterator[Batch]:
    """Every token but the first as a target exactly once, in order. Full windows come `batch` at a time; what is left
    at the end is one shorter row, so nothing is padded."""
    if len(tokens) < 2:
        raise DataError(f"the text has {len(tokens)} tokens; at least 2 are needed to predict one from another")
    full, rest = divmod(len(tokens) - 1, length)
    for first in range(0, full, batch):
        starts = np.arange(first, min(first + batch, full)) * length
        yield _stack([tokens], np.zeros_like(starts), starts, length, False)
    if rest:
        yield _stack([tokens], np.zeros(1, dtype=np.int64), np.array([full * length]), rest, False)


def _stack(texts: Sequence[Tokens], sources: Array, starts: Array, length: int, document_mask: bool) -> Batch:
    """Rows that begin at `starts` (B,) of the texts that `sources` (B,) number."""
    ids = np.empty((len(starts), length + 1), dtype=np.int64)
    for source, text in enumerate(texts):
        mine = sources == source
        ids[mine] = text.windows(starts[mine], length + 1)
    inputs, targets = torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())
    if not document_mask:
        return Batch(inputs, targets)
    places = zip(sources.tolist(), starts.tolist(), strict=True)
    numbers = np.stack([texts[source].documents(start, length + 1) for source, start in places])
    numbers -= numbers[:, :1]  # small numbers, from 0 in each row
    inside = numbers[:, 1:] == numbers[:, :-1]  # a document's last token predicts nothing of the next document
    positions = torch.from_numpy(restarting_positions(numbers[:, :-1]))
    return Batch(inputs, targets, torch.from_numpy(inside), positions, torch.from_numpy(numbers[:, :-1].copy()))


def restarting_positions(documents: Array) -> Array:
    """Positions (B, T) that count from 0 in each document of a row."""
    here = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.ones(documents.shape, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return here - np.maximum.accumulate(np.where(begins, here, 0), axis=1)


def pad(sequences: Sequence[Sequence[int]], pad_id: int | None) -> tuple[Tensor, Tensor]:
    """Sequences as one (B, T) tensor, filled up with the tokenizer's `pad_id`, and a bool mask of the real tokens."""
    if pad_id is None:
        raise DataError("this tokenizer has no padding token; give it one (tokenizer.specials.pad), or pack instead")
    length = max((len(sequence) for sequence in sequences), default=0)
    mask = np.arange(length) < np.array([len(sequence) for sequence in sequences], dtype=np.int64)[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(sequences), dtype=np.int64)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def packed(sequences: Sequence[Sequence[int]], length: int, pad_id: int | None) -> Batch:
    """Documents packed into as few rows (B, length) as best-fit finds, none attending to another.

    Each token but a document's first is a target exactly once. A document longer than a row continues in another
    one, as a document of its own. Document -1 is padding.
    """
    if pad_id is None:
        raise DataError("this tokenizer has no padding token; give it one (tokenizer.specials.pad) to pack documents")
    pieces = [  # `length` inputs and, one token later, as many targets
        sequence[start : start + length + 1] for sequence in sequences for start in range(0, len(sequence) - 1, length)
    ]
    if not pieces:
        raise DataError("no document has two tokens or more: there is nothing to predict")
    places = _fit([len(piece) - 1 for piece in pieces], length)
    shape = (max(row for row, _ in places) + 1, length)
    tokens, targets, documents = np.full(shape, pad_id), np.full(shape, pad_id), np.full(shape, -1)
    for number, (piece, (row, column)) in enumerate(zip(pieces, places, strict=True)):
        span = slice(column, column + len(piece) - 1)
        tokens[row, span], targets[row, span] = piece[:-1], piece[1:]
        documents[row, span] = number
    loss_mask, positions = torch.from_numpy(documents >= 0), torch.from_numpy(restarting_positions(documents))
    inputs, wanted, borders = map(torch.from_numpy, (tokens, targets, documents))
    return Batch(inputs, wanted, loss_mask, positions, borders)


def _fit(sizes: Sequence[int], length: int) -> list[tuple[int, int]]:
    """(row, column) for each size: longest first, into the row with the least space left (best-fit decreasing)."""
    places = [(0, 0)] * len(sizes)
    spaces: list[tuple[int, int]] = []  # (free places, row), sorted
    opened = 0
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        at = bisect_left(spaces, (sizes[item], -1))
        if at < len(spaces):
            free, row = spaces.pop(at)
        else:
            free, row, opened = length, opened, opened + 1
        places[item] = (row, length - free)
        insort(spaces, (free - sizes[item], row))
    return places


class Framed(NamedTuple):
    """tokens (B, T) int64, mask (B, T) bool, segments (B, T) int64 (None where there is one sentence)."""

    tokens: Tensor
    mask: Tensor
    segments: Tensor | None


class Frame(NamedTuple):
    """The special tokens `before` a sentence and `after` it, those `between` the two of a pair, and one to `fill` up.

    `segments`: whether the second of a pair is in a segment of its own.
    """

    before: Ids
    between: Ids
    after: Ids
    fill: int
    segments: bool = True

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Frame":
        """As the tokenizer's own file says: BERT's [CLS] first [SEP] second [SEP], LLaMA's bos before the first."""
        before, between, after, segments = tokenizer.pair_frame
        return cls(before, between, after, filler(tokenizer), segments)

    @classmethod
    def usual(cls, tokenizer: Tokenizer) -> "Frame":
        """[CLS] first [SEP] second [SEP]; with eos for [SEP] where the tokenizer has no such pair."""
        if tokenizer.cls_id is not None and tokenizer.sep_id is not None:
            return cls((tokenizer.cls_id,), (tokenizer.sep_id,), (tokenizer.sep_id,), filler(tokenizer))
        eos = (tokenizer.need("eos"),)
        return cls((), eos, eos, filler(tokenizer))

    def specials(self, texts: int) -> int:
        """How many special tokens stand around one text, or two."""
        return len(self.before) + (texts - 1) * len(self.between) + len(self.after)

    def text_length(self, length: int | None, texts: int = 1) -> int | None:
        """How many tokens of one text, or of two, fit into a row of `length`."""
        return text_length(length, self.specials(texts))


def filler(tokenizer: Tokenizer) -> int:
    """A token for places that are masked: nobody reads them, so where there is no padding token, any will do."""
    return next((id for id in (tokenizer.pad_id, tokenizer.eos_id) if id is not None), 0)


def framed(
    first: Sequence[Sequence[int]], second: Sequence[Sequence[int]] | None, frame: Frame, *, length: int | None = None
) -> Framed:
    """Sentences, or pairs of them, in a frame. Of nothing at all, one token is read. Of a pair that is too long, the
    longer sentence is cut first (Devlin et al. 2019)."""
    most = frame.text_length(length, 1 if second is None else 2)
    if second is None:
        rows = [[*frame.before, *ids[:most], *frame.after] or [frame.fill] for ids in first]
        return Framed(*pad(rows, frame.fill), None)
    whole: list[list[int]] = []
    segments: list[list[int]] = []
    for one, two in zip(first, second, strict=True):
        if most is not None and len(one) + len(two) > most:
            one = one[: max(most - len(two), (most + 1) // 2)]  # what the second leaves, or half
            two = two[: most - len(one)]
        head, tail = [*frame.before, *one, *frame.between], [*two, *frame.after]
        whole.append(head + tail or [frame.fill])
        segments.append([0] * len(head) + [int(frame.segments)] * len(tail) or [0])
    return Framed(*pad(whole, frame.fill), pad(segments, 0)[0])


def framed_lengths(examples: Examples, fields: Sequence[str], frame: Frame, length: int) -> Array:
    """(examples,): tokens of a sentence, or of a pair in two fields, in its frame; 1 at least, `length` at most."""
    text = np.sum([examples.lengths(field) for field in fields], axis=0)
    return np.clip(text + frame.specials(len(fields)), 1, length)


def text_length(length: int | None, specials: int) -> int | None:
    """How many tokens of text fit into a row beside its special tokens."""
    if length is not None and length <= specials:
        raise DataError(f"batch.length = {length} leaves no space for text beside {specials} special tokens; raise it")
    return None if length is None else length - specials
