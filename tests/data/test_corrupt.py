"""Masked words and missing spans: what is predicted, what is kept, and that nothing is lost."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data import held

from weft.data.batch import Batch, windows_batch
from weft.data.corrupt import (
    CUTTING,
    MASKING,
    Masking,
    SpanCorruption,
    corrupt_spans,
    mask_words,
    masked_batch,
    sentinels,
    span_counts,
    spans_batch,
    word_starts,
)
from weft.data.sampler import Mixture, Streams, Windows, rank_samples, streams
from weft.errors import DataError, TokenizerError
from weft.text.config import BPE, Byte, Char, Specials, TrainedConfig, Unigram, Word, WordPiece
from weft.text.tokenizer import build_tokenizer

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
many = settings(max_examples=25, deadline=None)

PAD, CLS, SEP, MASK_ID = 0, 2, 3, 4  # special ids with ordinary ids on both sides, as in BERT's vocabulary
BERT = Masking(0.15, 90, MASK_ID, np.array([PAD, CLS, SEP, MASK_ID, 50]), PAD, CLS, SEP)


def stream(seed: int = 0) -> Streams:
    return streams([0], seed, MASKING)


# ---- masked words


@many
@given(
    st.lists(st.integers(0, 89), min_size=1, max_size=60),
    st.floats(0.01, 1.0),
    st.lists(st.booleans(), min_size=60),
    st.integers(0),
)
def test_special_tokens_are_never_masked(ids: list[int], rate: float, begins: list[bool], seed: int) -> None:
    row = np.array([ids], dtype=np.int64)
    special = np.isin(row, BERT.special_ids)
    for starts in (None, np.array([begins[: len(ids)]], dtype=bool)):
        inputs, chosen = mask_words(row, replace(BERT, rate=rate), stream(seed), starts=starts)
        assert not (chosen & special).any()
        assert chosen.any() == (~special).any()  # at least one word, if there is one
        assert (inputs[~chosen] == row[~chosen]).all()
        inserted = inputs[chosen & (inputs != row)]
        assert (np.isin(inserted, BERT.special_ids) <= (inserted == MASK_ID)).all()  # no special token but the mask
        assert row.tolist() == [ids]


def test_any_ordinary_token_may_be_inserted() -> None:
    inputs, chosen = mask_words(np.full((1, 40_000), 7), replace(BERT, rate=1.0), stream())
    assert chosen.all()
    assert set(inputs.ravel().tolist()) == set(range(90)) - {PAD, CLS, SEP, 50}


def test_the_tokens_of_a_word_are_treated_alike() -> None:
    starts = np.tile([True, False, False, False], (1, 5000))
    row = np.tile([11, 12, 13, 14], (1, 5000))
    masking = replace(BERT, vocab_size=10**9)  # a random token is then never the original one
    inputs, chosen = mask_words(row, masking, stream(), starts=starts)
    words, masked, same = (flags.reshape(-1, 4) for flags in (chosen, inputs == MASK_ID, inputs == row))
    for flags in (words, masked, same):
        assert (flags.all(1) == flags.any(1)).all()
    assert chosen.mean() == pytest.approx(0.15, abs=1e-3)
    assert masked[words.any(1)].mean() == pytest.approx(0.8, abs=0.05)


def test_a_special_token_ends_a_word() -> None:
    """The token after [SEP] begins a word, although it looks like the inside of one."""
    row, starts = np.array([[CLS, 11, 12, SEP, 12, 12, SEP]]), np.array([[False, True, *[False] * 5]])
    masks = set()
    for seed in range(40):
        _, chosen = mask_words(row, replace(BERT, rate=0.3), stream(seed), starts=starts)
        masks.add(tuple(chosen[0].tolist()))
    first, second = (False, True, True, False, False, False, False), (False, False, False, False, True, True, False)
    assert masks == {first, second}


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_word_starts(config: TrainedConfig) -> None:
    tokenizer = build_tokenizer(config, TEXTS)
    starts = word_starts(tokenizer)
    assert starts.shape == (tokenizer.vocab_size,)
    assert starts[list(tokenizer.special_tokens.values())].all()

    def words(text: str) -> list[str]:
        ids = tokenizer.encode(text)
        pieces = [tokenizer.token_bytes(id).decode() for id in ids]
        bounds = [index for index, begins in enumerate(starts[ids].tolist()) if begins or index == 0]
        return ["".join(pieces[begin:end]).strip() for begin, end in pairwise([*bounds, len(ids)])]

    assert words("The quick brown foxes jumped again") == ["The", "quick", "brown", "foxes", "jumped", "again"]
    if config.kind != "word":
        assert words("sleeping dogs, again")[-3:] == ["dogs", ",", "again"]


def test_characters_of_scripts_without_spaces_are_words() -> None:
    tokenizer = build_tokenizer(Byte(specials=MASK), TEXTS)
    begins = word_starts(tokenizer)[tokenizer.encode("東京é…x")]
    assert begins.tolist() == [True, False, False, True, False, False, False, False, True, False, False, False]


def test_a_batch_of_running_text() -> None:
    tokens, samples = held.tokens(np.arange(500) % 40 + 5, starts=(0, 100, 230)), rank_samples(3, 6)
    plain = windows_batch([tokens], Mixture((Windows(500, 30, seed=1),), (1,)), samples)
    masked = masked_batch(plain, samples, BERT, seed=9)
    assert masked.tokens.shape == masked.targets.shape == (6, 32)
    assert torch.equal(masked.targets[:, 1:-1], plain.tokens)
    assert (masked.tokens[:, 0] == CLS).all() and (masked.tokens[:, -1] == SEP).all()
    assert masked.loss_mask is not None and not masked.loss_mask[:, [0, -1]].any()
    assert torch.equal(masked.tokens[~masked.loss_mask], masked.targets[~masked.loss_mask])
    assert 6 * 4 <= masked.count <= 6 * 5
    unframed = masked_batch(plain, samples, Masking(0.15, 90, MASK_ID, BERT.special_ids), seed=9)
    assert torch.equal(unframed.targets, plain.tokens)


def test_the_frame_belongs_to_the_first_and_the_last_document() -> None:
    tokens = held.tokens(np.arange(12) + 5, starts=(0, 3, 8))
    plain = windows_batch([tokens], Mixture((Windows(12, 11),), (1,)), [0], document_mask=True)
    masked = masked_batch(plain, [0], BERT, seed=0)
    assert masked.documents is not None and masked.positions is not None
    assert masked.documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2]]
    assert masked.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3]]


def equal(one: Batch, other: Batch) -> bool:
    assert one.loss_mask is not None and other.loss_mask is not None
    same = torch.equal(one.tokens, other.tokens) and torch.equal(one.loss_mask, other.loss_mask)
    return same and torch.equal(one.targets, other.targets)


def test_the_mask_of_a_row_depends_on_its_sample_and_not_on_its_batch() -> None:
    tokens = held.tokens(np.arange(5, 505) % 85 + 5)
    mixture = Mixture((Windows(500, 30, seed=1),), (1,))

    def batch(step: int, size: int, rank: int = 0, ranks: int = 1) -> Batch:
        samples = rank_samples(step, size, rank=rank, ranks=ranks)
        return masked_batch(windows_batch([tokens], mixture, samples), samples, BERT, seed=2)

    full = batch(1, 8)
    halves = [batch(1, 8, rank, 2) for rank in range(2)]
    smaller = [batch(step, 4) for step in (2, 3)]  # samples 8 … 15 in steps of four
    for parts in (halves, smaller):
        assert torch.equal(torch.cat([part.tokens for part in parts]), full.tokens)
    text = Batch(full.targets[:, 1:-1], full.targets[:, 1:-1])
    assert equal(masked_batch(text, range(8, 16), BERT, seed=2), full)
    assert not equal(masked_batch(text, range(16, 24), BERT, seed=2), full)
    assert not equal(masked_batch(text, range(8, 16), BERT, seed=3), full)


@many
@given(st.integers(0, 2**62), st.integers(1, 40), st.integers(1, 6), st.booleans(), st.randoms(use_true_random=False))
def test_a_rows_mask_ignores_other_rows(first: int, length: int, size: int, whole_words: bool, order: Random) -> None:
    """Alone, in another order, or with padding, a row has the same mask."""
    rng = np.random.default_rng(first)
    ids, samples = rng.integers(0, 90, (size, length)), first + np.arange(size)
    masking = replace(BERT, starts=rng.random(90) < 0.5 if whole_words else None)
    inputs, chosen = masking.mask(ids, samples, 7)
    shuffled = order.sample(range(size), size)
    padded = np.pad(ids[shuffled], ((0, 0), (0, 5)), constant_values=PAD)
    padded_inputs, padded_chosen = masking.mask(padded, samples[shuffled], 7)
    assert (padded_inputs[:, :length] == inputs[shuffled]).all()
    assert (padded_chosen[:, :length] == chosen[shuffled]).all() and not padded_chosen[:, length:].any()
    single, _ = masking.mask(ids[-1:], samples[-1:], 7)
    assert (single == inputs[-1:]).all()


@pytest.mark.parametrize(("words", "expected"), [(10, 1.5), (40, 6.0), (3, 1.0)])
def test_the_rate_is_exact_and_every_word_equally_likely(words: int, expected: float) -> None:
    rows = 8000
    ids = np.tile([CLS, *range(10, 10 + words), SEP], (rows, 1))
    inputs, chosen = BERT.mask(ids, np.arange(rows), 0)
    counts = chosen.sum(axis=1)
    assert set(counts.tolist()) == {int(expected), int(np.ceil(expected))}
    assert counts.mean() == pytest.approx(expected, abs=4 * 0.5 / rows**0.5)
    by_word = chosen[:, 1:-1].sum(axis=0)
    assert ((by_word - by_word.mean()) ** 2 / by_word.mean()).sum() < 2.5 * words + 10  # χ²: about `words` on average
    correlation = np.corrcoef(chosen[:-1, 1:-1].ravel(), chosen[1:, 1:-1].ravel())[0, 1]  # of consecutive samples
    assert abs(correlation) < 4 / (rows * words) ** 0.5
    for outcome, share in ((inputs == MASK_ID, 0.8), (inputs == ids, 0.1 + 0.1 / 85)):
        tolerance = 4 * (share * (1 - share) / chosen.sum()) ** 0.5
        assert outcome[chosen].mean() == pytest.approx(share, abs=tolerance)


def test_masking_of_a_tokenizer() -> None:
    tokenizer = build_tokenizer(WordPiece(vocab_size=75), TEXTS)
    masking = Masking.of(tokenizer, whole_words=True)
    assert (masking.mask_id, masking.cls_id, masking.frame) == (tokenizer.mask_id, tokenizer.cls_id, 2)
    assert masking.special_ids.tolist() == sorted(tokenizer.special_tokens.values())
    assert masking.starts is not None
    with pytest.raises(TokenizerError, match=r"no mask token .* set tokenizer\.specials\.mask=<mask>"):
        Masking.of(build_tokenizer(Byte(), TEXTS))


# ---- missing spans

EOS = 1
SENTINELS = np.arange(100, 200)
T5 = SpanCorruption(0.15, 3.0, SENTINELS, EOS, start_id=0)


@pytest.mark.parametrize(
    ("length", "noise", "spans"),
    [(512, 77, 26), (10, 2, 1), (2, 1, 1), (568, 85, 28), (30, 4, 1)],
)
def test_span_counts_of_the_paper(length: int, noise: int, spans: int) -> None:
    """568 tokens become 512 and 114 (115 with the last sentinel), the sizes T5 was trained with."""
    assert span_counts(length) == (noise, spans)


@many
@given(st.integers(2, 300), st.floats(0.05, 0.9), st.floats(1.0, 6.0), st.integers(0, 2**32))
def test_source_and_target_restore_the_text(length: int, rate: float, mean: float, seed: int) -> None:
    ids = np.arange(1000, 1000 + length)
    marks = np.arange(100, 900)
    noise, spans = span_counts(length, rate, mean)
    corruption = SpanCorruption(rate, mean, marks, EOS, start_id=0)
    (source,), (target,) = corrupt_spans(ids[None], corruption, streams([0], seed, CUTTING))
    assert (len(source), len(target)) == (length - noise + spans + 1, noise + spans + 2)
    assert source[-1] == target[-1] == EOS and target[-2] == marks[spans]
    parts = np.split(target[:-2], np.flatnonzero(target[:-2] < 900))[1:]
    removed = {int(part[0]): part[1:].tolist() for part in parts}
    assert list(removed) == marks[:spans].tolist() and all(removed.values())
    assert [token for id in source[:-1].tolist() for token in removed.get(id, [id])] == ids.tolist()


def test_spans_occur_everywhere() -> None:
    """Every token but the first is removed about as often as any other."""
    texts = np.tile(np.arange(1000, 1100), (2000, 1))
    sources, _ = corrupt_spans(texts, T5, streams(range(2000), 0, CUTTING))
    removed = 2000 - np.bincount(sources[sources >= 1000] - 1000, minlength=100)
    assert removed[0] == 0  # a text never begins with a span
    assert removed[10:90] / 2000 == pytest.approx(np.full(80, 0.15), abs=0.05)


def test_a_batch_of_spans() -> None:
    specials = Specials(eos="</s>", pad="<pad>", extra=tuple(f"<extra_id_{n}>" for n in range(9)))
    tokenizer = build_tokenizer(BPE(vocab_size=300, specials=specials), TEXTS)
    assert sentinels(tokenizer).tolist() == [tokenizer.id(f"<extra_id_{n}>") for n in range(9)]
    spans = SpanCorruption.of(tokenizer)
    texts = np.arange(20, 100).reshape(2, 40)
    batch = spans_batch(texts, [4, 5], spans, seed=1)
    assert batch.source is not None and batch.source.mask.all() and batch.loss_mask is None
    for row in range(2):
        (source,), (target,) = corrupt_spans(texts[row : row + 1], spans, streams([4 + row], 1, CUTTING))
        assert batch.source.tokens[row].tolist() == source.tolist()
        assert batch.targets[row].tolist() == target.tolist()
        assert batch.tokens[row].tolist() == [tokenizer.pad_id, *target[:-1].tolist()]
    assert not torch.equal(spans_batch(texts, [6, 7], spans, seed=1).targets, batch.targets)
    assert not torch.equal(spans_batch(texts, [4, 5], spans, seed=2).targets, batch.targets)


def test_too_few_sentinels_are_refused() -> None:
    with pytest.raises(TokenizerError, match="extra_id_0"):
        sentinels(build_tokenizer(Byte(), TEXTS))
    with pytest.raises(
        DataError, match=r"300 tokens lose 15 spans, but the tokenizer has 9 sentinels .* 16 are needed"
    ):
        corrupt_spans(np.arange(300)[None], replace(T5, sentinels=SENTINELS[:9]), stream())
