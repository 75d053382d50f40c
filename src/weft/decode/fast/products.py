"""Products of rows with a matrix of small numbers: 16, 8 or 4 bits.

`Plain16`, `Plain8` and `Plain4` are the definition: widen, multiply. The others give the same but for rounding, by
weft's own kernels where a compiler was found (`native.py`) and by those that torch has for a CPU. Which of them work
here, and which is the fastest, is tried on a small matrix and not guessed from a name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.decode.fast import native, rounding
from weft.decode.fast.rounding import Bits, Packed
from weft.machine import best_of, has_triton

SAMPLE = (1024, 768)  # the shape of the matrix that kernels are timed with
FIRST_CREDIT = 0.5  # of its time counts for the first kernel: another has to be clearly faster, on a busy machine too


class Product(nn.Module):
    """x (M, K) → x Wᵀ (M, N), by a kernel that reads these tensors, or some of them.

    They move with the module and are in no checkpoint, as they follow from the weights.
    """

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
        """What the kernel reads of a weight, by name."""
        return weight._asdict()


class Plain16(Product):
    """The definition, in bf16: x is rounded too where the processor multiplies bf16."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return F.linear(x, self.numbers.to(x.dtype))  # there torch multiplies bf16 one by one
        return F.linear(x.bfloat16(), self.numbers).to(x.dtype)


class Plain8(Product):
    """The definition, in 8 bits."""

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        return {"numbers": weight.numbers, "scales": weight.unpack().scales[:, 0]}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.numbers.to(x.dtype)) * self.scales.to(x.dtype)


class Plain4(Product):
    """The definition, in 4 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Packed(self.numbers, self.scales, self.centres).unpack().dequantize().to(x.dtype))


def _kleidiai_packed(numbers: Tensor, scales: Tensor) -> Tensor:
    """Numbers (N, K) from −8 to 7 with scales (N, groups), as KleidiAI's kernel reads them."""
    (N, K), groups = numbers.shape, scales.shape[1]
    codes = (numbers + 8).to(torch.uint8)
    both = codes[:, ::2] | (codes[:, 1::2] << 4)  # two numbers a byte, the even one in the lower half
    kept = (scales.float() if groups == 1 else scales.bfloat16()).contiguous()
    return torch.ops.aten._dyn_quant_pack_4bit_weight(both, kept, None, K // groups, K, N)


class KleidiAI4(Product):
    """4 bits on Arm: the kernel rounds each row of x to 8 bits as well, and multiplies whole numbers.

    It knows no centres. They are multiplied by the sums of x over each group, a product 32 times as narrow but two more
    operations: so weights have them only where they pay.
    """

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        numbers, scales, centres = weight.unpack()
        return {"packed": _kleidiai_packed(numbers, scales), "centres": None if centres is None else centres.t()}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._dyn_quant_matmul_4bit(x.float(), self.packed, self.group, self.K, self.N)
        if self.centres is not None:
            y.addmm_(x.float().unflatten(1, (-1, self.group)).sum(-1), self.centres)
        return y.to(x.dtype)


class KleidiAI8(Product):
    """8 bits on Arm: q = 16 a + b with signed 4-bit digits a and b, which the kernel for 4 bits multiplies at once.

    It is faster than the kernel for 8 bits, which converts every number to a float.
    """

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        numbers, scales, _ = weight.unpack()
        upper = (numbers + 8) >> 4  # rounds down; 119 + 8 is the most that 8 bits hold
        lower = numbers - (upper << 4)
        return {"packed": _kleidiai_packed(torch.cat((upper, lower)), torch.cat((16 * scales, scales)))}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._dyn_quant_matmul_4bit(x.float(), self.packed, self.group, self.K, 2 * self.N)
        return (y[:, : self.N] + y[:, self.N :]).to(x.dtype)


class Torch8(Plain8):
    """8 bits on other CPUs, with x in the type of the scales: on x86 torch has faster kernels for bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x.to(self.scales.dtype), self.numbers, self.scales).to(x.dtype)


class Torch4(Product):
    """4 bits on other CPUs, likewise."""

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        numbers, scales, centres = weight.unpack()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((numbers + 8).int(), 8)
        both = torch.stack((scales.t(), (torch.zeros_like(scales) if centres is None else centres).t()), dim=-1)
        return {"packed": packed, "scales": both}

    def forward(self, x: Tensor) -> Tensor:
        given = x.to(self.scales.dtype), self.packed, self.group, self.scales
        return torch.ops.aten._weight_int4pack_mm_for_cpu(*given).to(x.dtype)


class Triton8(Plain8):
    """8 bits on a GPU, by weft's kernels; the CUDA fast path reads `numbers` and `scales` itself."""

    def forward(self, x: Tensor) -> Tensor:
        from weft.decode.fast import kernels8

        return kernels8.product(kernels8.rounded(x), self.numbers, self.scales, x.dtype)


class Triton4(Product):
    """4 bits on a GPU, likewise.

    scales: int32 (N, K/32), a scale and a centre in bf16 each.
    """

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        numbers, scales, centres = weight
        assert scales is not None
        both = torch.stack((scales, torch.zeros_like(scales) if centres is None else centres.bfloat16()), dim=-1)
        return {"numbers": numbers, "scales": both.view(torch.int32).squeeze(-1)}

    def forward(self, x: Tensor) -> Tensor:
        from weft.decode.fast import kernels4

        return kernels4.product(x.contiguous(), self.numbers, self.scales)


class Native(Product):
    """By weft's own kernels; x is rounded to 8 bits where the weights are whole numbers, in blocks of 32."""

    def tensors(self, weight: Packed) -> dict[str, Tensor | None]:
        if weight.bits == "bf16":  # the very same ones, which may be a file's pages
            return weight._asdict()
        return {name: None if each is None else native.in_bands(each) for name, each in weight._asdict().items()}

    def forward(self, x: Tensor) -> Tensor:
        return native.multiply(self.matrix(), x).to(x.dtype)

    def matrix(self, bias: Tensor | None = None) -> native.Matrix:
        """What the kernels read, which points into this module's tensors and the bias."""
        return native.matrix(self.numbers, (self.N, self.K), self.scales, self.centres, bias)


@cache
def has_kernels() -> bool:
    """Whether weft's kernels for a GPU can be compiled: for NVIDIA's alone, as they use PTX in places."""
    return torch.version.hip is None and has_triton()


class Case(NamedTuple):
    """A matrix (N, K) with so many scales a row, on a device."""

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
        return self.device.type == "cuda" and has_kernels()

    @property
    def kleidiai(self) -> bool:
        """Whether Arm's kernels are: elsewhere the operation exists too, but only as a slow stand-in."""
        grouped = self.groups == 1 or (self.K // self.groups) % 32 == 0
        return self.on_cpu and torch.backends.kleidiai.is_available() and self.K % 2 == 0 and grouped


@dataclass(frozen=True)
class Kernel:
    """A way to multiply: what makes a product of weights, and for which matrices.

    Where `centres_cost` time, groups have them only where they pay.
    """

    name: str
    make: Callable[[Packed], Product]
    fits: Callable[[Case], bool] = lambda case: True
    centres_cost: bool = False


def _torch_8(case: Case) -> bool:
    return case.on_cpu and case.groups == 1 and case.N % 4 == 0 and case.K % 16 == 0


def _torch_4(case: Case) -> bool:
    grouped = case.K // case.groups in (32, 64, 128, 256)
    return case.on_cpu and grouped and case.N % 16 == 0 and case.K % 32 == 0


KERNELS: dict[Bits, tuple[Kernel, ...]] = {
    "bf16": (Kernel("native", Native, lambda case: case.native),),
    "int8": (
        Kernel("Triton", Triton8, lambda case: case.triton and case.groups == 1),
        Kernel("native", Native, lambda case: case.native and case.groups == 1 and case.K % native.BLOCK == 0),
        Kernel("KleidiAI", KleidiAI8, lambda case: case.kleidiai and case.groups == 1),
        Kernel("torch, bf16", lambda weight: Torch8(weight).bfloat16(), _torch_8),
        Kernel("torch", Torch8, _torch_8),
    ),
    "int4": (
        Kernel("Triton", Triton4, lambda case: case.triton and case.groups * rounding.GROUP == case.K),
        Kernel("native", Native, lambda case: case.native and case.groups * native.BLOCK == case.K, centres_cost=True),
        Kernel("KleidiAI", KleidiAI4, lambda case: case.kleidiai, centres_cost=True),
        Kernel("torch, bf16", lambda weight: Torch4(weight).bfloat16(), _torch_4),
        Kernel("torch", Torch4, _torch_4),
    ),
}
DEFINITIONS: dict[Bits, type[Product]] = {"bf16": Plain16, "int8": Plain8, "int4": Plain4}
PLAIN = {bits: Kernel("plain", make) for bits, make in DEFINITIONS.items()}


def packed(bits: Bits, weight: Tensor) -> Packed:
    """A weight (N, K) rounded to so many bits, as the kernel that multiplies by it here wants it rounded."""
    N, K = weight.shape
    kept, groups = rounding.layout(bits, K)
    if kept == "bf16":
        return Packed(weight.bfloat16().contiguous())
    if kept == "int8":
        return Packed.of(rounding.quantize_rows(weight), kept)
    kernel = fastest(kept, Case(N, K, groups, weight.device), weight.dtype)
    plain = kernel.centres_cost and not rounding.centres_pay(weight, K // groups)
    return Packed.of((rounding.quantize_around_zero if plain else rounding.quantize_groups)(weight, K // groups), kept)


def product(weight: Packed, dtype: torch.dtype) -> Product:
    """The product with a matrix, for x of this type: by the fastest of the kernels that work here, or as defined."""
    case = Case(*weight.shape, weight.groups, weight.numbers.device)
    return fastest(weight.bits, case, dtype).make(weight)


def able_to(bits: Bits, case: Case, dtype: torch.dtype) -> list[Kernel]:
    """The kernels that multiply x of this type by a matrix here."""
    return [kernel for kernel in KERNELS[bits] if kernel.fits(case) and works(kernel, bits, case.device, dtype)]


def fastest(bits: Bits, case: Case, dtype: torch.dtype) -> Kernel:
    """The kernel to take for a matrix: on a CPU by the clock, where the first of `KERNELS` has some credit."""
    able = able_to(bits, case, dtype)
    if not case.on_cpu or len(able) < 2:
        return able[0] if able else PLAIN[bits]
    taken = seconds(bits)
    return min(able, key=lambda kernel: taken[kernel.name] * (FIRST_CREDIT if kernel is able[0] else 1.0))


@cache
def seconds(bits: Bits) -> dict[str, float]:
    """How long a decoding step's product of ordinary size takes one thread of this CPU, by each kernel that works. Of
    several threads one may wait for a processor that is busy with other things, and the clock would show that."""
    sample, x = _sample(bits, *SAMPLE), torch.ones(1, SAMPLE[1])
    case = Case(*SAMPLE, sample.groups, torch.device("cpu"))
    multiply = {kernel.name: kernel.make(sample) for kernel in able_to(bits, case, torch.float32) or [PLAIN[bits]]}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return best_of({name: partial(each, x) for name, each in multiply.items()}, 0.01)
    finally:
        torch.set_num_threads(threads)


@cache
def works(kernel: Kernel, bits: Bits, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel gives what the definition gives, tried on a small matrix."""
    if device.type == "cpu" and dtype != torch.float32:
        return False
    sample = Packed(*(None if part is None else part.to(device) for part in _sample(bits, 64, 256)))  # type: ignore[arg-type]
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    try:
        if not kernel.fits(Case(64, 256, sample.groups, device)):
            return False
        y = kernel.make(sample)(x).float()
    except (RuntimeError, AttributeError):  # no such kernel here
        return False
    expected = F.linear(x.float(), sample.unpack().dequantize())
    # kernels that round x to 8 bits are about 1 % off
    return bool((y - expected).norm() < 0.05 * expected.norm())


@cache
def _sample(bits: Bits, N: int, K: int) -> Packed:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    if bits == "bf16":
        return Packed(weight.bfloat16())
    return Packed.of(rounding.quantize_rows(weight) if bits == "int8" else rounding.quantize_groups(weight), bits)
