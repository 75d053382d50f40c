"""Cases for tests with several parameters."""

from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: list[Any]) -> list[Any]:
    """Every combination of values; those that add no pair of values to the ones before are marked slow."""
    seen: set[tuple[int, int, int, int]] = set()
    cases = []
    for chosen in sorted(product(*(range(len(axis)) for axis in axes)), key=lambda chosen: sum(chosen) % len(axes[0])):
        pairs = {(a, chosen[a], b, chosen[b]) for a, b in combinations(range(len(axes)), 2)}
        values = [axis[place] for axis, place in zip(axes, chosen, strict=True)]
        cases.append(pytest.param(*values, marks=() if pairs - seen else pytest.mark.slow))
        seen |= pairs
    return cases
