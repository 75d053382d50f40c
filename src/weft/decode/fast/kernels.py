"""Kernels of a decode step on a GPU, in Triton: a step of a small batch is bound by the memory it reads.

A matrix times one vector reads the matrix once. The norm before it and the gate or residual after it are fused, so a
layer is four such products and one attention (`attend.py`). Each kernel may start while the previous one finishes (PDL,
programmatic dependent launch): it loads its first weights, then waits for its input. Imported only with a GPU.
"""

import tomllib
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.decode.fast import kernels4
from weft.decode.fast.kernels4 import load_block

# Tiles of a matrix–vector product: rows, columns and bits of a matrix → rows and columns of a tile, and warps.
Tile = tuple[int, int, int]
_TILES = tomllib.loads(Path(__file__).with_name("tiles.toml").read_text(encoding="utf-8"))["tiles"]
TILES: dict[tuple[int, int, int], Tile] = {tuple(matrix): tuple(tile) for matrix, tile in _TILES}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def to_float(tile):  # type: ignore[no-untyped-def]
    """Convert to float32; 8-bit numbers q become 128.5 + q/256.

    An integer conversion is eight times slower than a product. But 128 + u/256 is a float whose third byte is u, so a
    byte permutation makes it; u = q + 128 is q with its first bit flipped.
    """
    if tile.dtype == tl.int8:
        converted = tl.inline_asm_elementwise(
            """{
            .reg .b32 u;
            xor.b32 u, $4, 0x80808080;
            prmt.b32 $0, u, 0x43000000, 0x7404;
            prmt.b32 $1, u, 0x43000000, 0x7414;
            prmt.b32 $2, u, 0x43000000, 0x7424;
            prmt.b32 $3, u, 0x43000000, 0x7434;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [tile],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    elif tile.dtype == tl.bfloat16:
        converted = tl.inline_asm_elementwise(
            "shl.b32 $0,$2,16; and.b32 $1,$2,0xffff0000;", "=&r,=r,r", [tile], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        converted = tile.to(tl.float32)
    return converted


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _matvec_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, gain_ptr, residual_ptr, y_ptr, eps,
    N: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # A thread has eight consecutive columns of both the weights and x, so nothing moves between threads.
    column = tl.max_contiguous(tl.arange(0, BLOCK), 8)
    tiles = w_ptr + rows[:, None].to(tl.int64) * K + column[None, :]
    # Weights never change, so the first ones are loaded before the previous kernel has finished.
    tile = load_block(tiles, (column < K)[None, :], BLOCK <= K)
    if GATED:
        tile_up = load_block(tiles + N * K, (column < K)[None, :], BLOCK <= K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    if GATED:
        sums_up = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    xs = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        here = start + column
        x = to_float(load_block(x_ptr + here, here < K, start + BLOCK <= K))
        if NORM:
            squares += x * x
            x *= to_float(load_block(gain_ptr + here, here < K, start + BLOCK <= K))
        if SCALED:
            xs += x
        now = tile
        if GATED:
            now_up = tile_up
        if start + BLOCK < K:  # load the next tile while this one is multiplied
            ahead = (here + BLOCK < K)[None, :]
            tile = load_block(tiles + (start + BLOCK), ahead, start + 2 * BLOCK <= K)
            if GATED:
                tile_up = load_block(tiles + (N * K + start + BLOCK), ahead, start + 2 * BLOCK <= K)
        sums += to_float(now) * x[None, :]
        if GATED:
            sums_up += to_float(now_up) * x[None, :]
    if SCALED:  # Σ (128.5 + q/256) x − 128.5 Σ x, lane by lane: the difference of the full sums would lose digits
        sums -= 128.5 * xs[None, :]
        if GATED:
            sums_up -= 128.5 * xs[None, :]
    y = tl.sum(sums, axis=1)
    if SCALED:
        y *= 256 * tl.load(scale_ptr + rows).to(tl.float32)
    if NORM:  # gain · x / RMS(x): the root is one number per row, so it is applied last
        root = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= root
    if GATED:
        up = tl.sum(sums_up, axis=1)
        if SCALED:
            up *= 256 * tl.load(scale_ptr + N + rows).to(tl.float32)
        if NORM:
            up *= root
        y = y / (1 + tl.exp(-y)) * up
    if RESIDUAL:
        y += tl.load(residual_ptr + rows).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gate_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside, other=0).to(tl.float32)
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _argmax_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, step_ptr, history_ptr, tokens_ptr, stride, V, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    ids = tl.zeros((BLOCK,), tl.int32)
    nans = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        here = start + column
        x = tl.load(logits_ptr + row.to(tl.int64) * stride + here, mask=here < V, other=float("-inf")).to(tl.float32)
        nans += (x != x).to(tl.int32)
        higher = x > peaks  # the first of equals wins
        ids = tl.where(higher, here, ids)
        peaks = tl.where(higher, x, peaks)
    peak = tl.max(peaks, axis=0)
    best = tl.min(tl.where(peaks == peak, ids, V), axis=0)
    finite = (tl.sum(nans, axis=0) == 0) & (peak > float("-inf")) & (peak < float("inf"))
    step = tl.load(step_ptr)
    tl.store(history_ptr + step * tl.num_programs(0) + row, tl.where(finite, best, -1).to(tl.int64))
    tl.store(tokens_ptr + row, tl.where(finite, best, 0).to(tl.int64))


def matvec_tile(N: int, K: int, bits: int) -> Tile:
    """Rows and columns of a tile, and warps, for a matrix (N, K): enough loads in flight to saturate the memory."""
    unit, per_warp = (32, 32) if bits == 4 else (1, 256)  # columns in a unit, and units that a warp reads
    rows, block, warps = fitted(TILES.get((N, K, bits), (4, 64, 2) if bits == 4 else (4, 1024, 4)), N, K // unit)
    return rows, block, max(1, min(warps, block // per_warp))


def fitted(tile: Tile, N: int, K: int) -> Tile:
    """Make a tile fit a matrix (N, K): its rows divide N, and it has no more columns than are needed."""
    rows, block, warps = tile
    while N % rows:
        rows //= 2
    return rows, min(triton.next_power_of_2(K), block), warps


def matvec(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    pdl: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Multiply weight (N, K) by x (1, K), in one pass over the weights → (1, N), or (1, N/2) if `gated`.

    With `scale` (N,) the weights are 8-bit integers, with (N, K/32) 4-bit ones (`kernels4.py`). With `gain` (K,) x is
    normalised first (RMSNorm). `gated` returns silu of the first half times the second. `residual` is added last.
    """
    (rows, K), four = (len(weight), x.shape[1]), weight.dtype == torch.uint8
    N = rows // 2 if gated else rows
    y = torch.empty(1, N, dtype=x.dtype, device=x.device) if out is None else out
    height, block, warps = tile or matvec_tile(N, K, 4 if four else 8 * weight.element_size())
    assert N % height == 0
    if four:
        assert scale is not None
        quantized = kernels4.quantize(x, gain, eps, pdl)
        kernels4.matvec(quantized, (weight, scale), residual, gated, y, (height, block, warps), pdl)
        return y
    _matvec_kernel[(N // height,)](
        x, weight, scale, gain, residual, y, eps, N, K,
        scale is not None, gain is not None, gated, residual is not None, height, block, pdl,
        num_warps=warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return y


def gate(x: Tensor) -> Tensor:
    """Multiply silu of the first half of x (rows, 2 · width) by the second → (rows, width)."""
    rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    _gate_kernel[(rows, triton.cdiv(width, block))](x, y, width, block, num_warps=4)
    return y


def argmax_tokens(logits: Tensor, vocab_size: int, step: Tensor, history: Tensor) -> Tensor:
    """Return the likeliest of the first `vocab_size` tokens of logits (rows, V), (rows,), and store them in `history`
    (steps, rows) at index `step` (1,). Where a logit is NaN or the largest is infinite, 0 is returned and −1 stored."""
    tokens = torch.empty(logits.shape[0], dtype=torch.long, device=logits.device)
    assert logits.stride(1) == 1 and history.is_contiguous()
    block = min(8192, triton.next_power_of_2(vocab_size))
    _argmax_kernel[(logits.shape[0],)](
        logits, step, history, tokens, logits.stride(0), vocab_size, block, num_warps=max(1, block // 512)
    )
    return tokens


def has_pdl(device: Any) -> bool:
    """Whether a kernel may overlap with the previous one: on Hopper and later."""
    return torch.cuda.get_device_capability(device)[0] >= 9 and hasattr(tl.extra.cuda, "gdc_wait")
