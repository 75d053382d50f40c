"""Attention on a GPU, written in Triton: in a decoding step one query a row, and a cache that it is put into.

The keys of a row are split over many programs, the last of which puts their parts together (Dao et al. 2023,
"Flash-Decoding"). The kernel rotates the query and the key (rotary positions), stores key and value in the cache, and
attends to all of it. The cache lies in one piece, or in the blocks of a pool (`engine/paging.py`), there in 8 bits too:
whole numbers, and a scale for each vector, which multiplies a key's score or a value's weight.

Only `cuda.py` imports this file, and only where there is a GPU.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.decode.fast.kernels import floats

# As `benchmarks/gpu_decode.py --parts tune` found them on an H200:
CROWD = 2  # programs for each processor of the GPU, about
BLOCK = 64  # keys at a time

Angles = tuple[Tensor, Tensor]  # cosines and sines
Scales = tuple[Tensor | None, ...]  # of keys and of values, where these are in 8 bits


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
def scales_of(scales_ptr, there, seen, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales of vectors that begin there: they lie as the vectors do."""
    return tl.load(scales_ptr + there // D, mask=seen, other=0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def in_8_bits(x, peak):  # type: ignore[no-untyped-def]
    """Parts of vectors whose largest numbers are `peak`, as `rounding.quantize_vectors` has them: numbers, scales."""
    scale = tl.maximum(peak.to(tl.float32) / 127, 1.1754943508222875e-38).to(tl.bfloat16)
    # adding 1.5 · 2²³ rounds to the nearest whole number, of two the even one
    y = (x.to(tl.float32) / scale.to(tl.float32) + 12582912.0) - 12582912.0
    return tl.clamp(y, -127.0, 127.0).to(tl.int8), scale


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def seen_too(scores, v, v_scales, peak, total, mixed, EIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """What was seen so far, and keys with these scores (queries, keys) and values v (keys, D) besides."""
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    fade = tl.exp2(peak - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * fade + tl.sum(weights, axis=1)
    if EIGHT:
        weights *= v_scales[None, :]
    mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None])
    return higher, total, mixed


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, lengths_ptr, out_ptr,
    partial_ptr, peaks_ptr, totals_ptr, counter_ptr,
    tables_ptr, slots_ptr, table_stride, row_stride, head_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr, EIGHT: tl.constexpr, ASM: tl.constexpr,
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
    kind = qkv_ptr.dtype.element_ty
    asked_ptr = qkv_ptr + row * WIDTH + kv * SHARED * D
    asked = asked_ptr + member[:, None] * D + half[None, :]
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
    if GROUP == 1:
        # one query: no product of matrices, so that 8 bits become floats where they arrive
        turned = tl.load(asked_ptr + (whole + HALF) % D).to(tl.float32) * tl.load(sin_ptr + place * HALF + whole % HALF)
        q = tl.load(asked_ptr + whole).to(tl.float32) * tl.load(cos_ptr + place * HALF + whole % HALF)
        q = ((q + tl.where(whole < HALF, -turned, turned)) * scale).to(kind).to(tl.float32)
        lift = 128.5 * tl.sum(q, axis=0)
        high = float("-inf")
        all_weights = 0.0
        sums = tl.zeros((D,), tl.float32)
        for start in tl.range(first, last, BLOCK, num_stages=3):  # else only what feeds tensor cores is fetched ahead
            key = start + tl.arange(0, BLOCK)
            seen = key < last
            there = where(key, seen, base, table_ptr, row_stride, D, PAGE)
            at = there[:, None] + whole[None, :]
            k = tl.load(keys_ptr + at, mask=seen[:, None], other=0)
            v = tl.load(values_ptr + at, mask=seen[:, None], other=0)
            k_scales = scales_of(key_scales_ptr, there, seen, D)
            v_scales = scales_of(value_scales_ptr, there, seen, D)
            scores = (tl.sum(floats(k, ASM) * q[None, :], axis=1) - lift) * (256 * k_scales)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(high, tl.max(scores, axis=0))
            fade = tl.exp2(high - higher)
            weights = tl.exp2(scores - higher)
            all_weights = all_weights * fade + tl.sum(weights, axis=0)
            weights *= 256 * v_scales
            sums = sums * fade + (tl.sum(weights[:, None] * floats(v, ASM), axis=0) - 128.5 * tl.sum(weights, axis=0))
            high = higher
        peak = tl.maximum(peak, high)
        total += all_weights
        mixed += sums[None, :]
    else:
        for start in range(first, last, BLOCK):
            key = start + tl.arange(0, BLOCK)
            seen = key < last
            there = where(key, seen, base, table_ptr, row_stride, D, PAGE)
            at = keys_ptr + there[None, :] + half[:, None]
            ka = tl.load(at, mask=seen[None, :], other=0).to(kind)
            kb = tl.load(at + HALF, mask=seen[None, :], other=0).to(kind)
            v = tl.load(values_ptr + there[:, None] + whole[None, :], mask=seen[:, None], other=0).to(kind)
            scores = tl.dot(qb, kb, tl.dot(qa, ka))
            v_scales = None
            if EIGHT:
                scores *= scales_of(key_scales_ptr, there, seen, D)[None, :]
                v_scales = scales_of(value_scales_ptr, there, seen, D)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            peak, total, mixed = seen_too(scores, v, v_scales, peak, total, mixed, EIGHT)

    if split == 0:  # the newest token: rotated, stored, and seen by its own query
        own = qkv_ptr + row * WIDTH + (HEADS + kv) * D
        a1 = tl.load(own + half).to(tl.float32)
        b1 = tl.load(own + HALF + half).to(tl.float32)
        ka1 = (a1 * cos - b1 * sin).to(kind)
        kb1 = (b1 * cos + a1 * sin).to(kind)
        v1 = tl.load(own + KV_HEADS * D + whole).to(kind)
        new = where(place, place >= 0, base, table_ptr, row_stride, D, PAGE)
        if EIGHT:
            k_peak = tl.maximum(tl.max(tl.abs(ka1), axis=0), tl.max(tl.abs(kb1), axis=0))
            ka1, k_scale = in_8_bits(ka1, k_peak)
            kb1, k_scale = in_8_bits(kb1, k_peak)
            v1, v_scale = in_8_bits(v1, tl.max(tl.abs(v1), axis=0))
            tl.store(key_scales_ptr + new // D, k_scale)
            tl.store(value_scales_ptr + new // D, v_scale)
        tl.store(keys_ptr + new + half, ka1)
        tl.store(keys_ptr + new + HALF + half, kb1)
        tl.store(values_ptr + new + whole, v1)
        if EIGHT:
            ka1 = ka1.to(tl.float32) * k_scale.to(tl.float32)
            kb1 = kb1.to(tl.float32) * k_scale.to(tl.float32)
            v1 = v1.to(tl.float32) * v_scale.to(tl.float32)
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


class Attention:
    """Attention over a cache and its workspace, for one batch size: parts of rows too long for one program.

    The work is split over about so many `programs`. `eight`: keys and values are in 8 bits.
    """

    def __init__(
        self, batch: int, heads: int, kv_heads: int, d_head: int, device: torch.device, programs: int, eight: bool
    ):
        self.heads, self.kv_heads, self.d_head = heads, kv_heads, d_head
        self.block, self.warps, self.stages = BLOCK, 4, 3
        self.group = max(16, triton.next_power_of_2(heads // kv_heads))
        if eight and heads == kv_heads:  # tensor cores want 16 queries; one that has floats to make anyway needs none
            self.group, self.block, self.warps = 1, 32, 1
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
        scales: Scales = (None, None),
    ) -> Tensor:
        """qkv (batch, width) of one token a row, after lengths (batch,) others whose keys and values (batch, kv_heads,
        max_len, d_head) are stored; with tables (slots, blocks of a text), in (blocks, kv_heads, block, d_head), row i
        where tables[slots[i]] says. The token is rotated by angles (max_len, d_head/2), stored too, and attends to all.
        → out (batch, heads · d_head). Keys and values in 8 bits have `scales`, of their shape without d_head.
        """
        assert keys.stride() == values.stride() and keys.stride()[2:] == (self.d_head, 1)
        page, stride = (0, 0) if tables is None else (keys.shape[2], tables.stride(0))
        _attend_kernel[(lengths.shape[0] * self.kv_heads, self.splits)](
            qkv, *angles, keys, values, *scales, lengths, out, self.partial, self.peaks, self.totals, self.counter,
            tables, slots, stride, keys.stride(0), keys.stride(1), scale, self.heads, self.kv_heads, self.d_head,
            self.group, self.block, self.splits, page, pdl, keys.dtype == torch.int8, qkv.is_cuda,
            num_warps=self.warps, num_stages=self.stages, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
        return out
