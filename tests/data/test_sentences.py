"""Sentence pairs: whole passages, adjacent in half of the pairs, independent of the batch."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data import held

from weft.data.config import HashSplit, NoSplit, TextSource
from weft.data.corrupt import Masking
from weft.data.examples import Examples
from weft.data.sampler import Array, rank_samples
from weft.data.sentences import (
    SentencePairs,
    Sentences,
    document_sentences,
    next_sentence_batch,
    sentence_examples,
    sentence_pairs,
)
from weft.data.shards import SIDES, Side
from weft.data.split import split_sections
from weft.errors import DataError, TokenizerError
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

many = settings(max_examples=25, deadline=None)

PAD, CLS, SEP, MASK_ID = 0, 2, 3, 4  # special ids with ordinary ids on both sides, as in BERT's vocabulary
BERT = Masking(0.15, 9000, MASK_ID, np.array([PAD, CLS, SEP, MASK_ID, 50]), PAD, CLS, SEP)


def sentences_of(documents: list[list[int]]) -> Examples:
    """Sentences whose ids encode their document and position; `documents` are the lengths of all sentences."""
    rows: list[dict[str, Any]] = []
    for document, sentences in enumerate(documents):
        ids = 1000 * (document + 1) + np.arange(sum(sentences))
        rows += [{"tokens": part.tolist(), "document": document} for part in np.split(ids, np.cumsum(sentences)[:-1])]
    return held.examples(rows)


def passages(sentences: Sentences, pairs: SentencePairs) -> Iterator[tuple[Array, Array, bool]]:
    for a, a_length, b, b_length, is_next in zip(*pairs, strict=True):
        yield sentences.tokens[a : a + a_length], sentences.tokens[b : b + b_length], bool(is_next)


@many
@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=2, max_size=8).filter(
        lambda documents: any(len(sentences) > 1 for sentences in documents)
    ),
    st.integers(5, 64),
    st.integers(0, 2**40),
)
def test_pairs_are_passages(documents: list[list[int]], length: int, sample: int) -> None:
    sentences = Sentences(sentences_of(documents))
    ((a, b, is_next),) = passages(sentences, sentence_pairs(sentences, [sample], seed=3, length=length))
    assert len(a) >= 1 and len(b) >= 1 and len(a) + len(b) <= length - 3
    for passage in (a, b):
        assert (np.diff(passage) == 1).all()  # contiguous, from one document
    assert (b[0] == a[-1] + 1) == is_next == (a[0] // 1000 == b[0] // 1000)


def test_nine_tenths_of_the_pairs_fill_the_row() -> None:
    sentences = Sentences(sentences_of([[5] * 100] * 20))
    pairs = sentence_pairs(sentences, range(600), seed=0, length=63)
    totals = pairs.a_length + pairs.b_length
    assert (totals == 60).mean() == pytest.approx(0.9, abs=0.04)
    assert totals.min() < 20


def test_an_epoch_of_pairs_covers_the_text() -> None:
    sentences = Sentences(sentences_of([[4, 6] * 20] * 10))  # 2000 tokens
    count = sentences.per_epoch(53)
    assert count == 40
    offsets = sentences.offsets(range(2 * count), 1, 53)
    assert sorted(offsets[:count].tolist()) == sorted(offsets[count:].tolist()) == list(range(0, 2000, 50))
    assert offsets[:count].tolist() != offsets[count:].tolist()
    first = sentences.first(np.array([0, 3, 4, 10, 199, 200]))
    assert first.tolist() == [0, 0, 1, 2, 38, 40]  # 39 is the last sentence of its document


def test_a_batch_of_pairs() -> None:
    sentences = Sentences(sentences_of([[7, 5, 9, 4] * 5] * 6))
    batch = next_sentence_batch(sentences, BERT, rank_samples(2, 7), seed=5, length=40)
    assert batch.mask is not None and batch.segments is not None and batch.loss_mask is not None
    assert batch.next_sentence is not None and batch.next_sentence_weight is not None
    assert batch.tokens.shape == batch.targets.shape == batch.segments.shape == (7, 40)
    pairs = sentence_pairs(sentences, range(14, 21), seed=5, length=40)
    for row, (a, b, is_next) in enumerate(passages(sentences, pairs)):
        expected = [CLS, *a.tolist(), SEP, *b.tolist(), SEP]
        real = batch.mask[row]
        assert batch.targets[row][real].tolist() == expected
        assert batch.segments[row][real].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
        assert batch.next_sentence[row] == is_next
        assert (batch.targets[row][~real] == PAD).all() and (batch.tokens[row][~real] == PAD).all()
        assert (batch.segments[row][~real] == 0).all()
    assert not batch.loss_mask[torch.isin(batch.targets, torch.tensor(BERT.special_ids))].any()
    assert float(batch.next_sentence_weight.sum()) == pytest.approx(batch.count)
    parts = batch.split(3)
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    weights = torch.cat([part.next_sentence_weight for part in parts if part.next_sentence_weight is not None])
    assert torch.equal(weights, batch.next_sentence_weight)  # of the whole step, not of a micro-batch


@many
@given(st.integers(0, 2**40), st.integers(1, 5), st.integers(5, 40))
def test_a_pair_is_independent_of_other_rows(step: int, size: int, length: int) -> None:
    sentences = Sentences(sentences_of([[7, 5, 9, 4] * 3, [2], [30, 1]]))
    batch = next_sentence_batch(sentences, BERT, rank_samples(step, size), seed=5, length=length)
    for row in range(size):
        single = next_sentence_batch(sentences, BERT, [step * size + row], seed=5, length=length)
        for name in ("tokens", "targets", "loss_mask", "mask", "segments", "next_sentence"):
            assert torch.equal(getattr(single, name)[0], getattr(batch, name)[row])


def test_texts_without_pairs_are_refused() -> None:
    with pytest.raises(DataError, match="1 document: half of the sentence pairs come from another one"):
        Sentences(sentences_of([[3, 4]]))
    with pytest.raises(DataError, match="every document is a single sentence"):
        Sentences(sentences_of([[3], [4]]))
    sentences = Sentences(sentences_of([[3, 4], [4]]))
    with pytest.raises(TokenizerError, match="cls, sep and pad"):
        next_sentence_batch(sentences, Masking(0.15, 90, 4, np.array([4])), [0, 1], seed=0, length=16)
    with pytest.raises(DataError, match=r"batch\.length = 4"):
        next_sentence_batch(sentences, BERT, [0, 1], seed=0, length=4)


def test_sentences_of_both_sides_in_one_pass(tmp_path: Path) -> None:
    """As if each side were read separately; a sentence may continue in the next section of its document."""
    lines = ["One sentence stands here.", "Is it long?", "Well, not so very long!", "It ends at last."]
    rows = [" ".join(lines[(n + k) % 4] for k in range(n % 7)) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (tmp_path / "b.txt").write_text(" ".join(lines * 400))
    tokenizer = build_tokenizer(Byte(), [])
    half = HashSplit(fraction=0.4)
    for source, split in (("a.jsonl", half), ("b.txt", half), ("b.txt", NoSplit())):
        text = TextSource([str(tmp_path / source)], split)
        sentences = list(document_sentences(split_sections(text)))
        for side in SIDES:
            separate = (section for section in split_sections(text) if section.side == side)
            assert [item for item in sentences if item[0] == side] == list(document_sentences(separate))
        read: Counter[Side] = Counter()
        examples = list(sentence_examples(text, tokenizer, read))
        assert read == Counter({side: sum(s.size for s in split_sections(text) if s.side == side) for side in read})
        decoded = [(side, tokenizer.decode(row["tokens"]), row["document"]) for side, row in examples]
        assert decoded == sentences and len(sentences) > 100
        assert {side for side, _, _ in sentences} == ({"train"} if isinstance(split, NoSplit) else set(SIDES))
    joined = "".join(sentence for _, sentence, _ in sentences)
    assert joined.replace(" ", "") == "".join(lines * 400).replace(" ", "")
