"""Masked words, sentence pairs and missing spans: what is asked, what is left alone, and that nothing is lost."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.batch import Batch, windows_batch
from weft.data.corrupt import (
    Masking,
    Sentences,
    Spans,
    corrupt_spans,
    mask_words,
    masked_batch,
    pairs_masked_batch,
    row_generator,
    sentence_pairs,
    sentinels,
    span_counts,
    spans_batch,
    word_starts,
)
from weft.data.sampler import Array, Windows, rows
from weft.data.shards import Tokens
from weft.errors import DataError, TokenizerError
from weft.text.config import BPE, Byte, Char, Specials, TrainedConfig, Unigram, Word, WordPiece

TEXTS = ["The quick brown foxes (unbelievably!) jumped over sleeping dogs, again and again."] * 6
MASK = Specials(pad="<pad>", unk="<unk>", mask="<mask>")
KINDS: list[TrainedConfig] = [
    Word(specials=MASK),
    Char(specials=MASK),
    Byte(specials=MASK),
    BPE(vocab_size=275, specials=MASK),
    WordPiece(vocab_size=75, lowercase=False),
    Unigram(vocab_size=290, specials=MASK),
]
many = settings(max_examples=80, deadline=None)

PAD, CLS, SEP, MASK_ID = 0, 2, 3, 4  # as in BERT's vocabulary, with ordinary tokens on both sides of the special ones
BERT = Masking(0.15, 90, MASK_ID, np.array([PAD, CLS, SEP, MASK_ID, 50]), PAD, CLS, SEP)


def generator(seed: int = 0) -> np.random.Generator:
    return row_generator(seed, 0, 0)


# ---- masked words


@many
@given(
    st.lists(st.integers(0, 89), max_size=60),
    st.floats(0.01, 1.0),
    st.lists(st.booleans(), min_size=60),
    st.integers(0),
)
def test_what_masking_touches(ids: list[int], rate: float, begins: list[bool], seed: int) -> None:
    row = np.array(ids, dtype=np.int64)
    starts = np.array(begins[: len(ids)], dtype=bool)
    special = np.isin(row, BERT.special_ids)
    for given_starts in (None, starts):
        inputs, chosen = mask_words(
            row,
            rate=rate,
            mask_id=MASK_ID,
            vocab_size=90,
            special_ids=BERT.special_ids,
            starts=given_starts,
            generator=generator(seed % 2**64),
        )
        assert not (chosen & special).any()
        assert chosen.any() == (~special).any()  # one word at least, where there is one
        assert (inputs[~chosen] == row[~chosen]).all()
        put = inputs[chosen & (inputs != row)]
        assert (np.isin(put, BERT.special_ids) <= (put == MASK_ID)).all()  # of the special tokens, the mask alone
        assert row.tolist() == ids


def test_any_ordinary_token_may_be_put_in() -> None:
    row = np.full(40_000, 7)
    inputs, chosen = mask_words(
        row, rate=1.0, mask_id=MASK_ID, vocab_size=90, special_ids=BERT.special_ids, generator=generator()
    )
    assert chosen.all()
    assert set(inputs.tolist()) == set(range(90)) - {PAD, CLS, SEP, 50}


def test_whole_words_share_their_fate() -> None:
    starts = np.tile([True, False, False, False], 5000)
    row = np.tile([11, 12, 13, 14], 5000)
    inputs, chosen = mask_words(
        row,
        mask_id=MASK_ID,
        vocab_size=10**9,  # so that what is put in is never what stood there
        special_ids=BERT.special_ids,
        starts=starts,
        generator=generator(),
    )
    words = chosen.reshape(-1, 4)
    assert (words.all(1) == words.any(1)).all()
    assert chosen.mean() == pytest.approx(0.15, abs=1e-3)
    masked, same = (inputs == MASK_ID).reshape(-1, 4), (inputs == row).reshape(-1, 4)
    assert (masked.all(1) == masked.any(1)).all()
    assert (same.all(1) == same.any(1)).all()
    assert masked[words.any(1)].mean() == pytest.approx(0.8, abs=0.05)


def test_a_special_token_ends_a_word() -> None:
    """The piece behind [SEP] looks like the inside of a word; it is a word of its own there."""
    row, starts = np.array([CLS, 11, 12, SEP, 12, 12, SEP]), np.array([False, True, False, False, False, False, False])
    seen = set()
    for seed in range(40):
        _, chosen = mask_words(
            row, rate=0.3, mask_id=MASK_ID, vocab_size=90, special_ids=BERT.special_ids, starts=starts,
            generator=generator(seed),
        )  # fmt: skip
        seen.add(tuple(chosen.tolist()))
    first, second = (False, True, True, False, False, False, False), (False, False, False, False, True, True, False)
    assert seen == {first, second}


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_where_words_begin(config: TrainedConfig) -> None:
    tokenizer = config.train(TEXTS)
    starts = word_starts(tokenizer)
    assert starts.shape == (tokenizer.vocab_size,)
    assert starts[list(tokenizer.special_tokens.values())].all()

    def words(text: str) -> list[str]:
        ids = tokenizer.encode(text)
        pieces = [tokenizer.token_bytes(id).decode() for id in ids]
        borders = [place for place, begins in enumerate(starts[ids].tolist()) if begins or place == 0]
        cuts = pairwise([*borders, len(ids)])
        return ["".join(pieces[begin:end]).strip() for begin, end in cuts]

    assert words("The quick brown foxes jumped again") == ["The", "quick", "brown", "foxes", "jumped", "again"]
    if config.kind != "word":
        assert words("sleeping dogs, again")[-3:] == ["dogs", ",", "again"]


def test_characters_of_scripts_without_spaces_are_words() -> None:
    tokenizer = Byte(specials=MASK).train(TEXTS)
    begins = word_starts(tokenizer)[tokenizer.encode("東京é…x")]
    assert begins.tolist() == [True, False, False, True, False, False, False, False, True, False, False, False]


def test_a_batch_of_running_text() -> None:
    tokens = Tokens.from_array(np.arange(500) % 40 + 5, starts=(0, 100, 230))
    plain = windows_batch(tokens, Windows(500, 30, seed=1), step=3, batch=6)
    masked = masked_batch(plain, rows(3, 6), BERT, seed=9)
    assert masked.tokens.shape == masked.targets.shape == (6, 32)
    assert torch.equal(masked.targets[:, 1:-1], plain.tokens)
    assert (masked.tokens[:, 0] == CLS).all()
    assert (masked.tokens[:, -1] == SEP).all()
    assert masked.loss_mask is not None
    assert torch.equal(masked.tokens[~masked.loss_mask], masked.targets[~masked.loss_mask])
    assert not masked.loss_mask[:, [0, -1]].any()
    assert 6 * 4 <= masked.count <= 6 * 5
    bare = masked_batch(plain, rows(3, 6), Masking(0.15, 90, MASK_ID, BERT.special_ids), seed=9)
    assert torch.equal(bare.targets, plain.tokens)


def test_documents_stay_apart_around_the_frame() -> None:
    tokens = Tokens.from_array(np.arange(12) + 5, starts=(0, 3, 8))
    plain = windows_batch(tokens, Windows(12, 11), step=0, batch=1, document_mask=True)
    masked = masked_batch(plain, [0], BERT, seed=0)
    assert masked.documents is not None
    assert masked.positions is not None
    assert masked.documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2]]
    assert masked.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3]]


def equal(one: Batch, other: Batch) -> bool:
    fields = ("tokens", "targets", "loss_mask", "mask", "segments", "follows", "follows_weight")
    pairs = [(getattr(one, name), getattr(other, name)) for name in fields]
    return all(a is b if a is None else torch.equal(a, b) for a, b in pairs)


def test_a_row_is_masked_alike_in_any_batch_and_anew_each_time() -> None:
    tokens = Tokens.from_array(np.arange(5, 505) % 85 + 5)
    windows = Windows(500, 30, seed=1)

    def batch(step: int, size: int, rank: int = 0, ranks: int = 1) -> Batch:
        return masked_batch(
            windows_batch(tokens, windows, step, size, rank, ranks), rows(step, size, rank, ranks), BERT, seed=2
        )

    whole = batch(1, 8)
    halves = [batch(1, 8, rank, 2) for rank in range(2)]
    smaller = [batch(step, 4) for step in (2, 3)]  # samples 8 … 15 in steps of four
    for parts in (halves, smaller):
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    text = Batch(whole.targets[:, 1:-1], whole.targets[:, 1:-1])
    assert equal(masked_batch(text, range(8, 16), BERT, seed=2), whole)
    assert not equal(masked_batch(text, range(16, 24), BERT, seed=2), whole)
    assert not equal(masked_batch(text, range(8, 16), BERT, seed=3), whole)


def test_masking_of_a_tokenizer() -> None:
    tokenizer = WordPiece(vocab_size=75).train(TEXTS)
    masking = Masking.of(tokenizer, whole_words=True)
    assert (masking.mask_id, masking.cls_id, masking.frame) == (tokenizer.mask_id, tokenizer.cls_id, 2)
    assert masking.special_ids.tolist() == sorted(tokenizer.special_tokens.values())
    assert masking.starts is not None
    with pytest.raises(TokenizerError, match=r"no mask token .* set specials\.mask"):
        Masking.of(Byte().train(TEXTS))


# ---- sentence pairs


class Listed:
    """Sentences in memory, each of them numbers that say which document and which token they are."""

    def __init__(self, documents: list[list[int]]) -> None:
        """documents: the length of each sentence of each document."""
        self.numbers = np.array([d for d, sentences in enumerate(documents) for _ in sentences], dtype=np.int64)
        self.sentences: list[Array] = []
        for document, sentences in enumerate(documents):
            ids = 1000 * (document + 1) + np.arange(sum(sentences))
            self.sentences += np.split(ids, np.cumsum(sentences)[:-1])

    def __len__(self) -> int:
        return len(self.sentences)

    def ids(self, field: str, index: int) -> Array:
        assert field == "tokens"
        return self.sentences[index]

    def lengths(self, field: str) -> Array:
        assert field == "tokens"
        return np.array([len(sentence) for sentence in self.sentences])

    def values(self, field: str) -> Array:
        assert field == "document"
        return self.numbers


@many
@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=2, max_size=8).filter(
        lambda documents: any(len(sentences) > 1 for sentences in documents)
    ),
    st.integers(5, 64),
    st.integers(0, 2**40),
)
def test_pairs_are_passages(documents: list[list[int]], length: int, sample: int) -> None:
    sentences = Sentences(Listed(documents))
    ((a, b, follows),) = sentence_pairs(sentences, [sample], 3, length)
    assert len(a) >= 1
    assert len(b) >= 1
    assert len(a) + len(b) <= length - 3
    for passage in (a, b):
        assert (np.diff(passage) == 1).all()  # in one piece, from one document
    assert (b[0] == a[-1] + 1) == follows  # other documents' numbers are far off
    assert follows == (a[0] // 1000 == b[0] // 1000)


def test_most_pairs_fill_the_row_and_a_tenth_does_not() -> None:
    sentences = Sentences(Listed([[5] * 100] * 20))
    totals = np.array([len(a) + len(b) for a, b, _ in sentence_pairs(sentences, range(600), 0, 63)])
    assert (totals == 60).mean() == pytest.approx(0.9, abs=0.04)
    assert totals.min() < 20


def test_an_epoch_of_pairs_goes_through_the_text() -> None:
    sentences = Sentences(Listed([[4, 6] * 20] * 10))  # 2000 tokens
    count = sentences.per_epoch(53)
    assert count == 40
    places = sentences.places(range(2 * count), 1, 53)
    assert sorted(places[:count].tolist()) == sorted(places[count:].tolist()) == list(range(0, 2000, 50))
    assert places[:count].tolist() != places[count:].tolist()
    assert [sentences.first(token) for token in (0, 3, 4, 10, 199, 200)] == [0, 0, 1, 2, 38, 40]  # 39 is the last one


def test_a_batch_of_pairs() -> None:
    sentences = Sentences(Listed([[7, 5, 9, 4] * 5] * 6))
    masking = Masking(0.15, 9000, MASK_ID, BERT.special_ids, PAD, CLS, SEP)
    batch = pairs_masked_batch(sentences, masking, 2, 7, seed=5, length=40)
    assert batch.mask is not None
    assert batch.segments is not None
    assert batch.follows is not None
    assert batch.follows_weight is not None
    assert batch.tokens.shape == batch.targets.shape == batch.segments.shape == (7, 40)
    for row, (a, b, follows) in enumerate(sentence_pairs(sentences, range(14, 21), 5, 40)):
        expected = [CLS, *a.tolist(), SEP, *b.tolist(), SEP]
        real = batch.mask[row]
        assert batch.targets[row][real].tolist() == expected
        assert batch.segments[row][real].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
        assert batch.follows[row] == follows
        assert (batch.targets[row][~real] == PAD).all()
        assert (batch.tokens[row][~real] == PAD).all()
        assert (batch.segments[row][~real] == 0).all()
    assert batch.loss_mask is not None
    assert not batch.loss_mask[torch.isin(batch.targets, torch.tensor(BERT.special_ids))].any()
    assert float(batch.follows_weight.sum()) == pytest.approx(batch.count)
    parts = [pairs_masked_batch(sentences, masking, 2, 7, rank, 3, seed=5, length=40) for rank in range(3)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    weights = torch.cat([part.follows_weight for part in parts if part.follows_weight is not None])
    assert torch.equal(weights, batch.follows_weight)  # of the whole step, not of the rank's share


def test_what_gives_no_pairs() -> None:
    with pytest.raises(DataError, match="1 document: half of the sentence pairs come from another document"):
        Sentences(Listed([[3, 4]]))
    with pytest.raises(DataError, match="every document is a single sentence"):
        Sentences(Listed([[3], [4]]))
    sentences = Sentences(Listed([[3, 4], [4]]))
    with pytest.raises(TokenizerError, match="cls, sep and pad"):
        pairs_masked_batch(sentences, Masking(0.15, 90, 4, np.array([4])), 0, 2, seed=0, length=16)
    with pytest.raises(DataError, match=r"batch\.length = 4"):
        pairs_masked_batch(sentences, BERT, 0, 2, seed=0, length=4)


# ---- missing spans

EOS = 1
SENTINELS = np.arange(100, 200)


@pytest.mark.parametrize(
    ("length", "noise", "spans"),
    [(512, 77, 26), (10, 2, 1), (2, 1, 1), (568, 85, 28), (30, 4, 1)],
)
def test_counts_of_the_paper(length: int, noise: int, spans: int) -> None:
    """568 tokens become 512 and 114 (with the last sentinel 115), the sizes T5 was trained with."""
    assert span_counts(length) == (noise, spans)


@many
@given(st.integers(2, 300), st.floats(0.05, 0.9), st.floats(1.0, 6.0), st.integers(0, 2**32))
def test_spans_put_back_give_the_text(length: int, rate: float, mean: float, seed: int) -> None:
    ids = np.arange(1000, 1000 + length)
    marks = np.arange(100, 900)
    noise, spans = span_counts(length, rate, mean)
    source, target = corrupt_spans(
        ids, rate=rate, mean=mean, sentinels=marks, eos=EOS, generator=row_generator(seed, 0, 2)
    )
    assert len(source) == length - noise + spans + 1
    assert len(target) == noise + spans + 2
    assert source[-1] == target[-1] == EOS
    assert target[-2] == marks[spans]
    told = np.split(target[:-2], np.flatnonzero(target[:-2] < 900))[1:]
    lost = {int(part[0]): part[1:].tolist() for part in told}
    assert list(lost) == marks[:spans].tolist()
    assert all(lost.values())
    back = [token for id in source[:-1].tolist() for token in lost.get(id, [id])]
    assert back == ids.tolist()


def test_spans_lie_anywhere() -> None:
    """Every token but the first is cut out about as often as any other."""
    times = np.zeros(100)
    for sample in range(2000):
        source, _ = corrupt_spans(
            np.arange(1000, 1100), sentinels=SENTINELS, eos=EOS, generator=row_generator(0, sample, 2)
        )
        times[np.setdiff1d(np.arange(100), source - 1000)] += 1
    assert times[0] == 0  # the text begins with something
    assert times[10:90] / 2000 == pytest.approx(np.full(80, 0.15), abs=0.05)


def test_a_batch_of_spans() -> None:
    tokenizer = BPE(
        vocab_size=300, specials=Specials(eos="</s>", pad="<pad>", extra=tuple(f"<extra_id_{n}>" for n in range(9)))
    ).train(TEXTS)
    assert sentinels(tokenizer).tolist() == [tokenizer.id(f"<extra_id_{n}>") for n in range(9)]
    spans = Spans.of(tokenizer)
    texts = [np.arange(20, 60), np.arange(60, 80)]
    batch = spans_batch(texts, [4, 5], spans, seed=1)
    assert batch.source is not None
    assert batch.loss_mask is not None
    for row, (ids, sample) in enumerate(zip(texts, [4, 5], strict=True)):
        source, target = corrupt_spans(
            ids, sentinels=spans.sentinels, eos=spans.eos_id, generator=row_generator(1, sample, 2)
        )
        assert batch.source.tokens[row][batch.source.mask[row]].tolist() == source.tolist()
        assert batch.targets[row][batch.loss_mask[row]].tolist() == target.tolist()
        assert batch.tokens[row, : len(target)].tolist() == [tokenizer.pad_id, *target[:-1].tolist()]
    alone = spans_batch(texts[1:], [5], spans, seed=1)
    assert alone.source is not None
    assert alone.source.mask.all()
    assert alone.targets[0].tolist() == batch.targets[1][batch.loss_mask[1]].tolist()


def test_what_gives_no_spans() -> None:
    with pytest.raises(TokenizerError, match="extra_id_0"):
        sentinels(Byte().train(TEXTS))
    with pytest.raises(
        DataError, match=r"300 tokens lose 15 spans, but the tokenizer has 9 sentinels .* 16 are needed"
    ):
        corrupt_spans(np.arange(300), sentinels=SENTINELS[:9], eos=EOS, generator=generator())
    unpadded = Spans(0.15, 3.0, SENTINELS, EOS, 5, None)
    with pytest.raises(DataError, match="no padding token"):
        spans_batch([np.arange(20), np.arange(40)], [0, 1], unpadded, seed=0)
    assert spans_batch([np.arange(40), np.arange(40)], [0, 1], unpadded, seed=0).loss_mask.all()  # type: ignore[union-attr]
