"""Number formats. Weights, gradients and the optimizer's memory stay in fp32; precision says how products are formed.

fp32: as written. tf32: fp32 in memory, matrix products on tensor cores with 10 bits of mantissa.
bf16: matrix products in bfloat16 under autocast, norms and softmax in fp32.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from weft.train.config import Precision


def pick_device() -> torch.device:
    """The first CUDA device where there is one, else the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context that forward passes run in."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


@contextmanager
def arithmetic(precision: Precision, deterministic: bool) -> Iterator[None]:
    """Process-wide switches for the time of a run, put back afterwards.

    On one machine with one version of torch a processor repeats itself bit for bit anyway; `deterministic` also holds
    CUDA to kernels that do, at some cost in speed.
    """
    matmul = torch.get_float32_matmul_precision()
    was = torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            # a processor without bf16 products says so with a stack trace, and then computes them another way
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(was)
