"""`dropout.place_keys` and `dropout.dropped` in one GPU kernel each: step by step they are dozens of small ones.

The backward pass draws the same numbers again: nothing but the keys is kept.
"""

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

GOLDEN = tl.constexpr(-1640531527)
FIRST = tl.constexpr(0x7FEB352D)
SECOND = tl.constexpr(0x846CA68B - 2**32)
BLOCK = 1024


@triton.jit
def last_hash(h):  # type: ignore[no-untyped-def]
    """As `dropout._last_hash`."""
    h ^= h >> 15
    h *= FIRST
    h ^= h >> 15
    h *= SECOND
    return h


@triton.jit
def _drop(x, keys, out, numbers, width, first, limit, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    column = (place % width).to(tl.int32) + first
    h = last_hash(tl.load(keys + place // width, mask=inside, other=0) + column * GOLDEN)
    value = tl.load(x + place, mask=inside, other=0.0)
    kept = tl.where(h < limit, 0.0, value.to(tl.float32) * scale)
    tl.store(out + place, kept.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mix(h):  # type: ignore[no-untyped-def]
    h = (h ^ ((h >> 16) & 0xFFFF)) * FIRST
    h = (h ^ ((h >> 15) & 0x1FFFF)) * SECOND
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def _place(keys, out, places, call, outer, inner, outer_first, inner_first, AXES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < places
    h = _mix(tl.load(keys + place // (outer * inner), mask=inside, other=0) + call)
    if AXES == 2:
        h = _mix(h + ((place // inner) % outer + outer_first) * GOLDEN)
    h = _mix(h + (place % inner + inner_first) * GOLDEN)
    tl.store(out + place, h, mask=inside)


def place_keys(keys: Tensor, call: int, sizes: tuple[int, ...], first: tuple[int, ...]) -> Tensor:
    """keys (batch,) of rows → those of the places (batch, *sizes), of one axis or two, that count from `first`."""
    out = keys.new_empty(len(keys), *sizes)
    outer, inner = (1, *sizes)[-2:]
    begin = (0, *first, *(0,) * (len(sizes) - len(first)))[-2:]
    with torch.cuda.device_of(keys):
        grid = (triton.cdiv(out.numel(), BLOCK),)
        _place[grid](keys, out, out.numel(), call, outer, inner, *begin, AXES=len(sizes), BLOCK=BLOCK)
    return out


class Drop(NamedTuple):
    """The first column, the hash below which a number is dropped, and what the others are multiplied by."""

    first: int
    limit: int
    scale: float


def _run(x: Tensor, keys: Tensor, drop: Drop) -> Tensor:
    x, keys = x.contiguous(), keys.contiguous()
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(x.numel(), BLOCK),)
        _drop[grid](x, keys, out, x.numel(), x.shape[-1], *drop, BLOCK=BLOCK)
    return out


class Dropped(torch.autograd.Function):
    """x (…, width), keys (…) → as `dropout.dropped`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, drop: Drop) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.drop = drop
        return _run(x, keys, drop)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (keys,) = ctx.saved_tensors
        return _run(gradient, keys, ctx.drop), None, None
