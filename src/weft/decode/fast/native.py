"""The step and its products in C (`native/decode/step.c`); without a compiler everything goes by torch's operations."""

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
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}  # of numbers: c/products.h's
ACTIVATIONS = {"relu": 0, "silu": 1, "gelu": 2, "gelu-tanh": 3}
BLOCK = 32  # numbers with one scale, as c/bands.h has it
BAND = 16  # rows that lie interleaved there
MANY_ROWS, MANY_COLUMNS = 8, 16  # that c/tiles.h wants a matrix to have at least, and in multiples
MAX_D_HEAD = 512  # that native/decode/step.c has memory for


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Matrix(Structure):
    _fields_ = _fields(c_int32, "kind rows columns") + _fields(c_void_p, "weights scales centres bias")


class Norm(Structure):
    _fields_ = _fields(c_void_p, "gain bias") + _fields(c_float, "eps offset") + _fields(c_int32, "centred")


class Layer(Structure):
    _fields_ = [
        *_fields(Norm, "attention_norm feedforward_norm"),
        *_fields(Matrix, "qkv out up down"),
        *_fields(c_void_p, "keys values"),
    ]


class Model(Structure):
    _fields_ = [
        *_fields(c_int32, "layers d_model heads kv_heads d_head d_ff gated activation block"),
        ("stride", c_int64),
        ("scale", c_float),
        *_fields(c_void_p, "cos sin"),
        ("layer", POINTER(Layer)),
        ("norm", Norm),
        ("head", Matrix),
    ]


class Texts(Structure):
    _fields_ = _fields(c_int32, "texts width") + _fields(c_void_p, "counts places tables")


@cache
def library() -> ctypes.CDLL | None:
    """What was compiled, or None where that is not possible or not wanted."""
    found = compiler.load(SOURCE, "weft's decoding step")
    if found is None:
        return None
    found.weft_product.argtypes = [POINTER(Matrix), c_void_p, c_void_p, c_int, c_int]
    found.weft_many.argtypes = found.weft_product.argtypes
    found.weft_step.argtypes = [POINTER(Model), c_void_p, POINTER(Texts), c_int, c_void_p, c_int]
    found.weft_log_totals.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int]
    found.weft_log_totals.restype = None
    return found


def address(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def in_bands(rows: Tensor) -> Tensor:
    """Rows (N, width) as c/bands.h reads whole numbers, their scales and centres: 16 rows interleaved, bytes in fours.
    The last band is filled up with zeros."""
    rows = F.pad(rows, (0, 0, 0, -len(rows) % BAND))
    words = rows.view(torch.int32) if rows.element_size() == 1 else rows
    return words.unflatten(0, (-1, BAND)).transpose(1, 2).contiguous().view(rows.dtype)


def matrix(
    numbers: Tensor,
    shape: Sequence[int],
    scales: Tensor | None = None,
    centres: Tensor | None = None,
    bias: Tensor | None = None,
) -> Matrix:
    """A matrix of this shape: float32 or bf16, or int8 or two 4-bit numbers a byte (uint8), which are `in_bands`. The
    tensors have to be kept for as long as it is used."""
    return Matrix(KINDS[numbers.dtype], *shape, address(numbers), address(scales), address(centres), address(bias))


def multiply(found: Matrix, x: Tensor, threads: int | None = None) -> Tensor:
    """x (M, columns) times a matrix (N, columns) → (M, N), in float32, by all threads or so many."""
    x = x.float().contiguous()
    y = torch.empty(len(x), found.rows)
    compiled: Any = library()
    if compiled.weft_product(found, x.data_ptr(), y.data_ptr(), len(x), threads or torch.get_num_threads()):
        raise MemoryError("a product found no memory")
    return y


def multiply_many(found: Matrix, x: Tensor, y: Tensor) -> Tensor:
    """The same with a float32 matrix, of at least 8 rows and of columns in sixteens, → y. Many rows at once are faster,
    but how each is summed up depends on how many there are."""
    x = x.contiguous()
    compiled: Any = library()
    if compiled.weft_many(found, x.data_ptr(), y.data_ptr(), len(x), torch.get_num_threads()):
        raise MemoryError("a product found no memory")
    return y


def log_totals(x: Tensor) -> Tensor:
    """log Σ eˣ of each row of x (rows, columns) in float32, whose numbers lie side by side → (rows, 1)."""
    y = torch.empty(len(x), 1)
    compiled: Any = library()
    threads = min(torch.get_num_threads(), max(1, len(x)))
    compiled.weft_log_totals(x.data_ptr(), *x.shape, x.stride(0), y.data_ptr(), threads)
    return y
