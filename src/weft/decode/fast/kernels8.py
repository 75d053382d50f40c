"""Products with weights in 8 bits on a GPU, written in Triton: for some rows of x, and for many.

Tensor cores multiply whole numbers, so that weights need not become floats. A row of x is rounded to 15 bits with one
scale, as near to x as 16-bit floats are: each number is 128 · upper + lower, of 8 bits each, and the two products take
about as long as one of floats. (8 bits of x alone take half of that, but change what a model writes as much as its
weights' 8 bits do.) The norm or the gate before a product is done as x is rounded.

Imported only where there is a GPU.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.decode.fast.kernels4 import loaded, put_rows

Rounded = tuple[Tensor, Tensor]  # numbers (2, …, K) int8, the upper ones first, and scales (rows,) float32


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _round_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gain_ptr, upper_ptr, lower_ptr, scale_ptr, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < K
    kind = x_ptr.dtype.element_ty
    at = x_ptr + row * (2 * K if GATED else K) + column
    x = tl.load(at, mask=inside, other=0).to(tl.float32)
    if GATED:
        up = tl.load(at + K, mask=inside, other=0).to(tl.float32)
        x = (x / (1 + tl.exp(-x)) * up).to(kind).to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
        x = (x * root * tl.load(gain_ptr + column, mask=inside, other=0).to(tl.float32)).to(kind).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / 16256, 1.1754943508222875e-38)
    whole = (x / scale + 12582912.0) - 12582912.0  # the nearest whole numbers, up to 127 · 128
    upper = (whole / 128 + 12582912.0) - 12582912.0
    tl.store(upper_ptr + row * K + column, upper.to(tl.int8), mask=inside)
    tl.store(lower_ptr + row * K + column, (whole - 128 * upper).to(tl.int8), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _product_kernel(  # type: ignore[no-untyped-def]
    upper_ptr, lower_ptr, x_scale_ptr, w_ptr, w_scale_ptr, residual_ptr, y_ptr, M,
    N: tl.constexpr, K: tl.constexpr, RESIDUAL: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    DEEP: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    # tiles in bands, so that what they read again is still in the cache
    tile = tl.program_id(0)
    across: tl.constexpr = (N + WIDE - 1) // WIDE
    band = tile // (BAND * across)
    height = tl.minimum(tl.cdiv(M, HIGH) - band * BAND, BAND)
    within = tile % (BAND * across)
    rows = (band * BAND + within % height) * HIGH + tl.arange(0, HIGH)
    columns = within // height * WIDE + tl.arange(0, WIDE)
    depth = tl.arange(0, DEEP)
    at = tl.minimum(rows, M - 1)[:, None].to(tl.int64) * K + depth[None, :]
    upper_ptr += at
    lower_ptr += at
    weights_ptr = w_ptr + tl.minimum(columns, N - 1)[:, None].to(tl.int64) * K + depth[None, :]
    uppers = tl.zeros((HIGH, WIDE), tl.int32)
    lowers = tl.zeros((HIGH, WIDE), tl.int32)
    for start in range(0, K, DEEP):
        inside = (start + depth < K)[None, :]
        w = tl.trans(loaded(weights_ptr, inside, K % DEEP == 0))
        uppers = tl.dot(loaded(upper_ptr, inside, K % DEEP == 0), w, uppers, out_dtype=tl.int32)
        lowers = tl.dot(loaded(lower_ptr, inside, K % DEEP == 0), w, lowers, out_dtype=tl.int32)
        upper_ptr += DEEP
        lower_ptr += DEEP
        weights_ptr += DEEP
    y = uppers.to(tl.float32) * 128 + lowers.to(tl.float32)
    y *= tl.load(x_scale_ptr + tl.minimum(rows, M - 1))[:, None]
    y *= tl.load(w_scale_ptr + tl.minimum(columns, N - 1)).to(tl.float32)[None, :]
    put_rows(y, residual_ptr, y_ptr, rows, columns, M, N, RESIDUAL)


def rounded(x: Tensor, gain: Tensor | None = None, eps: float = 0.0, gated: bool = False) -> Rounded:
    """x (…, K) in 15 bits: with `gain` (K,) after RMSNorm; `gated`, of x (…, 2 K), silu of the first half times the
    second."""
    x, K, M = x.contiguous(), x.shape[-1] // (2 if gated else 1), x.numel() // x.shape[-1]
    y = torch.empty(2, *x.shape[:-1], K, dtype=torch.int8, device=x.device)
    scales = torch.empty(M, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(K)
    warps = max(1, min(8, block // 512))
    _round_kernel[(M,)](x, gain, *y, scales, eps, K, block, gain is not None, gated, num_warps=warps)
    return y, scales


def product(x: Rounded, weight: Tensor, scale: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """x (…, K) times 8-bit weights (N, K) with scale (N,), plus `residual` → (…, N)."""
    (numbers, scales), (N, K) = x, weight.shape
    M = len(scales)
    y = torch.empty(*numbers.shape[1:-1], N, dtype=dtype, device=weight.device)
    assert residual is None or residual.is_contiguous()
    high, wide, warps, stages = tile_for(M, N)
    _product_kernel[(triton.cdiv(M, high) * triton.cdiv(N, wide),)](
        *numbers, scales, weight, scale, residual, y, M, N, K, residual is not None, high, wide, 128, 8,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def tile_for(M: int, N: int) -> tuple[int, int, int, int]:
    """Rows and columns of a tile of a product, warps, and stages, as they were found on an H200."""
    large = N >= 8192
    wide = 128 if (128 if large else 256) < M else 64 if large or M > 64 else 32
    return min(64, max(16, triton.next_power_of_2(M))), wide, 4, 3 if wide == 128 or (large and M >= 64) else 4
