"""Attention of chunks of prompts on a GPU, written in Triton, and where their keys and values are put.

Over the blocks of a pool many texts are read in one call, none padded. The tokens of all chunks lie one behind the
other. A chunk's keys and values are first put into its text's blocks; then its queries, a tile of them at a time,
attend to all keys of the text up to their own, those of earlier chunks and of shared prefixes too (Dao 2023,
"FlashAttention-2"; Kwon et al. 2023). Imported only where there is a GPU.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.decode.fast.attend import Angles, Scales, in_8_bits, scales_of, seen_too, where

# As `benchmarks/gpu_decode.py --parts tune` found them on an H200:
HIGH = 128  # queries of a tile of a chunk
WIDE = 64  # keys that it looks at at a time

Paged = tuple[Tensor, Tensor, Tensor]  # places, slots and tables


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, places_ptr, slots_ptr,
    tables_ptr, table_stride, time, row_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    ROTATED: tl.constexpr, STORED: tl.constexpr, PAGE: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Rotate a token's queries where they are, and store its rotated keys, and its values, at its place."""
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    token = tl.program_id(0)
    mine = qkv_ptr + token.to(tl.int64) * WIDTH
    if PAGE > 0:
        place = tl.load(places_ptr + token).to(tl.int32)
        table_ptr = tables_ptr + tl.load(slots_ptr + token).to(tl.int64) * table_stride
        base = where(place, place >= 0, 0, table_ptr, row_stride, D, PAGE)
    else:
        place = token % time
        base = (token // time).to(tl.int64) * row_stride + place * D
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + place * HALF + half)[None, :]
    sin = tl.load(sin_ptr + place * HALF + half)[None, :]
    head = tl.arange(0, ROTATED)[:, None]  # the heads of queries, then those of keys
    at = mine + head * D + half[None, :]
    a = tl.load(at, mask=head < HEADS + KV_HEADS, other=0).to(tl.float32)
    b = tl.load(at + HALF, mask=head < HEADS + KV_HEADS, other=0).to(tl.float32)
    kind = qkv_ptr.dtype.element_ty
    ra = (a * cos - b * sin).to(kind)
    rb = (b * cos + a * sin).to(kind)
    tl.store(at, ra, mask=head < HEADS)
    tl.store(at + HALF, rb, mask=head < HEADS)
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    key = base + (head - HEADS) * head_stride
    stored = tl.arange(0, STORED)[:, None]
    whole = tl.arange(0, D)[None, :]
    v = tl.load(mine + (HEADS + KV_HEADS + stored) * D + whole, mask=stored < KV_HEADS, other=0)
    value = base + stored * head_stride
    if EIGHT:
        peak = tl.maximum(tl.max(tl.abs(ra), axis=1, keep_dims=True), tl.max(tl.abs(rb), axis=1, keep_dims=True))
        ra, k_scale = in_8_bits(ra, peak)
        rb, k_scale = in_8_bits(rb, peak)
        v, v_scale = in_8_bits(v, tl.max(tl.abs(v), axis=1, keep_dims=True))
        tl.store(key_scales_ptr + key // D, k_scale, mask=is_key)
        tl.store(value_scales_ptr + value // D, v_scale, mask=stored < KV_HEADS)
    tl.store(keys_ptr + key + half[None, :], ra, mask=is_key)
    tl.store(keys_ptr + key + HALF + half[None, :], rb, mask=is_key)
    tl.store(values_ptr + value + whole, v, mask=stored < KV_HEADS)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _seen_from(  # type: ignore[no-untyped-def]
    q, places, begin, end, peak, total, mixed,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, base, table_ptr, block_stride, scale,
    D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, EIGHT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What queries q (HIGH, D) at their places make of the keys from `begin` to `end`; MASKED where some come later."""
    whole = tl.arange(0, D)
    for start in range(begin, end, WIDE):
        key = start + tl.arange(0, WIDE)
        there = where(key, key < end, base, table_ptr, block_stride, D, PAGE)
        if MASKED:
            k = tl.load(keys_ptr + there[None, :] + whole[:, None], mask=(key < end)[None, :], other=0)
            v = tl.load(values_ptr + there[:, None] + whole[None, :], mask=(key < end)[:, None], other=0)
        else:
            k = tl.load(keys_ptr + there[None, :] + whole[:, None])
            v = tl.load(values_ptr + there[:, None] + whole[None, :])
        scores = tl.dot(q, k.to(q.dtype)) * scale
        v_scales = None
        if EIGHT:
            scores *= scales_of(key_scales_ptr, there, key < end, D)[None, :]
            v_scales = scales_of(value_scales_ptr, there, key < end, D)
        if MASKED:
            scores = tl.where(key[None, :] <= places[:, None], scores, float("-inf"))
        peak, total, mixed = seen_too(scores, v.to(q.dtype), v_scales, peak, total, mixed, EIGHT)
    return peak, total, mixed


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_chunks_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, out_ptr, tiles_ptr, tables_ptr,
    table_stride, block_stride, head_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    tile = tiles_ptr + tl.program_id(1) * 4
    head = tl.program_id(0)
    slot = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2).to(tl.int32)
    begun = tl.load(tile + 3).to(tl.int32)
    table_ptr = tables_ptr + slot.to(tl.int64) * table_stride
    base = (head // (HEADS // KV_HEADS)).to(tl.int64) * head_stride
    row = tl.arange(0, HIGH)
    whole = tl.arange(0, D)
    token = first.to(tl.int64) + row
    asked = qkv_ptr + token[:, None] * WIDTH + head * D + whole[None, :]
    q = tl.load(asked, mask=(row < count)[:, None], other=0)
    scale *= 1.4426950408889634  # powers of two are cheaper than powers of e
    peak = tl.full((HIGH,), float("-inf"), tl.float32)
    total = tl.zeros((HIGH,), tl.float32)
    mixed = tl.zeros((HIGH, D), tl.float32)
    places = begun + row
    before = begun // WIDE * WIDE  # all queries of the tile see all keys up to here
    peak, total, mixed = _seen_from(
        q, places, 0, before, peak, total, mixed,
        keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, base, table_ptr, block_stride, scale,
        D, WIDE, PAGE, EIGHT, False,
    )  # fmt: skip
    peak, total, mixed = _seen_from(
        q, places, before, begun + count, peak, total, mixed,
        keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, base, table_ptr, block_stride, scale,
        D, WIDE, PAGE, EIGHT, True,
    )  # fmt: skip
    answers = out_ptr + token[:, None] * (HEADS * D) + head * D + whole[None, :]
    tl.store(answers, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=(row < count)[:, None])


def rotate_and_store(
    qkv: Tensor, angles: Angles, keys: Tensor, values: Tensor, paged: Paged | None = None, scales: Scales = (None, None)
) -> None:
    """Rotate the queries of qkv (batch, time, width) in place; store rotated keys, and values, at the cache's start.

    With places, slots and tables, of qkv (tokens, width): token i is the one at places[i] of its text, and is stored in
    keys and values (blocks, kv_heads, block, d_head), in the blocks that tables[slots[i]] names.
    """
    places, slots, tables = paged or (None, None, None)
    kv_heads, page, d_head = keys.shape[1:]
    heads = qkv.shape[-1] // d_head - 2 * kv_heads
    page, stride = (0, 0) if tables is None else (page, tables.stride(0))
    assert keys.stride() == values.stride() and keys.stride()[2:] == (d_head, 1) and qkv.is_contiguous()
    _store_kernel[(qkv.numel() // qkv.shape[-1],)](
        qkv, *angles, keys, values, *scales, places, slots, tables, stride, qkv.shape[-2], keys.stride(0),
        keys.stride(1), heads, kv_heads, d_head, triton.next_power_of_2(heads + kv_heads),
        triton.next_power_of_2(kv_heads), page, keys.dtype == torch.int8, num_warps=4,
    )  # fmt: skip


def attend_chunks(
    qkv: Tensor, keys: Tensor, values: Tensor, scales: Scales, tables: Tensor, tiles: Tensor, scale: float, out: Tensor
) -> Tensor:
    """Queries of qkv (tokens, width), already rotated, over what one layer's blocks hold of their texts.

    tiles (n, 4): the slot of a text, the first token of a tile of at most HIGH queries, how many they are, and the
    first one's place in its text. → out (tokens, heads · d_head).
    """
    kv_heads, page, d_head = keys.shape[1:]
    heads = qkv.shape[1] // d_head - 2 * kv_heads
    assert tiles.is_contiguous() and keys.stride() == values.stride()
    wide = WIDE if d_head <= 128 else WIDE // 2
    _attend_chunks_kernel[(heads, len(tiles))](
        qkv, keys, values, *scales, out, tiles, tables, tables.stride(0), keys.stride(0), keys.stride(1), scale,
        heads, kv_heads, d_head, HIGH, wide, page, keys.dtype == torch.int8,
        num_warps=8, num_stages=3 if d_head <= 128 else 2,
    )  # fmt: skip
    return out
