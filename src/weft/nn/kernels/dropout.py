"""`dropout.position_keys` and `dropout.drop_values` as one GPU kernel each, instead of dozens of small ones.

The backward pass hashes again, so only the keys are saved.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

# the constants of `nn/dropout.py`
GOLDEN = tl.constexpr(-1640531527)
FIRST = tl.constexpr(0x7FEB352D)
SECOND = tl.constexpr(0x846CA68B - 2**32)
BLOCK = 1024  # elements per program


@triton.jit
def last_hash(h):  # type: ignore[no-untyped-def]
    h ^= h >> 15
    h *= FIRST
    h ^= h >> 15
    h *= SECOND
    return h


@triton.jit
def _drop(x, keys, out, elements, width, first, limit, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    column = (index % width).to(tl.int32) + first
    h = last_hash(tl.load(keys + index // width, mask=inside, other=0) + column * GOLDEN)
    value = tl.load(x + index, mask=inside, other=0.0)
    kept = tl.where(h < limit, 0.0, value.to(tl.float32) * scale)
    tl.store(out + index, kept.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mix(h):  # type: ignore[no-untyped-def]
    h = (h ^ ((h >> 16) & 0xFFFF)) * FIRST
    h = (h ^ ((h >> 15) & 0x1FFFF)) * SECOND
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def _position_keys(  # type: ignore[no-untyped-def]
    keys, out, elements, call, outer, inner, outer_first, inner_first, AXES: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    h = _mix(tl.load(keys + index // (outer * inner), mask=inside, other=0) + call)
    if AXES == 2:
        h = _mix(h + ((index // inner) % outer + outer_first) * GOLDEN)
    h = _mix(h + (index % inner + inner_first) * GOLDEN)
    tl.store(out + index, h, mask=inside)


def position_keys(keys: Tensor, call: int, sizes: tuple[int, ...], first: tuple[int, ...]) -> Tensor:
    """Row keys (batch,) → keys of the positions (batch, *sizes), on one or two axes that count from `first`."""
    out = keys.new_empty(len(keys), *sizes)
    outer, inner = (1, *sizes)[-2:]
    begin = (0, *first)[-2:]
    with torch.cuda.device_of(keys):
        grid = (triton.cdiv(out.numel(), BLOCK),)
        _position_keys[grid](keys, out, out.numel(), call, outer, inner, *begin, AXES=len(sizes), BLOCK=BLOCK)
    return out


def _launch(x: Tensor, keys: Tensor, first: int, limit: int, scale: float) -> Tensor:
    x, keys = x.contiguous(), keys.contiguous()
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(x.numel(), BLOCK),)
        _drop[grid](x, keys, out, x.numel(), x.shape[-1], first, limit, scale, BLOCK=BLOCK)
    return out


class KeyedDropout(torch.autograd.Function):
    """`dropout.drop_values` of x (…, width) with keys (…)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, first: int, limit: int, scale: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.options = first, limit, scale
        return _launch(x, keys, first, limit, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        return _launch(gradient, keys, *ctx.options), None, None, None, None
