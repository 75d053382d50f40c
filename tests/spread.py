"""Tables of cases of which `make test` runs some, and `make test-all` every one."""

from collections.abc import Iterable
from typing import Any

import pytest


def spread(cases: Iterable[Any], keep: int) -> list[Any]:
    """Mark all but `keep` cases as slow; those kept lie at equal distances, the first one included."""
    listed = list(cases)
    kept = {round(number * len(listed) / keep) for number in range(keep)}
    return [case if index in kept else slow(case) for index, case in enumerate(listed)]


def slow(case: Any) -> Any:
    """One case, marked as slow; a tuple holds the values of several parameters."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
