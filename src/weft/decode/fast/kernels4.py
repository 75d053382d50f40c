"""Products with weights in 4 bits on a GPU, written in Triton: for one row as `kernels.py` has it, for some, for many.

One row is rounded to 8 bits first, as it is on a CPU: whole numbers are multiplied four at a time, where making floats
of 4-bit weights takes longer than reading them.

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
ROUNDING = tl.constexpr(12582912.0)  # 1.5 · 2²³
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
def _parted(both):  # type: ignore[no-untyped-def]
    """Scales, and centres."""
    return (both << 16).to(tl.float32, bitcast=True), (both & -0x10000).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _scaled(both):  # type: ignore[no-untyped-def]
    """Scales times 16, and centres less 24 scales: what belongs to Σ (1 + u/16) x and to Σ x."""
    scale, centre = _parted(both)
    return scale * 16, centre - scale * 24


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _round_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gain_ptr, q_ptr, scale_ptr, eps, K: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """x (K,), normed, as whole numbers from −127 to 127 with a scale a group, and the sum of what they stand for. A
    norm needs all groups in one program."""
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = (group < K // GROUP)[:, None]
    if PDL:  # the product behind this fetches weights first, so it may start at once
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + at, mask=there, other=0).to(tl.float32)
    root = 1.0
    if NORM:  # gain · x / RMS(x)
        root = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / K + eps)
        x *= tl.load(gain_ptr + at, mask=there, other=0).to(tl.float32)
    most = tl.max(tl.abs(x), axis=1)
    # a float to which 1.5 · 2²³ is added has its nearest whole number in its lowest bits
    q = x * tl.where(most > 1e-30, 127.0 / most, 0.0)[:, None] + ROUNDING
    scale = most * root / 127.0
    inside = group < K // GROUP
    tl.store(q_ptr + at, q.to(tl.int32, bitcast=True).to(tl.int8), mask=there)
    tl.store(scale_ptr + 2 * group, scale, mask=inside)
    tl.store(scale_ptr + 2 * group + 1, scale * tl.sum(q - ROUNDING, axis=1), mask=inside)


def rounded(x: Tensor, gain: Tensor | None, eps: float, pdl: bool) -> tuple[Tensor, Tensor]:
    """x (1, K), normed if there is a `gain`, in 8 bits (K,), and a scale and a sum for each group (K/32, 2)."""
    K = x.shape[1]
    q = torch.empty(K, dtype=torch.int8, device=x.device)
    scales = torch.empty(K // 32, 2, dtype=torch.float32, device=x.device)
    groups = K // 32
    block = 16 if gain is None else triton.next_power_of_2(groups)
    _round_kernel[(triton.cdiv(groups, block),)](
        x, gain, q, scales, eps, K, gain is not None, block, pdl,
        num_warps=min(16, max(1, block // 8)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return q, scales


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _dots(tile, lower_x, upper_x, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Σ u q of every group: tile (ROWS, BLOCK, 16), q (BLOCK, 16) of the lower and of the upper halves → (ROWS, BLOCK).

    Four bytes are multiplied and added up by one instruction; three of the four numbers that come back are 0, and
    adding them costs nothing. A sum below 2²² becomes a float as in `_round_kernel`, for a conversion is slow.
    """
    if ASM:
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
    else:
        sums = (tile & 15).to(tl.int32) * lower_x[None, :, :] + (tile >> 4).to(tl.int32) * upper_x[None, :, :]
    return (tl.sum(sums, axis=2) + 0x4B400000).to(tl.float32, bitcast=True) - ROUNDING


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _matvec_kernel(  # type: ignore[no-untyped-def]
    q_ptr, x_scale_ptr, w_ptr, group_ptr, residual_ptr, y_ptr,
    N: tl.constexpr, GROUPS: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As the kernel of `kernels.py`, for weights (N, K/2), groups (N, K/32) and x in 8 bits; a BLOCK has groups."""
    written = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = written[:, None].to(tl.int64)
    # a group's bytes a thread, and the x that belong to them, so that none of them changes hands
    group = tl.arange(0, BLOCK)
    byte = tl.arange(0, HALF)
    scales = group_ptr + rows * GROUPS + group[None, :]
    tiles = w_ptr + (rows * GROUPS + group[None, :])[:, :, None] * HALF + byte[None, None, :]
    # weights never change, so the first of them can be fetched before the kernel in front has ended
    ahead = (group < GROUPS)[None, :]
    tile = loaded(tiles, ahead[:, :, None], BLOCK <= GROUPS)
    both = loaded(scales, ahead, BLOCK <= GROUPS)
    if GATED:
        tile_up = loaded(tiles + N * GROUPS * HALF, ahead[:, :, None], BLOCK <= GROUPS)
        both_up = loaded(scales + N * GROUPS, ahead, BLOCK <= GROUPS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    if GATED:
        others = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.static_range(0, GROUPS, BLOCK):
        here = start + group
        inside = here < GROUPS
        at = q_ptr + here[:, None] * GROUP + byte[None, :]
        lower = loaded(at, inside[:, None], start + BLOCK <= GROUPS)
        upper = loaded(at + HALF, inside[:, None], start + BLOCK <= GROUPS)
        x_scale = loaded(x_scale_ptr + 2 * here, inside, start + BLOCK <= GROUPS)[None, :]
        total = loaded(x_scale_ptr + 2 * here + 1, inside, start + BLOCK <= GROUPS)[None, :]
        now, now_both = tile, both
        if GATED:
            now_up, now_both_up = tile_up, both_up
        if start + BLOCK < GROUPS:  # the next tile is on its way while this one is multiplied
            ahead = (here + BLOCK < GROUPS)[None, :]
            tiles += BLOCK * HALF
            scales += BLOCK
            tile = loaded(tiles, ahead[:, :, None], start + 2 * BLOCK <= GROUPS)
            both = loaded(scales, ahead, start + 2 * BLOCK <= GROUPS)
            if GATED:
                tile_up = loaded(tiles + N * GROUPS * HALF, ahead[:, :, None], start + 2 * BLOCK <= GROUPS)
                both_up = loaded(scales + N * GROUPS, ahead, start + 2 * BLOCK <= GROUPS)
        scale, centre = _parted(now_both)
        sums += scale * (x_scale * _dots(now, lower, upper, ASM) - 8 * total) + centre * total
        if GATED:
            scale, centre = _parted(now_both_up)
            others += scale * (x_scale * _dots(now_up, lower, upper, ASM) - 8 * total) + centre * total
    y = tl.sum(sums, axis=1)
    if GATED:
        y = y / (1 + tl.exp(-y)) * tl.sum(others, axis=1)
    if RESIDUAL:
        y += tl.load(residual_ptr + written).to(tl.float32)
    tl.store(y_ptr + written, y.to(y_ptr.dtype.element_ty))


def matvec(
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    residual: Tensor | None,
    gated: bool,
    y: Tensor,
    tile: tuple[int, int, int],
    pdl: bool,
) -> None:
    """Weights (rows, K/2) with their groups times x, which is `rounded`, into y (1, N)."""
    height, block, warps = tile
    N, groups = y.shape[1], weight[1].shape[1]
    _matvec_kernel[(N // height,)](
        *x, *weight, residual, y, N, groups, gated, residual is not None, height, block, pdl, y.is_cuda,
        num_warps=warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


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
