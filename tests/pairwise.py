"""Cases for tests with several parameters: all combinations, of which the quick tests run those that add something."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of values; those that add no pair of values to the ones before are marked slow."""
    return _covering(2, *axes)


def each_once(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of values; those that add no value to the ones before are marked slow."""
    return _covering(1, *axes)


def _covering(strength: int, *given: Iterable[Any]) -> list[Any]:
    axes = [list(axis) for axis in given]
    seen: set[tuple[tuple[int, int], ...]] = set()
    cases = []
    for chosen in sorted(product(*(range(len(axis)) for axis in axes)), key=lambda chosen: sum(chosen) % len(axes[0])):
        adds = set(combinations(enumerate(chosen), strength))
        values = [axis[place] for axis, place in zip(axes, chosen, strict=True)]
        cases.append(pytest.param(*values, marks=() if adds - seen else pytest.mark.slow))
        seen |= adds
    return cases
