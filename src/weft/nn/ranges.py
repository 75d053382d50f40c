"""The ranges of a row's places that one process reads, where several divide every row among them.

Tokens of several ranges stand one after the other in one tensor: token 0 is the first place of the first range.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

Ranges = tuple[range, ...]  # in order, none touching the next; empty where a process reads whole rows


def spans(ranges: Ranges) -> Iterator[tuple[slice, range]]:
    """Which tokens are those of a range, and the range, one after the other."""
    begin = 0
    for each in ranges:
        yield slice(begin, begin + len(each)), each
        begin += len(each)


def within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The ranges of tokens start … stop − 1."""
    cut = (each[max(0, start - own.start) : max(0, stop - own.start)] for own, each in spans(ranges))
    return tuple(each for each in cut if each)


def taken(rows: Tensor, ranges: Ranges) -> Tensor:
    """The ranges of rows (batch, time, …) as (batch, tokens, …); whole rows as they are."""
    return torch.cat([rows[:, each.start : each.stop] for each in ranges], dim=1) if ranges else rows
