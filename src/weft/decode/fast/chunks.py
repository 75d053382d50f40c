"""Attention of prompt chunks on a GPU, in Triton, and the storing of their keys and values.

Over a paged cache the chunks of many texts are read in one call without padding: their tokens are concatenated. A
chunk's keys and values are first stored in its text's blocks. Then its queries, one tile at a time, attend to all keys
of the text up to their own, including those of earlier chunks and shared prefixes (Dao 2023, "FlashAttention-2"; Kwon
et al. 2023). Imported only where there is a GPU.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.decode.fast.attend import Angles, Scales, load_scales, online_softmax, quantize_int8, vector_offsets

# Tuned by `benchmarks/gpu_decode.py --parts tune` on an H200:
QUERY_TILE = 128  # queries of a chunk in one tile
KEY_TILE = 64  # keys per iteration

PagedTokens = tuple[Tensor, Tensor, Tensor]  # positions, slots and tables


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, positions_ptr, slots_ptr,
    tables_ptr, table_stride, time, row_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    ROTATED: tl.constexpr, STORED: tl.constexpr, PAGE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Rotate a token's queries in place, and store its rotated keys, and its values, in the cache."""
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    token = tl.program_id(0)
    token_ptr = qkv_ptr + token.to(tl.int64) * WIDTH
    if PAGE > 0:
        position = tl.load(positions_ptr + token).to(tl.int32)
        table_ptr = tables_ptr + tl.load(slots_ptr + token).to(tl.int64) * table_stride
        base = vector_offsets(position, position >= 0, 0, table_ptr, row_stride, D, PAGE)
    else:
        position = token % time
        base = (token // time).to(tl.int64) * row_stride + position * D
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + position * HALF + half)[None, :]
    sin = tl.load(sin_ptr + position * HALF + half)[None, :]
    head = tl.arange(0, ROTATED)[:, None]  # query heads, then key heads
    at = token_ptr + head * D + half[None, :]
    a = tl.load(at, mask=head < HEADS + KV_HEADS, other=0).to(tl.float32)
    b = tl.load(at + HALF, mask=head < HEADS + KV_HEADS, other=0).to(tl.float32)
    dtype = qkv_ptr.dtype.element_ty
    ra = (a * cos - b * sin).to(dtype)
    rb = (b * cos + a * sin).to(dtype)
    tl.store(at, ra, mask=head < HEADS)
    tl.store(at + HALF, rb, mask=head < HEADS)
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    key = base + (head - HEADS) * head_stride
    kv = tl.arange(0, STORED)[:, None]
    dims = tl.arange(0, D)[None, :]
    v = tl.load(token_ptr + (HEADS + KV_HEADS + kv) * D + dims, mask=kv < KV_HEADS, other=0)
    value = base + kv * head_stride
    if INT8:
        peak = tl.maximum(tl.max(tl.abs(ra), axis=1, keep_dims=True), tl.max(tl.abs(rb), axis=1, keep_dims=True))
        ra, k_scale = quantize_int8(ra, peak)
        rb, k_scale = quantize_int8(rb, peak)
        v, v_scale = quantize_int8(v, tl.max(tl.abs(v), axis=1, keep_dims=True))
        tl.store(key_scales_ptr + key // D, k_scale, mask=is_key)
        tl.store(value_scales_ptr + value // D, v_scale, mask=kv < KV_HEADS)
    tl.store(keys_ptr + key + half[None, :], ra, mask=is_key)
    tl.store(keys_ptr + key + HALF + half[None, :], rb, mask=is_key)
    tl.store(values_ptr + value + dims, v, mask=kv < KV_HEADS)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_range(  # type: ignore[no-untyped-def]
    q, positions, begin, end, peak, total, mixed,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, base, table_ptr, block_stride, scale,
    D: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, INT8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend from queries q (QUERIES, D) at `positions` to the keys [begin, end). MASKED: some are after a query."""
    dims = tl.arange(0, D)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        offsets = vector_offsets(key, key < end, base, table_ptr, block_stride, D, PAGE)
        if MASKED:
            k = tl.load(keys_ptr + offsets[None, :] + dims[:, None], mask=(key < end)[None, :], other=0)
            v = tl.load(values_ptr + offsets[:, None] + dims[None, :], mask=(key < end)[:, None], other=0)
        else:
            k = tl.load(keys_ptr + offsets[None, :] + dims[:, None])
            v = tl.load(values_ptr + offsets[:, None] + dims[None, :])
        scores = tl.dot(q, k.to(q.dtype)) * scale
        v_scales = None
        if INT8:
            scores *= load_scales(key_scales_ptr, offsets, key < end, D)[None, :]
            v_scales = load_scales(value_scales_ptr, offsets, key < end, D)
        if MASKED:
            scores = tl.where(key[None, :] <= positions[:, None], scores, float("-inf"))
        peak, total, mixed = online_softmax(scores, v.to(q.dtype), v_scales, peak, total, mixed, INT8)
    return peak, total, mixed


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_chunks_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, out_ptr, tiles_ptr, tables_ptr,
    table_stride, block_stride, head_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    tile = tiles_ptr + tl.program_id(1) * 4
    head = tl.program_id(0)
    slot = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2).to(tl.int32)
    first_position = tl.load(tile + 3).to(tl.int32)
    table_ptr = tables_ptr + slot.to(tl.int64) * table_stride
    base = (head // (HEADS // KV_HEADS)).to(tl.int64) * head_stride
    row = tl.arange(0, QUERIES)
    dims = tl.arange(0, D)
    token = first.to(tl.int64) + row
    q_ptrs = qkv_ptr + token[:, None] * WIDTH + head * D + dims[None, :]
    q = tl.load(q_ptrs, mask=(row < count)[:, None], other=0)
    scale *= 1.4426950408889634  # log₂ e: exp2 is cheaper than exp
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, D), tl.float32)
    positions = first_position + row
    unmasked = first_position // KEYS * KEYS  # all queries of the tile see all keys before this one
    peak, total, mixed = _attend_range(
        q, positions, 0, unmasked, peak, total, mixed,
        keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, base, table_ptr, block_stride, scale,
        D, KEYS, PAGE, INT8, False,
    )  # fmt: skip
    peak, total, mixed = _attend_range(
        q, positions, unmasked, first_position + count, peak, total, mixed,
        keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, base, table_ptr, block_stride, scale,
        D, KEYS, PAGE, INT8, True,
    )  # fmt: skip
    out_ptrs = out_ptr + token[:, None] * (HEADS * D) + head * D + dims[None, :]
    tl.store(out_ptrs, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=(row < count)[:, None])


def rotate_and_store(
    qkv: Tensor,
    angles: Angles,
    keys: Tensor,
    values: Tensor,
    paged: PagedTokens | None = None,
    scales: Scales = (None, None),
) -> None:
    """Rotate the queries of qkv (batch, time, width) in place; store rotated keys, and values, from the cache's start.

    With positions, slots and tables, qkv is (tokens, width): token i is at positions[i] of its text, and is stored in
    keys and values (blocks, kv_heads, block_size, d_head), in the blocks tables[slots[i]].
    """
    positions, slots, tables = paged or (None, None, None)
    kv_heads, page, d_head = keys.shape[1:]
    heads = qkv.shape[-1] // d_head - 2 * kv_heads
    page, stride = (0, 0) if tables is None else (page, tables.stride(0))
    assert keys.stride() == values.stride() and keys.stride()[2:] == (d_head, 1) and qkv.is_contiguous()
    _store_kernel[(qkv.numel() // qkv.shape[-1],)](
        qkv, *angles, keys, values, *scales, positions, slots, tables, stride, qkv.shape[-2], keys.stride(0),
        keys.stride(1), heads, kv_heads, d_head, triton.next_power_of_2(heads + kv_heads),
        triton.next_power_of_2(kv_heads), page, keys.dtype == torch.int8, num_warps=4,
    )  # fmt: skip


def attend_chunks(
    qkv: Tensor, keys: Tensor, values: Tensor, scales: Scales, tables: Tensor, tiles: Tensor, scale: float, out: Tensor
) -> Tensor:
    """Attend from the queries of qkv (tokens, width), already rotated, to their texts' keys in one layer's blocks →
    out (tokens, heads · d_head).

    tiles (n, 4): a text's slot, the row of a tile's first query, the number of its queries (at most QUERY_TILE), and
    the first one's position in its text.
    """
    kv_heads, page, d_head = keys.shape[1:]
    heads = qkv.shape[1] // d_head - 2 * kv_heads
    assert tiles.is_contiguous() and keys.stride() == values.stride()
    key_tile = KEY_TILE if d_head <= 128 else KEY_TILE // 2
    _attend_chunks_kernel[(heads, len(tiles))](
        qkv, keys, values, *scales, out, tiles, tables, tables.stride(0), keys.stride(0), keys.stride(1), scale,
        heads, kv_heads, d_head, QUERY_TILE, key_tile, page, keys.dtype == torch.int8,
        num_warps=8, num_stages=3 if d_head <= 128 else 2,
    )  # fmt: skip
    return out
