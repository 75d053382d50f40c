"""Products of rows with a matrix of small numbers: 16, 8 or 4 bits.

`Plain16`, `Plain8` and `Plain4` are the definition: widen, multiply. The others give the same but for rounding, by
weft's own kernels where a compiler was found (`native.py`) and by those that torch has for a CPU. Which of them work
here, and which is the fastest, is tried on a small matrix and not guessed from a name.
"""

from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.decode.fast import native
from weft.decode.fast.packed import Bits, Packed, layout
from weft.decode.fast.rounding import (
    Groups,
    centres_pay,
    quantize_around_zero,
    quantize_groups,
    quantize_rows,
)
from weft.machine import best_of, has_triton

SAMPLE = (1024, 768)  # the shape of the matrix that kernels are timed with
FASTER = 0.5  # of the time that the first one takes: what another has to be below to be taken, on a busy machine too

# ---- two numbers a byte


def _nibbles(numbers: Tensor) -> Tensor:
    """Numbers (N, K) from −8 to 7 as bytes (N, K/2): the even one in the lower half, both counted from −8 up."""
    codes = (numbers + 8).to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _from_nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).to(torch.int8) - 8


# ---- products of rows (M, K) with a matrix (N, K) of small numbers


class Product(nn.Module):
    """x (M, K) → x Wᵀ (M, N)."""

    centres_cost: ClassVar[bool] = False  # whether groups have centres only where they pay

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        """Whether a matrix of this shape, with so many scales a row, can be multiplied this way there."""
        raise AssertionError("each product says what it fits")

    def __init__(self, weight: Groups):
        super().__init__()
        self.N, self.K = weight.numbers.shape
        self.group = self.K // weight.scales.shape[1]
        self.pack(*weight)

    def pack(self, numbers: Tensor, scales: Tensor, centres: Tensor | None) -> None:
        """Keep numbers (N, K), scales and centres (N, groups) as the kernel wants them."""
        raise AssertionError("each product packs")

    def keep(self, name: str, tensor: Tensor) -> None:
        """A tensor that moves with the module and is in no checkpoint: it follows from the weights."""
        self.register_buffer(name, tensor.contiguous(), persistent=False)


class Plain16(Product):
    """The definition, in bf16: x is rounded too where the processor multiplies bf16."""

    numbers: Tensor

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        return True

    def pack(self, numbers: Tensor, scales: Tensor, centres: Tensor | None) -> None:
        self.keep("numbers", numbers)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return F.linear(x, self.numbers.to(x.dtype))  # there torch multiplies bf16 one by one
        return F.linear(x.bfloat16(), self.numbers).to(x.dtype)


class Plain8(Product):
    """The definition, in 8 bits. On a GPU, the CUDA fast path reads `numbers` and `scales` itself."""

    numbers: Tensor
    scales: Tensor

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        return groups == 1

    def pack(self, numbers: Tensor, scales: Tensor, centres: Tensor | None) -> None:
        self.keep("numbers", numbers)
        self.keep("scales", scales[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.numbers.to(x.dtype)) * self.scales.to(x.dtype)


class Plain4(Product):
    """The definition, in 4 bits."""

    packed: Tensor
    scales: Tensor
    centres: Tensor

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        return K % 2 == 0

    def pack(self, numbers: Tensor, scales: Tensor, centres: Tensor | None) -> None:
        self.keep("packed", _nibbles(numbers))
        self.keep("scales", scales)
        self.keep("centres", torch.zeros_like(scales) if centres is None else centres)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Groups(_from_nibbles(self.packed), self.scales, self.centres).dequantize().to(x.dtype))


class Dynamic4(Product):
    """4 bits on Arm: the kernel rounds each row of x to 8 bits as well, and multiplies whole numbers.

    It knows no centres. They are multiplied by the sums of x over each group, a product 32 times as narrow but two more
    operations: so weights have them only where they pay.
    """

    centres_cost = True
    packed: Tensor
    centres: Tensor | None

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        # elsewhere the operation exists too, but only as a slow stand-in
        grouped = groups == 1 or (K // groups) % 32 == 0
        return device.type == "cpu" and torch.backends.kleidiai.is_available() and K % 2 == 0 and grouped

    def pack(self, numbers: Tensor, scales: Tensor, centres: Tensor | None) -> None:
        kept = scales.float() if self.group == self.K else scales.bfloat16()
        args = (_nibbles(numbers), kept.contiguous(), None, self.group, self.K, self.N)
        self.keep("packed", torch.ops.aten._dyn_quant_pack_4bit_weight(*args))
        self.register_buffer("centres", None if centres is None else centres.t().contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._dyn_quant_matmul_4bit(x.float(), self.packed, self.group, self.K, self.N)
        if self.centres is not None:
            y.addmm_(x.float().unflatten(1, (-1, self.group)).sum(-1), self.centres)
        return y.to(x.dtype)


class Digits8(Product):
    """8 bits on Arm: q = 16 a + b with signed 4-bit digits a and b, which `Dynamic4`'s kernel multiplies at once.

    It is faster than the kernel for 8 bits, which converts every number to a float.
    """

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        return groups == 1 and Dynamic4.fits(N, K, groups, device)

    def pack(self, numbers: Tensor, scales: Tensor, centres: Tensor | None) -> None:
        upper = (numbers + 8) >> 4  # rounds down; 119 + 8 is the most that 8 bits hold
        lower = numbers - (upper << 4)
        self.digits = Dynamic4(Groups(torch.cat((upper, lower)), torch.cat((16 * scales, scales))))

    def forward(self, x: Tensor) -> Tensor:
        y = self.digits(x)
        return y[:, : self.N] + y[:, self.N :]


class Columns8(Product):
    """8 bits on other CPUs."""

    numbers: Tensor
    scales: Tensor
    kind: ClassVar[torch.dtype] = torch.float32

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        return device.type == "cpu" and groups == 1 and N % 4 == 0 and K % 16 == 0

    def pack(self, numbers: Tensor, scales: Tensor, centres: Tensor | None) -> None:
        self.keep("numbers", numbers)
        self.keep("scales", scales[:, 0].to(self.kind))

    def forward(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x.to(self.kind), self.numbers, self.scales).to(x.dtype)


class HalfColumns8(Columns8):
    """The same with x in bf16, for which torch has faster kernels on x86."""

    kind = torch.bfloat16


@cache
def has_kernels() -> bool:
    """Whether weft's kernels for a GPU can be compiled: for NVIDIA's alone, as they use PTX in places."""
    return torch.version.hip is None and has_triton()


class Fused4(Product):
    """4 bits on a GPU, by weft's kernels; the CUDA fast path reads `numbers` and `scales` itself.

    scales: int32 (N, K/32), a scale and a centre in bf16 each.
    """

    numbers: Tensor
    scales: Tensor

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        return device.type == "cuda" and groups * 32 == K and has_kernels()

    def pack(self, numbers: Tensor, scales: Tensor, centres: Tensor | None) -> None:
        self.keep("numbers", Packed.of(Groups(numbers, scales, centres), "int4").numbers)
        both = torch.stack((scales, torch.zeros_like(scales) if centres is None else centres), dim=-1)
        self.keep("scales", both.bfloat16().view(torch.int32).squeeze(-1))

    def forward(self, x: Tensor) -> Tensor:
        from weft.decode.fast import kernels4

        return kernels4.product(x.contiguous(), self.numbers, self.scales)


class Tiles4(Product):
    """4 bits on other CPUs."""

    packed: Tensor
    scales: Tensor
    kind: ClassVar[torch.dtype] = torch.float32

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        grouped = K // groups in (32, 64, 128, 256)
        return device.type == "cpu" and grouped and N % 16 == 0 and K % 32 == 0

    def pack(self, numbers: Tensor, scales: Tensor, centres: Tensor | None) -> None:
        self.keep("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu((numbers + 8).int(), 8))
        added = torch.zeros_like(scales) if centres is None else centres
        both = torch.stack((scales.t(), added.t()), dim=-1)
        self.keep("scales", both.to(self.kind))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(self.kind), self.packed, self.group, self.scales)
        return y.to(x.dtype)


class HalfTiles4(Tiles4):
    """The same with x in bf16, for which torch has faster kernels on x86."""

    kind = torch.bfloat16


class Native(Product):
    """By weft's own kernels; x is rounded to 8 bits where the weights are whole numbers, in blocks of 32."""

    centres_cost = True
    bits: ClassVar[Bits]
    numbers: Tensor
    scales: Tensor | None
    centres: Tensor | None

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        return device.type == "cpu" and native.library() is not None

    def __init__(self, weight: Groups | Packed):
        nn.Module.__init__(self)
        packed = weight if isinstance(weight, Packed) else Packed.of(weight, self.bits)
        self.N, self.K = packed.shape
        self.group = self.K // packed.groups
        for name, tensor in packed._asdict().items():  # bf16: the very same ones, which may be a file's pages
            kept = tensor if tensor is None or self.bits == "bf16" else native.in_bands(tensor)
            self.register_buffer(name, kept, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return native.multiply(self.matrix(), x).to(x.dtype)

    def matrix(self, bias: Tensor | None = None) -> native.Matrix:
        """What the kernels read, which points into this module's tensors and the bias."""
        return native.matrix(self.numbers, (self.N, self.K), self.scales, self.centres, bias)


class Native16(Native):
    """bf16: as exact as the weights are."""

    bits = "bf16"


class Native8(Native):
    """8 bits."""

    bits = "int8"

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        return groups == 1 and K % native.BLOCK == 0 and Native.fits(N, K, groups, device)


class Native4(Native):
    """4 bits: of 32 neighbours the first 16 are in the lower halves of 16 bytes, the others in the upper."""

    bits = "int4"

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        return groups * native.BLOCK == K and Native.fits(N, K, groups, device)


KERNELS: dict[Bits, tuple[type[Product], ...]] = {
    "bf16": (Native16,),
    "int8": (Native8, Digits8, HalfColumns8, Columns8),
    "int4": (Fused4, Native4, Dynamic4, HalfTiles4, Tiles4),
}
PLAIN: dict[Bits, type[Product]] = {"bf16": Plain16, "int8": Plain8, "int4": Plain4}


def packed(bits: Bits, weight: Tensor) -> Packed:
    """A weight (N, K) rounded to so many bits, as the kernel that multiplies by it here wants it rounded."""
    N, K = weight.shape
    kept, groups = layout(bits, K)
    if kept == "bf16":
        return Packed(weight.bfloat16().contiguous())
    if kept == "int8":
        return Packed.of(quantize_rows(weight), kept)
    kind = fastest(kept, (N, K, groups), weight.device, weight.dtype)
    plain = kind.centres_cost and not centres_pay(weight, K // groups)
    return Packed.of((quantize_around_zero if plain else quantize_groups)(weight, K // groups), kept)


def product(weight: Packed, dtype: torch.dtype) -> Product:
    """The product with a matrix, for x of this type: by the fastest of the kernels that work here, or as defined."""
    kind = fastest(weight.bits, (*weight.shape, weight.groups), weight.numbers.device, dtype)
    return kind(weight) if issubclass(kind, Native) else kind(weight.unpack())


def fastest(bits: Bits, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> type[Product]:
    """The product to take for a matrix (N, K) with so many scales a row: on a CPU by the clock, where the first of
    `KERNELS` has a little credit."""
    able = [kind for kind in KERNELS[bits] if kind.fits(*shape, device) and works(kind, bits, device, dtype)]  # type: ignore[arg-type]
    if device.type != "cpu" or len(able) < 2:
        return able[0] if able else PLAIN[bits]
    taken = seconds(bits)
    return min(able, key=lambda kind: taken[kind.__name__] * (FASTER if kind is able[0] else 1.0))


@cache
def seconds(bits: Bits) -> dict[str, float]:
    """How long a decoding step's product of ordinary size takes one thread of this CPU, by each kernel that works.

    Of several threads one may wait for a processor that is busy with other things, and the clock would show that.
    """
    sample, x = _sample(bits, *SAMPLE), torch.ones(1, SAMPLE[1])
    here = SAMPLE[0], SAMPLE[1], sample.scales.shape[1]
    device, dtype = torch.device("cpu"), torch.float32
    kinds = [kind for kind in KERNELS[bits] if kind.fits(*here, device) and works(kind, bits, device, dtype)]  # type: ignore[arg-type]
    multiply = {kind.__name__: kind(sample) for kind in kinds or [PLAIN[bits]]}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return best_of({name: partial(each, x) for name, each in multiply.items()}, 0.01)
    finally:
        torch.set_num_threads(threads)


@cache
def works(kind: type[Product], bits: Bits, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel gives what the definition gives, tried on a small matrix."""
    if device.type == "cpu" and dtype != torch.float32:
        return False
    rounded = Groups(*(None if part is None else part.to(device) for part in _sample(bits, 64, 256)))  # type: ignore[arg-type]
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    try:
        if not kind.fits(64, 256, rounded.scales.shape[1], device):
            return False
        y = kind(rounded)(x).float()
    except (RuntimeError, AttributeError):  # no such kernel here
        return False
    expected = F.linear(x.float(), rounded.dequantize())
    # kernels that round x to 8 bits are about 1 % off
    return bool((y - expected).norm() < 0.05 * expected.norm())


@cache
def _sample(bits: Bits, N: int, K: int) -> Groups:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    if bits == "bf16":
        return Groups(weight.bfloat16(), torch.ones(N, 1))
    return quantize_rows(weight) if bits == "int8" else quantize_groups(weight)
