"""Call the C code that trains word vectors (`native/words/words.c`); the readable versions are used without it."""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.native import compiler
from weft.progress import Advance, pause

SOURCE = compiler.SOURCES / "words" / "words.c"
PAD = 16  # a row of a table has a multiple of this many floats
CALL_CHUNKS = 64  # chunks per call: after each, progress is shown and an interrupt noticed
MEASURED = 16  # one chunk of this many measures its loss in word2vec
PAIRS = 8192  # pairs of a chunk in GloVe

Floats = NDArray[np.float32]


class Word2VecCall(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "keep", "threshold", "alias", "embedding", "context", "loss")),
        ("count", c_int64),
        ("seed", c_uint64),
        *((name, c_int32) for name in ("vocab_size", "width", "window", "negatives", "cbow", "chunk")),
        *((name, c_float) for name in ("lr_start", "lr_end")),
    ]


class GloVeCall(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("first", "second", "log_count", "weight", "words", "contexts")),
        *((name, c_void_p) for name in ("word_squares", "context_squares", "word_biases", "context_biases", "loss")),
        ("count", c_int64),
        ("width", c_int32),
        ("lr", c_float),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """Compiled library, or None if there is no compiler or it is switched off."""
    lib = compiler.load(SOURCE, "weft's word-vector kernels", (Word2VecCall, GloVeCall))
    if lib is not None:
        for function, call in ((lib.weft_word2vec, Word2VecCall), (lib.weft_glove, GloVeCall)):
            function.argtypes = [POINTER(call), c_int64, c_int64, c_int]
            function.restype = None
    return lib


def padded(rows: int, width: int, fill: float = 0.0) -> Floats:
    """Table (rows, width), the width rounded up to a multiple of PAD."""
    return np.full((rows, -(-width // PAD) * PAD), fill, dtype=np.float32)


def train_chunks(
    call: Structure,
    arrays: dict[str, NDArray[Any]],
    chunks: int,
    *,
    reference: Callable[[int, NDArray[np.float64]], None],
    threads: int,
    tick: Advance,
) -> float:
    """Train on all chunks of an epoch, on `threads` threads in C, or by `reference` one by one; return the mean loss.

    `arrays` are the fields of `call` that are pointers.
    """
    loss = np.zeros(2)
    lib = library()
    if lib is None:
        for chunk in range(chunks):
            reference(chunk, loss)
            tick(1)
            pause()
        return float(loss[0] / max(1.0, loss[1]))
    for name, array in {**arrays, "loss": loss}.items():
        assert array.flags.c_contiguous, name
        setattr(call, name, array.ctypes.data_as(c_void_p).value)
    function = lib.weft_word2vec if isinstance(call, Word2VecCall) else lib.weft_glove
    for first in range(0, chunks, CALL_CHUNKS):
        last = min(chunks, first + CALL_CHUNKS)
        function(call, first, last, threads)
        tick(last - first)
    return float(loss[0] / max(1.0, loss[1]))
