"""Batches of examples of similar length."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weft.data.sampler import Buckets
from weft.errors import DataError

many = settings(max_examples=25, deadline=None)
LENGTHS = st.integers(1, 2).flatmap(
    lambda sides: st.lists(st.lists(st.integers(1, 40), min_size=sides, max_size=sides), min_size=1, max_size=120)
)
LIMITS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(dict, size=st.integers(1, 20)), st.builds(dict, tokens=st.integers(80, 400))
)


def padded_size(lengths: Any, rows: Any) -> int:
    batch = np.asarray(lengths)[rows]
    return len(batch) * int(batch.max(axis=0).sum())


@many
@given(LENGTHS, LIMITS, st.integers(0, 2**64), st.integers(0, 3))
def test_an_epoch_has_every_example_once_and_no_batch_is_too_large(
    lengths: list[list[int]], limit: dict[str, Any], seed: int, epoch: int
) -> None:
    buckets = Buckets(lengths, **limit, seed=seed)
    steps = buckets.steps_per_epoch
    batches = [buckets.rows(epoch * steps + step) for step in range(steps)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    for batch in batches:
        if "tokens" in limit:
            assert padded_size(lengths, batch) <= limit["tokens"]
        else:
            assert len(batch) <= limit["size"]
    sizes = [len(batch) for batch in batches]
    assert buckets.smallest == min(sizes)
    assert "tokens" in limit or max(sizes) - min(sizes) <= 1
    assert buckets.epoch(steps * epoch) == epoch


@many
@given(LENGTHS, LIMITS, st.integers(0, 9), st.integers(0, 300), st.integers(1, 4))
def test_any_number_of_ranks_shares_the_same_rows(
    lengths: list[list[int]], limit: dict[str, Any], seed: int, step: int, ranks: int
) -> None:
    buckets = Buckets(lengths, **limit, seed=seed)
    rows = buckets.rows(step)
    assert rows.tolist() == Buckets(lengths, **limit, seed=seed).rows(step).tolist()
    if len(rows) < ranks:
        with pytest.raises(DataError, match=f"step {step} has {len(rows)} rows for {ranks} processes"):
            buckets.rows(step, 0, ranks)
        return
    shared = [buckets.rows(step, rank, ranks) for rank in range(ranks)]
    assert np.concatenate(shared).tolist() == rows.tolist()
    assert min(len(part) for part in shared) >= 1


def sentence_lengths(count: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(0)
    source = rng.lognormal(2.6, 0.35, count)
    return np.stack([source, source * rng.lognormal(0, 0.2, count)], axis=1).astype(np.int64) + 2


def test_batches_are_nearly_full_and_have_little_padding() -> None:
    lengths = sentence_lengths(8000)
    for buckets in (Buckets(lengths, size=32), Buckets(lengths, tokens=2048)):
        sizes = [padded_size(lengths, buckets.rows(step)) for step in range(buckets.steps_per_epoch)]
        assert 1 - lengths.sum() / sum(sizes) < 0.1
    assert np.mean(sizes) > 0.93 * 2048
    random = sum(padded_size(lengths, np.arange(first, first + 64)) for first in range(0, 7936, 64))
    assert 1 - lengths[:7936].sum() / random > 0.4  # padding of random batches


@pytest.mark.parametrize("count", range(1021, 1031))
def test_the_last_batch_of_an_epoch_is_not_small(count: int) -> None:
    buckets = Buckets(np.full(count, 8), tokens=8 * 64)
    sizes = [buckets.size(step) for step in range(buckets.steps_per_epoch)]
    assert len(sizes) == -(-count // 64)  # the minimum
    assert min(sizes) >= 48 and max(sizes) <= 64


def test_epochs_differ_in_order_and_in_the_rows_of_a_batch() -> None:
    lengths = sentence_lengths(5000)
    buckets = Buckets(lengths, tokens=2048, seed=1)
    steps = buckets.steps_per_epoch
    first = [buckets.rows(step) for step in range(steps)]
    second = [buckets.rows(step + steps) for step in range(steps)]
    assert sum(a.tolist() == b.tolist() for a, b in zip(first, second, strict=True)) < steps / 10
    sets = {frozenset(batch.tolist()) for batch in second}
    assert sum(frozenset(batch.tolist()) in sets for batch in first) < steps / 10
    sizes = [lengths[batch].mean() for batch in first]
    assert abs(np.corrcoef(np.arange(steps), sizes)[0, 1]) < 0.3  # not sorted by length
    assert Buckets(lengths, tokens=2048, seed=2).rows(0).tolist() != first[0].tolist()


def test_a_late_step_is_as_fast_as_the_first() -> None:
    buckets = Buckets(sentence_lengths(8000), tokens=2048)
    started = time.perf_counter()
    for step in range(10**12, 10**12 + 20):
        buckets.rows(step)
    assert time.perf_counter() - started < 2


def test_an_example_above_the_token_budget_is_refused() -> None:
    with pytest.raises(DataError, match=r"example 1 \(counted from 0\) has 30 \+ 40 = 70 tokens, .*tokens = 64: set"):
        Buckets([[3, 3], [30, 40]], tokens=64)
    with pytest.raises(DataError, match=r"example 0 .* has 9 tokens"):
        Buckets([9, 2], tokens=8)
    assert Buckets([[3, 3], [30, 40]], tokens=70).steps_per_epoch == 2
    with pytest.raises(DataError, match="no examples"):
        Buckets([], size=4)
