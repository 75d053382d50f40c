"""Matrix products with 4-bit weights on a GPU, in Triton: for one row of x, for a few, and for many.

A single row is first quantised to 8 bits, as on a CPU: integers are multiplied four at a time, whereas converting 4-bit
weights to float takes longer than reading them. Imported only where there is a GPU.

A group is 32 consecutive weights of a row in 16 bytes: the first 16 in the lower nibbles, the others in the upper. It
has a scale and a centre, the bf16 halves of an int32: nibble u stands for the weight scale · (u − 8) + centre.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from torch.nn import functional as F

GROUP = tl.constexpr(32)
HALF = tl.constexpr(16)
# 1.5 · 2²³: a float this large has no fraction bits. Adding it rounds to the nearest integer, ties to even, and leaves
# that integer in the low mantissa bits. Valid for magnitudes below 2²².
ROUND_MAGIC = tl.constexpr(12582912.0)
MAX_FUSED_ROWS = 64  # rows of x up to which weights are dequantised inside the product


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_block(pointers, mask, FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a block, without a mask if it is FULL."""
    return tl.load(pointers) if FULL else tl.load(pointers, mask=mask, other=0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def store_rows(y, residual_ptr, y_ptr, rows, columns, M, N: tl.constexpr, RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a block of a product (M, N), plus the residual."""
    at = rows[:, None].to(tl.int64) * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=inside, other=0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _nibbles_to_float(tile):  # type: ignore[no-untyped-def]
    """1 + u/16 for lower and upper nibbles u, by a byte permutation: u is the top of such a float's mantissa. An
    integer conversion would be slow."""
    lower, upper = tl.inline_asm_elementwise(
        """{
        .reg .b32 l, h;
        shl.b32 l, $8, 3;
        shr.b32 h, $8, 1;
        lop3.b32 l, l, 0x78787878, 0x80808080, 0xEA;
        lop3.b32 h, h, 0x78787878, 0x80808080, 0xEA;
        prmt.b32 $0, l, 0x3F000000, 0x7044;
        prmt.b32 $1, l, 0x3F000000, 0x7144;
        prmt.b32 $2, l, 0x3F000000, 0x7244;
        prmt.b32 $3, l, 0x3F000000, 0x7344;
        prmt.b32 $4, h, 0x3F000000, 0x7044;
        prmt.b32 $5, h, 0x3F000000, 0x7144;
        prmt.b32 $6, h, 0x3F000000, 0x7244;
        prmt.b32 $7, h, 0x3F000000, 0x7344;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
        [tile],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=4,
    )
    return lower, upper


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _split_scales(both):  # type: ignore[no-untyped-def]
    """Scales, and centres."""
    return (both << 16).to(tl.float32, bitcast=True), (both & -0x10000).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _nibble_scales(both):  # type: ignore[no-untyped-def]
    """Factor and offset that turn 1 + u/16 into a weight: 16 · scale, and centre − 24 · scale."""
    scale, centre = _split_scales(both)
    return scale * 16, centre - scale * 24


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gain_ptr, q_ptr, scale_ptr, eps, K: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Quantise x (K,), normalised if NORM, to integers from −127 to 127, with a scale and the dequantised sum of each
    group. A norm needs all groups in one program."""
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    valid = (group < K // GROUP)[:, None]
    if PDL:  # the following product loads weights first, so it may start now
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + at, mask=valid, other=0).to(tl.float32)
    root = 1.0
    if NORM:  # gain · x / RMS(x)
        root = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / K + eps)
        x *= tl.load(gain_ptr + at, mask=valid, other=0).to(tl.float32)
    peak = tl.max(tl.abs(x), axis=1)
    q = x * tl.where(peak > 1e-30, 127.0 / peak, 0.0)[:, None] + ROUND_MAGIC
    scale = peak * root / 127.0
    inside = group < K // GROUP
    tl.store(q_ptr + at, q.to(tl.int32, bitcast=True).to(tl.int8), mask=valid)
    tl.store(scale_ptr + 2 * group, scale, mask=inside)
    tl.store(scale_ptr + 2 * group + 1, scale * tl.sum(q - ROUND_MAGIC, axis=1), mask=inside)


def quantize(x: Tensor, gain: Tensor | None, eps: float, pdl: bool) -> tuple[Tensor, Tensor]:
    """Quantise x (1, K), normalised if there is a `gain`, to int8 (K,), with a scale and a sum per group (K/32, 2)."""
    K = x.shape[1]
    q = torch.empty(K, dtype=torch.int8, device=x.device)
    scales = torch.empty(K // 32, 2, dtype=torch.float32, device=x.device)
    groups = K // 32
    block = 16 if gain is None else triton.next_power_of_2(groups)
    _quantize_kernel[(triton.cdiv(groups, block),)](
        x, gain, q, scales, eps, K, gain is not None, block, pdl,
        num_warps=min(16, max(1, block // 8)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return q, scales


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _group_dots(tile, lower_x, upper_x):  # type: ignore[no-untyped-def]
    """Σ u q of every group: tile (ROWS, BLOCK, 16), q (BLOCK, 16) for the lower and the upper nibbles → (ROWS, BLOCK).

    One instruction multiplies and adds four bytes. Three of the four results are 0, and adding them costs nothing. A
    sum below 2²² becomes a float by ROUND_MAGIC's bits, since an integer conversion is slow.
    """
    sums = tl.inline_asm_elementwise(
        """{
        .reg .b32 l, h;
        and.b32 l, $4, 0x0F0F0F0F;
        shr.b32 h, $4, 4;
        and.b32 h, h, 0x0F0F0F0F;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        dp4a.u32.s32 $0, l, $5, $0;
        dp4a.u32.s32 $0, h, $6, $0;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [tile, lower_x[None, :, :], upper_x[None, :, :]],
        dtype=tl.int32,
        is_pure=True,
        pack=4,
    )
    return (tl.sum(sums, axis=2) + 0x4B400000).to(tl.float32, bitcast=True) - ROUND_MAGIC


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _matvec_kernel(  # type: ignore[no-untyped-def]
    q_ptr, x_scale_ptr, w_ptr, group_ptr, residual_ptr, y_ptr,
    N: tl.constexpr, GROUPS: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply 4-bit weights (N, K/2) with groups (N, K/32) by a quantised x; a BLOCK counts groups."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = row[:, None].to(tl.int64)
    # A thread has the bytes of one group and the x that belong to them, so nothing moves between threads.
    group = tl.arange(0, BLOCK)
    byte = tl.arange(0, HALF)
    scales = group_ptr + rows * GROUPS + group[None, :]
    tiles = w_ptr + (rows * GROUPS + group[None, :])[:, :, None] * HALF + byte[None, None, :]
    # Weights never change, so the first ones are loaded before the previous kernel has finished.
    ahead = (group < GROUPS)[None, :]
    tile = load_block(tiles, ahead[:, :, None], BLOCK <= GROUPS)
    both = load_block(scales, ahead, BLOCK <= GROUPS)
    if GATED:
        tile_up = load_block(tiles + N * GROUPS * HALF, ahead[:, :, None], BLOCK <= GROUPS)
        both_up = load_block(scales + N * GROUPS, ahead, BLOCK <= GROUPS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    if GATED:
        sums_up = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.static_range(0, GROUPS, BLOCK):
        here = start + group
        inside = here < GROUPS
        at = q_ptr + here[:, None] * GROUP + byte[None, :]
        lower = load_block(at, inside[:, None], start + BLOCK <= GROUPS)
        upper = load_block(at + HALF, inside[:, None], start + BLOCK <= GROUPS)
        x_scale = load_block(x_scale_ptr + 2 * here, inside, start + BLOCK <= GROUPS)[None, :]
        total = load_block(x_scale_ptr + 2 * here + 1, inside, start + BLOCK <= GROUPS)[None, :]
        now, now_both = tile, both
        if GATED:
            now_up, now_both_up = tile_up, both_up
        if start + BLOCK < GROUPS:  # load the next tile while this one is multiplied
            ahead = (here + BLOCK < GROUPS)[None, :]
            tiles += BLOCK * HALF
            scales += BLOCK
            tile = load_block(tiles, ahead[:, :, None], start + 2 * BLOCK <= GROUPS)
            both = load_block(scales, ahead, start + 2 * BLOCK <= GROUPS)
            if GATED:
                tile_up = load_block(tiles + N * GROUPS * HALF, ahead[:, :, None], start + 2 * BLOCK <= GROUPS)
                both_up = load_block(scales + N * GROUPS, ahead, start + 2 * BLOCK <= GROUPS)
        scale, centre = _split_scales(now_both)
        sums += scale * (x_scale * _group_dots(now, lower, upper) - 8 * total) + centre * total
        if GATED:
            scale, centre = _split_scales(now_both_up)
            sums_up += scale * (x_scale * _group_dots(now_up, lower, upper) - 8 * total) + centre * total
    y = tl.sum(sums, axis=1)
    if GATED:
        y = y / (1 + tl.exp(-y)) * tl.sum(sums_up, axis=1)
    if RESIDUAL:
        y += tl.load(residual_ptr + row).to(tl.float32)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty))


def matvec(
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    residual: Tensor | None,
    gated: bool,
    y: Tensor,
    tile: tuple[int, int, int],
    pdl: bool,
) -> None:
    """Multiply weights (rows, K/2) with their groups by x from `quantize` → y (1, N)."""
    height, block, warps = tile
    N, groups = y.shape[1], weight[1].shape[1]
    _matvec_kernel[(N // height,)](
        *x, *weight, residual, y, N, groups, gated, residual is not None, height, block, pdl,
        num_warps=warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, group_ptr, residual_ptr, y_ptr, M,
    N: tl.constexpr, GROUPS: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.arange(0, DEPTH)
    byte = tl.arange(0, HALF)
    depth = tl.arange(0, DEPTH * HALF)
    k = (depth // HALF) * GROUP + depth % HALF
    first = columns[:, None].to(tl.int64) * GROUPS + group[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, GROUPS, DEPTH):
        valid = (columns < N)[:, None] & (start + group < GROUPS)[None, :]
        tiles = w_ptr + (first + start)[:, :, None] * HALF + byte[None, None, :]
        tile = tl.load(tiles, mask=valid[:, :, None], other=0)
        scale, centre = _nibble_scales(tl.load(group_ptr + first + start, mask=valid, other=0))
        lower, upper = _nibbles_to_float(tile)
        lower = (lower * scale[:, :, None] + centre[:, :, None]).to(x_ptr.dtype.element_ty)
        upper = (upper * scale[:, :, None] + centre[:, :, None]).to(x_ptr.dtype.element_ty)
        at = x_ptr + rows[:, None] * (GROUPS * GROUP) + start * GROUP + k[None, :]
        inside = (rows < M)[:, None] & (k + start * GROUP < GROUPS * GROUP)[None, :]
        x = tl.load(at, mask=inside, other=0.0)
        sums = tl.dot(x, tl.trans(tl.reshape(lower, (COLUMNS, DEPTH * HALF))), sums)
        x = tl.load(at + HALF, mask=inside, other=0.0)
        sums = tl.dot(x, tl.trans(tl.reshape(upper, (COLUMNS, DEPTH * HALF))), sums)
    store_rows(sums, residual_ptr, y_ptr, rows, columns, M, N, RESIDUAL)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _dequantize_kernel(w_ptr, group_ptr, y_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    byte = tl.arange(0, HALF)
    valid = (group < count)[:, None]
    tile = tl.load(w_ptr + group[:, None] * HALF + byte[None, :], mask=valid, other=0)
    scale, centre = _nibble_scales(tl.load(group_ptr + group, mask=group < count, other=0))
    lower, upper = _nibbles_to_float(tile)
    at = y_ptr + group[:, None] * GROUP + byte[None, :]
    dtype = y_ptr.dtype.element_ty
    tl.store(at, (lower * scale[:, None] + centre[:, None]).to(dtype), mask=valid)
    tl.store(at + HALF, (upper * scale[:, None] + centre[:, None]).to(dtype), mask=valid)


def dequantize(weight: Tensor, groups: Tensor, dtype: torch.dtype) -> Tensor:
    """4-bit weights (N, K/2) with their groups → (N, K) in this dtype."""
    N, count = groups.shape
    y = torch.empty(N, count * 32, dtype=dtype, device=weight.device)
    _dequantize_kernel[(triton.cdiv(N * count, 256),)](weight, groups, y, N * count, 256, num_warps=4)
    return y


def matmul(x: Tensor, weight: Tensor, groups: Tensor, residual: Tensor | None = None) -> Tensor:
    """x (…, K) times 4-bit weights (N, K/2) with their groups, plus `residual` → (…, N)."""
    (N, count), M = groups.shape, x.numel() // x.shape[-1]
    if M > MAX_FUSED_ROWS:
        y = F.linear(x, dequantize(weight, groups, x.dtype))
        return y if residual is None else y.add_(residual)
    y = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    columns, depth = (32, 8) if N < 8192 else (128, 4)
    rows = min(64, max(16, triton.next_power_of_2(M)))
    _matmul_kernel[(triton.cdiv(N, columns), triton.cdiv(M, rows))](
        x, weight, groups, residual, y, M, N, count, residual is not None, rows, columns, depth,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return y
