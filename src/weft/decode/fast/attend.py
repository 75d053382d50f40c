"""Attention of a decode step on a GPU, in Triton: one query per row over the KV cache, which it also extends.

The keys of a row are split over many programs; the last one to finish combines their results (Dao et al. 2023,
"Flash-Decoding"). The kernel rotates query and key (rotary positions), stores key and value in the cache, and attends
to all of it. The cache is contiguous, or paged (`engine/paging.py`) and then possibly int8: one scale per vector, which
multiplies a key's score or a value's weight. Only `cuda.py` imports this file, and only where there is a GPU.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.decode.fast.kernels import to_float
from weft.decode.fast.kernels4 import ROUND_MAGIC

# Tuned by `benchmarks/gpu_decode.py --parts tune` on an H200:
PROGRAMS_PER_SM = 2  # programs that share the work, for each streaming multiprocessor
KEY_BLOCK = 64  # keys per iteration

Angles = tuple[Tensor, Tensor]  # cosines and sines
Scales = tuple[Tensor | None, ...]  # of int8 keys and values


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def vector_offsets(key, valid, base, table_ptr, block_stride, D: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of the vectors of these keys: consecutive, or in blocks of PAGE keys that a table lists."""
    if PAGE > 0:
        block = tl.load(table_ptr + key // PAGE, mask=valid, other=0).to(tl.int64)
        offsets = base + block * block_stride + (key % PAGE) * D
    else:
        offsets = base + key.to(tl.int64) * D
    return offsets


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_scales(scales_ptr, offsets, valid, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of the vectors at `offsets`. They are laid out like the vectors."""
    return tl.load(scales_ptr + offsets // D, mask=valid, other=0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def quantize_int8(x, peak):  # type: ignore[no-untyped-def]
    """Quantise parts of vectors whose largest magnitude is `peak`, like `quantize_vectors`: numbers, scales."""
    scale = tl.maximum(peak.to(tl.float32) / 127, 1.1754943508222875e-38).to(tl.bfloat16)
    y = (x.to(tl.float32) / scale.to(tl.float32) + ROUND_MAGIC) - ROUND_MAGIC
    return tl.clamp(y, -127.0, 127.0).to(tl.int8), scale


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def online_softmax(scores, v, v_scales, peak, total, mixed, INT8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Update running maximum, sum and output by keys with scores (queries, keys) and values v (keys, D)."""
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    rescale = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    total = total * rescale + tl.sum(weights, axis=1)
    if INT8:
        weights *= v_scales[None, :]
    mixed = tl.dot(weights.to(v.dtype), v, mixed * rescale[:, None])
    return new_peak, total, mixed


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, lengths_ptr, out_ptr,
    partial_ptr, peaks_ptr, totals_ptr, counter_ptr,
    tables_ptr, slots_ptr, table_stride, row_stride, head_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    QUERIES: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    unit = tl.program_id(0)
    split = tl.program_id(1)
    row = unit // KV_HEADS
    kv = unit % KV_HEADS
    query = tl.arange(0, GROUP)
    half = tl.arange(0, HALF)
    dims = tl.arange(0, D)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(lengths_ptr + row).to(tl.int32)
    cos = tl.load(cos_ptr + position * HALF + half)
    sin = tl.load(sin_ptr + position * HALF + half)
    dtype = qkv_ptr.dtype.element_ty
    q_ptr = qkv_ptr + row * WIDTH + kv * QUERIES * D
    q_ptrs = q_ptr + query[:, None] * D + half[None, :]
    a = tl.load(q_ptrs, mask=(query < QUERIES)[:, None], other=0).to(tl.float32)
    b = tl.load(q_ptrs + HALF, mask=(query < QUERIES)[:, None], other=0).to(tl.float32)
    scale *= 1.4426950408889634  # log₂ e: exp2 is cheaper than exp
    qa = ((a * cos[None, :] - b * sin[None, :]) * scale).to(dtype)
    qb = ((b * cos[None, :] + a * sin[None, :]) * scale).to(dtype)

    peak = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, D), tl.float32)
    base = kv.to(tl.int64) * head_stride
    table_ptr = tables_ptr
    if PAGE > 0:
        table_ptr += tl.load(slots_ptr + row).to(tl.int64) * table_stride
    else:
        base += row.to(tl.int64) * row_stride
    per_split = tl.cdiv(tl.cdiv(position, SPLITS), BLOCK) * BLOCK
    first = split * per_split
    last = tl.minimum(first + per_split, position)
    if GROUP == 1:
        # A single query needs no matrix product, so int8 becomes float where it is loaded.
        rotated = tl.load(q_ptr + (dims + HALF) % D).to(tl.float32) * tl.load(sin_ptr + position * HALF + dims % HALF)
        q = tl.load(q_ptr + dims).to(tl.float32) * tl.load(cos_ptr + position * HALF + dims % HALF)
        q = ((q + tl.where(dims < HALF, -rotated, rotated)) * scale).to(dtype).to(tl.float32)
        correction = 128.5 * tl.sum(q, axis=0)
        single_peak = float("-inf")
        single_total = 0.0
        sums = tl.zeros((D,), tl.float32)
        for start in tl.range(first, last, BLOCK, num_stages=3):  # by default only loads for tensor cores are pipelined
            key = start + tl.arange(0, BLOCK)
            valid = key < last
            offsets = vector_offsets(key, valid, base, table_ptr, row_stride, D, PAGE)
            at = offsets[:, None] + dims[None, :]
            k = tl.load(keys_ptr + at, mask=valid[:, None], other=0)
            v = tl.load(values_ptr + at, mask=valid[:, None], other=0)
            k_scales = load_scales(key_scales_ptr, offsets, valid, D)
            v_scales = load_scales(value_scales_ptr, offsets, valid, D)
            scores = (tl.sum(to_float(k) * q[None, :], axis=1) - correction) * (256 * k_scales)
            scores = tl.where(valid, scores, float("-inf"))
            new_peak = tl.maximum(single_peak, tl.max(scores, axis=0))
            rescale = tl.exp2(single_peak - new_peak)
            weights = tl.exp2(scores - new_peak)
            single_total = single_total * rescale + tl.sum(weights, axis=0)
            weights *= 256 * v_scales
            sums = sums * rescale + (tl.sum(weights[:, None] * to_float(v), axis=0) - 128.5 * tl.sum(weights, axis=0))
            single_peak = new_peak
        peak = tl.maximum(peak, single_peak)
        total += single_total
        mixed += sums[None, :]
    else:
        for start in range(first, last, BLOCK):
            key = start + tl.arange(0, BLOCK)
            valid = key < last
            offsets = vector_offsets(key, valid, base, table_ptr, row_stride, D, PAGE)
            at = keys_ptr + offsets[None, :] + half[:, None]
            ka = tl.load(at, mask=valid[None, :], other=0).to(dtype)
            kb = tl.load(at + HALF, mask=valid[None, :], other=0).to(dtype)
            v = tl.load(values_ptr + offsets[:, None] + dims[None, :], mask=valid[:, None], other=0).to(dtype)
            scores = tl.dot(qb, kb, tl.dot(qa, ka))
            v_scales = None
            if INT8:
                scores *= load_scales(key_scales_ptr, offsets, valid, D)[None, :]
                v_scales = load_scales(value_scales_ptr, offsets, valid, D)
            scores = tl.where(valid[None, :], scores, float("-inf"))
            peak, total, mixed = online_softmax(scores, v, v_scales, peak, total, mixed, INT8)

    if split == 0:  # the newest token: rotate and store its key and value, and attend to them
        new_ptr = qkv_ptr + row * WIDTH + (HEADS + kv) * D
        a1 = tl.load(new_ptr + half).to(tl.float32)
        b1 = tl.load(new_ptr + HALF + half).to(tl.float32)
        ka1 = (a1 * cos - b1 * sin).to(dtype)
        kb1 = (b1 * cos + a1 * sin).to(dtype)
        v1 = tl.load(new_ptr + KV_HEADS * D + dims).to(dtype)
        new = vector_offsets(position, position >= 0, base, table_ptr, row_stride, D, PAGE)
        if INT8:
            k_peak = tl.maximum(tl.max(tl.abs(ka1), axis=0), tl.max(tl.abs(kb1), axis=0))
            ka1, k_scale = quantize_int8(ka1, k_peak)
            kb1, k_scale = quantize_int8(kb1, k_peak)
            v1, v_scale = quantize_int8(v1, tl.max(tl.abs(v1), axis=0))
            tl.store(key_scales_ptr + new // D, k_scale)
            tl.store(value_scales_ptr + new // D, v_scale)
        tl.store(keys_ptr + new + half, ka1)
        tl.store(keys_ptr + new + HALF + half, kb1)
        tl.store(values_ptr + new + dims, v1)
        if INT8:
            ka1 = ka1.to(tl.float32) * k_scale.to(tl.float32)
            kb1 = kb1.to(tl.float32) * k_scale.to(tl.float32)
            v1 = v1.to(tl.float32) * v_scale.to(tl.float32)
        score = tl.sum(qa.to(tl.float32) * ka1.to(tl.float32)[None, :], axis=1)
        score += tl.sum(qb.to(tl.float32) * kb1.to(tl.float32)[None, :], axis=1)
        new_peak = tl.maximum(peak, score)
        rescale = tl.exp2(peak - new_peak)
        weight = tl.exp2(score - new_peak)
        total = total * rescale + weight
        mixed = mixed * rescale[:, None] + weight[:, None] * v1.to(tl.float32)[None, :]
        peak = new_peak

    out_ptrs = out_ptr + (row * HEADS + kv * QUERIES + query)[:, None] * D + dims[None, :]
    if SPLITS == 1:
        result = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptrs, result, mask=(query < QUERIES)[:, None])
    else:
        part = (unit * SPLITS + split) * GROUP + query
        tl.store(peaks_ptr + part, peak)
        tl.store(totals_ptr + part, total)
        tl.store(partial_ptr + part[:, None] * D + dims[None, :], mixed, mask=(query < QUERIES)[:, None])
        tl.debug_barrier()  # all threads of this program have stored before the counter is raised
        finished = tl.atomic_add(counter_ptr + unit, 1, sem="acq_rel")
        if finished == SPLITS - 1:  # the last program combines the parts
            splits = tl.arange(0, SPLITS)
            for number in tl.static_range(QUERIES):
                parts = (unit * SPLITS + splits) * GROUP + number
                peaks = tl.load(peaks_ptr + parts, cache_modifier=".cg")
                totals = tl.load(totals_ptr + parts, cache_modifier=".cg")
                factors = tl.exp2(peaks - tl.max(peaks, axis=0))
                partials = tl.load(partial_ptr + parts[:, None] * D + dims[None, :], cache_modifier=".cg")
                combined = tl.sum(partials * factors[:, None], axis=0) / tl.sum(totals * factors, axis=0)
                combined_ptrs = out_ptr + (row * HEADS + kv * QUERIES + number) * D + dims
                tl.store(combined_ptrs, combined.to(out_ptr.dtype.element_ty))
            tl.store(counter_ptr + unit, 0)


class DecodeAttention:
    """Attention of a decode step for one batch size, by about `programs` programs; `int8`: the cache is quantised."""

    def __init__(
        self, batch: int, heads: int, kv_heads: int, d_head: int, device: torch.device, programs: int, int8: bool
    ):
        self.heads, self.kv_heads, self.d_head = heads, kv_heads, d_head
        self.block, self.warps, self.stages = KEY_BLOCK, 4, 3
        self.group = max(16, triton.next_power_of_2(heads // kv_heads))
        if int8 and heads == kv_heads:  # tensor cores need 16 queries; int8 must become float first anyway
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
        """Attend from one token per row, qkv (batch, width), to the lengths (batch,) cached ones before it and itself
        → out (batch, heads · d_head). The token is rotated by angles (max_len, d_head/2), and its key and value are
        stored.

        keys, values (batch, kv_heads, max_len, d_head); or with tables (slots, blocks of a text) paged, (blocks,
        kv_heads, block_size, d_head), row i in the blocks tables[slots[i]]. int8 keys and values have `scales` of
        their shape without d_head.
        """
        assert keys.stride() == values.stride() and keys.stride()[2:] == (self.d_head, 1)
        page, stride = (0, 0) if tables is None else (keys.shape[2], tables.stride(0))
        _attend_kernel[(lengths.shape[0] * self.kv_heads, self.splits)](
            qkv, *angles, keys, values, *scales, lengths, out, self.partial, self.peaks, self.totals, self.counter,
            tables, slots, stride, keys.stride(0), keys.stride(1), scale, self.heads, self.kv_heads, self.d_head,
            self.group, self.block, self.splits, page, pdl, keys.dtype == torch.int8,
            num_warps=self.warps, num_stages=self.stages, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
        return out
