"""Products of whole numbers on a GPU, written in Triton: x is rounded to 8 bits as well, and tensor cores multiply those
twice as fast as 16 bits. Weights need not become floats first.

Up to 128 neighbours of a row of x have one scale. What is done before a product, the norm or the gate, is done on the way.

Only `cuda.py` imports this file, and only where there is a GPU.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.decode.fast.kernels4 import put_rows

GROUPS = (128, 64)  # neighbours with one scale: the first that divides a row's length
Rounded = tuple[Tensor, Tensor]  # numbers (…, K) int8, and scales (K/group, rows) float32


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _round_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gain_ptr, y_ptr, scale_ptr, M, eps,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < K
    kind = x_ptr.dtype.element_ty
    at = x_ptr + row * (2 * K if GATED else K) + column
    x = tl.load(at, mask=inside, other=0).to(tl.float32)
    if GATED:
        up = tl.load(at + K, mask=inside, other=0).to(tl.float32)
        x = (x / (1 + tl.exp(-x)) * up).to(kind).to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / K + eps)
        x = (x * root * tl.load(gain_ptr + column, mask=inside, other=0).to(tl.float32)).to(kind).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1) / 127, 1.1754943508222875e-38)
    numbers = (x / scale[:, None] + 12582912.0) - 12582912.0  # the nearest whole numbers
    tl.store(y_ptr + row * K + column, numbers.to(tl.int8), mask=inside)
    tl.store(scale_ptr + group * M + row, scale, mask=group * GROUP < K)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _product_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, residual_ptr, y_ptr, M,
    N: tl.constexpr, K: tl.constexpr, RESIDUAL: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    # a band of BAND tiles' height at a time, so that what is read again is still in the cache
    tile = tl.program_id(0)
    down = tl.cdiv(M, HIGH)
    across: tl.constexpr = (N + WIDE - 1) // WIDE
    band = tile // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    within = tile % (BAND * across)
    rows = (band * BAND + within % height) * HIGH + tl.arange(0, HIGH)
    columns = within // height * WIDE + tl.arange(0, WIDE)
    depth = tl.arange(0, GROUP)
    xs = x_ptr + tl.minimum(rows, M - 1)[:, None].to(tl.int64) * K + depth[None, :]
    ws = w_ptr + tl.minimum(columns, N - 1)[:, None].to(tl.int64) * K + depth[None, :]
    scales = x_scale_ptr + tl.minimum(rows, M - 1)
    sums = tl.zeros((HIGH, WIDE), tl.float32)
    for _ in range(0, K, GROUP):
        part = tl.dot(tl.load(xs), tl.trans(tl.load(ws)), out_dtype=tl.int32)
        sums += part.to(tl.float32) * tl.load(scales)[:, None]
        xs += GROUP
        ws += GROUP
        scales += M
    y = sums * tl.load(w_scale_ptr + tl.minimum(columns, N - 1)).to(tl.float32)[None, :]
    put_rows(y, residual_ptr, y_ptr, rows, columns, M, N, RESIDUAL)


def fit(weight: Tensor) -> bool:
    """Whether these are the weights of a layer that `product` multiplies by."""
    return weight.dtype == torch.int8 and weight.shape[1] % GROUPS[-1] == 0


def rounded(x: Tensor, gain: Tensor | None = None, eps: float = 0.0, gated: bool = False) -> Rounded:
    """x (…, K) in 8 bits: with `gain` (K,) after RMSNorm; `gated`, of x (…, 2 K), silu of the first half times the
    second."""
    K = x.shape[-1] // 2 if gated else x.shape[-1]
    M = x.numel() // x.shape[-1]
    group = next(group for group in GROUPS if K % group == 0)
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], K, dtype=torch.int8, device=x.device)
    scales = torch.empty(K // group, M, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(K // group)
    _round_kernel[(M,)](
        x, gain, y, scales, M, eps, K, group, padded, gain is not None, gated, num_warps=max(1, min(8, padded // 4))
    )
    return y, scales


def product(x: Rounded, weight: Tensor, scale: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """x (…, K) times 8-bit weights (N, K) with scale (N,), plus `residual` → (…, N)."""
    (numbers, scales), (N, K) = x, weight.shape
    M = numbers.numel() // K
    y = torch.empty(*numbers.shape[:-1], N, dtype=dtype, device=weight.device)
    high, wide, warps, stages = shape_for(M, N)
    _product_kernel[(triton.cdiv(M, high) * triton.cdiv(N, wide),)](
        numbers, scales, weight, scale, residual, y, M, N, K, residual is not None, high, wide, K // len(scales), 8,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def shape_for(M: int, N: int) -> tuple[int, int, int, int]:
    """Rows and columns of a tile of a product, warps, and stages."""
    if M <= 64:
        return (16 if M <= 16 else 32 if M <= 32 else 64), 32 if N < 8192 else 64, 4, 5
    return 128, 128, 8, 4
