import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.sampler import Windows, draw, permute, rows, streams
from weft.errors import DataError

many = settings(max_examples=60, deadline=None)


@many
@given(st.integers(1, 300), st.integers(0, 2**64), st.integers(0, 50))
def test_the_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    index = np.arange(count)
    assert sorted(permute(index, count, np.full(count, epoch), seed)) == list(index)


@many
@given(st.integers(2, 400), st.integers(1, 40), st.integers(0, 99), st.integers(0, 5))
def test_every_window_once_an_epoch(tokens: int, length: int, seed: int, epoch: int) -> None:
    if tokens <= length:
        return
    windows = Windows(tokens, length, seed)
    starts = np.sort(windows.starts(np.arange(windows.count) + epoch * windows.count))
    assert (np.diff(starts) == length).all()
    assert 0 <= starts[0] < length
    assert starts[-1] + length + 1 <= tokens
    assert tokens - windows.count * length < 2 * length + 1  # less than two windows are left out


@many
@given(st.integers(1, 24), st.integers(1, 8), st.integers(0, 40), st.integers(0, 9))
def test_any_number_of_ranks_shares_out_the_same_rows(batch: int, ranks: int, step: int, seed: int) -> None:
    if ranks > batch:
        return
    windows = Windows(5000, 16, seed)
    alone = windows.starts(rows(step, batch))
    shared = [windows.starts(rows(step, batch, rank, ranks)) for rank in range(ranks)]
    assert np.concatenate(shared).tolist() == alone.tolist()
    sizes = [len(part) for part in shared]
    assert max(sizes) - min(sizes) <= 1


def test_resuming_is_the_same_as_never_stopping() -> None:
    windows = Windows(1000, 7, seed=3)
    whole = windows.starts(np.arange(0, 1000))
    assert np.concatenate([windows.starts(rows(step, 8)) for step in range(125)]).tolist() == whole.tolist()


def test_epochs_and_seeds_differ() -> None:
    windows = Windows(100_000, 10, seed=1)
    first, second = windows.starts(np.arange(50)), windows.starts(np.arange(50) + windows.count)
    assert (first != second).sum() > 45
    assert (first != Windows(100_000, 10, seed=2).starts(np.arange(50))).sum() > 45
    shifts = windows.starts(np.arange(20) * windows.count) % 10
    assert len(set(shifts.tolist())) > 3


def test_the_order_looks_random() -> None:
    count = 10_000
    order = permute(np.arange(count), count, np.zeros(count, dtype=np.int64), 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04  # 4 standard errors
    assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 0.04
    where = permute(np.full(4000, 5), 8, np.arange(4000), 0)
    assert (np.abs(np.bincount(where, minlength=8) - 500) < 100).all()  # a place falls on every other one


def test_numbers_by_their_place_look_random() -> None:
    numbers = draw(streams(range(300), 0, 3)[:, None], np.arange(300))
    assert numbers.shape == (300, 300)
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    assert (np.abs(np.histogram(numbers, 10, (0, 1))[0] - 9000) < 360).all()  # 4 standard errors
    for one, other in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1]), (numbers, numbers.T)):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02
    for another in (draw(streams(range(300), 1, 3)[:, None], np.arange(300)), draw(streams(range(300), 0, 4), 0)):
        assert not np.isin(another, numbers).any()
    assert (draw(streams([7], 0, 3), [40, 2]) == numbers[7, [40, 2]]).all()


def test_a_huge_text_costs_nothing() -> None:
    windows = Windows(10**13, 4096, seed=5)
    starts = windows.starts(np.arange(1000) + 3 * windows.count)
    assert len(set(starts.tolist())) == 1000
    assert starts.max() + 4097 <= 10**13


def test_too_short_a_text() -> None:
    with pytest.raises(DataError, match="the text has 10 tokens, a window of 10 needs 11"):
        Windows(10, 10)
