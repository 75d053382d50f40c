"""Attention on a GPU, written in Triton: in a decoding step one query a row, and a cache that it is put into.

The keys of a row are split over many programs, the last of which puts their parts together (Dao et al. 2023,
"Flash-Decoding"). The kernel rotates the query and the key (rotary positions), stores key and value in the cache, and
attends to all of it. The cache lies in one piece, or in the blocks of a pool (`engine/paging.py`).

Over the blocks of a pool chunks of prompts are read as well, many texts in one call, none padded. The tokens of all
chunks lie one behind the other. A chunk's keys and values are first put into its text's blocks; then its queries, a
tile of them at a time, attend to all keys of the text up to their own, those of earlier chunks and of shared prefixes
too (Dao 2023, "FlashAttention-2"; Kwon et al. 2023).

Only `cuda.py` imports this file, and only where there is a GPU.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

# As `benchmarks/gpu_decode.py --parts tune` found them on an H200:
CROWD = 2  # programs for each processor of the GPU, about
BLOCK = 64  # keys at a time
HIGH = 128  # queries of a tile of a chunk
WIDE = 64  # keys that it looks at at a time

Angles = tuple[Tensor, Tensor]  # cosines and sines
Paged = tuple[Tensor, Tensor, Tensor]  # places, slots and tables


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def where(key, seen, base, table_ptr, block_stride, D: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the vectors of these keys begin: one behind the other, or in blocks of PAGE that a table names."""
    if PAGE > 0:
        number = tl.load(table_ptr + key // PAGE, mask=seen, other=0).to(tl.int64)
        at = base + number * block_stride + (key % PAGE) * D
    else:
        at = base + key.to(tl.int64) * D
    return at


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def seen_too(scores, v, peak, total, mixed):  # type: ignore[no-untyped-def]
    """What was seen so far, and keys with these scores (queries, keys) and values v (keys, D) besides."""
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    fade = tl.exp2(peak - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * fade + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None])
    return higher, total, mixed


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, lengths_ptr, out_ptr,
    partial_ptr, peaks_ptr, totals_ptr, counter_ptr,
    tables_ptr, slots_ptr, table_stride, row_stride, head_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    SHARED: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    here = tl.program_id(0)
    split = tl.program_id(1)
    row = here // KV_HEADS
    kv = here % KV_HEADS
    member = tl.arange(0, GROUP)
    half = tl.arange(0, HALF)
    whole = tl.arange(0, D)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.load(lengths_ptr + row).to(tl.int32)
    cos = tl.load(cos_ptr + place * HALF + half)
    sin = tl.load(sin_ptr + place * HALF + half)
    kind = keys_ptr.dtype.element_ty
    asked = qkv_ptr + row * WIDTH + (kv * SHARED + member)[:, None] * D + half[None, :]
    a = tl.load(asked, mask=(member < SHARED)[:, None], other=0).to(tl.float32)
    b = tl.load(asked + HALF, mask=(member < SHARED)[:, None], other=0).to(tl.float32)
    scale *= 1.4426950408889634  # powers of two are cheaper than powers of e
    qa = ((a * cos[None, :] - b * sin[None, :]) * scale).to(kind)
    qb = ((b * cos[None, :] + a * sin[None, :]) * scale).to(kind)

    peak = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, D), tl.float32)
    base = kv.to(tl.int64) * head_stride
    table_ptr = tables_ptr
    if PAGE > 0:
        table_ptr += tl.load(slots_ptr + row).to(tl.int64) * table_stride
    else:
        base += row.to(tl.int64) * row_stride
    per = tl.cdiv(tl.cdiv(place, SPLITS), BLOCK) * BLOCK
    first = split * per
    last = tl.minimum(first + per, place)
    for start in range(first, last, BLOCK):
        key = start + tl.arange(0, BLOCK)
        seen = key < last
        there = where(key, seen, base, table_ptr, row_stride, D, PAGE)
        at = keys_ptr + there[None, :] + half[:, None]
        ka = tl.load(at, mask=seen[None, :], other=0)
        kb = tl.load(at + HALF, mask=seen[None, :], other=0)
        v = tl.load(values_ptr + there[:, None] + whole[None, :], mask=seen[:, None], other=0)
        scores = tl.dot(qb, kb, tl.dot(qa, ka))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        peak, total, mixed = seen_too(scores, v, peak, total, mixed)

    if split == 0:  # the newest token: rotated, stored, and seen by its own query
        own = qkv_ptr + row * WIDTH + (HEADS + kv) * D
        a1 = tl.load(own + half).to(tl.float32)
        b1 = tl.load(own + HALF + half).to(tl.float32)
        ka1 = (a1 * cos - b1 * sin).to(kind)
        kb1 = (b1 * cos + a1 * sin).to(kind)
        v1 = tl.load(own + KV_HEADS * D + whole).to(kind)
        new = where(place, place >= 0, base, table_ptr, row_stride, D, PAGE)
        tl.store(keys_ptr + new + half, ka1)
        tl.store(keys_ptr + new + HALF + half, kb1)
        tl.store(values_ptr + new + whole, v1)
        score = tl.sum(qa.to(tl.float32) * ka1.to(tl.float32)[None, :], axis=1)
        score += tl.sum(qb.to(tl.float32) * kb1.to(tl.float32)[None, :], axis=1)
        higher = tl.maximum(peak, score)
        fade = tl.exp2(peak - higher)
        weight = tl.exp2(score - higher)
        total = total * fade + weight
        mixed = mixed * fade[:, None] + weight[:, None] * v1.to(tl.float32)[None, :]
        peak = higher

    answers = out_ptr + (row * HEADS + kv * SHARED + member)[:, None] * D + whole[None, :]
    if SPLITS == 1:
        result = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(answers, result, mask=(member < SHARED)[:, None])
    else:
        place_of = (here * SPLITS + split) * GROUP + member
        tl.store(peaks_ptr + place_of, peak)
        tl.store(totals_ptr + place_of, total)
        tl.store(partial_ptr + place_of[:, None] * D + whole[None, :], mixed, mask=(member < SHARED)[:, None])
        tl.debug_barrier()  # all of this program's threads have stored before it says so
        ended = tl.atomic_add(counter_ptr + here, 1, sem="acq_rel")
        if ended == SPLITS - 1:  # the last one to end puts the parts together
            parts = tl.arange(0, SPLITS)
            for number in tl.static_range(SHARED):
                at_part = (here * SPLITS + parts) * GROUP + number
                peaks = tl.load(peaks_ptr + at_part, cache_modifier=".cg")
                totals = tl.load(totals_ptr + at_part, cache_modifier=".cg")
                share = tl.exp2(peaks - tl.max(peaks, axis=0))
                pieces = tl.load(partial_ptr + at_part[:, None] * D + whole[None, :], cache_modifier=".cg")
                answer = tl.sum(pieces * share[:, None], axis=0) / tl.sum(totals * share, axis=0)
                answered = out_ptr + (row * HEADS + kv * SHARED + number) * D + whole
                tl.store(answered, answer.to(out_ptr.dtype.element_ty))
            tl.store(counter_ptr + here, 0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, places_ptr, slots_ptr, tables_ptr,
    table_stride, time, row_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    ROTATED: tl.constexpr, STORED: tl.constexpr, PAGE: tl.constexpr,
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
    kind = keys_ptr.dtype.element_ty
    ra = (a * cos - b * sin).to(kind)
    rb = (b * cos + a * sin).to(kind)
    tl.store(at, ra, mask=head < HEADS)
    tl.store(at + HALF, rb, mask=head < HEADS)
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    key = keys_ptr + base + (head - HEADS) * head_stride + half[None, :]
    tl.store(key, ra, mask=is_key)
    tl.store(key + HALF, rb, mask=is_key)
    stored = tl.arange(0, STORED)[:, None]
    whole = tl.arange(0, D)[None, :]
    v = tl.load(mine + (HEADS + KV_HEADS + stored) * D + whole, mask=stored < KV_HEADS, other=0)
    tl.store(values_ptr + base + stored * head_stride + whole, v, mask=stored < KV_HEADS)


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


class Attention:
    """Attention over a cache and its workspace, for one batch size: parts of rows too long for one program.

    The work is split over about so many `programs`, which look at `block` keys at a time.
    """

    def __init__(
        self, batch: int, heads: int, kv_heads: int, d_head: int, device: torch.device, programs: int, block: int
    ):
        self.heads, self.kv_heads, self.d_head = heads, kv_heads, d_head
        self.block, self.warps, self.stages = block, 4, 3
        self.group = max(16, triton.next_power_of_2(heads // kv_heads))
        self.splits = min(64, triton.next_power_of_2(max(1, programs // (batch * kv_heads))))
        self.programs = batch * kv_heads * self.splits
        parts = self.programs * self.group if self.splits > 1 else 0
        self.partial = torch.empty(parts * d_head, dtype=torch.float32, device=device)
        self.peaks = torch.empty(parts, dtype=torch.float32, device=device)
        self.totals = torch.empty(parts, dtype=torch.float32, device=device)
        self.counter = torch.zeros(batch * kv_heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        qkv: Tensor,
        angles: Angles,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        scale: float,
        out: Tensor,
        pdl: bool = False,
        tables: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """qkv (batch, width) of one token a row, after lengths (batch,) others whose keys and values (batch, kv_heads,
        max_len, d_head) are stored; with tables (slots, blocks of a text), in (blocks, kv_heads, block, d_head), row i
        where tables[slots[i]] says. The token is rotated by angles (max_len, d_head/2), stored too, and attends to all.
        → out (batch, heads · d_head).
        """
        assert keys.stride() == values.stride() and keys.stride()[2:] == (self.d_head, 1)
        page, stride = (0, 0) if tables is None else (keys.shape[2], tables.stride(0))
        _attend_kernel[(lengths.shape[0] * self.kv_heads, self.splits)](
            qkv, *angles, keys, values, lengths, out, self.partial, self.peaks, self.totals, self.counter,
            tables, slots, stride, keys.stride(0), keys.stride(1), scale,
            self.heads, self.kv_heads, self.d_head, self.group, self.block, self.splits, page, pdl,
            num_warps=self.warps, num_stages=self.stages, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
        return out


def rotate_and_store(qkv: Tensor, angles: Angles, keys: Tensor, values: Tensor, paged: Paged | None = None) -> None:
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
        qkv, *angles, keys, values, places, slots, tables, stride, qkv.shape[-2], keys.stride(0), keys.stride(1),
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
