"""The runs of a row's places that one process reads, where several divide every row among them.

Tokens of several runs stand one after the other in one tensor: token 0 is the first place of the first run.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

Runs = tuple[range, ...]  # in order, none touching the next; empty where a process reads whole rows


def spans(runs: Runs) -> Iterator[tuple[slice, range]]:
    """Which tokens are those of a run, and the run, one after the other."""
    begin = 0
    for run in runs:
        yield slice(begin, begin + len(run)), run
        begin += len(run)


def within(runs: Runs, start: int, stop: int) -> Runs:
    """The runs of tokens start … stop − 1."""
    cut = (run[max(0, start - own.start) : max(0, stop - own.start)] for own, run in spans(runs))
    return tuple(run for run in cut if run)


def taken(rows: Tensor, runs: Runs) -> Tensor:
    """The runs of rows (batch, time, …) as (batch, tokens, …); whole rows as they are."""
    return torch.cat([rows[:, run.start : run.stop] for run in runs], dim=1) if runs else rows
