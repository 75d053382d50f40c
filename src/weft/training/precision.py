"""Number formats. Weights, gradients and the optimizer's state stay in fp32; precision says how products are formed.

fp32: as written. tf32: fp32 in memory, matrix products on tensor cores with 10 bits of mantissa.
bf16: matrix products in bfloat16 under autocast, and what runs along the skip connections too; norms and softmax in
fp32. fp16: products in float16, the loss multiplied so that small gradients don't vanish (`training/step.py`).
fp8: as bf16, with the products inside blocks in eight bits (e4m3; Micikevicius et al. 2022), forward and back to the
inputs. Each row is divided by its largest number first, so that one large number costs its own row alone; scaling and
narrowing then need no pass of their own. The gradients of the weights, sums over many tokens, stay in bf16.
"""

import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.errors import ConfigError
from weft.machine import matmul_rates, processor
from weft.nn.block import Block
from weft.nn.dropout import RowRng
from weft.nn.linear import Linear
from weft.recipe.config import Precision

TYPICAL = (512, 512, 2048)  # tokens, d_model and d_ff of a product by which a processor is judged
SLOWER = 2.0  # times as slow as fp32 is a format that nobody wants without knowing
NARROW: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=NARROW[precision]) if precision in NARROW else nullcontext()


def reading(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a trained model reads text: that of its training, but fp32 on a processor that multiplies
    the other far more slowly, as where a run of a GPU is used elsewhere."""
    return autocast("fp32" if slow_precision(precision, device) else precision, device)


@contextmanager
def arithmetic(precision: Precision, deterministic: bool) -> Iterator[None]:
    """Process-wide switches for the time of a run, put back afterwards.

    On one machine with one version of torch a processor repeats itself bit for bit anyway; `deterministic` also holds
    CUDA to kernels that do, at some cost in speed.
    """
    matmul = torch.get_float32_matmul_precision()
    was, short = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    mkldnn: Any = torch.backends.mkldnn
    onednn = mkldnn.enabled
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    mkldnn.enabled = onednn and not (precision in ("fp32", "tf32") and _plain_arm())
    torch.backends.cudnn.allow_tf32 = precision == "tf32"  # cuDNN uses it for recurrent models by default
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings(), _attention_kernels(deterministic):
            # a processor without bf16 products says so with a stack trace, and then computes them another way
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = short
        mkldnn.enabled = onednn
        torch.use_deterministic_algorithms(was)


def _plain_arm() -> bool:
    """Whether this is an ARM processor with NEON alone, as Neoverse-N1 is: oneDNN's products in fp32, which torch takes
    for a third of a step, are a tenth to a third slower there than its BLAS. By what the processor has and not by a
    measurement: a resumed run must not sum in another order."""
    return platform.system() == "Linux" and platform.machine() == "aarch64" and "SVE" not in processor()[1]


def _attention_kernels(deterministic: bool) -> AbstractContextManager[object]:
    """From Hopper on, cuDNN's attention before the others; its gradients are not the same bits twice."""
    if deterministic or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def check_precision(precision: Precision, device: torch.device) -> None:
    """Refuse a precision that the device has no products for."""
    if precision == "fp8":
        if device.type != "cuda":
            raise ConfigError("precision = 'fp8': needs a GPU with eight-bit products; use fp32 on this processor")
        if torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f"precision = 'fp8': {name} has no eight-bit products (Ada, Hopper or later); use bf16")


def slow_precision(precision: Precision, device: torch.device) -> str | None:
    """A line of warning where a precision works but is far slower than another, or the same, else None."""
    if precision == "tf32" and device.type == "cpu":
        return "precision = tf32: a processor has no such products, and forms them in fp32"
    if precision not in ("bf16", "fp16") or device.type != "cpu":
        return None
    rates = matmul_rates(*TYPICAL, dtypes=("fp32", precision))
    times = rates["fp32"] / max(1.0, rates[precision])
    line = f"precision = {precision}: this processor multiplies it {times:,.0f} times as slowly as fp32"
    return None if times < SLOWER else line


EIGHT = torch.float8_e4m3fn
MAX_EIGHT = torch.finfo(EIGHT).max
SIXTEEN = 16  # sizes of eight-bit products are multiples of it


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (N, K) in eight bits and the scale (N, 1) that undoes it, x ≈ x8 · scale; a row's largest is the type's."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / MAX_EIGHT
    return (x / scale).clamp(-MAX_EIGHT, MAX_EIGHT).to(EIGHT), scale


def eight_bit_product(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a (N, K) times b (M, K) transposed, both quantised, plus a bias (M,), in `dtype`. A processor forms the same
    product in fp32."""
    if a[0].is_cuda:
        return torch._scaled_mm(a[0], b[0].T, a[1], b[1].T, bias, out_dtype=dtype, use_fast_accum=True)
    y = a[0].float() @ b[0].float().T * (a[1] * b[1].T)
    return (y if bias is None else y + bias).to(dtype)


class _EightBitLinear(torch.autograd.Function):
    """x Wᵀ + b and the gradient by x as eight-bit products; the gradient by W as a product of what was kept of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_type = None if bias is None else bias.dtype
        return eight_bit_product(quantise(x), quantise(weight), x.dtype, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g = upstream[0]
        d_x = eight_bit_product(quantise(g), quantise(weight.T.contiguous()), x.dtype)
        if not g.is_cuda:  # where narrow products are slow, and this is a test
            g, x = g.float(), x.float()
        d_bias = None if ctx.bias_type is None else g.sum(0, dtype=torch.float32).to(ctx.bias_type)
        return d_x, (g.T @ x).to(weight.dtype), d_bias


class EightBitLinear(Linear):
    """A linear layer with eight-bit products under autocast, a plain one elsewhere; its weights stay as they are."""

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        device = x.device.type
        if not torch.is_autocast_enabled(device) or (x.numel() // self.in_features) % SIXTEEN:
            return super().forward(x)
        rows = x.flatten(0, -2).to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return _EightBitLinear.apply(rows, self.weight, self.bias).unflatten(0, x.shape[:-1])


def use_eight_bits(model: nn.Module) -> None:
    """Turn the linear layers inside blocks into `EightBitLinear`, in place. Parameters stay the same. Embeddings and
    heads stay out: they are few, and sensitive."""
    for block in (module for module in model.modules() if isinstance(module, Block)):
        for part in block.modules():
            if type(part) is Linear and part.in_features % SIXTEEN == 0 and part.out_features % SIXTEEN == 0:
                part.__class__ = EightBitLinear
