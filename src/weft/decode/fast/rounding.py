"""Weights rounded to 8 or 4 bits: whole numbers, with scales and centres that bring them close to what they were.

`Groups` has the numbers one by one, `Packed` as files keep them; weft's own kernels multiply by these, `in_bands`.
"""

from collections.abc import Callable, Iterator
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
        if self.scales is None:
            return Groups(self.numbers, torch.ones(len(self.numbers), 1, device=self.numbers.device))
        if self.bits == "int8":
            return Groups(self.numbers, self.scales)
        halves = self.numbers.unflatten(1, (self.scales.shape[1], -1))
        codes = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)
        return Groups(codes.to(torch.int8) - 8, self.scales.float(), self.centres)

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
        same = {name: (tuple(each.shape), each.dtype) for name, each in found.items()} == wanted
        return same and all(each.is_contiguous() for each in found.values())


def quantize_rows(weight: Tensor) -> Groups:
    """weight (N, K) in 8 bits: numbers (N, K) from −119 to 119, and a scale for each row (N, 1), in float32."""
    w = weight.float()
    scale = (w.abs().amax(dim=1, keepdim=True) / MAX_INT8).clamp(min=torch.finfo(torch.float32).tiny)
    return Groups((w / scale).round().to(torch.int8), scale)


def quantize_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (…, D) in 8 bits: numbers (…, D) from −127 to 127, and a scale for each vector (…), in bf16."""
    scales = (x.abs().amax(dim=-1).float() / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
    return (x.float() / scales.float().unsqueeze(-1)).round_().to(torch.int8), scales


def quantize_groups(weight: Tensor, group: int = GROUP) -> Groups:
    """weight (N, K) in 4 bits: numbers (N, K) from −8 to 7, with scales and centres (N, K/group).

    How much of a group's range they cover is decided by the squared error of the whole group. Weights that came as
    blocks of 16 even steps, as those of a Q4_1 file, are met where they are.
    """
    return _by_groups(_centred, weight, group)


def quantize_around_zero(weight: Tensor, group: int = GROUP) -> Groups:
    """The same without centres.

    −8 has no counterpart, so the scale has the sign that makes the largest weight of a group negative. Whether that
    weight is met exactly or a little cut off is decided by the squared error of the whole group.
    """
    return _by_groups(_around_zero, weight, group)


def centres_pay(weight: Tensor, group: int = GROUP) -> bool:
    """Whether centres leave much less error, judged by some of the rows. They do for blocks of a Q4_1 file, which lie
    on 16 even steps around any middle; weights as they were trained lie around 0 anyway."""
    some = weight[:: max(1, len(weight) // 64)]
    ways = quantize_around_zero, quantize_groups
    plain, centred = ((some - rounded(some, group).dequantize()).square().sum() for rounded in ways)
    return bool(centred < WORTH * plain)


def _by_groups(rounded: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor, group: int) -> Groups:
    """A weight of which groups (rows, groups of a row, group) become numbers, scales and centres, some rows at once."""
    rows = max(1, (CHUNK_ON_CUDA if weight.is_cuda else CHUNK) // weight.shape[1])
    parts = [rounded(some.float().unflatten(1, (-1, group))) for some in weight.split(rows)]
    numbers, *others = (torch.cat(part) for part in zip(*parts, strict=True))
    return Groups(numbers.flatten(1), *(each.squeeze(-1) for each in others))


def _around_zero(w: Tensor) -> tuple[Tensor, ...]:
    high, low = w.amax(dim=-1, keepdim=True), w.amin(dim=-1, keepdim=True)
    largest, scratch = torch.where(high > -low, high, low), torch.empty_like(w)

    def tried(most: float) -> tuple[Tensor, ...]:
        scale = _step(largest / most)
        numbers = torch.div(w, scale, out=scratch).round_().clamp_(-8, 7)
        left = torch.addcmul(w, numbers, scale, value=-1, out=scratch)
        return scale, left.square_().sum(dim=-1, keepdim=True)

    scales, _ = _best(map(tried, SHRINKS))
    return torch.div(w, scales, out=scratch).round_().clamp_(-8, 7).to(torch.int8), scales


def _centred(w: Tensor) -> tuple[Tensor, ...]:
    high, low = w.amax(dim=-1, keepdim=True), w.amin(dim=-1, keepdim=True)
    middle, range_, scratch = (high + low) / 2, (high - low) / 15, torch.empty_like(w)

    def around_middle(scale: Tensor) -> Tensor:
        """Numbers −8 … 7, which lie around −½, in steps around the middle."""
        return torch.sub(w, middle + scale / 2, out=scratch).div_(scale).round_().clamp_(-8, 7)

    def tried(reach: float) -> tuple[Tensor, ...]:
        scale = _step(range_ * reach)
        left = torch.addcmul(w, around_middle(scale), scale, value=-1, out=scratch)
        centre = left.mean(dim=-1, keepdim=True)  # with the numbers fixed, the best one
        return scale, centre, left.sub_(centre).square_().sum(dim=-1, keepdim=True)

    scales, centres, _ = _best(map(tried, REACHES))
    return around_middle(scales).to(torch.int8), scales, centres


def _best(tries: Iterator[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """For each group the best of several tries, whose errors stand last."""
    best = next(tries)
    for tried in tries:
        better = tried[-1] < best[-1]
        best = tuple(torch.where(better, new, old) for new, old in zip(tried, best, strict=True))
    return best


def _step(scale: Tensor) -> Tensor:
    """Scales in bf16's steps; 1 instead of 0."""
    scale = scale.bfloat16().float()
    return torch.where(scale == 0, 1.0, scale)
