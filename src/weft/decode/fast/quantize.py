"""Weights in 8 or 4 bits: a decoding step reads every weight once, so smaller weights are faster steps.

A weight w of a row is stored as a whole number q with w ≈ scale · q. In 8 bits a row has one scale; in 4 bits every 32
neighbours have their own, and a centre, w ≈ scale · q + centre, as in GGUF's Q4_1. Only weights are stored so; tables
that are looked up, norms and biases stay as they are, and the table that gives the logits is stored in 8 bits either
way, because every error in it shows.

`Plain8` and `Plain4` are the definition: dequantize, multiply. The other products give the same by the kernels that
torch has for a CPU. Which of them works here is tried on a small matrix, not guessed from a name.
"""

from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.decode.fast.rounding import (
    GROUP,
    Groups,
    centres_pay,
    quantize_around_zero,
    quantize_groups,
    quantize_rows,
)
from weft.errors import ConfigError, ModelError
from weft.models import heads
from weft.models.base import LanguageModel
from weft.models.transformer import Transformer
from weft.nn.lora import LowRank
from weft.progress import bar

Bits = Literal["int8", "int4"]


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

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        return device.type == "cpu" and groups == 1 and N % 4 == 0 and K % 16 == 0

    def pack(self, numbers: Tensor, scales: Tensor, centres: Tensor | None) -> None:
        self.keep("numbers", numbers)
        self.keep("scales", scales[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x.float(), self.numbers, self.scales).to(x.dtype)


class Tiles4(Product):
    """4 bits on other CPUs, and on a GPU, where x is bf16."""

    packed: Tensor
    scales: Tensor

    @staticmethod
    def fits(N: int, K: int, groups: int, device: torch.device) -> bool:
        grouped = K // groups in (32, 64, 128, 256)
        return grouped and N % 16 == 0 and K % (128 if device.type == "cuda" else 32) == 0

    def pack(self, numbers: Tensor, scales: Tensor, centres: Tensor | None) -> None:
        codes = (numbers + 8).to(torch.uint8)
        if numbers.is_cuda:
            packed = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4) | codes[:, 1::2], 8)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 8)
        self.keep("packed", packed)
        kind = torch.bfloat16 if numbers.is_cuda else torch.float32
        added = torch.zeros_like(scales) if centres is None else centres
        both = torch.stack((scales.t(), added.t()), dim=-1)
        self.keep("scales", both.to(kind))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            wide = x.to(torch.bfloat16)
            return torch.ops.aten._weight_int4pack_mm(wide, self.packed, self.group, self.scales).to(x.dtype)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.float(), self.packed, self.group, self.scales)
        return y.to(x.dtype)


KERNELS: dict[Bits, tuple[type[Product], ...]] = {"int8": (Digits8, Columns8), "int4": (Dynamic4, Tiles4)}
PLAIN: dict[Bits, type[Product]] = {"int8": Plain8, "int4": Plain4}


def product(bits: Bits, weight: Tensor) -> Product:
    """A weight (N, K) in so many bits, with the first of the kernels that works here, or the plain definition."""
    N, K = weight.shape
    narrow = bits == "int4" and K % 2 == 0
    group = GROUP if K % GROUP == 0 else K
    kept: Bits = "int4" if narrow else "int8"
    groups = K // group if narrow else 1
    fit = (kind for kind in KERNELS[kept] if kind.fits(N, K, groups, weight.device))
    kind = next((kind for kind in fit if works(kind, kept, weight.device, weight.dtype)), PLAIN[kept])  # type: ignore[arg-type]
    if not narrow:
        return kind(quantize_rows(weight))
    plain = kind is Dynamic4 and not centres_pay(weight, group)
    return kind(quantize_around_zero(weight, group) if plain else quantize_groups(weight, group))


@cache
def works(kind: type[Product], bits: Bits, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel gives what the definition gives, tried on a small matrix."""
    if device.type == "cpu" and dtype != torch.float32:
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator).to(device)
    x = torch.randn(3, 256, generator=generator).to(device, dtype)
    rounded = quantize_rows(weight) if bits == "int8" else quantize_groups(weight)
    try:
        if not kind.fits(64, 256, rounded.scales.shape[1], device):
            return False
        y = kind(rounded)(x).float()
    except (RuntimeError, AttributeError):  # no such kernel here
        return False
    expected = F.linear(x.float(), rounded.dequantize())
    # kernels that round x to 8 bits are about 1 % off
    return bool((y - expected).norm() < 0.05 * expected.norm())


# ---- modules


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights: (…, K) → (…, N)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: Bits):
        super().__init__()
        self.product = product(bits, weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.product.N)
        return y if self.bias is None else y + self.bias


class QuantizedHead(heads.WordHead):
    """Features to words through a quantized table, which a tied model has beside its embeddings."""

    def __init__(self, head: heads.WordHead, table: Tensor, bits: Bits):
        nn.Module.__init__(self)
        self.scale, self.weight = head.scale, None
        self.words = QuantizedLinear(table, head.bias, bits)

    def forward(self, features: Tensor, table: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, time, d_model) → logits (batch, time, vocab_size)."""
        return self.words(self.prepare(features))


def check_bits(bits: str) -> Bits:
    """`bits` if it names a width."""
    for known in KERNELS:
        if bits == known:
            return known
    raise ConfigError(f"quantize = '{bits}': expected 'int8' or 'int4'")


@torch.no_grad()
def quantize(model: LanguageModel, bits: str) -> LanguageModel:
    """Quantize a Transformer's weights in place, on the device where they are.

    Afterwards the model can write and be evaluated, but not be trained or saved.
    """
    width = check_bits(bits)
    if not isinstance(model, Transformer):
        kind = getattr(model.config, "kind", type(model).__name__)
        raise ModelError(f"a model of kind '{kind}' can't be quantized; Transformers can")
    found = [
        (parent, name, part)
        for parent in model.modules()
        for name, part in parent.named_children()
        if isinstance(part, nn.Linear)
    ]
    with bar("quantizing", len(found)) as advance:
        for parent, name, part in found:
            whole = part.merge() if isinstance(part, LowRank) else part
            setattr(parent, name, QuantizedLinear(whole.weight, whole.bias, width))
            advance(1)
    if type(model.output) is heads.WordHead:
        table = model.embedding.weight if model.output.weight is None else model.output.weight
        model.output = QuantizedHead(model.output, table, "int8")
    return model.eval()
