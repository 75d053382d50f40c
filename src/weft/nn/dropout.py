"""Dropout (Srivastava et al. 2014) whose mask depends on the row, not on the process that reads it.

In training, whether an element is dropped is a hash of its row's key, the number of its `Dropout` in the model, and its
position in the row: a counter-based generator without state (Salmon et al. 2011). One process, several processes, and
one process that accumulates gradients over micro-batches therefore drop the same elements, with any padding. A pass
gets the keys as its `rng`; without one, torch's generators draw.

Keys are mixed axis by axis, starting with the row; only the last axis is hashed element by element. The hashes multiply
twice and shift three times (Wellons 2018, "lowbias32"; the last one is shorter).
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.machine import has_triton
from weft.nn.mask import Ranges, slice_ranges

GOLDEN = -1640531527  # 2³² over the golden ratio, as a signed integer: spreads consecutive indices
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # multipliers of the hash
CHUNK = 1 << 15  # elements hashed at a time on a CPU: they stay in its cache
SHARED_STRIDE = 32  # numbers reserved per run of a shared block; bounds the dropouts in one block


class RowRng(NamedTuple):
    """Random keys (batch,) int32 of a pass, the row indices read here, and an `offset` for repeated blocks. `step`
    (batch,) repeats the key of what all rows of a step share, however they are divided."""

    keys: Tensor
    ranges: Ranges = ()
    offset: int = 0
    step: Tensor | None = None

    def for_repeat(self, times: int) -> "RowRng":
        """Generator for a part of the model that already ran `times` times in this pass."""
        return self._replace(offset=self.offset + SHARED_STRIDE * times) if times else self

    def of_step(self) -> "RowRng | None":
        """Generator for one tensor (1, …) that all rows of a step share, such as a weight; None without its key."""
        return None if self.step is None else RowRng(self.step[:1])


def row_keys(base: int, rows: Tensor) -> Tensor:
    """Keys (batch,) int32 of the rows with numbers `rows` (batch,) in a step; `base` depends on seed and step."""
    return _mix(_mix(rows.to(torch.int32) * GOLDEN + base) + (base >> 7))


def position_keys(rng: RowRng, number: int, shape: torch.Size, *, first: tuple[int, ...] = ()) -> Tensor:
    """Keys int32 of all positions of `shape` (batch, …, time) for the dropout of this `number`.

    Axis i after the batch counts from `first[i]`, 0 by default: a shard of a longer axis has its own positions. Of the
    last axis, the time, this process may read ranges only.
    """
    assert len(rng.keys) == shape[0], f"keys of {len(rng.keys)} rows for {shape[0]}"
    starts = (*first, *[0] * len(shape))[: len(shape) - 1]
    if not rng.ranges or len(shape) == 1:
        return _position_keys(rng, number, shape, first=starts)
    *outer, begin = starts
    here = slice_ranges(rng.ranges, begin, begin + shape[-1])
    parts = [(torch.Size((*shape[:-1], len(part))), (*outer, part.start)) for part in here]
    return torch.cat([_position_keys(rng, number, size, first=start) for size, start in parts], dim=-1)


def _position_keys(rng: RowRng, number: int, shape: torch.Size, *, first: tuple[int, ...]) -> Tensor:
    call = (number + rng.offset + 1) * 0x632BE5AB % 2**31
    if len(shape) in (2, 3) and (kernels := _gpu_kernels(rng.keys)) is not None:
        return kernels.position_keys(rng.keys, call, tuple(shape[1:]), first)
    keys = _mix(rng.keys + call)
    for begin, size in zip(first, shape[1:], strict=True):
        indices = torch.arange(begin, begin + size, dtype=torch.int32, device=rng.keys.device)
        keys = _mix(keys.unsqueeze(-1) + indices * GOLDEN)
    return keys


def drop_values(x: Tensor, p: float, keys: Tensor | None, *, first: int = 0) -> Tensor:
    """x (…, width) with elements zeroed with probability p and the others scaled by 1 / (1 − p). keys (…) are the keys
    of the vectors, whose elements count from `first`; None: torch's generator draws."""
    if keys is None:
        return F.dropout(x, p)
    limit, scale = threshold(p)
    if (kernels := _gpu_kernels(x)) is not None:
        return kernels.KeyedDropout.apply(x, keys, first, limit, scale)
    return (x * scale).masked_fill(_drop_mask(keys, x.shape[-1], first, limit=limit), 0.0)


def threshold(p: float) -> tuple[int, float]:
    """Hash below which an element is dropped, and the scale of the others."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31, 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _mix(h: Tensor) -> Tensor:
    """Hash int32 values, one to one."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * FIRST
    h = (h ^ ((h >> 15) & 0x1FFFF)) * SECOND
    return h ^ ((h >> 16) & 0xFFFF)


def _drop_mask(keys: Tensor, width: int, first: int, *, limit: int) -> Tensor:
    """Bool (…, width), True where the hash is below `limit`: elements to drop."""
    last = torch.arange(first, first + width, dtype=torch.int32, device=keys.device) * GOLDEN
    if keys.device.type != "cpu" or torch.compiler.is_compiling():
        return _last_hash(keys.unsqueeze(-1) + last) < limit
    flat = keys.reshape(-1, 1)
    dropped = torch.empty(len(flat), width, dtype=torch.bool)
    rows = max(1, CHUNK // width)
    for start in range(0, len(flat), rows):
        torch.lt(_last_hash(flat[start : start + rows] + last), limit, out=dropped[start : start + rows])
    return dropped.view(*keys.shape, width)


def _last_hash(h: Tensor) -> Tensor:
    """`_mix` without its last shift and with arithmetic shifts: only the upper bits are compared, and they suffice."""
    h ^= h >> 15
    h *= FIRST
    h ^= h >> 15
    h *= SECOND
    return h


def _gpu_kernels(x: Tensor) -> ModuleType | None:
    """Kernels for a tensor on a GPU; None in compiled code, which a compiler fuses, and without Triton."""
    if not x.is_cuda or torch.compiler.is_compiling() or not has_triton():
        return None
    from weft.nn.kernels import dropout as dropout_kernels

    return dropout_kernels


class AxisShard(NamedTuple):
    """One of `ranks` equal shards of a tensor's axis."""

    axis: int  # 1: the time; −1: the width
    rank: int
    ranks: int


class Dropout(nn.Module):
    """Zero elements of (batch, …) with probability p in training, and scale up the others.

    With `variational`, a row (batch, time, width) drops the same elements at all times (Gal and Ghahramani 2016).
    """

    def __init__(self, p: float, variational: bool = False):
        super().__init__()
        self.p, self.variational, self.number = p, variational, 0  # `number_dropouts` sets the number
        self.shard: AxisShard | None = None  # set if x is a shard of a longer tensor, whose positions then count

    @property
    def drops(self) -> bool:
        return self.training and self.p > 0.0

    def forward(self, x: Tensor, rng: RowRng | None = None, begin: int = 0) -> Tensor:
        """(batch, …) → (batch, …); the time counts from `begin`."""
        if not self.drops:
            return x
        if self.variational:
            if rng is None:
                return x * F.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.p)
            keys = position_keys(rng, self.number, x.shape[:1])
            return drop_values(x, self.p, keys[:, None].expand(x.shape[:2]))
        first = 0 if self.shard is None else self.shard.rank * x.shape[self.shard.axis]
        along_time = self.shard is not None and self.shard.axis == 1
        start = (begin + first if along_time else begin,)
        random_keys = None if rng is None else position_keys(rng, self.number, x.shape[:-1], first=start)
        return drop_values(x, self.p, random_keys, first=0 if along_time else first)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def number_dropouts(model: nn.Module, runs: Callable[[nn.Module], int] = lambda part: 0) -> None:
    """Number the dropouts of a model in module order. A part with `runs(part)` > 0 runs that many times in a pass and
    gets numbers for each run (`RowRng.for_repeat`)."""
    number = 0

    def visit(part: nn.Module) -> None:
        nonlocal number
        begin, times = number, runs(part)
        if isinstance(part, Dropout) and part.p:
            part.number = number
            number += 1
        for child in part.children():
            visit(child)
        if times:
            assert number - begin <= SHARED_STRIDE, f"a block has more than {SHARED_STRIDE} dropouts"
            number = begin + SHARED_STRIDE * times

    visit(model)
