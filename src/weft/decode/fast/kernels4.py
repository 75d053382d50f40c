"""Products with weights in 4 bits on a GPU, written in Triton: for one row as `kernels.py` has it, for some, for many.

A group is 32 neighbours of a row in 16 bytes: the first 16 in their lower halves, the others in the upper. It has a
scale and a centre, in bf16 in the lower and the upper half of a whole number: w ≈ scale · (u − 8) + centre, where u is
what a half byte holds.

Only `kernels.py` imports this file, and only where there is a GPU.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from torch.nn import functional as F

GROUP = tl.constexpr(32)
HALF = tl.constexpr(16)
MAX_FUSED_ROWS = 64  # of x, up to which weights become floats on their way, not beforehand


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def loaded(at, mask, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is there; a block that is WHOLE needs no mask."""
    return tl.load(at) if WHOLE else tl.load(at, mask=mask, other=0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def put_rows(y, residual_ptr, y_ptr, rows, columns, M, N: tl.constexpr, RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a block of a product (M, N), with what it is added to."""
    at = rows[:, None].to(tl.int64) * N + columns[None, :]
    kept = (rows < M)[:, None] & (columns < N)[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=kept, other=0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=kept)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _halves(tile, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 + u/16 of the lower and of the upper halves of bytes. Such a float has u behind its exponent: one move of bytes
    makes it, for a conversion of whole numbers is slow."""
    if ASM:
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
    else:
        lower = (tile & 15).to(tl.float32) / 16 + 1
        upper = (tile >> 4).to(tl.float32) / 16 + 1
    return lower, upper


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _scaled(both):  # type: ignore[no-untyped-def]
    """Scales times 16, and centres less 24 scales: what belongs to Σ (1 + u/16) x and to Σ x."""
    scale = (both << 16).to(tl.float32, bitcast=True)
    centre = (both & -0x10000).to(tl.float32, bitcast=True)
    return scale * 16, centre - scale * 24


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _dots(tile, lower_x, upper_x, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Σ (1 + u/16) x of every half of a group: tile (ROWS, BLOCK, 8), x (BLOCK, 8) → (ROWS, BLOCK)."""
    lower, upper = _halves(tile, ASM)
    return tl.sum(lower * lower_x[None, :, :] + upper * upper_x[None, :, :], axis=2)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def matvec_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, group_ptr, gain_ptr, residual_ptr, y_ptr, eps,
    N: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As the kernel of `kernels.py`, for weights (N, K/2) and groups (N, K/32); a BLOCK has halves of groups. They are
    always SCALED."""
    GROUPS: tl.constexpr = K // GROUP
    written = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = written[:, None].to(tl.int64)
    # half of a group's bytes a thread, and the x that belong to them, so that none of them changes hands
    piece = tl.arange(0, BLOCK)
    byte = tl.arange(0, 8)
    tiles = w_ptr + (rows * (2 * GROUPS) + piece[None, :])[:, :, None] * 8 + byte[None, None, :]
    # weights never change, so the first of them can be fetched before the kernel in front has ended
    scales = group_ptr + rows * GROUPS + (piece // 2)[None, :]
    ahead = (piece < 2 * GROUPS)[None, :]
    tile = loaded(tiles, ahead[:, :, None], BLOCK <= 2 * GROUPS)
    both = loaded(scales, ahead, BLOCK <= 2 * GROUPS)
    if GATED:
        tile_up = loaded(tiles + N * GROUPS * HALF, ahead[:, :, None], BLOCK <= 2 * GROUPS)
        both_up = loaded(scales + N * GROUPS, ahead, BLOCK <= 2 * GROUPS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    if GATED:
        others = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, 2 * GROUPS, BLOCK):
        here = start + piece
        inside = here < 2 * GROUPS
        columns = (here // 2)[:, None] * GROUP + (here % 2)[:, None] * 8 + byte[None, :]
        lower = loaded(x_ptr + columns, inside[:, None], start + BLOCK <= 2 * GROUPS).to(tl.float32)
        upper = loaded(x_ptr + columns + HALF, inside[:, None], start + BLOCK <= 2 * GROUPS).to(tl.float32)
        if NORM:
            squares += tl.sum(lower * lower + upper * upper, axis=1)
            lower *= loaded(gain_ptr + columns, inside[:, None], start + BLOCK <= 2 * GROUPS).to(tl.float32)
            upper *= loaded(gain_ptr + columns + HALF, inside[:, None], start + BLOCK <= 2 * GROUPS).to(tl.float32)
        total = tl.sum(lower + upper, axis=1)[None, :]
        scale, centre = _scaled(both)
        now = tile
        if GATED:
            scale_up, centre_up = _scaled(both_up)
            now_up = tile_up
        if start + BLOCK < 2 * GROUPS:  # the next tile is on its way while this one is multiplied
            ahead = (here + BLOCK < 2 * GROUPS)[None, :]
            tiles += BLOCK * 8
            scales += BLOCK // 2
            tile = loaded(tiles, ahead[:, :, None], start + 2 * BLOCK <= 2 * GROUPS)
            both = loaded(scales, ahead, start + 2 * BLOCK <= 2 * GROUPS)
            if GATED:
                tile_up = loaded(tiles + N * GROUPS * HALF, ahead[:, :, None], start + 2 * BLOCK <= 2 * GROUPS)
                both_up = loaded(scales + N * GROUPS, ahead, start + 2 * BLOCK <= 2 * GROUPS)
        sums += scale * _dots(now, lower, upper, ASM) + centre * total
        if GATED:
            others += scale_up * _dots(now_up, lower, upper, ASM) + centre_up * total
    y = tl.sum(sums, axis=1)
    if NORM:  # as in `kernels.py`; a function that both share is passed the sum of squares where nothing is normed, too
        root = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= root
    if GATED:
        up = tl.sum(others, axis=1)
        if NORM:
            up *= root
        y = y / (1 + tl.exp(-y)) * up
    if RESIDUAL:
        y += tl.load(residual_ptr + written).to(tl.float32)
    tl.store(y_ptr + written, y.to(y_ptr.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def product_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, group_ptr, residual_ptr, y_ptr, M,
    N: tl.constexpr, GROUPS: tl.constexpr, RESIDUAL: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    DEEP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * HIGH + tl.arange(0, HIGH)
    columns = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    group = tl.arange(0, DEEP)
    byte = tl.arange(0, HALF)
    depth = tl.arange(0, DEEP * HALF)
    place = (depth // HALF) * GROUP + depth % HALF
    first = columns[:, None].to(tl.int64) * GROUPS + group[None, :]
    sums = tl.zeros((HIGH, WIDE), tl.float32)
    for start in range(0, GROUPS, DEEP):
        there = (columns < N)[:, None] & (start + group < GROUPS)[None, :]
        tile = tl.load(
            w_ptr + (first + start)[:, :, None] * HALF + byte[None, None, :], mask=there[:, :, None], other=0
        )
        scale, centre = _scaled(tl.load(group_ptr + first + start, mask=there, other=0))
        lower, upper = _halves(tile, ASM)
        lower = (lower * scale[:, :, None] + centre[:, :, None]).to(x_ptr.dtype.element_ty)
        upper = (upper * scale[:, :, None] + centre[:, :, None]).to(x_ptr.dtype.element_ty)
        at = x_ptr + rows[:, None] * (GROUPS * GROUP) + start * GROUP + place[None, :]
        read = (rows < M)[:, None] & (place + start * GROUP < GROUPS * GROUP)[None, :]
        x = tl.load(at, mask=read, other=0.0)
        sums = tl.dot(x, tl.trans(tl.reshape(lower, (WIDE, DEEP * HALF))), sums)
        x = tl.load(at + HALF, mask=read, other=0.0)
        sums = tl.dot(x, tl.trans(tl.reshape(upper, (WIDE, DEEP * HALF))), sums)
    put_rows(sums, residual_ptr, y_ptr, rows, columns, M, N, RESIDUAL)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _widen_kernel(w_ptr, group_ptr, y_ptr, count, BLOCK: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    byte = tl.arange(0, HALF)
    there = (group < count)[:, None]
    tile = tl.load(w_ptr + group[:, None] * HALF + byte[None, :], mask=there, other=0)
    scale, centre = _scaled(tl.load(group_ptr + group, mask=group < count, other=0))
    lower, upper = _halves(tile, ASM)
    at = y_ptr + group[:, None] * GROUP + byte[None, :]
    kind = y_ptr.dtype.element_ty
    tl.store(at, (lower * scale[:, None] + centre[:, None]).to(kind), mask=there)
    tl.store(at + HALF, (upper * scale[:, None] + centre[:, None]).to(kind), mask=there)


def widen(weight: Tensor, groups: Tensor, dtype: torch.dtype) -> Tensor:
    """4-bit weights (N, K/2) with their groups as numbers (N, K)."""
    N, count = groups.shape
    y = torch.empty(N, count * 32, dtype=dtype, device=weight.device)
    _widen_kernel[(triton.cdiv(N * count, 256),)](weight, groups, y, N * count, 256, weight.is_cuda, num_warps=4)
    return y


def product(x: Tensor, weight: Tensor, groups: Tensor, residual: Tensor | None = None) -> Tensor:
    """x (…, K) times 4-bit weights (N, K/2) with their groups, plus `residual`: → (…, N)."""
    (N, count), M = groups.shape, x.numel() // x.shape[-1]
    if M > MAX_FUSED_ROWS:
        y = F.linear(x, widen(weight, groups, x.dtype))
        return y if residual is None else y.add_(residual)
    y = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    wide, deep = (32, 8) if N < 8192 else (128, 4)
    high = min(64, max(16, triton.next_power_of_2(M)))
    product_kernel[(triton.cdiv(N, wide), triton.cdiv(M, high))](
        x, weight, groups, residual, y, M, N, count, residual is not None, high, wide, deep, x.is_cuda,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return y
