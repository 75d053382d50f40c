"""Quantise to Q4_K, ggml's 4-bit format with two levels of scales: 4.5 bits per weight.

A block is 256 values of a row in 8 groups of 32. A group is  x ≈ d · scale · q − dmin · minimum  with 4 bits for q and
6 for `scale` and `minimum`; d and dmin, in fp16, belong to the block. The package `gguf` reads such blocks but cannot
write them.
"""

import torch
from torch import Tensor

GROUPS, SIZE = 8, 32
MAX_Q = 15  # largest 4-bit value
MAX_SCALE = 63  # largest 6-bit scale
# candidate ranges of a group, slightly narrower and wider than its own: clipping an outlier may help the others
RANGES = [(MAX_Q + change / 10) / MAX_Q for change in range(-10, 11, 2)]


def quantize(rows: Tensor) -> Tensor:
    """Quantise rows (rows, columns) fp32, columns a multiple of 256, to bytes (rows, columns / 256 · 144)."""
    x = rows.reshape(-1, GROUPS, SIZE)
    scale, minimum = _fit(x)
    d, scales = _six_bits(scale)
    dmin, minima = _six_bits(minimum)
    step, low = d * scales, dmin * minima
    q = ((x + low[..., None]) / step.clamp(min=1e-30)[..., None]).round().clamp(0, MAX_Q).to(torch.uint8)
    halves = torch.cat([d, dmin], dim=1).half().view(torch.uint8)  # (blocks, 4)
    pairs = q.reshape(-1, GROUPS // 2, 2, SIZE)  # two groups share bytes
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)  # (blocks, 128)
    # eight scales and eight minima of 6 bits (blocks, 8) → 12 bytes in ggml's layout
    scales, minima = scales.to(torch.uint8), minima.to(torch.uint8)
    high = [values[:, :4] | values[:, 4:] >> 4 << 6 for values in (scales, minima)]
    low_bits = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return torch.cat([halves, *high, low_bits, nibbles], dim=1).reshape(rows.shape[0], -1)


def _fit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each group (blocks, groups), both ≥ 0, that minimise the error of x ≈ scale · q − minimum.

    For each candidate range, q is rounded and a line fitted by weighted least squares; large values have larger
    weights because they matter more in products.
    """
    weight = x.abs() + x.square().mean(dim=-1, keepdim=True).sqrt()
    low = x.amin(dim=-1, keepdim=True).clamp(max=0)
    width = (x.amax(dim=-1, keepdim=True) - low).clamp(min=1e-30)
    total, wx = weight.sum(dim=-1, keepdim=True), (weight * x).sum(dim=-1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    scale, minimum = width / MAX_Q, 0 - low  # never −0
    for factor in RANGES:
        q = ((x - low) * (MAX_Q * factor / width)).round().clamp(0, MAX_Q)
        wq, wqq, wqx = ((weight * term).sum(dim=-1, keepdim=True) for term in (q, q * q, q * x))
        spread = total * wqq - wq * wq
        slope = torch.where(spread > 0, (total * wqx - wq * wx) / spread.clamp(min=1e-30), width / MAX_Q)
        offset = (wx - slope * wq) / total.clamp(min=1e-30)
        positive = offset > 0  # not representable: then the line goes through zero
        slope = torch.where(positive, wqx / wqq.clamp(min=1e-30), slope)
        offset = torch.where(positive, 0, offset)
        error = (weight * (slope * q + offset - x).square()).sum(dim=-1, keepdim=True)
        better = (error < best) & (slope > 0)
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, slope, scale), torch.where(better, 0 - offset, minimum)
    return scale.squeeze(-1), minimum.squeeze(-1)


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise values ≥ 0 (blocks, groups) to one fp16 factor per block (blocks, 1) and integers up to 63."""
    factor = (values.amax(dim=1, keepdim=True) / MAX_SCALE).half().float()
    return factor, (values / factor.clamp(min=1e-30)).round().clamp(0, MAX_SCALE)
