"""Dropout (Srivastava et al. 2014) whose numbers follow the row, not the process that happens to read it.

While a step trains, what is dropped is a function of the row's key, of which dropout of the pass this is, and of the
place within the row: a hash that counts, as Salmon et al. 2011 argue for, with no state. So one process, several, and
one that reads its batch in parts drop the same numbers, however far rows are padded. Outside of `following` torch's own
generators draw.

A place's key is mixed axis by axis, from the row on; only the last axis is hashed number by number. The hashes are
those of integers by two multiplications and three shifts (Wellons 2018, "lowbias32"; the last one is shorter).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.machine import has_triton
from weft.nn.runs import Runs, within

GOLDEN = -1640531527  # 2³² over the golden ratio, as a signed number: neighbours land far from each other
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32
CHUNK = 1 << 15  # numbers hashed at a time on a CPU: they stay in its cache


class _Pass:
    """The rows that are being read: their keys (batch,) int32, how many dropouts there were so far, and which of the
    rows' places are read here, if not all."""

    keys: Tensor | None = None
    calls: int = 0
    runs: Runs = ()


_now = _Pass()


@contextmanager
def following(keys: Tensor | None, runs: Runs = ()) -> Iterator[None]:
    """Inside, forward and backward passes read rows with these keys (batch,), int32, or `runs` of their places."""
    before = _now.keys, _now.calls, _now.runs
    _now.keys, _now.calls, _now.runs = keys, 0, runs
    try:
        yield
    finally:
        _now.keys, _now.calls, _now.runs = before


def next_call(calls: int = 1) -> int:
    """The number of the pass's next dropout; `calls` of them are taken. Outside of `following` nothing is counted."""
    if _now.keys is None:
        return 0
    number = _now.calls
    _now.calls = number + calls
    return number


@contextmanager
def calls_from(call: int) -> Iterator[None]:
    """Inside, `call` is the next one; afterwards the count is what it was. So a part of the pass can run again."""
    before = _now.calls
    _now.calls = call
    try:
        yield
    finally:
        _now.calls = before


def row_keys(base: int, rows: Tensor) -> Tensor:
    """Keys (batch,) int32 of rows (batch,), their numbers within a step; `base` is drawn from the seed and the step."""
    return _mix(_mix(rows.to(torch.int32) * GOLDEN + base) + (base >> 7))


def place_keys(shape: torch.Size, call: int, first: tuple[int, ...] = (), *, device: torch.device) -> Tensor | None:
    """Keys of the places of `shape` (batch, …) in this call, int32; None outside of `following`.

    An axis counts from its `first`, which are 0 where they aren't given: a part of a longer axis has its own places.
    The last one is the time, of which only some places may be read here.
    """
    if _now.keys is None:
        return None
    assert len(_now.keys) == shape[0], f"keys of {len(_now.keys)} rows for {shape[0]}"
    if not _now.runs or len(shape) == 1:
        return _place_keys(shape, call, first, device)
    *outer, begin = (*first, *[0] * len(shape))[: len(shape) - 1]
    runs = within(_now.runs, begin, begin + shape[-1])
    each = [(torch.Size((*shape[:-1], len(run))), call, (*outer, run.start), device) for run in runs]
    return torch.cat([_place_keys(*one) for one in each], dim=-1)


def _place_keys(shape: torch.Size, call: int, first: tuple[int, ...], device: torch.device) -> Tensor:
    assert _now.keys is not None
    call = (call + 1) * 0x632BE5AB % 2**31
    if device.type == "cuda" and not torch.compiler.is_compiling() and len(shape) in (2, 3):
        kernel = _kernel()
        if kernel is not None:
            return kernel.place_keys(_now.keys, call, tuple(shape[1:]), first[: len(shape) - 1])
    keys = _mix(_now.keys + call)
    for axis, size in enumerate(shape[1:]):
        begin = first[axis] if axis < len(first) else 0
        places = torch.arange(begin, begin + size, dtype=torch.int32, device=device)
        keys = _mix(keys.unsqueeze(-1) + places * GOLDEN)
    return keys


def dropped(x: Tensor, p: float, keys: Tensor | None, first: int = 0) -> Tensor:
    """x (…, width) with numbers set to 0 with probability p and the others scaled by 1 / (1 − p).

    keys (…) are those of its vectors, whose numbers count from `first`.
    """
    if keys is None:
        return F.dropout(x, p)
    limit, scale = threshold(p)
    if x.is_cuda and not torch.compiler.is_compiling():
        kernel = _kernel()
        if kernel is not None:
            return kernel.Dropped.apply(x, keys, kernel.Drop(first, limit, scale))
    return (x * scale).masked_fill(_lost(keys, x.shape[-1], first, limit), 0.0)


def threshold(p: float) -> tuple[int, float]:
    """The hash below which a number is dropped, and what the others are multiplied by."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31, 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _mix(h: Tensor) -> Tensor:
    """A hash of int32 numbers, one to one."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * FIRST
    h = (h ^ ((h >> 15) & 0x1FFFF)) * SECOND
    return h ^ ((h >> 16) & 0xFFFF)


def _lost(keys: Tensor, width: int, first: int, limit: int) -> Tensor:
    """Which numbers are dropped, bool (…, width): those whose hash is below `limit`."""
    last = torch.arange(first, first + width, dtype=torch.int32, device=keys.device) * GOLDEN
    if keys.device.type != "cpu" or torch.compiler.is_compiling():
        return _last_hash(keys.unsqueeze(-1) + last) < limit
    flat = keys.reshape(-1, 1)
    lost = torch.empty(len(flat), width, dtype=torch.bool)
    rows = max(1, CHUNK // width)
    for start in range(0, len(flat), rows):
        torch.lt(_last_hash(flat[start : start + rows] + last), limit, out=lost[start : start + rows])
    return lost.view(*keys.shape, width)


def _last_hash(h: Tensor) -> Tensor:
    """`_mix` without its last shift, and with shifts that keep the sign: upper bits decide, and they are as good."""
    h ^= h >> 15
    h *= FIRST
    h ^= h >> 15
    h *= SECOND
    return h


@cache
def _kernel() -> ModuleType | None:
    """The same in one kernel for GPUs, where there is Triton to compile it."""
    if not has_triton():
        return None
    from weft.nn.kernels import dropout as dropout_kernel

    return dropout_kernel


def dropped_alike(x: Tensor, p: float, call: int) -> Tensor:
    """x (batch, time, width) with the same numbers of a row set to 0 at all its places (Gal and Ghahramani 2016)."""
    keys = place_keys(x.shape[:1], call, device=x.device)
    if keys is None:
        return x * F.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), p)
    return dropped(x, p, keys[:, None].expand(x.shape[:2]))


class Part(NamedTuple):
    """One of `of` equal parts of an axis, where several processes divide what would be one tensor."""

    axis: int  # 1: the time; −1: the width
    rank: int
    of: int


class Dropout(nn.Module):
    """Numbers (batch, …) set to 0 with probability p in training, the others scaled up.

    With `variational` those of a row (batch, time, width) are the same at all its places.
    """

    def __init__(self, p: float, variational: bool = False):
        super().__init__()
        self.p, self.variational = p, variational
        self.part: Part | None = None  # which one x is of a longer tensor, whose places it then counts

    def forward(self, x: Tensor) -> Tensor:
        """(batch, …) → the same shape."""
        if not self.training or not self.p:
            return x
        if self.variational:
            return dropped_alike(x, self.p, next_call())
        first = 0 if self.part is None else self.part.rank * x.shape[self.part.axis]
        along_time = self.part is not None and self.part.axis == 1
        keys = place_keys(x.shape[:-1], next_call(), (first,) if along_time else (), device=x.device)
        return dropped(x, self.p, keys, 0 if along_time else first)

    def extra_repr(self) -> str:
        """As torch's own."""
        return f"p={self.p}"
