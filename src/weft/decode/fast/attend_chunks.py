"""Attention of chunks of prompts over the blocks of a pool, written in Triton: many texts in one call, none padded.

The tokens of all chunks lie one behind the other. A chunk's keys and values are first put into its text's blocks; then
its queries, a tile of them at a time, attend to all keys of the text up to their own, those of earlier chunks and of
shared prefixes too (Dao 2023, "FlashAttention-2"; Kwon et al. 2023).

Only `cuda.py` imports this file, and only where there is a GPU.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.decode.fast.attend import put, seen_too, where

HIGH = 128  # queries of a tile
WIDE = 64  # keys at a time


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, places_ptr,
    slots_ptr, tables_ptr, table_stride, block_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    ROTATED: tl.constexpr, STORED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    token = tl.program_id(0)
    place = tl.load(places_ptr + token).to(tl.int32)
    table_ptr = tables_ptr + tl.load(slots_ptr + token).to(tl.int64) * table_stride
    base = where(place, place >= 0, 0, table_ptr, block_stride, D, PAGE)
    mine = qkv_ptr + token.to(tl.int64) * WIDTH
    put(
        mine, cos_ptr, sin_ptr, place, keys_ptr, values_ptr, base, head_stride, HEADS, KV_HEADS, D, ROTATED, STORED
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _seen_from(  # type: ignore[no-untyped-def]
    q, places, begin, end, peak, total, mixed,
    keys_ptr, values_ptr, base, table_ptr, block_stride, scale,
    D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
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
        scores = tl.dot(q, k) * scale
        if MASKED:
            scores = tl.where(key[None, :] <= places[:, None], scores, float("-inf"))
        peak, total, mixed = seen_too(scores, v, peak, total, mixed)
    return peak, total, mixed


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_chunks_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, keys_ptr, values_ptr, out_ptr, tiles_ptr, tables_ptr, table_stride, block_stride, head_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
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
        keys_ptr, values_ptr, base, table_ptr, block_stride, scale, D, WIDE, PAGE, False,
    )  # fmt: skip
    peak, total, mixed = _seen_from(
        q, places, before, begun + count, peak, total, mixed,
        keys_ptr, values_ptr, base, table_ptr, block_stride, scale, D, WIDE, PAGE, True,
    )  # fmt: skip
    answers = out_ptr + token[:, None] * (HEADS * D) + head * D + whole[None, :]
    tl.store(answers, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=(row < count)[:, None])


# ---- what the kernels are called by


def store_chunks(
    qkv: Tensor, angles: tuple[Tensor, Tensor], blocks: Tensor, places: Tensor, at: tuple[Tensor, Tensor]
) -> None:
    """Rotate the queries of qkv (tokens, width) in place; store rotated keys, and values, in one layer's `blocks`
    (blocks, 2, kv_heads, block, d_head).

    Token i is the one at places[i] of its text, whose blocks tables[slots[i]] names; `at` is (tables, slots).
    """
    keys, values = blocks.unbind(1)
    kv_heads, page, d_head = keys.shape[1:]
    heads = qkv.shape[1] // d_head - 2 * kv_heads
    tables, slots = at
    assert qkv.is_contiguous() and keys.stride()[2:] == (d_head, 1)
    _store_kernel[(len(qkv),)](
        qkv, *angles, keys, values, places, slots, tables, tables.stride(0), keys.stride(0), keys.stride(1),
        heads, kv_heads, d_head, triton.next_power_of_2(heads + kv_heads), triton.next_power_of_2(kv_heads), page,
        num_warps=4,
    )  # fmt: skip


def attend_chunks(qkv: Tensor, blocks: Tensor, tables: Tensor, tiles: Tensor, scale: float, out: Tensor) -> Tensor:
    """Queries of qkv (tokens, width), already rotated, over what one layer's `blocks` hold of their texts.

    tiles (n, 4): the slot of a text, the first token of a tile of at most HIGH queries, how many they are, and the
    first one's place in its text. → out (tokens, heads · d_head).
    """
    keys, values = blocks.unbind(1)
    kv_heads, page, d_head = keys.shape[1:]
    heads = qkv.shape[1] // d_head - 2 * kv_heads
    assert tiles.is_contiguous() and keys.stride() == values.stride()
    wide = WIDE if d_head <= 128 else WIDE // 2
    _attend_chunks_kernel[(heads, len(tiles))](
        qkv, keys, values, out, tiles, tables, tables.stride(0), keys.stride(0), keys.stride(1), scale,
        heads, kv_heads, d_head, HIGH, wide, page, num_warps=8, num_stages=3 if d_head <= 128 else 2,
    )  # fmt: skip
    return out
