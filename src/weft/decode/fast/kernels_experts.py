"""Kernels of a mixture of experts that reads one token on a GPU, in Triton. Only the chosen experts' weights are read.

Each program finds the chosen experts itself from the router's logits, which are few: a kernel of its own for the choice
would take longer. An expert's rank is the number of experts with higher scores, so that no program waits for another,
and experts with equal scores are ranked by number.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.decode.fast.kernels import Tile, fitted, matvec, to_float
from weft.decode.fast.kernels4 import load_block
from weft.decode.fast.native import SCORES
from weft.nn import config
from weft.nn.experts import Experts

# rows and columns of a tile, and warps: the fastest of 18 on an H200 for 8 of 64 experts of (1024, 2048)
GATE_UP_TILE, DOWN_TILE = (32, 256, 8), (8, 1024, 4)
STRIP = 32  # scores that an expert's own is compared with at a time


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _scores(logits, bias_ptr, expert, peak, total, E: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of these experts, and what they are ranked by."""
    scores = logits
    if SCORE == 0:
        scores = tl.exp(logits - peak) / total
    if SCORE == 2:
        scores = 1 / (1 + tl.exp(-logits))
    ranked = scores
    if BIASED:
        ranked += tl.load(bias_ptr + expert, mask=expert < E, other=0.0).to(tl.float32)
    return scores, tl.where(expert < E, ranked, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _choose(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, scale, E: tl.constexpr, SIZE: tl.constexpr, STRIP: tl.constexpr, CHOSEN: tl.constexpr,
    SCORE: tl.constexpr, RENORMALISED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Rank of each expert, and the weight of its output, 0 unless it is chosen, both (SIZE,)."""
    expert = tl.arange(0, SIZE)
    logits = tl.load(logits_ptr + expert, mask=expert < E, other=float("-inf"))
    peak = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - peak), axis=0)
    scores, ranked = _scores(logits, bias_ptr, expert, peak, total, E, SCORE, BIASED)
    rank = tl.zeros((SIZE,), tl.int32)
    for start in tl.static_range(0, SIZE, STRIP):
        other = start + tl.arange(0, STRIP)
        theirs = tl.load(logits_ptr + other, mask=other < E, other=float("-inf"))
        _, theirs = _scores(theirs, bias_ptr, other, peak, total, E, SCORE, BIASED)
        earlier = other[None, :] < expert[:, None]
        above = (theirs[None, :] > ranked[:, None]) | ((theirs[None, :] == ranked[:, None]) & earlier)
        rank += tl.sum(above.to(tl.int32), axis=1)
    chosen = (rank < CHOSEN) & (expert < E)
    if SCORE == 1:
        scores = tl.exp(scores - peak)
    weights = tl.where(chosen, scores, 0.0)
    if RENORMALISED:
        weights /= tl.sum(weights, axis=0) + 1e-20
    return rank, weights * scale


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _ranked(number, rank, E: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of this rank. With NaN among the logits ranks are not unique: it stays within bounds."""
    expert = tl.sum(tl.where(rank == number, tl.arange(0, SIZE), 0), axis=0)
    return tl.minimum(expert, E - 1).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, gain_ptr, logits_ptr, bias_ptr, y_ptr, eps,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, STRIP: tl.constexpr, CHOSEN: tl.constexpr,
    SCORE: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.max_contiguous(tl.arange(0, BLOCK), 8)
    gain = load_block(gain_ptr + column, column < K, BLOCK <= K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_ahead = load_block(x_ptr + column, column < K, BLOCK <= K)
    number = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    rank, _ = _choose(logits_ptr, bias_ptr, 1.0, E, SIZE, STRIP, CHOSEN, SCORE, False, BIASED)
    tiles = w_ptr + (_ranked(number, rank, E, SIZE) * 2 * N + rows[:, None]) * K + column[None, :]
    gate = load_block(tiles, (column < K)[None, :], BLOCK <= K)
    up = load_block(tiles + N * K, (column < K)[None, :], BLOCK <= K)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    sums_up = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        x = to_float(x_ahead)
        squares += x * x
        x *= to_float(gain)
        gate_now, up_now = gate, up
        if start + BLOCK < K:  # load the next tiles while these are multiplied
            here = start + BLOCK + column
            gate = load_block(tiles + (start + BLOCK), (here < K)[None, :], start + 2 * BLOCK <= K)
            up = load_block(tiles + (N * K + start + BLOCK), (here < K)[None, :], start + 2 * BLOCK <= K)
            x_ahead = load_block(x_ptr + here, here < K, start + 2 * BLOCK <= K)
            gain = load_block(gain_ptr + here, here < K, start + 2 * BLOCK <= K)
        sums += to_float(gate_now) * x[None, :]
        sums_up += to_float(up_now) * x[None, :]
    root = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    gate = tl.sum(sums, axis=1) * root
    y = gate / (1 + tl.exp(-gate)) * (tl.sum(sums_up, axis=1) * root)
    tl.store(y_ptr + number * N + rows, y.to(y_ptr.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, residual_ptr, logits_ptr, bias_ptr, y_ptr, scale,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, STRIP: tl.constexpr, CHOSEN: tl.constexpr,
    SCORE: tl.constexpr, RENORMALISED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.max_contiguous(tl.arange(0, BLOCK), 8)
    # The previous kernel let this one start after it had waited for the router's, so the logits are complete.
    rank, weights = _choose(logits_ptr, bias_ptr, scale, E, SIZE, STRIP, CHOSEN, SCORE, RENORMALISED, BIASED)
    tiles = w_ptr + (_ranked(0, rank, E, SIZE) * N + rows[:, None]) * K + column[None, :]
    tile = load_block(tiles, (column < K)[None, :], BLOCK <= K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for number in tl.static_range(CHOSEN):
        weight = tl.sum(tl.where(rank == number, weights, 0.0), axis=0)
        following = w_ptr + (_ranked(number + 1, rank, E, SIZE) * N + rows[:, None]) * K + column[None, :]
        for start in tl.static_range(0, K, BLOCK):
            here = start + column
            now = tile
            if start + BLOCK < K:  # load the next tile while this one is multiplied
                tile = load_block(tiles + (start + BLOCK), (here + BLOCK < K)[None, :], start + 2 * BLOCK <= K)
            elif number + 1 < CHOSEN:
                tile = load_block(following, (column < K)[None, :], BLOCK <= K)
            x = to_float(load_block(x_ptr + number * K + here, here < K, start + BLOCK <= K))
            sums += to_float(now) * (weight * x)[None, :]
        tiles = following
    y = tl.sum(sums, axis=1) + tl.load(residual_ptr + rows).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty))


def fits(settings: config.Experts) -> bool:
    """Whether the kernels compute this mixture."""
    plain = settings.score in SCORES and settings.weighs == "output" and settings.shared != "gated"
    every = (settings.kept_groups or settings.groups) == settings.groups
    gated = settings.activation == "silu" and settings.beta == 1.0 and settings.limit is None and not settings.up_offset
    return plain and every and gated and not (settings.bias or settings.router_bias)


def mixture(
    layer: Experts,
    x: Tensor,
    norm: Any,
    *,
    residual: Tensor,
    pdl: bool = False,
    tiles: tuple[Tile, Tile] = (GATE_UP_TILE, DOWN_TILE),
) -> Tensor:
    """residual + the experts' mixture of RMSNorm(x) (1, d_model) → (1, d_model), without shared experts."""
    settings, router, gate_up, down = layer.settings, layer.router, layer.experts.gate_up, layer.experts.down
    E, d_model, d_ff = down.shape
    logits = torch.empty(1, E, dtype=torch.float32, device=x.device)
    matvec(x, router.weight, None, norm.weight, norm.eps, out=logits, pdl=pdl)
    choice = (E, max(STRIP, triton.next_power_of_2(E)), STRIP, settings.chosen, SCORES[settings.score])
    renormalised, biased = settings.score == "softmax-chosen" or settings.renormalised, router.choice_bias is not None
    launch = {"launch_pdl": True} if pdl else {}
    hidden, y = x.new_empty(settings.chosen, d_ff), x.new_empty(1, d_model)
    rows, block, warps = fitted(tiles[0], d_ff, d_model)
    _gate_up_kernel[(settings.chosen, d_ff // rows)](
        x, gate_up, norm.weight, logits, router.choice_bias, hidden, norm.eps, d_ff, d_model,
        *choice, biased, rows, block, pdl, num_warps=warps, **launch,
    )  # fmt: skip
    rows, block, warps = fitted(tiles[1], d_model, d_ff)
    _down_kernel[(d_model // rows,)](
        hidden, down, residual, logits, router.choice_bias, y, settings.scale, d_model, d_ff,
        *choice, renormalised, biased, rows, block, pdl, num_warps=warps, **launch,
    )  # fmt: skip
    return y
