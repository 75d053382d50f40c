"""Windows of texts in random order and in given proportions, computed from the seed, the step and the rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.sampler import Mixture, Windows, assign, draw, integer_shares, permute, rank_samples, streams
from weft.errors import DataError

many = settings(max_examples=25, deadline=None)


@many
@given(st.integers(1, 300), st.integers(0, 2**64), st.integers(0, 50))
def test_the_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    index = np.arange(count)
    assert sorted(permute(index, count, np.full(count, epoch), seed=seed)) == list(index)


@many
@given(st.integers(2, 400), st.integers(1, 40), st.integers(0, 99), st.integers(0, 5))
def test_an_epoch_has_every_window_once(tokens: int, length: int, seed: int, epoch: int) -> None:
    if tokens <= length:
        return
    windows = Windows(tokens, length, seed)
    starts = np.sort(windows.starts(np.arange(windows.count) + epoch * windows.count))
    assert (np.diff(starts) == length).all()
    assert 0 <= starts[0] < length
    assert starts[-1] + length + 1 <= tokens
    assert tokens - windows.count * length < 2 * length + 1  # fewer than two windows are skipped


@many
@given(st.integers(1, 24), st.integers(1, 8), st.integers(0, 40), st.integers(0, 9))
def test_any_number_of_ranks_shares_the_same_rows(batch: int, ranks: int, step: int, seed: int) -> None:
    if ranks > batch:
        return
    windows = Windows(5000, 16, seed)
    starts = windows.starts(rank_samples(step, batch))
    shared = [windows.starts(rank_samples(step, batch, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert np.concatenate(shared).tolist() == starts.tolist()
    sizes = [len(part) for part in shared]
    assert max(sizes) - min(sizes) <= 1


def test_steps_are_consecutive_samples() -> None:
    windows = Windows(1000, 7, seed=3)
    steps = [windows.starts(rank_samples(step, 8)) for step in range(125)]
    assert np.concatenate(steps).tolist() == windows.starts(np.arange(0, 1000)).tolist()


def test_epochs_and_seeds_differ() -> None:
    windows = Windows(100_000, 10, seed=1)
    first, second = windows.starts(np.arange(50)), windows.starts(np.arange(50) + windows.count)
    assert (first != second).sum() > 45
    assert (first != Windows(100_000, 10, seed=2).starts(np.arange(50))).sum() > 45
    shifts = windows.starts(np.arange(20) * windows.count) % 10
    assert len(set(shifts.tolist())) > 3


def test_the_order_looks_random() -> None:
    count = 10_000
    order = permute(np.arange(count), count, np.zeros(count, dtype=np.int64), seed=0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04  # 4 standard errors
    assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 0.04
    where = permute(np.full(4000, 5), 8, np.arange(4000), seed=0)
    assert (np.abs(np.bincount(where, minlength=8) - 500) < 100).all()  # an index is mapped to every other


def test_drawn_numbers_look_random() -> None:
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


def test_a_huge_text_is_sampled_without_cost() -> None:
    windows = Windows(10**13, 4096, seed=5)
    starts = windows.starts(np.arange(1000) + 3 * windows.count)
    assert len(set(starts.tolist())) == 1000
    assert starts.max() + 4097 <= 10**13


def test_short_texts_and_negative_weights_are_refused() -> None:
    with pytest.raises(DataError, match="the text has 10 tokens, a window of 10 needs 11"):
        Windows(10, 10)
    with pytest.raises(DataError, match="weights above 0"):
        integer_shares([1, -1])


# ---- mixtures

WEIGHTS = st.lists(st.floats(0.01, 10).map(lambda weight: round(weight, 3)), min_size=1, max_size=6)


@many
@given(WEIGHTS, st.integers(0, 2000))
def test_every_prefix_has_the_proportions(weights: list[float], samples: int) -> None:
    source, index = assign(np.arange(samples), weights)
    for number, weight in enumerate(weights):
        own = index[source == number]
        assert own.tolist() == list(range(len(own)))  # windows of a source in order, none skipped
        assert abs(len(own) - samples * weight / sum(weights)) <= len(weights)


@many
@given(WEIGHTS, st.integers(0, 10**9))
def test_a_sample_does_not_depend_on_its_neighbours(weights: list[float], first: int) -> None:
    source, index = assign(np.arange(first, first + 5), weights)
    single = [assign(np.array([first + i]), weights) for i in range(5)]
    assert [int(s[0]) for s, _ in single] == source.tolist()
    assert [int(i[0]) for _, i in single] == index.tolist()


def test_proportions_are_exact() -> None:
    source, _ = assign(np.arange(10_100), [0.6, 0.22, 0.08, 0.08, 0.03])
    assert np.bincount(source).tolist() == [6000, 2200, 800, 800, 300]
    assert integer_shares([0.6, 0.22]) == [30, 11]
    assert sum(integer_shares([1e-9, 1, 0.1234567891])) <= 2**31 + 3


def test_windows_come_from_their_sources() -> None:
    mixture = Mixture((Windows(1000, 10, 1), Windows(500, 10, 2)), (3, 1))
    source, starts = mixture.locate(np.arange(400))
    assert starts[source == 0].tolist() == mixture.windows[0].starts(np.arange(300)).tolist()
    assert starts[source == 1].tolist() == mixture.windows[1].starts(np.arange(100)).tolist()
    assert mixture.epochs(400) == [300 / 99, 100 / 49]
