"""Matrix products with 8-bit weights on a GPU, in Triton: for two and more rows of x.

Tensor cores multiply integers, so weights need not become float. A row of x is quantised to 15 bits with one scale, as
close to x as 16-bit floats are: each number is 128 · upper + lower, with 8 bits each, and the two integer products take
about as long as one float product. (8 bits of x alone take half of that, but change a model's output as much as the
8-bit weights do.) The norm or gate before a product is fused into the quantisation of x. Imported only with a GPU.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.decode.fast.kernels4 import ROUND_MAGIC, load_block, store_rows

QuantizedX = tuple[Tensor, Tensor]  # numbers (2, …, K) int8, the upper ones first, and scales (rows,) float32


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gain_ptr, upper_ptr, lower_ptr, scale_ptr, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < K
    dtype = x_ptr.dtype.element_ty
    at = x_ptr + row * (2 * K if GATED else K) + column
    x = tl.load(at, mask=inside, other=0).to(tl.float32)
    if GATED:
        up = tl.load(at + K, mask=inside, other=0).to(tl.float32)
        x = (x / (1 + tl.exp(-x)) * up).to(dtype).to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
        x = (x * root * tl.load(gain_ptr + column, mask=inside, other=0).to(tl.float32)).to(dtype).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / 16256, 1.1754943508222875e-38)
    number = (x / scale + ROUND_MAGIC) - ROUND_MAGIC  # up to 127 · 128
    upper = (number / 128 + ROUND_MAGIC) - ROUND_MAGIC
    tl.store(upper_ptr + row * K + column, upper.to(tl.int8), mask=inside)
    tl.store(lower_ptr + row * K + column, (number - 128 * upper).to(tl.int8), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _matmul_kernel(  # type: ignore[no-untyped-def]
    upper_ptr, lower_ptr, x_scale_ptr, w_ptr, w_scale_ptr, residual_ptr, y_ptr, M,
    N: tl.constexpr, K: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    # Tiles are ordered in bands of BAND tile rows, so that what they read again is still in the L2 cache.
    tile = tl.program_id(0)
    across: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    band = tile // (BAND * across)
    height = tl.minimum(tl.cdiv(M, ROWS) - band * BAND, BAND)
    within = tile % (BAND * across)
    rows = (band * BAND + within % height) * ROWS + tl.arange(0, ROWS)
    columns = within // height * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    at = tl.minimum(rows, M - 1)[:, None].to(tl.int64) * K + depth[None, :]
    upper_ptr += at
    lower_ptr += at
    weights_ptr = w_ptr + tl.minimum(columns, N - 1)[:, None].to(tl.int64) * K + depth[None, :]
    uppers = tl.zeros((ROWS, COLUMNS), tl.int32)
    lowers = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, K, DEPTH):
        inside = (start + depth < K)[None, :]
        w = tl.trans(load_block(weights_ptr, inside, K % DEPTH == 0))
        uppers = tl.dot(load_block(upper_ptr, inside, K % DEPTH == 0), w, uppers, out_dtype=tl.int32)
        lowers = tl.dot(load_block(lower_ptr, inside, K % DEPTH == 0), w, lowers, out_dtype=tl.int32)
        upper_ptr += DEPTH
        lower_ptr += DEPTH
        weights_ptr += DEPTH
    y = uppers.to(tl.float32) * 128 + lowers.to(tl.float32)
    y *= tl.load(x_scale_ptr + tl.minimum(rows, M - 1))[:, None]
    y *= tl.load(w_scale_ptr + tl.minimum(columns, N - 1)).to(tl.float32)[None, :]
    store_rows(y, residual_ptr, y_ptr, rows, columns, M, N, RESIDUAL)


def quantize(x: Tensor, gain: Tensor | None = None, eps: float = 0.0, gated: bool = False) -> QuantizedX:
    """Quantise x (…, K) to 15 bits: with `gain` (K,) after RMSNorm; if `gated`, silu(a) · b for x = [a, b] (…, 2 K)."""
    x, K, M = x.contiguous(), x.shape[-1] // (2 if gated else 1), x.numel() // x.shape[-1]
    y = torch.empty(2, *x.shape[:-1], K, dtype=torch.int8, device=x.device)
    scales = torch.empty(M, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(K)
    warps = max(1, min(8, block // 512))
    _quantize_kernel[(M,)](x, gain, *y, scales, eps, K, block, gain is not None, gated, num_warps=warps)
    return y, scales


def matmul(x: QuantizedX, weight: Tensor, scale: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """x (…, K) times 8-bit weights (N, K) with scale (N,), plus `residual` → (…, N)."""
    (numbers, scales), (N, K) = x, weight.shape
    M = len(scales)
    y = torch.empty(*numbers.shape[1:-1], N, dtype=dtype, device=weight.device)
    assert residual is None or residual.is_contiguous()
    rows, columns, warps, stages = matmul_tile(M, N)
    _matmul_kernel[(triton.cdiv(M, rows) * triton.cdiv(N, columns),)](
        *numbers, scales, weight, scale, residual, y, M, N, K, residual is not None, rows, columns, 128, 8,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def matmul_tile(M: int, N: int) -> tuple[int, int, int, int]:
    """Rows and columns of a product's tile, warps and stages, tuned on an H200."""
    large = N >= 8192
    columns = 128 if (128 if large else 256) < M else 64 if large or M > 64 else 32
    return min(64, max(16, triton.next_power_of_2(M))), columns, 4, 3 if columns == 128 or (large and M >= 64) else 4
