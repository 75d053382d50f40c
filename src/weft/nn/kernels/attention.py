"""GPU kernels of `attention_paths.dropout_attention` that never materialise the probabilities (Dao 2023).

PyTorch's fused kernels draw dropout from a row's index in the batch of one process. These drop the same elements as
`dropout.drop_values`: those where the hash of the query's key and the column is small. The backward pass hashes again,
and saves only the output, one value per query, and the keys. torch.compile treats the operations as opaque.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.nn.dropout import threshold
from weft.nn.kernels.dropout import GOLDEN, last_hash
from weft.nn.native import empty_token_major

LOG2E = 1.4426950408889634
# Tile sizes, the fastest on an H200. Tiles of 32 queries give wrong gradients there: Triton 3.6 overwrites operands of
# a product that is still reading them.
QUERIES, KEYS = 64, 64


@triton.jit
def _dropped(keys, columns, limit):  # type: ignore[no-untyped-def]
    """Whether each probability (queries, columns) is dropped."""
    return last_hash(keys[:, None] + columns[None, :] * GOLDEN) < limit


@triton.jit
def _visible(  # type: ignore[no-untyped-def]
    batch, rows, columns, T, S, real, documents,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, REAL: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """`Mask.visible` of a tile of queries and keys."""
    visible = (rows[:, None] < T) & (columns[None, :] < S)
    if CAUSAL:
        visible = visible & (columns[None, :] <= rows[:, None])
    if WINDOW > 0:
        visible = visible & (columns[None, :] > rows[:, None] - WINDOW)
        if not CAUSAL:
            visible = visible & (columns[None, :] < rows[:, None] + WINDOW)
    if REAL:
        visible = visible & (tl.load(real + batch * S + columns, mask=columns < S, other=0) != 0)[None, :]
    if DOCUMENTS:
        query_ids = tl.load(documents + batch * T + rows, mask=rows < T, other=-1)
        key_ids = tl.load(documents + batch * T + columns, mask=columns < S, other=-2)
        visible = visible & (query_ids[:, None] == key_ids[None, :])
    return visible


@triton.jit
def _key_range(start, T, S, BLOCK: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Range [low, high) of keys that `BLOCK` queries from `start` on may see, in steps of `STEP`."""
    low = 0
    high = S
    if CAUSAL:
        high = tl.minimum(S, start + BLOCK)
    elif WINDOW > 0:
        high = tl.minimum(S, start + BLOCK + WINDOW - 1)
    if WINDOW > 0:
        low = tl.maximum(0, start - WINDOW + 1) // STEP * STEP
    return low, high


@triton.jit
def _query_range(start, T, S, BLOCK: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Range [low, high) of queries that may see the `BLOCK` keys from `start` on, in steps of `STEP`."""
    low = 0
    high = T
    if CAUSAL:
        low = start // STEP * STEP
    elif WINDOW > 0:
        low = tl.maximum(0, start - WINDOW + 1) // STEP * STEP
    if WINDOW > 0:
        high = tl.minimum(T, start + BLOCK + WINDOW - 1)
    return low, high


@triton.jit
def _load(base, rows, stride, T, D: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Vectors (rows, d_head) of one head, zero-padded."""
    width = tl.arange(0, WIDE)
    inside = (rows[:, None] < T) & (width[None, :] < D)
    return tl.load(base + rows[:, None] * stride + width[None, :], mask=inside, other=0.0)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, keys, real, documents,
    scale, limit, keep_scale,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot,
    T, S,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, REAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    start, head_row = tl.program_id(0) * QUERIES, tl.program_id(1)
    batch, head = (head_row // H).to(tl.int64), head_row % H
    rows = start + tl.arange(0, QUERIES)
    q_tile = _load(q + batch * qb + head * qh, rows, qt, T, D, WIDE)
    random_keys = tl.load(keys + head_row.to(tl.int64) * T + rows, mask=rows < T, other=0)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out_tile = tl.zeros((QUERIES, WIDE), tl.float32)
    low, high = _key_range(start, T, S, QUERIES, KEYS, CAUSAL, WINDOW)
    for first in range(low, high, KEYS):
        columns = first + tl.arange(0, KEYS)
        k_tile = _load(k + batch * kb + (head // GROUP) * kh, columns, kt, S, D, WIDE)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        visible = _visible(batch, rows, columns, T, S, real, documents, CAUSAL, WINDOW, REAL, DOCUMENTS)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # a query that has seen no key yet
        p = tl.exp2(scores - finite[:, None])
        decay = tl.exp2(top - finite)
        total = total * decay + tl.sum(p, 1)
        p = tl.where(_dropped(random_keys, columns, limit), 0.0, p)
        v_tile = _load(v + batch * vb + (head // GROUP) * vh, columns, vt, S, D, WIDE)
        out_tile = out_tile * decay[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        top = new_top
    sees_any = total > 0.0
    out_tile = out_tile * (keep_scale / tl.where(sees_any, total, 1.0))[:, None]
    width = tl.arange(0, WIDE)
    inside = (rows[:, None] < T) & (width[None, :] < D)
    tl.store(out + batch * ob + head * oh + rows[:, None] * ot + width[None, :], out_tile, mask=inside)
    norm = tl.where(sees_any, top + tl.log2(tl.where(sees_any, total, 1.0)), float("inf"))
    tl.store(lse + head_row.to(tl.int64) * T + rows, norm, mask=rows < T)


@triton.jit
def _tile_gradients(  # type: ignore[no-untyped-def]
    q_tile, k_tile, v_tile, d_out, random_keys, norm, mean, visible, columns,
    scale, limit, keep_scale,
):  # fmt: skip
    """Probabilities of a tile of queries and keys after dropout, and the gradient of the scores."""
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
    p = tl.where(visible, tl.exp2(scores - norm[:, None]), 0.0)
    dropped = _dropped(random_keys, columns, limit)
    dp = tl.dot(d_out, tl.trans(v_tile), input_precision="ieee")
    ds = p * (tl.where(dropped, 0.0, dp * keep_scale) - mean[:, None])
    return tl.where(dropped, 0.0, p * keep_scale), ds


@triton.jit
def _backward_keys(  # type: ignore[no-untyped-def]
    q, k, v, up, dk, dv, lse, delta, keys, real, documents,
    scale, limit, keep_scale, slope,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ub, uh, ut, gb, gh, gt,
    T, S,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, REAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, separately for each head of queries."""
    start, head_row = tl.program_id(0) * KEYS, tl.program_id(1)
    batch, head = (head_row // H).to(tl.int64), head_row % H
    columns = start + tl.arange(0, KEYS)
    k_tile = _load(k + batch * kb + (head // GROUP) * kh, columns, kt, S, D, WIDE)
    v_tile = _load(v + batch * vb + (head // GROUP) * vh, columns, vt, S, D, WIDE)
    dk_tile = tl.zeros((KEYS, WIDE), tl.float32)
    dv_tile = tl.zeros((KEYS, WIDE), tl.float32)
    low, high = _query_range(start, T, S, KEYS, QUERIES, CAUSAL, WINDOW)
    for first in range(low, high, QUERIES):
        rows = first + tl.arange(0, QUERIES)
        q_tile = _load(q + batch * qb + head * qh, rows, qt, T, D, WIDE)
        d_out = _load(up + batch * ub + head * uh, rows, ut, T, D, WIDE)
        row = head_row.to(tl.int64) * T + rows
        random_keys = tl.load(keys + row, mask=rows < T, other=0)
        norm = tl.load(lse + row, mask=rows < T, other=float("inf"))
        mean = tl.load(delta + row, mask=rows < T, other=0.0)
        visible = _visible(batch, rows, columns, T, S, real, documents, CAUSAL, WINDOW, REAL, DOCUMENTS)
        p, ds = _tile_gradients(
            q_tile, k_tile, v_tile, d_out, random_keys, norm, mean, visible, columns, scale, limit, keep_scale
        )
        dv_tile += tl.dot(tl.trans(p.to(d_out.dtype)), d_out, input_precision="ieee")
        dk_tile += tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, input_precision="ieee")
    width = tl.arange(0, WIDE)
    inside = (columns[:, None] < S) & (width[None, :] < D)
    target = batch * gb + head * gh + columns[:, None] * gt + width[None, :]
    tl.store(dk + target, dk_tile * slope, mask=inside)
    tl.store(dv + target, dv_tile, mask=inside)


@triton.jit
def _backward_queries(  # type: ignore[no-untyped-def]
    q, k, v, up, dq, lse, delta, keys, real, documents,
    scale, limit, keep_scale, slope,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ub, uh, ut, gb, gh, gt,
    T, S,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, REAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    start, head_row = tl.program_id(0) * QUERIES, tl.program_id(1)
    batch, head = (head_row // H).to(tl.int64), head_row % H
    rows = start + tl.arange(0, QUERIES)
    q_tile = _load(q + batch * qb + head * qh, rows, qt, T, D, WIDE)
    d_out = _load(up + batch * ub + head * uh, rows, ut, T, D, WIDE)
    row = head_row.to(tl.int64) * T + rows
    random_keys = tl.load(keys + row, mask=rows < T, other=0)
    norm = tl.load(lse + row, mask=rows < T, other=float("inf"))
    mean = tl.load(delta + row, mask=rows < T, other=0.0)
    dq_tile = tl.zeros((QUERIES, WIDE), tl.float32)
    low, high = _key_range(start, T, S, QUERIES, KEYS, CAUSAL, WINDOW)
    for first in range(low, high, KEYS):
        columns = first + tl.arange(0, KEYS)
        k_tile = _load(k + batch * kb + (head // GROUP) * kh, columns, kt, S, D, WIDE)
        v_tile = _load(v + batch * vb + (head // GROUP) * vh, columns, vt, S, D, WIDE)
        visible = _visible(batch, rows, columns, T, S, real, documents, CAUSAL, WINDOW, REAL, DOCUMENTS)
        _, ds = _tile_gradients(
            q_tile, k_tile, v_tile, d_out, random_keys, norm, mean, visible, columns, scale, limit, keep_scale
        )
        dq_tile += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision="ieee")
    width = tl.arange(0, WIDE)
    inside = (rows[:, None] < T) & (width[None, :] < D)
    tl.store(dq + batch * gb + head * gh + rows[:, None] * gt + width[None, :], dq_tile * slope, mask=inside)


def _constants(q: Tensor, k: Tensor, causal: bool, window: int, real: object, documents: object) -> tuple[Any, ...]:
    """Constants that a kernel is compiled for."""
    heads, d_head = q.shape[1], q.shape[3]
    wide = max(16, triton.next_power_of_2(d_head))
    return heads, heads // k.shape[1], d_head, wide, causal, window, real is not None, documents is not None


def _strides(*tensors: Tensor) -> list[int]:
    """Strides of batch, head and time; vectors are contiguous."""
    assert all(tensor.stride(3) == 1 for tensor in tensors)
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _mask_pointers(unused: Tensor, real: Tensor | None, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Masks as kernels take them: bytes for bools, and any tensor for None."""
    return unused if real is None else real.view(torch.uint8), unused if documents is None else documents


def _contiguous_vectors(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


@torch.library.custom_op("weft::dropped_attention", mutates_args=())
def dropped_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, real: Tensor | None, documents: Tensor | None,
    causal: bool, window: int, scale: float, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention output, shaped as q, and log2 of each query's sum of exponentials, (batch, heads, time).

    q (batch, heads, time, d_head), k and v (batch, kv_heads, source time, d_head); keys (batch, heads, time) are random
    keys of the queries; real (batch, source time) bool; documents (batch, time); window 0: none. Scores are multiplied
    by `scale`, and probabilities dropped with probability p.
    """
    q, k, v = (_contiguous_vectors(x) for x in (q, k, v))
    batch, heads, time, d_head = q.shape
    out, lse = empty_token_major(q), q.new_empty(batch, heads, time, dtype=torch.float32)
    limit, keep_scale = threshold(p)
    with torch.cuda.device_of(q):
        _forward[(triton.cdiv(time, QUERIES), batch * heads)](
            q, k, v, out, lse, keys, *_mask_pointers(q, real, documents),
            scale * LOG2E, limit, keep_scale, *_strides(q, k, v, out), time, k.shape[2],
            *_constants(q, k, causal, window, real, documents),
            QUERIES, KEYS if d_head <= 64 else 32, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out, lse


@dropped_attention.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_token_major(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("weft::dropped_attention_backward", mutates_args=())
def dropped_attention_backward(
    d_out: Tensor, saved: list[Tensor], real: Tensor | None, documents: Tensor | None,
    causal: bool, window: int, scale: float, p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v; `saved` holds q, k, v, keys, and the two outputs of `dropped_attention`."""
    q, k, v, keys, out, lse = saved
    q, k, v, d_out = (_contiguous_vectors(x) for x in (q, k, v, d_out))
    (batch, heads, time, d_head), source = q.shape, k.shape[2]
    limit, keep_scale = threshold(p)
    delta = (d_out.float() * out.float()).sum(-1)
    dq = empty_token_major(q)
    dk, dv = (q.new_empty(batch, source, heads, d_head).transpose(1, 2) for _ in range(2))
    masks = _mask_pointers(q, real, documents)
    common = (scale * LOG2E, limit, keep_scale, scale, *_strides(q, k, v, d_out))
    constants = *_constants(q, k, causal, window, real, documents), QUERIES, KEYS
    stages = 3 if d_head <= 64 else 2
    with torch.cuda.device_of(q):
        _backward_keys[(triton.cdiv(source, KEYS), batch * heads)](
            q, k, v, d_out, dk, dv, lse, delta, keys, *masks, *common, *_strides(dk), time, source,
            *constants, num_warps=4, num_stages=stages,
        )  # fmt: skip
        _backward_queries[(triton.cdiv(time, QUERIES), batch * heads)](
            q, k, v, d_out, dq, lse, delta, keys, *masks, *common, *_strides(dq), time, source,
            *constants, num_warps=4, num_stages=stages,
        )  # fmt: skip
    if heads > k.shape[1]:
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).contiguous() for x in (dk, dv))
    return dq, dk, dv


@dropped_attention_backward.register_fake
def _(d_out: Tensor, saved: list[Tensor], *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = saved[:3]
    if q.shape[1] == k.shape[1]:
        return empty_token_major(q), empty_token_major(k), empty_token_major(v)
    return empty_token_major(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, keys, real, documents, *ctx.options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, keys, out, lse, real, documents)
    ctx.mark_non_differentiable(lse)


def _gradients(ctx: Any, d_out: Tensor, unused: Tensor) -> tuple[Tensor | None, ...]:
    *saved, real, documents = ctx.saved_tensors
    gradients = dropped_attention_backward(d_out, saved, real, documents, *ctx.options)
    return (*gradients, *[None] * 7)


dropped_attention.register_autograd(_gradients, setup_context=_save)
