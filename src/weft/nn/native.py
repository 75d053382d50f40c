"""Attention and GELU of a training step in C (`native/training/train.c`), forward and backward: float32 on a CPU.

PyTorch's attention multiplies at a third of a CPU's peak rate, and its GELU makes many passes over memory. The C code
keeps a head's scores in cache, and one thread sums every element in a fixed order, so that results do not depend on the
number of threads. Without a C compiler, PyTorch's functions are used.
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
MIN_PAIRS = 64 * 64  # queries times keys below which C gains nothing; nothing is compiled for less
MIN_WIDTH = 256  # width of activations below which C gains nothing
D_HEAD = 32  # d_head must be a multiple: the width of the register tiles in native/training/attention.h
MAX_D_HEAD = 256


class HeadsView(Structure):
    """Pointer to (batch, heads, time, d_head) and its strides; d_head is contiguous."""

    _fields_ = [("data", c_void_p), *((f"{name}_stride", c_int64) for name in ("batch", "head", "time"))]


class AttentionCall(Structure):
    _fields_ = [
        *((name, HeadsView) for name in ["q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v"]),
        *((name, c_void_p) for name in ("logsumexp", "scratch")),
        ("scratch_size", c_int64),
        *((name, c_int32) for name in ["batch", "heads", "kv_heads", "time", "source", "d_head", "causal"]),
        ("scale", c_float),
    ]


class Elements(Structure):
    _fields_ = [*((name, c_void_p) for name in ("x", "d_y", "y")), ("count", c_int64), ("exact", c_int32)]


@cache
def library() -> ctypes.CDLL | None:
    """Compiled library, or None if there is no compiler or it is switched off."""
    lib = compiler.load(SOURCE, "weft's training kernels", (HeadsView, AttentionCall, Elements))
    if lib is None:
        return None
    lib.weft_attention_scratch.argtypes = [c_int, c_int, c_int]
    lib.weft_attention_scratch.restype = c_int64
    lib.weft_attend.argtypes = [POINTER(AttentionCall), c_int, c_int]
    lib.weft_gelu.argtypes = [POINTER(Elements), c_int]
    lib.weft_attend.restype = lib.weft_gelu.restype = None
    return lib


def trains_eagerly(x: Tensor) -> bool:
    """Whether x is a plain float32 CPU tensor in an eager forward pass that will be differentiated."""
    plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype == torch.float32
    eager = not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
    return plain and x.requires_grad and torch.is_grad_enabled() and eager


def attention_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `FusedAttention` computes these heads: PyTorch's fused kernels are allowed, and no thread would idle."""
    if q.shape[2] * k.shape[2] < MIN_PAIRS or q.shape[-1] % D_HEAD or q.shape[-1] > MAX_D_HEAD:
        return False
    if not all(trains_eagerly(x) and x.stride(-1) == 1 for x in (q, k, v)) or q.shape[-1] != v.shape[-1]:
        return False
    busy = k.shape[0] * k.shape[1] >= torch.get_num_threads()
    return busy and torch.backends.cuda.flash_sdp_enabled() and library() is not None


def gelu_fits(x: Tensor) -> bool:
    return x.shape[-1] >= MIN_WIDTH and trains_eagerly(x) and library() is not None


class FusedAttention(torch.autograd.Function):
    """softmax(q kᵀ · scale) v of q (batch, heads, time, d_head), k and v (batch, kv_heads, source time, d_head)."""

    @staticmethod
    def forward(ctx: Any, scale: float, causal: bool, *qkv: Tensor) -> Tensor:
        q = qkv[0]
        out, logsumexp = empty_token_major(q), q.new_empty(q.shape[:3])
        _attend([*qkv, out], logsumexp, scale, causal=causal)
        ctx.save_for_backward(*qkv, out, logsumexp)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *saved, logsumexp = ctx.saved_tensors
        upstream = upstream if upstream.stride(-1) == 1 else upstream.contiguous()
        gradients = [empty_token_major(x) for x in saved[:3]]
        _attend([*saved, upstream, *gradients], logsumexp, ctx.scale, causal=ctx.causal)
        return None, None, *gradients


def empty_token_major(x: Tensor) -> Tensor:
    """Empty (batch, heads, time, d_head) in which the heads of a token are adjacent, as the next layer reads them."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _attend(tensors: list[Tensor], logsumexp: Tensor, scale: float, *, causal: bool) -> None:
    """Fill the output, the fourth of four tensors, or the gradients, the last three of eight."""
    q, k = tensors[:2]
    lib: Any = library()
    scratch_size, threads = lib.weft_attention_scratch(q.shape[2], k.shape[2], q.shape[3]), torch.get_num_threads()
    scratch = torch.empty(threads * scratch_size)
    views = [HeadsView(x.data_ptr(), *x.stride()[:3]) for x in tensors]
    views += [HeadsView()] * (8 - len(views))
    sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal
    call = AttentionCall(*views, logsumexp.data_ptr(), scratch.data_ptr(), scratch_size, *sizes, scale)
    lib.weft_attend(call, len(tensors) == 8, threads)


class FusedGELU(torch.autograd.Function):
    """x · Φ(x), or its tanh approximation. Saves x and recomputes the gate in the backward pass."""

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
    lib: Any = library()
    pointers = x.data_ptr(), None if d_y is None else d_y.data_ptr(), y.data_ptr()
    lib.weft_gelu(Elements(*pointers, x.numel(), exact), torch.get_num_threads())
    return y


class LinearWithBias(torch.autograd.Function):
    """x Wᵀ + b, with the bias's gradient as a product with ones: a fifth of the time of PyTorch's sum over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rows = upstream.flatten(0, -2)
        return (
            upstream @ weight if need_x else None,
            rows.mT @ x.flatten(0, -2) if need_weight else None,
            (rows.new_ones(1, len(rows)) @ rows)[0] if need_bias else None,
        )
