import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.sampler import Mixture, Windows, assign, shares
from weft.errors import DataError

many = settings(max_examples=60, deadline=None)

WEIGHTS = st.lists(st.floats(0.01, 10).map(lambda weight: round(weight, 3)), min_size=1, max_size=6)


@many
@given(WEIGHTS, st.integers(0, 2000))
def test_every_prefix_has_the_proportions(weights: list[float], samples: int) -> None:
    source, place = assign(np.arange(samples), weights)
    for number, weight in enumerate(weights):
        mine = place[source == number]
        assert mine.tolist() == list(range(len(mine)))  # a source's windows in order, none left out
        assert abs(len(mine) - samples * weight / sum(weights)) <= len(weights)


@many
@given(WEIGHTS, st.integers(0, 10**9))
def test_a_sample_does_not_depend_on_its_neighbours(weights: list[float], first: int) -> None:
    source, place = assign(np.arange(first, first + 5), weights)
    alone = [assign(np.array([first + i]), weights) for i in range(5)]
    assert [int(s[0]) for s, _ in alone] == source.tolist()
    assert [int(p[0]) for _, p in alone] == place.tolist()


def test_proportions_are_exact() -> None:
    source, _ = assign(np.arange(10_100), [0.6, 0.22, 0.08, 0.08, 0.03])
    assert np.bincount(source).tolist() == [6000, 2200, 800, 800, 300]
    assert shares([0.6, 0.22]) == [30, 11]
    assert sum(shares([1e-9, 1, 0.1234567891])) <= 2**31 + 3


def test_windows_come_from_their_sources() -> None:
    mixture = Mixture((Windows(1000, 10, 1), Windows(500, 10, 2)), (3, 1))
    source, starts = mixture.locate(np.arange(400))
    assert starts[source == 0].tolist() == mixture.windows[0].starts(np.arange(300)).tolist()
    assert starts[source == 1].tolist() == mixture.windows[1].starts(np.arange(100)).tolist()
    assert mixture.epochs(400) == [300 / 99, 100 / 49]


def test_weights_are_above_nothing() -> None:
    with pytest.raises(DataError, match="weights above 0"):
        shares([1, -1])
