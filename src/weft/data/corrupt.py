"""Corrupted text for a model to restore: masked words (BERT) and missing spans (T5).

The corruption of a row depends only on the seed and on the row's number among all samples of the run, not on its batch,
process or step. A text is therefore masked differently each time it is read, and a resumed run, or one with another
number of processes, sees the same rows.
"""

import re
from dataclasses import dataclass, replace
from itertools import count, takewhile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.data.batch import Batch, Source
from weft.data.sampler import Array, Streams, draw, streams
from weft.errors import DataError, TokenizerError
from weft.text.tokenizer import Tokenizer

Flags = npt.NDArray[np.bool_]
MASKED, REPLACED = 0.8, 0.1  # shares of the chosen words; the others are kept (Devlin et al. 2019, §3.1)
MASKING, PAIRING, CUTTING = range(3, 6)  # purposes of a row's random-number streams; the sampler uses 1 and 2


@dataclass(frozen=True)
class Masking:
    """The masking rate, and the tokenizer's ids that masking needs; `starts` (vocab_size,) is for whole words."""

    rate: float
    vocab_size: int
    mask_id: int
    special_ids: Array  # ascending
    pad_id: int | None = None
    cls_id: int | None = None
    sep_id: int | None = None
    starts: Flags | None = None  # marks the tokens that begin a word

    @classmethod
    def of(cls, tokenizer: Tokenizer, rate: float = 0.15, whole_words: bool = False) -> "Masking":
        """Masking for a tokenizer that has a mask token."""
        mask_id, special = tokenizer.need("mask"), set(tokenizer.special_tokens.values())
        if len(special) >= tokenizer.vocab_size:
            raise TokenizerError("this tokenizer has special tokens only: there is nothing to mask")
        return cls(
            rate,
            tokenizer.vocab_size,
            mask_id,
            special_ids=np.array(sorted(special)),
            pad_id=tokenizer.pad_id,
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
            starts=word_starts(tokenizer) if whole_words else None,
        )

    @property
    def frame(self) -> int:
        """Number of tokens that `masked_batch` puts around a row: [CLS] and [SEP], if the tokenizer has them."""
        return 2 if self.cls_id is not None and self.sep_id is not None else 0

    def mask(self, ids: Array, samples: npt.ArrayLike, seed: int) -> tuple[Array, Flags]:
        """Apply `mask_words` to the ids (B, T) of these samples (B,)."""
        starts = None if self.starts is None else self.starts[ids]
        return mask_words(ids, self, streams(samples, seed, MASKING), starts=starts)


def mask_words(ids: Array, masking: Masking, streams: Streams, *, starts: Flags | None = None) -> tuple[Array, Flags]:
    """Mask ids (B, T) as BERT does (Devlin et al. 2019, §3.1); return the inputs and the loss mask, both (B, T).

    A share `masking.rate` of each row's words is chosen, at least one. Of these, 80 % become the mask token, 10 % a
    random ordinary token, and 10 % are kept. Special tokens are never chosen and never inserted. Every token is a word,
    unless `starts` (B, T) marks where words begin: then all tokens of a word are chosen together and share one
    treatment. All draws for a row come from its stream (B,), and trailing special tokens do not change them.
    """
    special = np.isin(ids, masking.special_ids)
    begins = np.ones(ids.shape, dtype=bool) if starts is None else starts | special
    begins[:, 0] = True
    begins[:, 1:] |= special[:, :-1]
    heads = begins & ~special  # the first token of each word; a word's numbers are drawn at its position
    words = heads.sum(axis=1)
    # stochastic rounding: the expected share is exactly `rate`
    count = np.clip((masking.rate * words + draw(streams, 0)).astype(np.int64), np.minimum(words, 1), words)
    positions = np.arange(ids.shape[1])
    scores = np.where(heads, draw(streams[:, None], 1 + 3 * positions), 1.0)
    threshold = np.sort(scores, axis=1)[np.arange(len(ids)), count - 1]  # 1.0 if the row has no words
    chosen = heads & (scores <= threshold[:, None])
    head = np.broadcast_to(positions, ids.shape)
    if starts is not None:
        head = np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
        chosen = np.take_along_axis(chosen, head, axis=1)

    row, position = np.nonzero(chosen)
    treatment = draw(streams[row], 2 + 3 * head[row, position])
    inputs = ids.copy()
    masked, replaced = treatment < MASKED, (treatment >= MASKED) & (treatment < MASKED + REPLACED)
    inputs[row[masked], position[masked]] = masking.mask_id
    row, position = row[replaced], position[replaced]
    special_ids = masking.special_ids
    drawn = (draw(streams[row], 3 + 3 * position) * (masking.vocab_size - len(special_ids))).astype(np.int64)
    # id of the n-th ordinary token: n plus the number of special ids below it
    inputs[row, position] = drawn + np.searchsorted(special_ids - np.arange(len(special_ids)), drawn, side="right")
    return inputs, chosen


# first UTF-8 bytes of symbols and of scripts without spaces (U+2000 to U+9FFF, U+10000 and above)
UNSPACED = frozenset([0xC2, *range(0xE2, 0xEA), *range(0xF0, 0xF5)])


def word_starts(tokenizer: Tokenizer) -> Flags:
    """Tokens that begin a word, (vocab_size,): those that contain white space, symbols, and Chinese characters. The
    markers of a tokenizer before a word (`Ġ`, `▁`) and within one (`##`) are resolved by `token_bytes`."""
    starts = np.ones(tokenizer.vocab_size, dtype=bool)
    for id in range(tokenizer.vocab_size):
        try:
            text = tokenizer.token_bytes(id)
        except TokenizerError:  # an id that the vocabulary skips
            continue
        first = text.decode("utf-8", "ignore")[:1]
        if text[:1].isalnum() or (first.isalnum() and text[0] not in UNSPACED):
            starts[id] = False
        elif not first and text:  # part of a character
            starts[id] = text[0] in UNSPACED
    return starts


def masked_batch(batch: Batch, samples: npt.ArrayLike, masking: Masking, *, seed: int) -> Batch:
    """Mask words of a batch of running text (B, T) from `windows_batch`; `samples` (B,) are the numbers of its rows.

    The targets are the original tokens. If the tokenizer has both, rows become [CLS] row [SEP], so the text should be
    `masking.frame` tokens shorter than the rows.
    """
    framed = _framed(batch, masking) if masking.frame else batch
    inputs, chosen = masking.mask(framed.tokens.numpy(), samples, seed)
    return replace(framed, tokens=torch.from_numpy(inputs), targets=framed.tokens, loss_mask=torch.from_numpy(chosen))


def _framed(batch: Batch, masking: Masking) -> Batch:
    """Add [CLS] to the first document of each row and [SEP] to the last."""

    def surround(rows: Tensor, before: Tensor, after: Tensor) -> Tensor:
        return torch.cat([before.expand(len(rows), 1), rows, after.expand(len(rows), 1)], dim=1)

    assert masking.cls_id is not None and masking.sep_id is not None
    assert batch.mask is None, "rows of running text have no padding"
    tokens = surround(batch.tokens, torch.tensor([[masking.cls_id]]), torch.tensor([[masking.sep_id]]))
    documents, positions = batch.documents, batch.positions
    if documents is not None and positions is not None:
        positions = positions + (documents == documents[:, :1])  # [CLS] shifts the first document by one
        positions = surround(positions, torch.tensor([[0]]), positions[:, -1:] + 1)
        documents = surround(documents, documents[:, :1], documents[:, -1:])
    return replace(batch, tokens=tokens, documents=documents, positions=positions)


def sentinels(tokenizer: Tokenizer) -> Array:
    """Ids of the sentinels, the special tokens `<extra_id_0>`, `<extra_id_1>`, … that replace missing spans."""
    numbered = {
        int(match[1]): id
        for token, id in tokenizer.special_tokens.items()
        if (match := re.fullmatch(r"<extra_id_(\d+)>", token))
    }
    ids = [numbered[number] for number in takewhile(numbered.__contains__, count())]
    if len(ids) < 2:
        advice = 'set tokenizer.specials.extra = ["<extra_id_0>", "<extra_id_1>", …]'
        raise TokenizerError(f"span corruption needs sentinel tokens, which this tokenizer lacks; {advice}")
    return np.array(ids, dtype=np.int64)


def span_counts(length: int, rate: float = 0.15, mean: float = 3.0) -> tuple[int, int]:
    """Number of tokens removed from `length`, and the number of spans they form (Raffel et al. 2020, §3.3.4)."""
    assert length >= 2
    noise = min(max(round(length * rate), 1), length - 1)
    return noise, min(max(round(noise / mean), 1), noise, length - noise)


@dataclass(frozen=True)
class SpanCorruption:
    """Rate and mean length of the removed spans, and the tokenizer's ids; the decoder begins with `start_id`."""

    rate: float
    mean: float
    sentinels: Array
    eos_id: int
    start_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, rate: float = 0.15, mean: float = 3.0) -> "SpanCorruption":
        """Settings for a tokenizer with sentinels and eos. The decoder begins with bos, or with pad as T5's does."""
        start = tokenizer.need("pad") if tokenizer.bos_id is None else tokenizer.bos_id
        return cls(rate, mean, sentinels=sentinels(tokenizer), eos_id=tokenizer.need("eos"), start_id=start)


def corrupt_spans(ids: Array, corruption: SpanCorruption, streams: Streams) -> tuple[Array, Array]:
    """Corrupt ids (B, T) as T5 does (Raffel et al. 2020, §3.1.4); return the encoder's source and the targets.

    A share `rate` of the tokens is removed, in spans of `mean` tokens on average. In the source (B, S), a sentinel
    replaces each span; the target (B, U) is every sentinel followed by its span, and a final sentinel. Both end with
    eos. The spans of a row are drawn from its stream (B,).
    """
    sentinels, eos = corruption.sentinels, corruption.eos_id
    size, length = ids.shape
    noise, spans = span_counts(length, corruption.rate, corruption.mean)
    if spans >= len(sentinels):
        found = f"{length} tokens lose {spans} spans, but the tokenizer has {len(sentinels)} sentinels (<extra_id_0> …)"
        advice = "add some to tokenizer.specials.extra, or shorten batch.length"
        raise DataError(f"{found}, and {spans + 1} are needed: {advice}")
    kept = _random_lengths(length - noise, spans, streams, parity=0)
    removed = _random_lengths(noise, spans, streams, parity=1)
    row = np.arange(size)[:, None]
    begins = np.cumsum(kept + removed, axis=1) - removed  # where the spans begin in the text, (B, spans)
    border = np.zeros((size, length + 1), dtype=np.int8)
    border[row, begins], border[row, begins + removed] = 1, -1
    in_span = np.cumsum(border[:, :-1], axis=1) > 0

    marked = ids.copy()
    marked[row, begins] = sentinels[:spans]
    source = np.full((size, length - noise + spans + 1), eos)
    source[:, :-1] = marked[~in_span | (border[:, :-1] > 0)].reshape(size, -1)

    marks = np.cumsum(removed, axis=1) - removed + np.arange(spans)  # positions of the sentinels in the target
    ordinary = np.ones((size, noise + spans + 2), dtype=bool)
    ordinary[row, marks] = ordinary[:, -2:] = False
    target = np.full(ordinary.shape, eos)
    target[row, marks], target[:, -2] = sentinels[:spans], sentinels[spans]
    target[ordinary] = ids[in_span]
    return source, target


def _random_lengths(total: int, spans: int, streams: Streams, *, parity: int) -> Array:
    """Lengths (B, spans) of at least one that sum to `total`, drawn uniformly from all such lists, from the numbers of
    each stream at even (`parity` 0) or odd (1) positions."""
    scores = draw(streams[:, None], 2 * np.arange(total - 1) + parity)
    borders = np.sort(np.argsort(scores, axis=1)[:, : spans - 1], axis=1) + 1
    return np.diff(borders, axis=1, prepend=0, append=total)


def spans_batch(ids: Array, samples: npt.ArrayLike, corruption: SpanCorruption, *, seed: int) -> Batch:
    """Batch with texts (B, T) without some spans as sources and the spans as targets; `samples` (B,) are their numbers.
    All sources have one length, and so have all targets: nothing is padded."""
    source, targets = map(torch.from_numpy, corrupt_spans(ids, corruption, streams(samples, seed, CUTTING)))
    inputs = torch.cat([torch.full((len(targets), 1), corruption.start_id), targets[:, :-1]], dim=1)
    return Batch(inputs, targets, source=Source(source, torch.ones(source.shape, dtype=torch.bool)))
