"""Dropout (Srivastava et al. 2014) whose numbers follow the row, not the process that happens to read it.

While a step trains, what is dropped is a function of the row's key, of the number of the `Dropout` in its model, and of
the place within the row: a hash that counts, as Salmon et al. 2011 argue for, with no state. So one process, several,
and one that reads its batch in parts drop the same numbers, however far rows are padded. A pass is given the keys as
its `rng`; without one torch's own generators draw.

A place's key is mixed axis by axis, from the row on; only the last axis is hashed number by number. The hashes are
those of integers by two multiplications and three shifts (Wellons 2018, "lowbias32"; the last one is shorter).
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.machine import has_triton
from weft.nn.mask import Ranges, within

GOLDEN = -1640531527  # 2³² over the golden ratio, as a signed number: neighbours land far from each other
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32
CHUNK = 1 << 15  # numbers hashed at a time on a CPU: they stay in its cache
SHARED_STRIDE = 32  # numbers set aside for a part that is read several times: more than its dropouts


class RowRng(NamedTuple):
    """What the dropouts of a pass draw from: keys (batch,) int32 of the rows.

    `ranges` are the places of the rows that are read here, if not all. `offset` is added to the number of each
    dropout: a block that several layers share drops other numbers in each of them.
    """

    keys: Tensor
    ranges: Ranges = ()
    offset: int = 0

    def repeated(self, times: int) -> "RowRng":
        """For a part of the model that has been read so many `times` before in this pass."""
        return self._replace(offset=self.offset + SHARED_STRIDE * times) if times else self


def row_keys(base: int, rows: Tensor) -> Tensor:
    """Keys (batch,) int32 of rows (batch,), their numbers within a step; `base` is drawn from the seed and the step."""
    return _mix(_mix(rows.to(torch.int32) * GOLDEN + base) + (base >> 7))


def place_keys(rng: RowRng, number: int, shape: torch.Size, first: tuple[int, ...] = ()) -> Tensor:
    """Keys of the places of `shape` (batch, …) for the dropout of this `number`, int32.

    An axis counts from its `first`, which are 0 where they aren't given: a part of a longer axis has its own places.
    The last one is the time, of which only some places may be read here.
    """
    assert len(rng.keys) == shape[0], f"keys of {len(rng.keys)} rows for {shape[0]}"
    if not rng.ranges or len(shape) == 1:
        return _place_keys(rng, number, shape, first)
    *outer, begin = (*first, *[0] * len(shape))[: len(shape) - 1]
    here = within(rng.ranges, begin, begin + shape[-1])
    each = [_place_keys(rng, number, torch.Size((*shape[:-1], len(run))), (*outer, run.start)) for run in here]
    return torch.cat(each, dim=-1)


def _place_keys(rng: RowRng, number: int, shape: torch.Size, first: tuple[int, ...]) -> Tensor:
    device = rng.keys.device
    call = (number + rng.offset + 1) * 0x632BE5AB % 2**31
    if device.type == "cuda" and not torch.compiler.is_compiling() and len(shape) in (2, 3):
        kernel = _kernel()
        if kernel is not None:
            return kernel.place_keys(rng.keys, call, tuple(shape[1:]), first[: len(shape) - 1])
    keys = _mix(rng.keys + call)
    for axis, size in enumerate(shape[1:]):
        begin = first[axis] if axis < len(first) else 0
        places = torch.arange(begin, begin + size, dtype=torch.int32, device=device)
        keys = _mix(keys.unsqueeze(-1) + places * GOLDEN)
    return keys


def dropped(x: Tensor, p: float, keys: Tensor | None, first: int = 0) -> Tensor:
    """x (…, width) with numbers set to 0 with probability p and the others scaled by 1 / (1 − p). keys (…) are those of
    its vectors, whose numbers count from `first`."""
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


class Part(NamedTuple):
    """One of `of` equal parts of an axis, where several processes divide what would be one tensor."""

    axis: int  # 1: the time; −1: the width
    rank: int
    of: int


class Dropout(nn.Module):
    """Numbers (batch, …) set to 0 with probability p in training, the others scaled up.

    With `variational` those of a row (batch, time, width) are the same at all its places (Gal and Ghahramani 2016).
    `number_dropouts` gives each of a model's dropouts a number of its own.
    """

    def __init__(self, p: float, variational: bool = False):
        super().__init__()
        self.p, self.variational, self.number = p, variational, 0
        self.part: Part | None = None  # which one x is of a longer tensor, whose places it then counts

    @property
    def drops(self) -> bool:
        return self.training and self.p > 0.0

    def forward(self, x: Tensor, rng: RowRng | None = None, begin: int = 0) -> Tensor:
        """(batch, …) → the same shape; the time counts from `begin`."""
        if not self.drops:
            return x
        if self.variational:
            if rng is None:
                return x * F.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.p)
            rows = place_keys(rng, self.number, x.shape[:1])
            return dropped(x, self.p, rows[:, None].expand(x.shape[:2]))
        first = 0 if self.part is None else self.part.rank * x.shape[self.part.axis]
        along_time = self.part is not None and self.part.axis == 1
        start = (begin + first if along_time else begin,)
        keys = None if rng is None else place_keys(rng, self.number, x.shape[:-1], start)
        return dropped(x, self.p, keys, 0 if along_time else first)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def number_dropouts(model: nn.Module, repeats: Callable[[nn.Module], int] = lambda part: 0) -> None:
    """Give every dropout of a model a number, in the order in which they stand there. A part that `repeats` so many
    times in a pass, a block, has numbers of its own for each time (`RowRng.repeated`)."""
    number = 0

    def visit(part: nn.Module) -> None:
        nonlocal number
        begin, times = number, repeats(part)
        if isinstance(part, Dropout) and part.p:
            part.number = number
            number += 1
        for child in part.children():
            visit(child)
        if times:
            assert number - begin <= SHARED_STRIDE, "more dropouts in a block than numbers"
            number = begin + SHARED_STRIDE * times

    visit(model)
