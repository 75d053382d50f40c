"""The step and its products in C (`c/step.c`), compiled for this machine's processor when they are first wanted.

Without a compiler everything goes as it does without this file, by torch's operations. What was compiled is kept in
weft's cache folder, by the text of the sources, the compiler and the processor, with its hash behind it.
`WEFT_NATIVE=0` does without it.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.files import write_bytes
from weft.machine import fingerprint
from weft.progress import log_to_stderr
from weft.text.builtin import cache_folder

SOURCES = Path(__file__).parent / "c"
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread")
ON_ARM = platform.machine() == "aarch64"  # where -march leaves out how long instructions take; on x86 -mcpu does less
TUNING = (*(("-mcpu=native",), ("-march=native",))[:: 1 if ON_ARM else -1], ())  # the first that the compiler knows
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}  # of numbers: c/products.h's
ACTIVATIONS = {"relu": 0, "silu": 1, "gelu": 2, "gelu-tanh": 3}
OPENMP = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")
BLOCK = 32  # numbers with one scale, as c/bands.h has it
BAND = 16  # rows that lie interleaved there
MANY_ROWS, MANY_COLUMNS = 8, 16  # that c/tiles.h wants a matrix to have at least, and in multiples
MAX_D_HEAD = 512  # that c/step.c has memory for
MAX_LIBRARY_BYTES = 1 << 24
MAX_SECONDS = 30  # that compiling may take; two are usual


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
    _fields_ = _fields(c_int32, "rows width") + _fields(c_void_p, "places tables")


@cache
def library() -> ctypes.CDLL | None:
    """What was compiled, or None where that is not possible or not wanted."""
    if os.environ.get("WEFT_NATIVE") == "0" or os.name != "posix":
        return None
    try:
        found = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError):
        return None  # no compiler, or nowhere to keep its result safely: torch's operations do the same
    found.weft_product.argtypes = [POINTER(Matrix), c_void_p, c_void_p, c_int, c_int]
    found.weft_many.argtypes = found.weft_product.argtypes
    found.weft_step.argtypes = [POINTER(Model), c_void_p, POINTER(Texts), c_void_p, c_int]
    found.weft_log_totals.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int]
    found.weft_log_totals.restype = None
    found.weft_share.argtypes = [c_void_p, c_void_p, c_void_p]
    found.weft_share.restype = None
    if (threads := _openmp()) is not None:
        functions = (threads.GOMP_parallel, threads.omp_get_thread_num, threads.omp_get_num_threads)
        found.weft_share(*(ctypes.cast(function, c_void_p) for function in functions))
    return found


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library whose threads torch uses, where it can be found and has what compilers call."""
    folder = os.path.dirname(torch.__file__)
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if OPENMP.search(line)}
    for path in sorted(paths, key=lambda path: not path.startswith(os.path.dirname(folder))):
        try:
            found = ctypes.CDLL(path)
            found.GOMP_parallel, found.omp_get_thread_num, found.omp_get_num_threads  # noqa: B018 — are they there?
        except (OSError, AttributeError):
            continue
        return found
    return None


def _compiled() -> Path:
    """The library's place; what is damaged there, or others could have put there, is compiled again."""
    names = (os.environ.get("CC") or "cc", "cc", "gcc", "clang")
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C compiler")
    sources = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    compiler_itself = os.stat(compiler)
    known = f"{compiler} {compiler_itself.st_size} {compiler_itself.st_mtime} {FLAGS} {fingerprint()}".encode()
    name = f"step-{hashlib.sha256(b'%'.join([known, *sources])).hexdigest()[:16]}.so"
    path = (folder := cache_folder() / "compiled") / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _only_ours(os.lstat(folder)):
        raise OSError(f"{folder} is a link, or others can write to it")
    if not _is_whole(path):
        if sys.stderr.isatty():
            log_to_stderr("compiling weft's decoding step for this processor, once …")
        with tempfile.TemporaryDirectory() as scratch:
            content = _compile(compiler, Path(scratch) / name)
        if path.is_dir() and not path.is_symlink():
            raise OSError(f"{path} is a folder")
        write_bytes(path, content + hashlib.sha256(content).digest())  # what follows a library's end is not loaded
        path.chmod(0o700)
    return path


def _only_ours(place: os.stat_result) -> bool:
    mine = place.st_uid == os.getuid() and not place.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return mine and (stat.S_ISREG(place.st_mode) or stat.S_ISDIR(place.st_mode))


def _is_whole(path: Path) -> bool:
    """Whether a file is as this process's user wrote it: a library that was cut short would end the process."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            place = os.fstat(file.fileno())
            if not stat.S_ISREG(place.st_mode) or not _only_ours(place) or place.st_size > MAX_LIBRARY_BYTES:
                return False
            content = file.read()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _compile(compiler: str, made: Path) -> bytes:
    end = time.monotonic() + MAX_SECONDS
    for tuning in TUNING:
        command = [compiler, *FLAGS, *tuning, str(SOURCES / "step.c"), "-o", str(made), "-lm"]
        left = max(0.1, end - time.monotonic())
        if subprocess.run(command, capture_output=True, timeout=left, check=False).returncode == 0:
            return made.read_bytes()
    raise OSError(f"{compiler} can't compile {SOURCES}")


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
