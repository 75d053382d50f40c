"""Batches of windows and packed or padded sequences."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data import held

from weft.data.batch import Batch, Source, evaluation_batches, pack, pad, windows_batch
from weft.data.sampler import Mixture, Windows, rank_samples
from weft.errors import DataError

many = settings(max_examples=25, deadline=None)

SEQUENCES = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=30), min_size=1, max_size=12)


def test_windows_are_inputs_and_their_next_tokens() -> None:
    tokens, windows = held.tokens(np.arange(1000)), Windows(1000, 16, seed=4)
    batch = windows_batch([tokens], Mixture((windows,), (1,)), rank_samples(3, 8))
    assert batch.tokens.shape == batch.targets.shape == (8, 16)
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert batch.tokens[:, 0].tolist() == windows.starts(np.arange(24, 32)).tolist()
    assert (batch.loss_mask, batch.positions, batch.documents, batch.count) == (None, None, None, 128)
    shares = [rank_samples(3, 8, rank=rank, ranks=2) for rank in range(2)]
    parts = [windows_batch([tokens], Mixture((windows,), (5,)), share).tokens for share in shares]
    assert torch.equal(torch.cat(parts), batch.tokens)


def test_documents_do_not_attend_to_each_other() -> None:
    tokens = held.tokens(np.arange(12), starts=(0, 3, 8), sizes=(3, 5, 4))
    batch = windows_batch([tokens], Mixture((Windows(12, 11),), (1,)), [0], document_mask=True)
    assert batch.documents is not None and batch.positions is not None and batch.loss_mask is not None
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.loss_mask.tolist() == [[True, True, False, True, True, True, True, False, True, True, True]]
    assert batch.count == 9 and tokens.bytes == 12


def test_rows_of_a_mixture_come_from_their_texts() -> None:
    texts = [held.tokens(np.arange(200)), held.tokens(np.arange(1000, 1200))]
    mixture = Mixture((Windows(200, 8), Windows(200, 8)), (3, 1))
    batch = windows_batch(texts, mixture, rank_samples(0, 16))
    assert (batch.tokens[:, 0] >= 1000).sum() == 4
    assert torch.equal(batch.targets, batch.tokens + 1)


@many
@given(st.integers(2, 200), st.integers(1, 20), st.integers(1, 5))
def test_evaluation_predicts_each_token_once(count: int, length: int, batch: int) -> None:
    batches = list(evaluation_batches(held.tokens(np.arange(count)), length, batch))
    assert [t for b in batches for t in b.targets.flatten().tolist()] == list(range(1, count))
    assert all(len(b.tokens) <= batch and b.count == b.targets.numel() for b in batches)


def test_all_tensors_of_a_batch_are_split_and_moved() -> None:
    tokens = torch.arange(20).view(5, 4)
    source = Source(tokens + 100, torch.ones(5, 4, dtype=torch.bool))
    batch = Batch(tokens, tokens + 1, loss_mask=tokens % 2 == 0, source=source)
    parts = batch.split(2)
    assert [len(part.tokens) for part in parts] == [2, 3]
    assert sum(part.count for part in parts) == batch.count == 10
    assert parts[1].source is not None and torch.equal(parts[1].source.tokens, tokens[2:] + 100)
    moved = batch.to("meta")
    assert moved.source is not None and moved.positions is None
    assert moved.tokens.device.type == moved.source.mask.device.type == "meta"


@many
@given(SEQUENCES, st.integers(1, 12))
def test_packing_keeps_every_pair_once_and_documents_separate(sequences: list[list[int]], length: int) -> None:
    pairs = sorted(pair for s in sequences for pair in pairwise(s))
    if not pairs:
        with pytest.raises(DataError, match="nothing to predict"):
            pack(sequences, length, pad_id=0)
        return
    batch = pack(sequences, length, pad_id=0)
    assert batch.documents is not None and batch.positions is not None and batch.loss_mask is not None
    real = batch.loss_mask
    assert sorted(zip(batch.tokens[real].tolist(), batch.targets[real].tolist(), strict=True)) == pairs
    assert (batch.tokens[~real] == 0).all() and (batch.documents[~real] == -1).all()
    for number in set(batch.documents[real].tolist()):
        inside = batch.documents == number
        assert inside.any(1).sum() == 1  # in one row
        assert batch.positions[inside].tolist() == list(range(int(inside.sum())))
        assert torch.equal(batch.tokens[inside][1:], batch.targets[inside][:-1])


def test_packing_fills_rows() -> None:
    batch = pack([[1] * 8, [2] * 4, [3] * 5, [4] * 2], length=8, pad_id=0)
    assert batch.tokens.tolist() == [[1] * 7 + [4], [3] * 4 + [2] * 3 + [0]]


@many
@given(SEQUENCES, st.integers(0, 99))
def test_padding(sequences: list[list[int]], pad_id: int) -> None:
    ids, mask = pad(sequences, pad_id)
    assert ids.shape == mask.shape == (len(sequences), max(map(len, sequences)))
    assert [row[real].tolist() for row, real in zip(ids, mask, strict=True)] == sequences
    assert (ids[~mask] == pad_id).all()


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(DataError, match="no padding token"):
        pad([[1]], None)
    with pytest.raises(DataError, match="no padding token"):
        pack([[1, 2]], 4, None)
    with pytest.raises(DataError, match="at least 2"):
        list(evaluation_batches(held.tokens(np.arange(1)), 10, 2))
