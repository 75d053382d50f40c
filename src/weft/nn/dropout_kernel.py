"""`dropout.dropped` in one GPU kernel. The backward pass draws the same numbers again: nothing but the keys is kept."""

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
def _drop(  # type: ignore[no-untyped-def]
    x,
    keys,
    out,
    numbers,
    width,
    first,
    limit,
    scale,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    column = (place % width).to(tl.int32) + first
    h = tl.load(keys + place // width, mask=inside, other=0) + column * GOLDEN
    h ^= h >> 15
    h *= FIRST
    h ^= h >> 15
    h *= SECOND
    value = tl.load(x + place, mask=inside, other=0.0)
    kept = tl.where(h < limit, 0.0, value.to(tl.float32) * scale)
    tl.store(out + place, kept.to(out.dtype.element_ty), mask=inside)


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
