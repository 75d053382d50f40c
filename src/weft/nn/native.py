"""Attention and GELU of a training step in C (`native/training/train.c`), forward and back: float32 on a processor.

PyTorch's own attention multiplies at a third of a processor's rate, and its GELU passes over memory many times. Here a
head's scores stay in the cache, and every number is summed by one thread in one order, so that results do not depend on
how many there are. Without a compiler everything goes as it does without this file.
"""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.native import compiler

SOURCE = compiler.SOURCES / "training" / "train.c"
MIN_PAIRS = 64 * 64  # queries times keys: below that there is no time to gain, and nothing is compiled
MIN_WIDTH = 256  # of a layer whose activations are worth it
D_HEAD = 32  # a head is a multiple of it, as tiles in c/attention.h are
MAX_D_HEAD = 256


class Heads(Structure):
    _fields_ = [("at", c_void_p), ("row", c_int64), ("head", c_int64), ("place", c_int64)]


class Attention(Structure):
    _fields_ = [
        *((name, Heads) for name in ["q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v"]),
        *((name, c_void_p) for name in ("log_totals", "scratch")),
        ("space", c_int64),
        *((name, c_int32) for name in ["batch", "heads", "kv_heads", "time", "source", "d_head", "causal"]),
        ("scale", c_float),
    ]


class Elements(Structure):
    _fields_ = [*((name, c_void_p) for name in ("x", "d_y", "y")), ("count", c_int64), ("exact", c_int32)]


@cache
def library() -> ctypes.CDLL | None:
    """What was compiled, or None where that is not possible or not wanted."""
    found = compiler.load(SOURCE, "weft's training kernels", (Heads, Attention, Elements))
    if found is None:
        return None
    found.weft_attention_space.argtypes = [c_int, c_int, c_int]
    found.weft_attention_space.restype = c_int64
    found.weft_attend.argtypes = [POINTER(Attention), c_int, c_int]
    found.weft_gelu.argtypes = [POINTER(Elements), c_int]
    found.weft_attend.restype = found.weft_gelu.restype = None
    return found


def learns(x: Tensor) -> bool:
    """Whether x is an eager training's on a processor, in float32 and nothing but a tensor."""
    plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype == torch.float32
    eager = not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
    return plain and x.requires_grad and torch.is_grad_enabled() and eager


def attention_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `FusedAttention` computes these heads: where PyTorch may choose its fused kernels, and no thread would be
    idle."""
    if q.shape[2] * k.shape[2] < MIN_PAIRS or q.shape[-1] % D_HEAD or q.shape[-1] > MAX_D_HEAD:
        return False
    if not all(learns(x) and x.stride(-1) == 1 for x in (q, k, v)) or q.shape[-1] != v.shape[-1]:
        return False
    busy = k.shape[0] * k.shape[1] >= torch.get_num_threads()
    return busy and torch.backends.cuda.flash_sdp_enabled() and library() is not None


def gelu_fits(x: Tensor) -> bool:
    return x.shape[-1] >= MIN_WIDTH and learns(x) and library() is not None


class FusedAttention(torch.autograd.Function):
    """softmax(q kᵀ · scale) v of q (batch, heads, time, d_head), k and v (batch, kv_heads, source time, d_head)."""

    @staticmethod
    def forward(ctx: Any, scale: float, causal: bool, *qkv: Tensor) -> Tensor:
        q = qkv[0]
        out, log_totals = _by_places(q), q.new_empty(q.shape[:3])
        _attend([*qkv, out], log_totals, scale, causal)
        ctx.save_for_backward(*qkv, out, log_totals)
        ctx.options = scale, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *kept, log_totals = ctx.saved_tensors
        upstream = upstream if upstream.stride(-1) == 1 else upstream.contiguous()
        gradients = [_by_places(x) for x in kept[:3]]
        _attend([*kept, upstream, *gradients], log_totals, *ctx.options)
        return None, None, *gradients


def _by_places(x: Tensor) -> Tensor:
    """Memory for (batch, heads, time, d_head) in which a token's heads lie side by side, as they are read next."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _attend(tensors: list[Tensor], log_totals: Tensor, scale: float, causal: bool) -> None:
    """Fill the output, the fourth of the tensors, or the gradients, the last three of eight."""
    q, k = tensors[:2]
    compiled: Any = library()
    space, threads = compiled.weft_attention_space(q.shape[2], k.shape[2], q.shape[3]), torch.get_num_threads()
    scratch = torch.empty(threads * space)
    heads = [Heads(x.data_ptr(), *x.stride()[:3]) for x in tensors]
    heads += [Heads()] * (8 - len(heads))
    sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal
    given = Attention(*heads, log_totals.data_ptr(), scratch.data_ptr(), space, *sizes, scale)
    compiled.weft_attend(given, len(tensors) == 8, threads)


class FusedGELU(torch.autograd.Function):
    """x · Φ(x), or its approximation by a tanh. x is kept, and its share is computed once more in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exact: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.exact = exact
        return _gelu(x, None, exact)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return _gelu(ctx.saved_tensors[0], upstream.contiguous(), ctx.exact), None


def _gelu(x: Tensor, d_y: Tensor | None, exact: bool) -> Tensor:
    y = torch.empty_like(x)
    compiled: Any = library()
    pointers = x.data_ptr(), None if d_y is None else d_y.data_ptr(), y.data_ptr()
    compiled.weft_gelu(Elements(*pointers, x.numel(), exact), torch.get_num_threads())
    return y


class Biased(torch.autograd.Function):
    """x Wᵀ + b, whose bias learns by a product with ones: a fifth of the time that PyTorch's sum over rows takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = upstream.flatten(0, -2)
        return (
            upstream @ weight if of_x else None,
            rows.mT @ x.flatten(0, -2) if of_weight else None,
            (rows.new_ones(1, len(rows)) @ rows)[0] if of_bias else None,
        )
