"""Text that is corrupted on purpose, for a model to restore: masked words, missing spans.

What happens to a row depends on the seed and on the row's number among all samples of the run, and on nothing else:
not on the batch, the process or the step that it is in. So a text is masked anew each time it is read, and a resumed
run, or one with another number of processes, sees the same rows.
"""

import re
from dataclasses import dataclass, replace
from itertools import count, takewhile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.data.batch import Batch, Source
from weft.data.sampler import Array, Words, draw, streams
from weft.errors import DataError, TokenizerError
from weft.text.tokenizer import Tokenizer

Flags = npt.NDArray[np.bool_]
MASKED, REPLACED = 0.8, 0.1  # of the chosen words; the others stay (Devlin et al. 2019, §3.1)
MASKING, PAIRING, CUTTING = range(3, 6)  # what a row's random numbers are for; the sampler has purposes 1 and 2


@dataclass(frozen=True)
class Masking:
    """How words are masked, and the ids of the tokenizer that it takes.

    `special_ids` ascend; `starts` (vocab_size,) marks the tokens that begin a word, where whole words are masked.
    """

    rate: float
    vocab_size: int
    mask_id: int
    special_ids: Array
    pad_id: int | None = None
    cls_id: int | None = None
    sep_id: int | None = None
    starts: Flags | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, rate: float = 0.15, whole_words: bool = False) -> "Masking":
        """The masking of a tokenizer that has a mask token."""
        mask_id, special = tokenizer.need("mask"), set(tokenizer.special_tokens.values())
        if len(special) >= tokenizer.vocab_size:
            raise TokenizerError("this tokenizer has special tokens only: there is nothing to mask")
        others = tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id
        starts = word_starts(tokenizer) if whole_words else None
        return cls(rate, tokenizer.vocab_size, mask_id, np.array(sorted(special)), *others, starts)

    @property
    def frame(self) -> int:
        """How many tokens `masked_batch` puts around a row: [CLS] and [SEP], where the tokenizer has them."""
        return 2 if self.cls_id is not None and self.sep_id is not None else 0

    def mask(self, ids: Array, samples: npt.ArrayLike, seed: int) -> tuple[Array, Flags]:
        """`mask_words` on the ids (B, T) of these samples (B,)."""
        starts = None if self.starts is None else self.starts[ids]
        return mask_words(ids, self, streams(samples, seed, MASKING), starts)


def mask_words(ids: Array, masking: Masking, streams: Words, starts: Flags | None = None) -> tuple[Array, Flags]:
    """BERT's masking (Devlin et al. 2019, §3.1) of ids (B, T): what the model reads, and where it predicts, (B, T).

    A share `masking.rate` of a row's words is chosen, one at least. Of these 80 % become the mask token, 10 % any
    ordinary token, 10 % stay. Special tokens are never chosen, and never put in. Every token is a word, unless `starts`
    (B, T) marks where words begin: then all tokens of a word are chosen together and treated alike. What happens to a
    row is drawn from its stream (B,) alone, and special tokens after it change nothing.
    """
    special = np.isin(ids, masking.special_ids)
    begins = np.ones(ids.shape, dtype=bool) if starts is None else starts | special
    begins[:, 0] = True
    begins[:, 1:] |= special[:, :-1]
    heads = begins & ~special  # the first token of each word, for which its numbers are drawn
    words = heads.sum(axis=1)
    # the part after the point is drawn, so that on average it is `rate` exactly
    count = np.clip((masking.rate * words + draw(streams, 0)).astype(np.int64), np.minimum(words, 1), words)
    places = np.arange(ids.shape[1])
    lots = np.where(heads, draw(streams[:, None], 1 + 3 * places), 1.0)
    last = np.sort(lots, axis=1)[np.arange(len(ids)), count - 1]  # 1.0 where there is no word
    chosen = heads & (lots <= last[:, None])
    head = np.broadcast_to(places, ids.shape)
    if starts is not None:
        head = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        chosen = np.take_along_axis(chosen, head, axis=1)

    row, place = np.nonzero(chosen)
    fate = draw(streams[row], 2 + 3 * head[row, place])
    inputs = ids.copy()
    masked, replaced = fate < MASKED, (fate >= MASKED) & (fate < MASKED + REPLACED)
    inputs[row[masked], place[masked]] = masking.mask_id
    row, place = row[replaced], place[replaced]
    special_ids = masking.special_ids
    drawn = (draw(streams[row], 3 + 3 * place) * (masking.vocab_size - len(special_ids))).astype(np.int64)
    # the n-th ordinary token: n, and one more for each special token that is passed on the way there
    inputs[row, place] = drawn + np.searchsorted(special_ids - np.arange(len(special_ids)), drawn, side="right")
    return inputs, chosen


# first bytes of characters that are signs, or belong to scripts without spaces (U+2000 to U+9FFF, U+10000 and on)
APART = frozenset([0xC2, *range(0xE2, 0xEA), *range(0xF0, 0xF5)])


def word_starts(tokenizer: Tokenizer) -> Flags:
    """Which tokens begin a word, (vocab_size,): those that bring white space along, signs, and Chinese characters. What
    a tokenizer writes in front of a word (`Ġ`, `▁`) and within one (`##`) is all in the text that its tokens give."""
    starts = np.ones(tokenizer.vocab_size, dtype=bool)
    for id in range(tokenizer.vocab_size):
        try:
            text = tokenizer.token_bytes(id)
        except TokenizerError:  # a number that the vocabulary leaves out
            continue
        first = text.decode("utf-8", "ignore")[:1]
        if text[:1].isalnum() or (first.isalnum() and text[0] not in APART):
            starts[id] = False
        elif not first and text:  # part of a character
            starts[id] = text[0] in APART
    return starts


def masked_batch(batch: Batch, samples: npt.ArrayLike, masking: Masking, seed: int) -> Batch:
    """A batch of text (B, T), as `windows_batch` gives it, with words masked; `samples` (B,) number its rows.

    The targets are the tokens themselves. Rows become [CLS] row [SEP] where the tokenizer has both, so the text
    should be `masking.frame` tokens shorter than the rows.
    """
    framed = _framed(batch, masking) if masking.frame else batch
    inputs, chosen = masking.mask(framed.tokens.numpy(), samples, seed)
    return replace(framed, tokens=torch.from_numpy(inputs), targets=framed.tokens, loss_mask=torch.from_numpy(chosen))


def _framed(batch: Batch, masking: Masking) -> Batch:
    """[CLS] belongs to the first document of a row and [SEP] to the last one."""

    def around(inside: Tensor, before: Tensor, after: Tensor) -> Tensor:
        return torch.cat([before.expand(len(inside), 1), inside, after.expand(len(inside), 1)], dim=1)

    assert masking.cls_id is not None and masking.sep_id is not None
    assert batch.mask is None, "rows of running text have no padding"
    tokens = around(batch.tokens, torch.tensor([[masking.cls_id]]), torch.tensor([[masking.sep_id]]))
    documents, positions = batch.documents, batch.positions
    if documents is not None and positions is not None:
        positions = positions + (documents == documents[:, :1])  # the first document moves on by one
        positions = around(positions, torch.tensor([[0]]), positions[:, -1:] + 1)
        documents = around(documents, documents[:, :1], documents[:, -1:])
    return replace(batch, tokens=tokens, documents=documents, positions=positions)


def sentinels(tokenizer: Tokenizer) -> Array:
    """The ids of the special tokens `<extra_id_0>`, `<extra_id_1>`, …, which stand for the spans that were cut out."""
    numbered = {
        int(found[1]): id
        for token, id in tokenizer.special_tokens.items()
        if (found := re.fullmatch(r"<extra_id_(\d+)>", token))
    }
    ids = [numbered[number] for number in takewhile(numbered.__contains__, count())]
    if len(ids) < 2:
        advice = 'set tokenizer.specials.extra = ["<extra_id_0>", "<extra_id_1>", …]'
        raise TokenizerError(f"cutting spans out needs special tokens to stand for them; {advice}")
    return np.array(ids, dtype=np.int64)


def span_counts(length: int, rate: float = 0.15, mean: float = 3.0) -> tuple[int, int]:
    """How many of `length` tokens are cut out, and in how many spans (Raffel et al. 2020, §3.3.4)."""
    assert length >= 2
    noise = min(max(round(length * rate), 1), length - 1)
    return noise, min(max(round(noise / mean), 1), noise, length - noise)


@dataclass(frozen=True)
class SpanCorruption:
    """How spans are cut out, and the ids of the tokenizer that it takes; `start_id` is what writing begins with."""

    rate: float
    mean: float
    sentinels: Array
    eos_id: int
    start_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, rate: float = 0.15, mean: float = 3.0) -> "SpanCorruption":
        """For a tokenizer with sentinels and an eos token. Writing begins with bos, or with pad as T5's does."""
        start = tokenizer.need("pad") if tokenizer.bos_id is None else tokenizer.bos_id
        return cls(rate, mean, sentinels(tokenizer), tokenizer.need("eos"), start)


def corrupt_spans(ids: Array, corruption: SpanCorruption, streams: Words) -> tuple[Array, Array]:
    """T5's span corruption (Raffel et al. 2020, §3.1.4) of ids (B, T): what the encoder reads, and the targets.

    A share `rate` of the tokens is cut out, in spans of `mean` tokens on average. A sentinel stands for each of them in
    the source (B, S); the target (B, U) holds them after their sentinels, and one sentinel more. Both end with eos.
    What is cut out of a row is drawn from its stream (B,).
    """
    sentinels, eos = corruption.sentinels, corruption.eos_id
    size, length = ids.shape
    noise, spans = span_counts(length, corruption.rate, corruption.mean)
    if spans >= len(sentinels):
        found = f"{length} tokens lose {spans} spans, but the tokenizer has {len(sentinels)} sentinels (<extra_id_0> …)"
        advice = "add some to tokenizer.specials.extra, or shorten batch.length"
        raise DataError(f"{found}, and {spans + 1} are needed: {advice}")
    kept, cut = _segments(length - noise, spans, streams, 0), _segments(noise, spans, streams, 1)
    row = np.arange(size)[:, None]
    begins = np.cumsum(kept + cut, axis=1) - cut  # where the spans begin in the text, (B, spans)
    border = np.zeros((size, length + 1), dtype=np.int8)
    border[row, begins], border[row, begins + cut] = 1, -1
    lost = np.cumsum(border[:, :-1], axis=1) > 0

    marked = ids.copy()
    marked[row, begins] = sentinels[:spans]
    source = np.full((size, length - noise + spans + 1), eos)
    source[:, :-1] = marked[~lost | (border[:, :-1] > 0)].reshape(size, -1)

    marks = np.cumsum(cut, axis=1) - cut + np.arange(spans)  # where their sentinels stand in the target
    ordinary = np.ones((size, noise + spans + 2), dtype=bool)
    ordinary[row, marks] = ordinary[:, -2:] = False
    target = np.full(ordinary.shape, eos)
    target[row, marks], target[:, -2] = sentinels[:spans], sentinels[spans]
    target[ordinary] = ids[lost]
    return source, target


def _segments(items: int, segments: int, streams: Words, which: int) -> Array:
    """Lengths (B, segments), one at least each, that sum to `items`: every such list is as likely as any other."""
    lots = draw(streams[:, None], 2 * np.arange(items - 1) + which)
    borders = np.sort(np.argsort(lots, axis=1)[:, : segments - 1], axis=1) + 1
    return np.diff(borders, axis=1, prepend=0, append=items)


def spans_batch(ids: Array, samples: npt.ArrayLike, corruption: SpanCorruption, seed: int) -> Batch:
    """Texts (B, T) with spans cut out as sources, and the spans as targets; `samples` (B,) number them. Texts of one
    length stay of one length, and need no padding."""
    source, target = corrupt_spans(ids, corruption, streams(samples, seed, CUTTING))
    read, written = torch.from_numpy(source), torch.from_numpy(target)
    started = torch.cat([torch.full((len(written), 1), corruption.start_id), written[:, :-1]], dim=1)
    return Batch(started, written, source=Source(read, torch.ones(read.shape, dtype=torch.bool)))
