"""Matrix products with weights in 16, 8 or 4 bits, and the choice of the fastest kernel for them.

The `Reference…` modules define the result: dequantise, multiply. The others equal them up to rounding: weft's C
kernels where there is a compiler (`native.py`), weft's Triton kernels on a GPU, and torch's kernels for CPUs. Which of
them work and which is the fastest is measured on a small matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.decode.fast import native, quantized_weights
from weft.decode.fast.quantized_weights import Bits, Packed
from weft.machine import best_of, has_triton

SAMPLE = (1024, 768)  # shape of the matrix that kernels are timed with
FIRST_CREDIT = 0.5  # factor on the time of the first kernel: another must be clearly faster, on a busy machine too


class Matmul(nn.Module):
    """x (M, K) → x Wᵀ (M, N) for packed weights, by one kernel; no checkpoint has its tensors."""

    numbers: Tensor
    packed: Tensor
    scales: Tensor
    centres: Tensor | None

    def __init__(self, weight: Packed):
        super().__init__()
        self.N, self.K = weight.shape
        self.group = self.K // weight.groups
        for name, tensor in self.tensors(weight).items():
            self.register_buffer(name, None if tensor is None else tensor.contiguous(), persistent=False)

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        """Tensors that the kernel reads, by name."""
        return weight._asdict()


class ReferenceBF16(Matmul):
    """Definition of the product in bf16. x is rounded to bf16 as well if the CPU multiplies bf16."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return F.linear(x, self.numbers.to(x.dtype))  # torch's bf16 product would be a scalar loop
        return F.linear(x.bfloat16(), self.numbers).to(x.dtype)


class ReferenceInt8(Matmul):
    """Definition of the product in 8 bits."""

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        return {"numbers": weight.numbers, "scales": weight.unpack().scales[:, 0]}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.numbers.to(x.dtype)) * self.scales.to(x.dtype)


class ReferenceInt4(Matmul):
    """Definition of the product in 4 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Packed(self.numbers, self.scales, self.centres).unpack().dequantize().to(x.dtype))


def _pack_kleidiai(numbers: Tensor, scales: Tensor) -> Tensor:
    """Pack numbers (N, K) from −8 to 7 with scales (N, groups) for KleidiAI's 4-bit kernel."""
    (N, K), groups = numbers.shape, scales.shape[1]
    codes = (numbers + 8).to(torch.uint8)
    pairs = codes[:, ::2] | (codes[:, 1::2] << 4)  # even columns in the lower nibbles
    scales = (scales.float() if groups == 1 else scales.bfloat16()).contiguous()
    return torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scales, None, K // groups, K, N)


class KleidiAIInt4(Matmul):
    """4 bits on Arm: x is quantised to 8 bits. The kernel has no centres: these multiply the groups' sums of x."""

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        numbers, scales, centres = weight.unpack()
        return {"packed": _pack_kleidiai(numbers, scales), "centres": None if centres is None else centres.t()}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._dyn_quant_matmul_4bit(x.float(), self.packed, self.group, self.K, self.N)
        if self.centres is not None:
            y.addmm_(x.float().unflatten(1, (-1, self.group)).sum(-1), self.centres)
        return y.to(x.dtype)


def split_digits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Split 8-bit numbers q = 16 a + b into signed 4-bit digits a and b."""
    upper = (numbers + 8) >> 4  # rounds down; 119 + 8 is the largest that 8 bits hold
    return upper, numbers - (upper << 4)


class KleidiAIInt8(Matmul):
    """8 bits on Arm as two digits for the 4-bit kernel: torch's 8-bit one is slower, since it converts to float."""

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        numbers, scales, _ = weight.unpack()
        digits = torch.cat(split_digits(numbers))
        return {"packed": _pack_kleidiai(digits, torch.cat((16 * scales, scales)))}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._dyn_quant_matmul_4bit(x.float(), self.packed, self.group, self.K, 2 * self.N)
        return (y[:, : self.N] + y[:, self.N :]).to(x.dtype)


class TorchInt8(ReferenceInt8):
    """8 bits by torch's CPU kernel, with x in the dtype of the scales: on x86 its bf16 kernels are faster."""

    def forward(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x.to(self.scales.dtype), self.numbers, self.scales).to(x.dtype)


class TorchInt4(Matmul):
    """4 bits by torch's CPU kernel, with x in the dtype of the scales."""

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        numbers, scales, centres = weight.unpack()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((numbers + 8).int(), 8)
        both = torch.stack((scales.t(), (torch.zeros_like(scales) if centres is None else centres).t()), dim=-1)
        return {"packed": packed, "scales": both}

    def forward(self, x: Tensor) -> Tensor:
        arguments = x.to(self.scales.dtype), self.packed, self.group, self.scales
        return torch.ops.aten._weight_int4pack_mm_for_cpu(*arguments).to(x.dtype)


class TritonInt8(ReferenceInt8):
    """8 bits on a GPU. The CUDA fast path reads `numbers` and `scales` directly."""

    def forward(self, x: Tensor) -> Tensor:
        from weft.decode.fast import kernels8

        return kernels8.matmul(kernels8.quantize(x), self.numbers, self.scales, x.dtype)


class TritonInt4(Matmul):
    """4 bits on a GPU. The CUDA fast path reads `numbers`, and `scales` int32 (N, K/32): scale and centre in bf16."""

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        numbers, scales, centres = weight
        assert scales is not None
        both = torch.stack((scales, torch.zeros_like(scales) if centres is None else centres.bfloat16()), dim=-1)
        return {"numbers": numbers, "scales": both.view(torch.int32).squeeze(-1)}

    def forward(self, x: Tensor) -> Tensor:
        from weft.decode.fast import kernels4

        return kernels4.matmul(x.contiguous(), self.numbers, self.scales)


class NativeMatmul(Matmul):
    """16, 8 or 4 bits by weft's C kernels. With integer weights x is quantised to 8 bits in blocks of 32."""

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        if weight.bits == "bf16":  # in place: the weights may be pages of a mapped file
            return weight._asdict()
        tensors = weight._asdict().items()
        return {name: None if tensor is None else native.interleave_rows(tensor) for name, tensor in tensors}

    def forward(self, x: Tensor) -> Tensor:
        return native.multiply(self.matrix(), x).to(x.dtype)

    def matrix(self, bias: Tensor | None = None) -> native.CMatrix:
        """Description for C, which points into this module's tensors and the bias."""
        return native.matrix(self.numbers, (self.N, self.K), scales=self.scales, centres=self.centres, bias=bias)


@cache
def has_cuda_kernels() -> bool:
    """Whether weft's Triton kernels can be compiled. They contain PTX, so only for NVIDIA GPUs."""
    return torch.version.hip is None and has_triton()


class MatrixSpec(NamedTuple):
    """A matrix (N, K) with `groups` scales per row, on a device: what kernels are selected by."""

    N: int
    K: int
    groups: int
    device: torch.device

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def native(self) -> bool:
        return self.on_cpu and native.library() is not None

    @property
    def triton(self) -> bool:
        return self.device.type == "cuda" and has_cuda_kernels()

    @property
    def kleidiai(self) -> bool:
        """Whether Arm's kernels apply. Other CPUs have the operation too, as a slow fallback."""
        grouped = self.groups == 1 or (self.K // self.groups) % 32 == 0
        return self.on_cpu and torch.backends.kleidiai.is_available() and self.K % 2 == 0 and grouped


@dataclass(frozen=True)
class Kernel:
    """An implementation of `Matmul`, and the matrices it supports; `centres_cost`: centres take extra time."""

    name: str
    make: Callable[[Packed], Matmul]
    fits: Callable[[MatrixSpec], bool] = lambda spec: True
    centres_cost: bool = False


def _fits_torch_int8(spec: MatrixSpec) -> bool:
    return spec.on_cpu and spec.groups == 1 and spec.N % 4 == 0 and spec.K % 16 == 0


def _fits_torch_int4(spec: MatrixSpec) -> bool:
    return spec.on_cpu and spec.K // spec.groups in (32, 64, 128, 256) and spec.N % 16 == 0 and spec.K % 32 == 0


KERNELS: dict[Bits, tuple[Kernel, ...]] = {
    "bf16": (Kernel("native", NativeMatmul, lambda spec: spec.native),),
    "int8": (
        Kernel("Triton", TritonInt8, lambda spec: spec.triton and spec.groups == 1),
        Kernel("native", NativeMatmul, lambda spec: spec.native and spec.groups == 1 and spec.K % native.BLOCK == 0),
        Kernel("KleidiAI", KleidiAIInt8, lambda spec: spec.kleidiai and spec.groups == 1),
        Kernel("torch, bf16", lambda weight: TorchInt8(weight).bfloat16(), _fits_torch_int8),
        Kernel("torch", TorchInt8, _fits_torch_int8),
    ),
    "int4": (
        Kernel("Triton", TritonInt4, lambda spec: spec.triton and spec.groups * quantized_weights.GROUP == spec.K),
        Kernel(
            "native", NativeMatmul, lambda spec: spec.native and spec.groups * native.BLOCK == spec.K, centres_cost=True
        ),
        Kernel("KleidiAI", KleidiAIInt4, lambda spec: spec.kleidiai, centres_cost=True),
        Kernel("torch, bf16", lambda weight: TorchInt4(weight).bfloat16(), _fits_torch_int4),
        Kernel("torch", TorchInt4, _fits_torch_int4),
    ),
}
REFERENCE: dict[Bits, Kernel] = {
    "bf16": Kernel("plain", ReferenceBF16),
    "int8": Kernel("plain", ReferenceInt8),
    "int4": Kernel("plain", ReferenceInt4),
}


def pack_weight(bits: Bits, weight: Tensor) -> Packed:
    """Quantise a weight (N, K) to this width, with centres if they suit the kernel that will multiply it."""
    N, K = weight.shape
    stored, groups = quantized_weights.layout(bits, K)
    if stored == "bf16":
        return Packed(weight.bfloat16().contiguous())
    if stored == "int8":
        return quantized_weights.quantize_rows(weight).pack(stored)
    kernel = fastest(stored, MatrixSpec(N, K, groups, weight.device), weight.dtype)
    symmetric = kernel.centres_cost and not quantized_weights.centres_pay(weight, K // groups)
    scheme = quantized_weights.quantize_symmetric if symmetric else quantized_weights.quantize_groups
    return scheme(weight, K // groups).pack(stored)


def working_kernels(bits: Bits, spec: MatrixSpec, dtype: torch.dtype) -> list[Kernel]:
    return [kernel for kernel in KERNELS[bits] if kernel.fits(spec) and works(kernel, bits, spec.device, dtype=dtype)]


def fastest(bits: Bits, spec: MatrixSpec, dtype: torch.dtype) -> Kernel:
    """Kernel to use for a matrix. On a CPU kernels are timed, with an advantage for the first of `KERNELS`."""
    kernels = working_kernels(bits, spec, dtype)
    if not spec.on_cpu or len(kernels) < 2:
        return kernels[0] if kernels else REFERENCE[bits]
    times = seconds(bits)
    return min(kernels, key=lambda kernel: times[kernel.name] * (FIRST_CREDIT if kernel is kernels[0] else 1.0))


@cache
def seconds(bits: Bits) -> dict[str, float]:
    """Time of a decode step's product of ordinary size on this CPU, by each kernel that works. It is measured on one
    thread: with several, one may wait for a core that is busy with something else."""
    sample, x = _sample(bits, *SAMPLE), torch.ones(1, SAMPLE[1])
    spec = MatrixSpec(*SAMPLE, sample.groups, torch.device("cpu"))
    kernels = working_kernels(bits, spec, torch.float32) or [REFERENCE[bits]]
    matmuls = {kernel.name: kernel.make(sample) for kernel in kernels}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return best_of({name: partial(matmul, x) for name, matmul in matmuls.items()}, 0.01)
    finally:
        torch.set_num_threads(threads)


@cache
def works(kernel: Kernel, bits: Bits, device: torch.device, *, dtype: torch.dtype) -> bool:
    """Whether a kernel agrees with the definition on a small matrix."""
    if device.type == "cpu" and dtype != torch.float32:
        return False
    sample = Packed(*(None if part is None else part.to(device) for part in _sample(bits, 64, 256)))  # type: ignore[arg-type]
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    try:
        if not kernel.fits(MatrixSpec(64, 256, sample.groups, device)):
            return False
        y = kernel.make(sample)(x).float()
    except (RuntimeError, AttributeError):  # no such kernel here
        return False
    expected = F.linear(x.float(), sample.unpack().dequantize())
    # kernels that quantise x to 8 bits are about 1 % off
    return bool((y - expected).norm() < 0.05 * expected.norm())


@cache
def _sample(bits: Bits, N: int, K: int) -> Packed:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    if bits == "bf16":
        return Packed(weight.bfloat16())
    quantize = quantized_weights.quantize_rows if bits == "int8" else quantized_weights.quantize_groups
    return quantize(weight).pack(bits)
