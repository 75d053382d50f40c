"""Last part of a gated layer, (silu(gate) ⊙ up) Wᵀ, whose gradient is one GPU kernel between two matrix products.

Only the output of the layer's first product is saved for the backward pass. torch.compile writes the gradients of gate
and up into one tensor by computing both for every element and keeping one, which takes 1.6 times as long as the memory
traffic alone.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from torch.nn import functional as F

BLOCK, WARPS = 2048, 8  # columns and warps per program


@triton.jit
def _backward(gate_up, upstream, gradient, hidden, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + 2 * row * width + columns, mask=inside).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + columns, mask=inside).to(tl.float32)
    d_hidden = tl.load(upstream + row * width + columns, mask=inside).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    dtype = gradient.dtype.element_ty
    tl.store(hidden + row * width + columns, (silu * up).to(dtype), mask=inside)
    d_gate = d_hidden * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(gradient + 2 * row * width + columns, d_gate.to(dtype), mask=inside)
    tl.store(gradient + (2 * row + 1) * width + columns, (d_hidden * silu).to(dtype), mask=inside)


@torch.library.custom_op("weft::swiglu_backward", mutates_args=())
def swiglu_backward(gate_up: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of gate_up (rows, 2 · width), gates first, and silu(gate) ⊙ up, from upstream (rows, width)."""
    assert gate_up.is_contiguous() and upstream.is_contiguous()
    rows, width = upstream.shape
    gradient, hidden = torch.empty_like(gate_up), torch.empty_like(upstream)
    with torch.cuda.device_of(gate_up):
        grid = rows, triton.cdiv(width, BLOCK)
        _backward[grid](gate_up, upstream, gradient, hidden, width, BLOCK=BLOCK, num_warps=WARPS)
    return gradient, hidden


@swiglu_backward.register_fake
def _(gate_up: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up), torch.empty_like(upstream)


class SwiGLU(torch.autograd.Function):
    """gate_up (…, 2 · d_ff), weight (d_model, d_ff) → (…, d_model); products are in the dtype of `gate_up`."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, weight.to(gate_up.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weight = ctx.saved_tensors
        d_out = upstream[0].to(gate_up.dtype).flatten(0, -2)
        gradient, hidden = swiglu_backward(gate_up.flatten(0, -2).contiguous(), d_out @ weight.to(gate_up.dtype))
        return gradient.view_as(gate_up), (d_out.t() @ hidden).to(weight.dtype)
