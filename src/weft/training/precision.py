"""Number formats of matrix products. Weights, gradients and the optimizer's state stay in fp32.

fp32  as written
tf32  fp32 in memory, products on tensor cores with 10 bits of mantissa
bf16  products and the residual stream in bfloat16 under autocast; norms and softmax in fp32
fp16  products in float16, with a scaled loss so that small gradients do not vanish (`training/step.py`)
fp8   as bf16, with the products inside blocks in eight bits (e4m3; Micikevicius et al. 2022), forward and for the
      gradients of the inputs. Each row is scaled by its largest value, so that an outlier affects its row alone, and
      scaling fuses with the cast. The gradients of the weights, sums over many tokens, stay in bf16
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

TYPICAL = (512, 512, 2048)  # tokens, d_model and d_ff of the product that a CPU's speed is measured by
MAX_SLOWDOWN = 2.0  # times as slow as fp32 that a format may be on a CPU without a warning
NARROW: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=NARROW[precision]) if precision in NARROW else nullcontext()


def reading(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context of a trained model: that of its training, or fp32 on a CPU that is faster in it."""
    return autocast("fp32" if slow_precision(precision, device) else precision, device)


@contextmanager
def arithmetic(precision: Precision, deterministic: bool) -> Iterator[None]:
    """Set torch's process-wide precision and determinism for a run; undone on exit.

    A CPU is reproducible to the bit anyway; `deterministic` restricts CUDA to reproducible kernels, which are slower.
    """
    matmul = torch.get_float32_matmul_precision()
    algorithms, tf32 = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
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
            # a CPU without bf16 products warns with a stack trace, and falls back to another kernel
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
            # cuDNN copies the weights of a pass that has dropped some of them, and says so
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = tf32
        mkldnn.enabled = onednn
        if deterministic:  # the call imports torch's compiler
            torch.use_deterministic_algorithms(algorithms)


def _plain_arm() -> bool:
    """Return whether this is an ARM CPU with NEON alone, such as Neoverse-N1.

    There oneDNN's fp32 products, which torch uses for a third of a step, are 10 to 33 % slower than BLAS. Decided by
    the CPU's features rather than by a measurement: a resumed run must not sum in another order.
    """
    return platform.system() == "Linux" and platform.machine() == "aarch64" and "SVE" not in processor()[1]


def _attention_kernels(deterministic: bool) -> AbstractContextManager[object]:
    """Prefer cuDNN's attention from Hopper on; its gradients are not reproducible to the bit."""
    if deterministic or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def check_precision(precision: Precision, device: torch.device) -> None:
    """Refuse a precision that the device does not support."""
    if precision == "fp8":
        if device.type != "cuda":
            raise ConfigError("precision = 'fp8': needs a GPU with eight-bit products; use fp32 on a CPU")
        if torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f"precision = 'fp8': {name} has no eight-bit products (Ada, Hopper or later); use bf16")


def slow_precision(precision: Precision, device: torch.device) -> str | None:
    """Return a warning if a precision works on the device but is far slower than fp32, or the same; else None."""
    if precision == "tf32" and device.type == "cpu":
        return "precision = tf32: a CPU has no such products and computes them in fp32"
    if precision not in ("bf16", "fp16") or device.type != "cpu":
        return None
    rates = matmul_rates(*TYPICAL, dtypes=("fp32", precision))
    times = rates["fp32"] / max(1.0, rates[precision])
    line = f"precision = {precision}: this CPU multiplies it {times:,.0f} times as slowly as fp32"
    return None if times < MAX_SLOWDOWN else line


FP8 = torch.float8_e4m3fn
MAX_FP8 = torch.finfo(FP8).max
FP8_UNIT = 16  # the sizes of an eight-bit product must be multiples of it


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x (N, K) to eight bits, x ≈ x8 · scale; the scale (N, 1) maps a row's largest value to MAX_FP8."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / MAX_FP8
    return (x / scale).clamp(-MAX_FP8, MAX_FP8).to(FP8), scale


def eight_bit_product(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, *, bias: Tensor | None = None
) -> Tensor:
    """Return a (N, K) times b (M, K) transposed, both quantised, plus a bias (M,), in `dtype`; on a CPU via fp32."""
    if a[0].is_cuda:
        return torch._scaled_mm(a[0], b[0].T, a[1], b[1].T, bias, out_dtype=dtype, use_fast_accum=True)
    y = a[0].float() @ b[0].float().T * (a[1] * b[1].T)
    return (y if bias is None else y + bias).to(dtype)


class _EightBitProduct(torch.autograd.Function):
    """x Wᵀ + b, and the gradient by x, as eight-bit products; the gradient by W as a product of the saved x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_type = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(x.dtype)
        return eight_bit_product(quantise(x), quantise(weight), x.dtype, bias=bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g = upstream[0]
        d_x = eight_bit_product(quantise(g), quantise(weight.T.contiguous()), x.dtype)
        if not g.is_cuda:  # on a CPU narrow products are slow, and only tests compute this
            g, x = g.float(), x.float()
        d_bias = None if ctx.bias_type is None else g.sum(0, dtype=torch.float32).to(ctx.bias_type)
        return d_x, (g.T @ x).to(weight.dtype), d_bias


class EightBitLinear(Linear):
    """A linear layer over the weights of another, with eight-bit products under autocast and plain ones elsewhere."""

    def __init__(self, linear: Linear):
        options = {"bias": linear.bias is not None, "into_residual": linear.into_residual}
        super().__init__(linear.in_features, *linear.heights, **options, device="meta")
        self.weight, self.bias = linear.weight, linear.bias  # shared, so that parameters keep their names

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        device = x.device.type
        if not torch.is_autocast_enabled(device) or (x.numel() // self.in_features) % FP8_UNIT:
            return super().forward(x)
        rows = x.flatten(0, -2).to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return _EightBitProduct.apply(rows, self.weight, self.bias).unflatten(0, x.shape[:-1])


def use_eight_bits(model: nn.Module) -> None:
    """Replace the linear layers inside blocks by `EightBitLinear`, over the same parameters. Embeddings and heads are
    left out: they are few, and sensitive."""
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        for name, part in list(block.named_modules()):
            if type(part) is Linear and part.in_features % FP8_UNIT == 0 and part.out_features % FP8_UNIT == 0:
                block.set_submodule(name, EightBitLinear(part))
