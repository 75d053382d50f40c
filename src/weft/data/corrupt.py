"""Text that is spoiled on purpose, for a model to mend: masked words, sentence pairs, missing spans.

What happens to a row depends on the seed and on the row's number among all samples of the run, and on nothing else:
not on the batch, the process or the step that it is in. So a text is masked anew each time it is read, and a resumed
run, or one with another number of processes, sees the same rows.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.data.batch import Batch, Source, pad
from weft.data.sampler import Array, permute, rows
from weft.errors import DataError, TokenizerError

if TYPE_CHECKING:
    from weft.text.tokenizer import Tokenizer

Flags = npt.NDArray[np.bool_]
MASKED, REPLACED = 0.8, 0.1  # of the chosen words; the others stay (Devlin et al. 2019, §3.1)
SHORTER = 0.1  # of the sentence pairs
MASKING, PAIRING, CUTTING = range(3)  # what a row's random numbers are for


def row_generator(seed: int, sample: int, purpose: int) -> np.random.Generator:
    """The random numbers of one sample: Philox counts (Salmon et al. 2011), and each sample has a range of its own."""
    counter = np.array([0, 0, sample, purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, 0], dtype=np.uint64), counter=counter))


# ---- masked words


def mask_words(
    ids: Array,
    *,
    rate: float = 0.15,
    mask_id: int,
    vocab_size: int,
    special_ids: Array,
    starts: Flags | None = None,
    generator: np.random.Generator,
) -> tuple[Array, Flags]:
    """BERT's masking (Devlin et al. 2019, §3.1) of ids (T,): what the model reads (T,), and where it is asked (T,).

    `rate` of the words are chosen, one at least. Of these 80 % become `mask_id`, 10 % any ordinary token, 10 % stay.
    Special tokens (ascending) are never chosen, and never put in. Every token is a word, unless `starts` (T,) says
    where words begin: then all tokens of a word are chosen together and share its fate.
    """
    special = special_ids.take(np.searchsorted(special_ids, ids), mode="clip") == ids  # faster than np.isin
    begins = np.ones(len(ids), dtype=bool) if starts is None else starts | special
    begins[:1] = True
    begins[1:] |= special[:-1]
    word = np.cumsum(begins) - 1  # each token's word
    words = np.flatnonzero(~special[begins])
    if not len(words):
        return ids.copy(), np.zeros(len(ids), dtype=bool)
    # the part after the point is drawn, so that on average it is `rate` exactly
    count = min(max(1, int(rate * len(words) + generator.random())), len(words))
    fate = np.full(word[-1] + 1, 2.0)  # of each word
    fate[generator.choice(words, count, replace=False, shuffle=False)] = generator.random(count)
    fates = fate[word]
    replaced = (fates >= MASKED) & (fates < MASKED + REPLACED)
    drawn = generator.integers(vocab_size - len(special_ids), size=int(replaced.sum()))
    inputs = np.where(fates < MASKED, mask_id, ids)
    # the n-th ordinary token: n, and one more for each special token that is passed on the way there
    inputs[replaced] = drawn + np.searchsorted(special_ids - np.arange(len(special_ids)), drawn, side="right")
    return inputs, fates < 1.0


# first bytes of characters that are signs, or belong to scripts without spaces (U+2000 to U+9FFF, U+10000 and on)
APART = frozenset([0xC2, *range(0xE2, 0xEA), *range(0xF0, 0xF5)])


def word_starts(tokenizer: "Tokenizer") -> Flags:
    """Which tokens begin a word, (vocab_size,): those that bring white space along, signs, and Chinese characters.

    What a tokenizer writes in front of a word (`Ġ`, `▁`) and within one (`##`) is all in the text that its tokens give.
    """
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


@dataclass(frozen=True)
class Masking:
    """How words are masked, and the ids of the tokenizer that it takes.

    `special_ids` ascend; `starts` (vocab_size,) tells which tokens begin a word, where whole words are masked.
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
    def of(cls, tokenizer: "Tokenizer", rate: float = 0.15, whole_words: bool = False) -> "Masking":
        """The masking of a tokenizer that has a mask token."""
        mask_id, special = tokenizer.need("mask"), set(tokenizer.special_tokens.values())
        if len(special) >= tokenizer.vocab_size:
            raise TokenizerError("this tokenizer has special tokens only: there is nothing to mask")
        return cls(
            rate,
            tokenizer.vocab_size,
            mask_id,
            np.array(sorted(special)),
            tokenizer.pad_id,
            tokenizer.cls_id,
            tokenizer.sep_id,
            word_starts(tokenizer) if whole_words else None,
        )

    @property
    def frame(self) -> int:
        """How many tokens `masked_batch` puts around a row: [CLS] and [SEP], where the tokenizer has them."""
        return 2 if self.cls_id is not None and self.sep_id is not None else 0

    def mask(self, ids: Array, seed: int, sample: int) -> tuple[Array, Flags]:
        """`mask_words` on the ids (T,) of a sample."""
        return mask_words(
            ids,
            rate=self.rate,
            mask_id=self.mask_id,
            vocab_size=self.vocab_size,
            special_ids=self.special_ids,
            starts=None if self.starts is None else self.starts[ids],
            generator=row_generator(seed, sample, MASKING),
        )


def masked_batch(batch: Batch, samples: Iterable[int], masking: Masking, seed: int) -> Batch:
    """A batch of text (B, T), as `windows_batch` gives it, with words masked; `samples` number its rows.

    The targets are the tokens themselves. Rows become [CLS] row [SEP] where the tokenizer has both, so that the text
    should be `masking.frame` tokens shorter than the rows are to be.
    """
    framed = _framed(batch, masking) if masking.frame else batch
    pairs = [masking.mask(ids, seed, n) for ids, n in zip(framed.tokens.numpy(), samples, strict=True)]
    inputs, chosen = (torch.from_numpy(np.stack(column)) for column in zip(*pairs, strict=True))
    return replace(framed, tokens=inputs, targets=framed.tokens, loss_mask=chosen)


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


# ---- sentence pairs


class SentenceSource(Protocol):
    """Sentences in the order of the text, the ids of each in `tokens` and the number of its document in `document`."""

    def __len__(self) -> int: ...

    def ids(self, field: str, index: int, /) -> Array: ...

    def lengths(self, field: str, /) -> npt.NDArray[Any]: ...

    def values(self, field: str, /) -> npt.NDArray[Any]: ...


class Sentences:
    """Sentences that know their documents: what next-sentence pairs are drawn from."""

    def __init__(self, source: SentenceSource) -> None:
        """Refuses a source from which no pair can be drawn."""
        self.source = source
        numbers = np.asarray(source.values("document"))
        # ends[i] is the number of tokens up to and with sentence i; borders[d] the first sentence of document d
        lengths = np.asarray(source.lengths("tokens"), dtype=np.int64)
        assert (lengths > 0).all(), "a sentence has a token at least"
        self.ends = np.cumsum(lengths)
        self.borders = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1])) if len(numbers) else np.arange(0)
        self.borders = np.append(self.borders, len(numbers))
        if self.documents < 2:
            raise DataError(
                f"{self.documents} document: half of the sentence pairs come from another document; give two or more"
            )
        if not len(self.leading):
            raise DataError("every document is a single sentence: none follows another; join them, or mask words only")

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.borders) - 1

    @cached_property
    def leading(self) -> Array:
        """The sentences that another one of the same document follows."""
        last = np.zeros(len(self.ends), dtype=bool)
        last[self.borders[1:] - 1] = True
        return np.flatnonzero(~last)

    def per_epoch(self, length: int) -> int:
        """How many pairs of `length` tokens hold about as much as all sentences do."""
        return max(1, int(self.ends[-1]) // (length - 3))

    def places(self, samples: Sequence[int], seed: int, length: int) -> Array:
        """The tokens at which these samples begin to look for their text: (samples,).

        An epoch looks at `per_epoch` stretches of the text, each once, in an order of its own.
        """
        count = self.per_epoch(length)
        epoch, place = np.divmod(np.asarray(samples, dtype=np.int64), count)
        return permute(place, count, epoch, seed) * self.ends[-1] // count

    def first(self, token: float) -> int:
        """The sentence that holds this token, or the nearest before it that another one follows."""
        sentence = np.searchsorted(self.ends, token, side="right")
        return int(self.leading[max(0, int(np.searchsorted(self.leading, sentence, side="right")) - 1)])

    def passage(self, first: int, tokens: int) -> tuple[int, int]:
        """The first sentence, and the one after the last, of a passage of one document that reaches `tokens` tokens.

        It begins with `first`, or earlier where the document ends too soon.
        """
        document = np.searchsorted(self.borders, first, side="right")
        begin, stop = self.borders[document - 1], self.borders[document]
        last = np.searchsorted(self.ends, self.ends[stop - 1] - tokens, side="right")  # to begin with, at the latest
        first = int(max(begin, min(first, last)))
        before = self.ends[first - 1] if first else 0
        return first, int(min(stop, np.searchsorted(self.ends, before + tokens) + 1))

    def text(self, first: int, stop: int) -> Array:
        """The ids of sentences `first` … `stop` - 1, joined."""
        return np.concatenate([np.asarray(self.source.ids("tokens", each), np.int64) for each in range(first, stop)])


def sentence_pairs(
    sentences: Sentences, samples: Sequence[int], seed: int, length: int
) -> Iterator[tuple[Array, Array, bool]]:
    """For each sample two passages that fit into [CLS] a [SEP] b [SEP] of `length` tokens, and whether b follows a.

    As BERT draws them (Devlin et al. 2019, §3.1 and appendix A.2): whole sentences up to the length, or in a tenth of
    the pairs up to a shorter one, cut in two at random. Half the time the second part is given up for sentences of
    another document. Where the last sentence is too long, a loses its beginning or b its end, so that what is left
    still touches.
    """
    room = length - 3
    stretch = int(sentences.ends[-1]) / sentences.per_epoch(length)
    for sample, place in zip(samples, sentences.places(samples, seed, length).tolist(), strict=True):
        generator = row_generator(seed, sample, PAIRING)
        target = int(generator.integers(2, room + 1)) if generator.random() < SHORTER else room
        first, stop = sentences.passage(sentences.first(place + stretch * generator.random()), target)
        stop = max(stop, first + 2)  # two sentences at least, however long
        middle = int(generator.integers(first + 1, stop))
        a = sentences.text(first, middle)
        follows = bool(generator.random() < 0.5)
        if not follows:
            own = int(np.searchsorted(sentences.borders, first, side="right")) - 1
            other = int(generator.integers(sentences.documents - 1))
            other += other >= own
            anywhere = int(generator.integers(sentences.borders[other], sentences.borders[other + 1]))
            middle, stop = sentences.passage(anywhere, max(1, target - len(a)))
        b = sentences.text(middle, stop)
        for_b = min(len(b), max(room - len(a), room // 2))
        yield a[max(0, len(a) + for_b - room) :], b[:for_b], follows


def pairs_masked_batch(
    sentences: Sentences,
    masking: Masking,
    step: int,
    batch: int,
    rank: int = 0,
    ranks: int = 1,
    *,
    seed: int,
    length: int,
) -> Batch:
    """Rows (B/ranks, length) of [CLS] a [SEP] b [SEP] and padding, words masked: what BERT reads at `step`.

    All rows of the step are drawn, whatever the rank: the weight of the second task depends on how many targets there
    are in all of them.
    """
    if not masking.frame or masking.pad_id is None:
        raise TokenizerError("sentence pairs need a tokenizer with cls, sep and pad tokens, as wordpiece has them")
    if length < 5:
        raise DataError(f"batch.length = {length}: [CLS] a [SEP] b [SEP] needs 5 tokens at least")
    samples = rows(step, batch).tolist()
    tokens, targets = np.full((batch, length), masking.pad_id), np.full((batch, length), masking.pad_id)
    chosen, real, second = np.zeros((3, batch, length), dtype=bool)
    follows = np.zeros(batch, dtype=np.int64)
    for row, (a, b, after) in enumerate(sentence_pairs(sentences, samples, seed, length)):
        ids = np.concatenate([[masking.cls_id], a, [masking.sep_id], b, [masking.sep_id]])
        end = len(ids)
        targets[row, :end] = ids
        tokens[row, :end], chosen[row, :end] = masking.mask(ids, seed, samples[row])
        real[row, :end] = second[row, len(a) + 2 : end] = True
        follows[row] = after
    whole = Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        loss_mask=torch.from_numpy(chosen),
        mask=torch.from_numpy(real),
        segments=torch.from_numpy(second.astype(np.int64)),
        follows=torch.from_numpy(follows),
        follows_weight=torch.full((batch,), float(chosen.sum()) / batch),
    )
    return whole if ranks == 1 else whole.split(ranks)[rank]


# ---- missing spans


def sentinels(tokenizer: "Tokenizer") -> Array:
    """The ids of the special tokens `<extra_id_0>`, `<extra_id_1>`, …, which stand for spans that were cut out."""
    numbered = {
        int(found[1]): id
        for token, id in tokenizer.special_tokens.items()
        if (found := re.fullmatch(r"<extra_id_(\d+)>", token))
    }
    ids: list[int] = []
    while len(ids) in numbered:
        ids.append(numbered[len(ids)])
    if len(ids) < 2:
        raise TokenizerError(
            "cutting spans out needs special tokens to stand for them; "
            'set tokenizer.specials.extra = ["<extra_id_0>", "<extra_id_1>", …]'
        )
    return np.array(ids, dtype=np.int64)


def span_counts(length: int, rate: float = 0.15, mean: float = 3.0) -> tuple[int, int]:
    """How many of `length` tokens are cut out, and in how many spans (Raffel et al. 2020, §3.3.4)."""
    assert length >= 2
    noise = min(max(round(length * rate), 1), length - 1)
    return noise, min(max(round(noise / mean), 1), noise, length - noise)


def corrupt_spans(
    ids: Array,
    *,
    rate: float = 0.15,
    mean: float = 3.0,
    sentinels: Array,
    eos: int,
    generator: np.random.Generator,
) -> tuple[Array, Array]:
    """T5's span corruption (Raffel et al. 2020, §3.1.4) of ids (T,): what is read, and what is to be written.

    `rate` of the tokens are cut out in spans of `mean` tokens on average. A sentinel stands for each of them in the
    source; the target says them after their sentinels, and one sentinel more. Both end with `eos`.
    """
    noise, spans = span_counts(len(ids), rate, mean)
    if spans >= len(sentinels):
        raise DataError(
            f"{len(ids)} tokens lose {spans} spans, but the tokenizer has {len(sentinels)} sentinels (<extra_id_0> …), "
            f"and {spans + 1} are needed: add some to tokenizer.specials.extra, or shorten batch.length"
        )
    lengths = np.empty(2 * spans, dtype=np.int64)  # kept, cut, kept, cut, …
    lengths[::2], lengths[1::2] = _segments(len(ids) - noise, spans, generator), _segments(noise, spans, generator)
    pieces = np.split(ids, np.cumsum(lengths)[:-1])
    marks = sentinels[: spans + 1, None]
    source = [part for kept, mark in zip(pieces[::2], marks, strict=False) for part in (kept, mark)]
    target = [part for mark, cut in zip(marks, pieces[1::2], strict=False) for part in (mark, cut)]
    return np.concatenate([*source, [eos]]), np.concatenate([*target, marks[spans], [eos]])


def _segments(items: int, segments: int, generator: np.random.Generator) -> Array:
    """Lengths (segments,), one at least each, that sum to `items`: every such list is as likely as any other."""
    borders = np.sort(generator.choice(items - 1, segments - 1, replace=False, shuffle=False)) + 1
    return np.diff(borders, prepend=0, append=items)


@dataclass(frozen=True)
class Spans:
    """How spans are cut out, and the ids of the tokenizer that it takes; `start` is what writing begins with."""

    rate: float
    mean: float
    sentinels: Array
    eos_id: int
    start_id: int
    pad_id: int | None

    @classmethod
    def of(cls, tokenizer: "Tokenizer", rate: float = 0.15, mean: float = 3.0) -> "Spans":
        """For a tokenizer with sentinels and an eos token. Writing begins with bos, or with pad as T5's does."""
        start = tokenizer.need("pad") if tokenizer.bos_id is None else tokenizer.bos_id
        return cls(rate, mean, sentinels(tokenizer), tokenizer.need("eos"), start, tokenizer.pad_id)


def spans_batch(texts: Sequence[Array], samples: Iterable[int], spans: Spans, seed: int) -> Batch:
    """Texts with spans cut out as sources, and the spans as what is to be written; `samples` number the texts."""
    sources, targets = [], []
    for ids, sample in zip(texts, samples, strict=True):
        source, target = corrupt_spans(
            ids,
            rate=spans.rate,
            mean=spans.mean,
            sentinels=spans.sentinels,
            eos=spans.eos_id,
            generator=row_generator(seed, sample, CUTTING),
        )
        sources.append(source.tolist())
        targets.append(target.tolist())
    # texts of one length stay of one length, and need no padding
    fill = spans.start_id if spans.pad_id is None and len({len(ids) for ids in texts}) == 1 else spans.pad_id
    read, real = pad(sources, fill)
    written, counts = pad(targets, fill)
    started = torch.cat([torch.full((len(written), 1), spans.start_id), written[:, :-1]], dim=1)
    return Batch(started, written, loss_mask=counts, source=Source(read, real))
