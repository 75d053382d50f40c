"""Weights rounded to 8 or 4 bits: whole numbers, with scales and centres that bring them close to what they were."""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # neighbours with one scale, in 4 bits
MOST8 = 119  # in 8 bits: the largest number whose upper and lower half are signed 4-bit numbers (`Digits`)
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


def quantize_rows(weight: Tensor) -> Groups:
    """weight (N, K) in 8 bits: numbers (N, K) from −119 to 119, and a scale for each row (N, 1), in float32."""
    w = weight.float()
    scale = (w.abs().amax(dim=1, keepdim=True) / MOST8).clamp(min=torch.finfo(torch.float32).tiny)
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
