"""The end of a gated layer, (silu(gate) ⊙ up) Wᵀ, whose gradient is one GPU kernel between two products.

What is kept for the backward pass is what the layer's first product gave. A compiler that puts the gradients of gate
and up into one tensor computes both for every place and keeps one, and needs 1.6 times the time that memory takes.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from torch.nn import functional as F

BLOCK, WARPS = 2048, 8


@triton.jit
def _backward(both, upstream, gradient, hidden, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(both + 2 * row * width + columns, mask=inside).to(tl.float32)
    up = tl.load(both + (2 * row + 1) * width + columns, mask=inside).to(tl.float32)
    above = tl.load(upstream + row * width + columns, mask=inside).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * share
    kind = gradient.dtype.element_ty
    tl.store(hidden + row * width + columns, (silu * up).to(kind), mask=inside)
    by_gate = above * up * (share + silu * (1.0 - share))
    tl.store(gradient + 2 * row * width + columns, by_gate.to(kind), mask=inside)
    tl.store(gradient + (2 * row + 1) * width + columns, (above * silu).to(kind), mask=inside)


@torch.library.custom_op("weft::swiglu_backward", mutates_args=())
def swiglu_backward(both: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """both (rows, 2 · width), gates first; upstream (rows, width) → the gradient by both, and silu(gate) ⊙ up."""
    assert both.is_contiguous() and upstream.is_contiguous()
    rows, width = upstream.shape
    gradient, hidden = torch.empty_like(both), torch.empty_like(upstream)
    with torch.cuda.device_of(both):
        grid = rows, triton.cdiv(width, BLOCK)
        _backward[grid](both, upstream, gradient, hidden, width, BLOCK=BLOCK, num_warps=WARPS)
    return gradient, hidden


@swiglu_backward.register_fake
def _(both: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(both), torch.empty_like(upstream)


class SwiGLU(torch.autograd.Function):
    """both (…, 2 · d_ff), weight (d_model, d_ff) → (…, d_model); products are in the type of `both`."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(both, weight)
        gate, up = both.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, weight.to(both.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        both, weight = ctx.saved_tensors
        above = upstream[0].to(both.dtype).flatten(0, -2)
        gradient, hidden = swiglu_backward(both.flatten(0, -2).contiguous(), above @ weight.to(both.dtype))
        return gradient.view_as(both), (above.t() @ hidden).to(weight.dtype)
