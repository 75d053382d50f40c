"""Numbers as Q4_K, ggml's four bits with two levels of scales: 4.5 bits a weight.

256 numbers of a row make a block of 8 groups of 32. A group is  x ≈ d · scale · q − dmin · least  with q of 4 bits and
`scale` and `least` of 6; d and dmin, in fp16, are the block's. The package `gguf` reads such blocks and writes none.
"""

import torch
from torch import Tensor

GROUPS, SIZE = 8, 32
STEPS = 15  # between the least and the greatest q
LEVELS = 63  # of the 6-bit scales
# a group's range is tried a little narrower and wider than it is: clipping one outlier may serve the others
RANGES = [(STEPS + change / 10) / STEPS for change in range(-10, 11, 2)]


def quantize(rows: Tensor) -> Tensor:
    """rows (rows, columns) fp32, of whole blocks → bytes (rows, columns / 256 · 144)."""
    x = rows.reshape(-1, GROUPS, SIZE)
    scale, least = _fitted(x)
    d, scales = _six_bits(scale)
    dmin, leasts = _six_bits(least)
    step, low = d * scales, dmin * leasts
    q = ((x + low[..., None]) / step.clamp(min=1e-30)[..., None]).round().clamp(0, STEPS).to(torch.uint8)
    halves = torch.cat([d, dmin], dim=1).half().view(torch.uint8)  # (blocks, 4)
    pairs = q.reshape(-1, GROUPS // 2, 2, SIZE)  # two groups share their bytes
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)  # (blocks, 128)
    # eight scales and eight leasts of 6 bits (blocks, 8) → 12 bytes, as ggml lays them out
    scales, leasts = scales.to(torch.uint8), leasts.to(torch.uint8)
    high = [each[:, :4] | each[:, 4:] >> 4 << 6 for each in (scales, leasts)]
    low_bits = scales[:, 4:] & 15 | (leasts[:, 4:] & 15) << 4
    return torch.cat([halves, *high, low_bits, nibbles], dim=1).reshape(rows.shape[0], -1)


def _fitted(x: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the least of each group (blocks, groups), both ≥ 0: x ≈ scale · q − least with the least error.

    For each range, q is rounded and the line through it fitted by least squares; large numbers count more, for they
    move the products more.
    """
    weight = x.abs() + x.square().mean(dim=-1, keepdim=True).sqrt()
    low = x.amin(dim=-1, keepdim=True).clamp(max=0)
    width = (x.amax(dim=-1, keepdim=True) - low).clamp(min=1e-30)
    total, wx = weight.sum(dim=-1, keepdim=True), (weight * x).sum(dim=-1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    scale, least = width / STEPS, 0 - low  # never −0
    for factor in RANGES:
        q = ((x - low) * (STEPS * factor / width)).round().clamp(0, STEPS)
        wq, wqq, wqx = ((weight * each).sum(dim=-1, keepdim=True) for each in (q, q * q, q * x))
        spread = total * wqq - wq * wq
        slope = torch.where(spread > 0, (total * wqx - wq * wx) / spread.clamp(min=1e-30), width / STEPS)
        start = (wx - slope * wq) / total.clamp(min=1e-30)
        above = start > 0  # the offset can't be positive: then the line goes through zero
        slope = torch.where(above, wqx / wqq.clamp(min=1e-30), slope)
        start = torch.where(above, 0, start)
        error = (weight * (slope * q + start - x).square()).sum(dim=-1, keepdim=True)
        better = (error < best) & (slope > 0)
        best = torch.where(better, error, best)
        scale, least = torch.where(better, slope, scale), torch.where(better, 0 - start, least)
    return scale.squeeze(-1), least.squeeze(-1)


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values ≥ 0 (blocks, groups) as one factor that fp16 holds (blocks, 1) and whole numbers up to 63."""
    factor = (values.amax(dim=1, keepdim=True) / LEVELS).half().float()
    return factor, (values / factor.clamp(min=1e-30)).round().clamp(0, LEVELS)
