"""Weights quantised to 8 or 4 bits: w ≈ scale · number + centre, with integer numbers.

`Unpacked` has one number per element; `Packed` is the layout in files and kernels.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Bits = Literal["bf16", "int8", "int4"]
DTYPES: dict[Bits, torch.dtype] = {"bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}

GROUP = 32  # consecutive weights of a row with one scale, in 4 bits
MAX_INT8 = 119  # largest 8-bit number: both of its nibbles are then signed 4-bit numbers (`KleidiAIInt8`)
SYMMETRIC_PEAKS = (-8.5, -8.0, -7.5, -7.0)  # candidates for what a group's largest weight becomes, without centres
RANGE_FRACTIONS = (1.0, 0.94, 0.88, 0.82)  # candidates for the part of a group's range that isn't clipped
MAX_ERROR_RATIO = 0.75  # squared error with centres over that without, above which centres aren't worth their time
CHUNK, CHUNK_ON_CUDA = 1 << 18, 1 << 25  # weights quantised at a time, so that temporaries stay in cache


class Unpacked(NamedTuple):
    """Quantised weights: numbers (N, K) int8, scales (in 4 bits, of bf16) and centres (N, groups) float32, or 0."""

    numbers: Tensor
    scales: Tensor
    centres: Tensor | None = None

    def dequantize(self) -> Tensor:
        """float32 (N, K)."""
        w = self.numbers.unflatten(1, (self.scales.shape[1], -1)).float() * self.scales.unsqueeze(-1)
        return (w if self.centres is None else w + self.centres.unsqueeze(-1)).flatten(1)

    def pack(self, bits: Bits) -> "Packed":
        """Pack numbers that were quantised to this width."""
        numbers, scales, centres = self
        if bits == "bf16":
            return Packed(numbers.contiguous())
        if bits == "int8":
            return Packed(numbers.contiguous(), scales.float().contiguous())
        N, groups = scales.shape
        codes = (numbers + 8).to(torch.uint8).view(N, groups, 2, -1)
        pairs = (codes[:, :, 0] | (codes[:, :, 1] << 4)).flatten(1)
        return Packed(pairs, scales.bfloat16().contiguous(), None if centres is None else centres.float().contiguous())


def layout(bits: Bits, K: int) -> tuple[Bits, int]:
    """Width in which rows of K weights are stored, and scales per row. Odd rows can't be stored in 4 bits."""
    if bits != "int4" or K % 2:
        return "int8" if bits == "int4" else bits, 1
    return "int4", K // GROUP if K % GROUP == 0 else 1


class Packed(NamedTuple):
    """A matrix (N, K) in 16, 8 or 4 bits. The fields' names are those of the tensors in files.

    In 4 bits, numbers have an offset of 8; the first half of a group is in the lower nibbles, the second in the upper.
    """

    numbers: Tensor  # bf16 (N, K), int8 (N, K), or for 4 bits uint8 (N, K/2)
    scales: Tensor | None = None  # float32 (N, 1) for 8 bits, bf16 (N, groups) for 4
    centres: Tensor | None = None  # float32 (N, groups)

    def unpack(self) -> Unpacked:
        if self.scales is None:
            return Unpacked(self.numbers, torch.ones(len(self.numbers), 1, device=self.numbers.device))
        if self.bits == "int8":
            return Unpacked(self.numbers, self.scales)
        pairs = self.numbers.unflatten(1, (self.scales.shape[1], -1))
        codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
        return Unpacked(codes.to(torch.int8) - 8, self.scales.float(), self.centres)

    @property
    def bits(self) -> Bits:
        return next(bits for bits, dtype in DTYPES.items() if dtype == self.numbers.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, width = self.numbers.shape
        return N, width * 2 if self.bits == "int4" else width

    @property
    def groups(self) -> int:
        """Scales per row."""
        return 1 if self.scales is None else self.scales.shape[1]

    def is_for(self, bits: Bits, N: int, K: int) -> bool:
        """Whether shapes and dtypes are those of (N, K) weights in this width: kernels don't check what they read."""
        stored, groups = layout(bits, K)
        expected = {"numbers": ((N, K // 2 if stored == "int4" else K), DTYPES[stored])}
        if stored != "bf16":
            expected["scales"] = ((N, groups), torch.float32 if stored == "int8" else torch.bfloat16)
        if stored == "int4" and self.centres is not None:
            expected["centres"] = ((N, groups), torch.float32)
        tensors = {name: tensor for name, tensor in self._asdict().items() if tensor is not None}
        same = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == expected
        return same and all(tensor.is_contiguous() for tensor in tensors.values())


def quantize_rows(weight: Tensor) -> Unpacked:
    """Quantise weight (N, K) to 8 bits: numbers (N, K) from −119 to 119, and one scale per row (N, 1), in float32."""
    w = weight.float()
    scale = (w.abs().amax(dim=1, keepdim=True) / MAX_INT8).clamp(min=torch.finfo(torch.float32).tiny)
    return Unpacked((w / scale).round().to(torch.int8), scale)


def quantize_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x (…, D) to 8 bits: numbers (…, D) from −127 to 127, and one scale per vector (…), in bf16."""
    scales = (x.abs().amax(dim=-1).float() / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
    return (x.float() / scales.float().unsqueeze(-1)).round_().to(torch.int8), scales


def quantize_groups(weight: Tensor, group: int = GROUP) -> Unpacked:
    """Quantise weight (N, K) to 4 bits with centres: numbers (N, K) from −8 to 7, scales and centres (N, K/group).

    The range that is covered minimises a group's squared error. 16 even steps, as in a Q4_1 file, are met exactly.
    """
    return _by_groups(_centred, weight, group)


def quantize_symmetric(weight: Tensor, group: int = GROUP) -> Unpacked:
    """Quantise weight (N, K) to 4 bits without centres: numbers (N, K) from −8 to 7, scales (N, K/group).

    −8 has no counterpart, so the sign of a scale makes the group's largest weight negative. Whether that weight is met
    exactly or clipped a little minimises the group's squared error.
    """
    return _by_groups(_symmetric, weight, group)


def centres_pay(weight: Tensor, group: int = GROUP) -> bool:
    """Whether centres reduce the error by much, judged by a sample of rows. They do for blocks of a Q4_1 file, which
    are 16 even steps around any middle. Trained weights are centred around 0 already."""
    sample = weight[:: max(1, len(weight) // 64)]
    schemes = quantize_symmetric, quantize_groups
    symmetric, centred = ((sample - scheme(sample, group).dequantize()).square().sum() for scheme in schemes)
    return bool(centred < MAX_ERROR_RATIO * symmetric)


def _by_groups(quantizer: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor, group: int) -> Unpacked:
    """Apply `quantizer` to groups (rows, groups, group) of a chunk of rows at a time."""
    rows = max(1, (CHUNK_ON_CUDA if weight.is_cuda else CHUNK) // weight.shape[1])
    chunks = [quantizer(chunk.float().unflatten(1, (-1, group))) for chunk in weight.split(rows)]
    numbers, *others = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return Unpacked(numbers.flatten(1), *(tensor.squeeze(-1) for tensor in others))


def _symmetric(w: Tensor) -> tuple[Tensor, ...]:
    high, low = w.amax(dim=-1, keepdim=True), w.amin(dim=-1, keepdim=True)
    # −8 has no counterpart, so the sign of a scale makes the group's largest weight negative
    largest, scratch = torch.where(high > -low, high, low), torch.empty_like(w)

    def candidate(peak: float) -> tuple[Tensor, ...]:
        scale = _bf16_scale(largest / peak)
        numbers = torch.div(w, scale, out=scratch).round_().clamp_(-8, 7)
        return scale, torch.addcmul(w, numbers, scale, value=-1, out=scratch).square_().sum(dim=-1, keepdim=True)

    scales, _ = _best(map(candidate, SYMMETRIC_PEAKS))
    return torch.div(w, scales, out=scratch).round_().clamp_(-8, 7).to(torch.int8), scales


def _centred(w: Tensor) -> tuple[Tensor, ...]:
    high, low = w.amax(dim=-1, keepdim=True), w.amin(dim=-1, keepdim=True)
    middle, step, scratch = (high + low) / 2, (high - low) / 15, torch.empty_like(w)

    def around_middle(scale: Tensor) -> Tensor:
        """Numbers −8 … 7, whose mean is −½, in steps around the middle of the range."""
        return torch.sub(w, middle + scale / 2, out=scratch).div_(scale).round_().clamp_(-8, 7)

    def candidate(fraction: float) -> tuple[Tensor, ...]:
        scale = _bf16_scale(step * fraction)
        error = torch.addcmul(w, around_middle(scale), scale, value=-1, out=scratch)
        centre = error.mean(dim=-1, keepdim=True)  # the best one for these numbers
        return scale, centre, error.sub_(centre).square_().sum(dim=-1, keepdim=True)

    scales, centres, _ = _best(map(candidate, RANGE_FRACTIONS))
    return around_middle(scales).to(torch.int8), scales, centres


def _best(candidates: Iterator[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """For each group, the candidate with the smallest error. The error is a candidate's last tensor."""
    best = next(candidates)
    for candidate in candidates:
        better = candidate[-1] < best[-1]
        best = tuple(torch.where(better, new, old) for new, old in zip(candidate, best, strict=True))
    return best


def _bf16_scale(scale: Tensor) -> Tensor:
    """Round scales to bf16, in float32; 1 instead of 0."""
    scale = scale.bfloat16().float()
    return torch.where(scale == 0, 1.0, scale)
