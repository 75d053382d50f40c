"""Weights rounded to 8 or 4 bits: whole numbers, with scales and centres that bring them close to what they were.

`Groups` has the numbers one by one, `Packed` as files keep them; weft's own kernels multiply by these, `in_bands`.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Bits = Literal["bf16", "int8", "int4"]
DTYPES: dict[Bits, torch.dtype] = {"bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}

GROUP = 32  # neighbours with one scale, in 4 bits
MAX_INT8 = 119  # in 8 bits: the largest number whose upper and lower half are signed 4-bit numbers (`KleidiAI8`)
SHRINKS = (-8.5, -8.0, -7.5, -7.0)  # what the largest weight of a group may become, without a centre
WORTH = 0.75  # of the squared error that centres leave at most, where they cost time
REACHES = (1.0, 0.94, 0.88, 0.82)  # how much of a group's range 4 bits may cover; what lies beyond is cut off
CHUNK, CHUNK_ON_CUDA = 1 << 18, 1 << 25  # weights quantized at a time: few enough for a processor's cache


class Groups(NamedTuple):
    """w ≈ scale · number + centre: numbers (N, K) int8, scales and centres (N, groups) float32; without centres, 0.

    In 4 bits the scales are of bf16's steps, which is how the kernels keep them.
    """

    numbers: Tensor
    scales: Tensor
    centres: Tensor | None = None

    def dequantize(self) -> Tensor:
        """float32 (N, K)."""
        w = self.numbers.unflatten(1, (self.scales.shape[1], -1)).float() * self.scales.unsqueeze(-1)
        return (w if self.centres is None else w + self.centres.unsqueeze(-1)).flatten(1)


def layout(bits: Bits, K: int) -> tuple[Bits, int]:
    """The width that rows of K numbers are kept in, and how many scales each has; an odd K has no 4 bits."""
    if bits != "int4" or K % 2:
        return "int8" if bits == "int4" else bits, 1
    return "int4", K // GROUP if K % GROUP == 0 else 1


class Packed(NamedTuple):
    """A matrix (N, K) of small numbers.

    numbers: bf16 (N, K), int8 (N, K), or for 4 bits uint8 (N, K/2), counted from −8 up: of each group the first half is
    in the lower halves of its bytes, the second in the upper. scales: float32 (N, 1) for 8 bits, bf16 (N, groups) for
    4. centres: float32 (N, groups), or none.
    """

    numbers: Tensor
    scales: Tensor | None = None
    centres: Tensor | None = None

    @classmethod
    def of(cls, rounded: Groups, bits: Bits) -> "Packed":
        """What was rounded to so many bits."""
        numbers, scales, centres = rounded
        if bits == "bf16":
            return cls(numbers.contiguous())
        if bits == "int8":
            return cls(numbers.contiguous(), scales.float().contiguous())
        N, groups = scales.shape
        codes = (numbers + 8).to(torch.uint8).view(N, groups, 2, -1)
        both = (codes[:, :, 0] | (codes[:, :, 1] << 4)).flatten(1)
        return cls(both, scales.bfloat16().contiguous(), None if centres is None else centres.float().contiguous())

    def unpack(self) -> Groups:
        """The numbers, one by one."""
        if self.scales is None:
            return Groups(self.numbers, torch.ones(len(self.numbers), 1, device=self.numbers.device))
        if self.bits == "int8":
            return Groups(self.numbers, self.scales)
        halves = self.numbers.unflatten(1, (self.scales.shape[1], -1))
        codes = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)
        return Groups(codes.to(torch.int8) - 8, self.scales.float(), self.centres)

    @property
    def bits(self) -> Bits:
        """How many each number has."""
        return next(bits for bits, dtype in DTYPES.items() if dtype == self.numbers.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, width = self.numbers.shape
        return N, width * 2 if self.bits == "int4" else width

    @property
    def groups(self) -> int:
        """How many scales a row has."""
        return 1 if self.scales is None else self.scales.shape[1]

    def is_for(self, bits: Bits, N: int, K: int) -> bool:
        """Whether it is what (N, K) weights become: kernels read as much as that, whatever there is."""
        kept, groups = layout(bits, K)
        wanted = {"numbers": ((N, K // 2 if kept == "int4" else K), DTYPES[kept])}
        if kept != "bf16":
            wanted["scales"] = ((N, groups), torch.float32 if kept == "int8" else torch.bfloat16)
        if kept == "int4" and self.centres is not None:
            wanted["centres"] = ((N, groups), torch.float32)
        found = {name: tensor for name, tensor in self._asdict().items() if tensor is not None}
        return {name: (tuple(each.shape), each.dtype) for name, each in found.items()} == wanted and all(
            each.is_contiguous() for each in found.values()
        )


def quantize_rows(weight: Tensor) -> Groups:
    """weight (N, K) in 8 bits: numbers (N, K) from −119 to 119, and a scale for each row (N, 1), in float32."""
    w = weight.float()
    scale = (w.abs().amax(dim=1, keepdim=True) / MAX_INT8).clamp(min=torch.finfo(torch.float32).tiny)
    return Groups((w / scale).round().to(torch.int8), scale)


def quantize_groups(weight: Tensor, group: int = GROUP) -> Groups:
    """weight (N, K) in 4 bits: numbers (N, K) from −8 to 7, with scales and centres (N, K/group).

    How much of a group's range they cover is decided by the squared error of the whole group. Weights that came as
    blocks of 16 even steps, as those of a Q4_1 file, are met where they are.
    """
    parts = [_centred(some, group) for some in _chunks(weight)]
    return Groups(*(torch.cat(part) for part in zip(*parts, strict=True)))


def quantize_around_zero(weight: Tensor, group: int = GROUP) -> Groups:
    """The same without centres.

    −8 has no counterpart, so the scale has the sign that makes the largest weight of a group negative. Whether that
    weight is met exactly or a little cut off is decided by the squared error of the whole group.
    """
    parts = [_around_zero(some, group) for some in _chunks(weight)]
    return Groups(*(torch.cat(part) for part in zip(*parts, strict=True)))


def centres_pay(weight: Tensor, group: int = GROUP) -> bool:
    """Whether centres leave much less error, judged by some of the rows. They do for blocks of a Q4_1 file, which lie
    on 16 even steps around any middle; weights as they were trained lie around 0 anyway."""
    some = weight[:: max(1, len(weight) // 64)]
    plain, centred = (
        (some - rounded.dequantize()).square().sum()
        for rounded in (quantize_around_zero(some, group), quantize_groups(some, group))
    )
    return bool(centred < WORTH * plain)


def _chunks(weight: Tensor) -> tuple[Tensor, ...]:
    """Some rows of a weight at a time."""
    return weight.split(max(1, (CHUNK_ON_CUDA if weight.is_cuda else CHUNK) // weight.shape[1]))


def _around_zero(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    w = weight.float().unflatten(1, (-1, group))  # (N, K/group, group)
    high, low = w.amax(dim=-1, keepdim=True), w.amin(dim=-1, keepdim=True)
    largest, scratch = torch.where(high > -low, high, low), torch.empty_like(w)
    scales = best = None
    for most in SHRINKS:
        scale = _step(largest / most)
        tried = torch.div(w, scale, out=scratch).round_().clamp_(-8, 7)
        error = torch.addcmul(w, tried, scale, value=-1, out=scratch).square_().sum(dim=-1, keepdim=True)
        if scales is None or best is None:
            scales, best = scale, error
            continue
        scales = torch.where(error < best, scale, scales)
        best = torch.minimum(best, error)
    assert scales is not None
    numbers = torch.div(w, scales, out=scratch).round_().clamp_(-8, 7)
    return numbers.flatten(1).to(torch.int8), scales.squeeze(-1)


def _centred(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    w = weight.float().unflatten(1, (-1, group))  # (N, K/group, group)
    high, low = w.amax(dim=-1, keepdim=True), w.amin(dim=-1, keepdim=True)
    middle, range_, scratch = (high + low) / 2, (high - low) / 15, torch.empty_like(w)
    best: tuple[Tensor, ...] | None = None
    for reach in REACHES:
        scale = _step(range_ * reach)
        numbers = _around_middle(w, scale, middle, scratch)
        left = torch.addcmul(w, numbers, scale, value=-1, out=scratch)
        centre = left.mean(dim=-1, keepdim=True)  # with the numbers fixed, the best one
        tried = scale, centre, left.sub_(centre).square_().sum(dim=-1, keepdim=True)
        if best is None:
            best = tried
            continue
        better = tried[-1] < best[-1]
        best = tuple(torch.where(better, new, old) for new, old in zip(tried, best, strict=True))
    assert best is not None
    scales, centres, _ = best
    numbers = _around_middle(w, scales, middle, scratch)
    return numbers.flatten(1).to(torch.int8), scales.squeeze(-1), centres.squeeze(-1)


def _step(scale: Tensor) -> Tensor:
    """Scales in bf16's steps; 1 instead of 0."""
    scale = scale.bfloat16().float()
    return torch.where(scale == 0, 1.0, scale)


def _around_middle(w: Tensor, scale: Tensor, middle: Tensor, out: Tensor) -> Tensor:
    """w (…, group) as numbers −8 … 7, which lie around −½, in steps around the middle (…, 1)."""
    return torch.sub(w, middle + scale / 2, out=out).div_(scale).round_().clamp_(-8, 7)
