"""Bindings to the decoder step and matrix products in C (`native/decode/step.c`)."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.native import compiler

SOURCE = compiler.SOURCES / "decode" / "step.c"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}  # the enum in gemv.h; uint8: int4 pairs
ACTIVATIONS = {"relu": 0, "silu": 1, "gelu": 2, "gelu-tanh": 3, "relu2": 4}  # the enum in step.c
NORMALISED = {"none": 0, "head": 1, "rotated": 2, "heads": 3}  # queries and keys; the enum in attention.h
SCORES = {"softmax": 0, "softmax-chosen": 1, "sigmoid": 2}  # the enum in experts.h; kernels_experts.py has the same
BLOCK = 32  # values with one scale (quantised_gemv.h)
PANEL_ROWS = 16  # interleaved rows of a panel (quantised_gemv.h)
MIN_GEMM_ROWS, GEMM_COLUMNS = 8, 16  # `gemm` needs at least these rows, and a multiple of these columns
MAX_D_HEAD = 512  # bounds buffers on the C stack (attention.h)
NO_WINDOW = 2**31 - 1  # tokens: INT32_MAX


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class CMatrix(Structure):
    _fields_ = _fields(c_int32, "dtype rows columns") + _fields(c_void_p, "weights scales centres bias")


class CNorm(Structure):
    _fields_ = _fields(c_void_p, "gain bias") + _fields(c_float, "eps offset") + _fields(c_int32, "centred")


class CExperts(Structure):
    _fields_ = [
        *_fields(c_int32, "experts chosen score renormalised weighs_input groups kept_groups best_two"),
        *_fields(c_float, "scale limit up_offset"),
        ("choice_bias", c_void_p),
        *_fields(CMatrix, "router shared_gate"),
        *_fields(POINTER(CMatrix), "gate_up down"),
    ]


class CLayer(Structure):
    _fields_ = [
        *_fields(CNorm, "attention_norm feedforward_norm q_norm k_norm"),
        *_fields(CMatrix, "qkv out up down"),
        ("experts", POINTER(CExperts)),
        *_fields(c_void_p, "keys values cos sin sinks"),
        *_fields(c_int32, "window rotated adjacent"),
    ]


class CModel(Structure):
    _fields_ = [
        *_fields(c_int32, "layers d_model heads kv_heads d_head activation qk_norm block_size"),
        *_fields(c_int32, "d_ff max_experts max_chosen d_expert"),
        ("stride", c_int64),
        *_fields(c_float, "scale clip beta residual_scale"),
        ("layer", POINTER(CLayer)),
        ("norm", CNorm),
        ("head", CMatrix),
    ]


class CBatch(Structure):
    _fields_ = _fields(c_int32, "texts table_width") + _fields(c_void_p, "counts positions tables")


@cache
def library() -> ctypes.CDLL | None:
    """Load the compiled library, or None if it is disabled or cannot be compiled."""
    compiled = compiler.load(SOURCE, "weft's decoding step", (CMatrix, CNorm, CExperts, CLayer, CModel, CBatch))
    if compiled is None:
        return None
    compiled.weft_multiply.argtypes = [POINTER(CMatrix), c_void_p, c_void_p, c_int, c_int]
    compiled.weft_gemm.argtypes = compiled.weft_multiply.argtypes
    compiled.weft_step.argtypes = [POINTER(CModel), c_void_p, POINTER(CBatch), c_int, c_void_p, c_int]
    compiled.weft_logsumexp.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int]
    compiled.weft_logsumexp.restype = None
    return compiled


def address(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def interleave_rows(rows: Tensor) -> Tensor:
    """Pack rows (N, width) of int8 or int4 weights, or of their scales or centres, into panels of 16 interleaved rows
    (quantised_gemv.h): weights four bytes at a time, the others one value at a time. The last panel is zero-padded."""
    rows = F.pad(rows, (0, 0, 0, -len(rows) % PANEL_ROWS))
    words = rows.view(torch.int32) if rows.element_size() == 1 else rows
    return words.unflatten(0, (-1, PANEL_ROWS)).transpose(1, 2).contiguous().view(rows.dtype)


def matrix(
    weights: Tensor,
    shape: Sequence[int],
    *,
    scales: Tensor | None = None,
    centres: Tensor | None = None,
    bias: Tensor | None = None,
) -> CMatrix:
    """Describe a matrix of this shape to C: float32 or bf16 weights, or int8 or pairs of int4 (uint8) that went through
    `interleave_rows`. It points into the tensors, which must outlive it."""
    rows, columns = shape
    return CMatrix(DTYPES[weights.dtype], rows, columns, *map(address, (weights, scales, centres, bias)))


def multiply(weight: CMatrix, x: Tensor, threads: int | None = None) -> Tensor:
    """Multiply x (M, columns) by a matrix (N, columns) transposed, in float32 → (M, N); threads: torch's by default."""
    x = x.float().contiguous()
    assert x.dim() == 2 and x.shape[1] == weight.columns, f"{tuple(x.shape)} times {weight.columns} columns"
    y = torch.empty(len(x), weight.rows)
    compiled: Any = library()
    if compiled.weft_multiply(weight, x.data_ptr(), y.data_ptr(), len(x), threads or torch.get_num_threads()):
        raise MemoryError("out of memory in a matrix product")
    return y


def gemm(weight: CMatrix, x: Tensor, out: Tensor, *, threads: int | None = None) -> Tensor:
    """Multiply x (M, columns) by a float32 matrix (N, columns) transposed → out (M, N). Faster than `multiply` for
    several rows, but the order in which a row is summed depends on their number."""
    x = x.contiguous()
    assert x.shape[1] == weight.columns and out.shape == (len(x), weight.rows), f"{tuple(x.shape)} → {tuple(out.shape)}"
    compiled: Any = library()
    if compiled.weft_gemm(weight, x.data_ptr(), out.data_ptr(), len(x), threads or torch.get_num_threads()):
        raise MemoryError("out of memory in a matrix product")
    return out


def logsumexp(x: Tensor) -> Tensor:
    """log Σ eˣ of each row of x (rows, columns), float32 and contiguous within rows → (rows, 1)."""
    assert x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1
    y = torch.empty(len(x), 1)
    compiled: Any = library()
    threads = min(torch.get_num_threads(), max(1, len(x)))
    compiled.weft_logsumexp(x.data_ptr(), *x.shape, x.stride(0), y.data_ptr(), threads)
    return y
