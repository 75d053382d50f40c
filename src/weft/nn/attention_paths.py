"""Choice of the kernel that computes an attention, made in `attend`.

All paths compute `reference_attention`. The fused kernels need memory linear in the length, and never materialise the
probabilities.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from weft.machine import has_triton
from weft.nn import native
from weft.nn.activations import apply_softcap
from weft.nn.dropout import RowRng, drop_values, position_keys
from weft.nn.mask import MAX_DENSE_ENTRIES, AttentionMask, Ranges, range_slices
from weft.nn.scaled_dot_product import QKV, Probabilities, changed, masked_softmax, reference_attention

QUERY_BLOCK = 512  # queries per block where attention is computed block by block
MAX_KEPT_ENTRIES = 2**28  # probabilities, over all rows and heads, that a GPU keeps for the backward pass


class Scoring(NamedTuple):
    """Computation of attention probabilities from queries and keys: scale, softcap and dropout."""

    scale: float
    softcap: float | None = None
    p: float = 0.0  # probability of dropout
    rng: RowRng | None = None  # generator for dropout; None: torch's
    number: int = 0  # of the dropout in its model
    first_head: int = 0  # index of this process's first head, under tensor parallelism
    kernels: bool = False  # whether weft's GPU kernels are loaded
    sinks: Tensor | None = None  # (heads,), scores that belong to no key

    def scores(self, qkv: QKV) -> Tensor:
        """Scores (batch, heads, time, source time) before masking."""
        q, k, _ = qkv.repeat_kv()
        return apply_softcap(q @ k.mT * self.scale, self.softcap)

    def random_keys(self, shape: torch.Size, first_query: int = 0) -> Tensor | None:
        """Random keys of `shape` (batch, heads, time); None if torch's generator draws."""
        if self.rng is None:
            return None
        return position_keys(self.rng, self.number, shape, first=(self.first_head, first_query))

    def drop(self, probabilities: Tensor, first_query: int = 0, first_key: int = 0) -> Tensor:
        """Attention probabilities after dropout, of a block of queries and keys."""
        if not self.p:
            return probabilities
        keys = self.random_keys(probabilities.shape[:-1], first_query)
        return drop_values(probabilities, self.p, keys, first=first_key)


def attend(qkv: QKV, mask: AttentionMask, scoring: Scoring, *, tap: Probabilities | None = None) -> Tensor:
    """Compute attention with the fastest kernel that fits → (batch, heads, time, d_v).

    If `tap` has watchers, the probabilities pass through it. As long as no watcher changes them, the usual kernels
    compute the result, so that it is bit for bit the same with and without watchers.
    """
    if tap is not None and tap.watchers:
        probabilities = masked_softmax(scoring.scores(qkv), mask.dense(), scoring.sinks)
        replaced = tap(probabilities)
        if changed(replaced, probabilities):
            return scoring.drop(replaced) @ qkv.repeat_kv().v
    if scoring.softcap is not None:
        return attend_by_formula(qkv, mask, scoring)
    if scoring.p:
        return dropout_attention(qkv, mask, scoring)
    if scoring.sinks is not None:
        return attend_with_sinks(qkv, scoring.scale, mask, sinks=scoring.sinks)
    return fast_attention(qkv, scoring.scale, mask)


def attend_with_sinks(qkv: QKV, scale: float, mask: AttentionMask, *, sinks: Tensor) -> Tensor:
    """Compute attention with sinks (heads,) by the fused kernels, which know none: as one more key, visible to all,
    whose value is 0. A coordinate that the other keys lack gives its score; widths stay multiples of 8."""
    column = F.pad((sinks / scale).to(qkv.q.dtype)[:, None], (0, 7))[:, None]  # (heads, 1, 8)

    def attend_block(part: QKV, queries: slice, keys: slice) -> Tensor:
        q = torch.cat((part.q, column.expand(*part.q.shape[:-1], 8)), dim=-1)
        sink = (torch.arange(q.shape[-1], device=q.device) == part.k.shape[-1]).to(q.dtype)
        k = torch.cat((F.pad(part.k, (0, 8)), sink.expand(*part.k.shape[:2], 1, -1)), dim=2)
        v = F.pad(part.v, (0, k.shape[-1] - part.v.shape[-1], 0, 1))
        visible = _match_dtype(mask.part(queries, keys), q)
        if visible is not None:
            visible = F.pad(visible, (0, 1), value=visible.dtype == torch.bool)
        return _fused(QKV(q, k, v), scale, mask=visible)[..., : part.v.shape[-1]]

    if qkv.pairs <= MAX_DENSE_ENTRIES:
        return attend_block(qkv, slice(0, qkv.q.shape[2]), slice(0, qkv.k.shape[2]))
    return _by_query_blocks(qkv, mask, attend_block)


def fast_attention(qkv: QKV, scale: float, mask: AttentionMask) -> Tensor:
    """Compute attention without dropout, by the fused kernel that fits the mask."""
    limits, biased = mask.mask, mask.position.biases
    if not biased and (limits.triangular or limits.full):
        if native.attention_fits(*qkv):
            return native.FusedAttention.apply(scale, limits.triangular, *qkv)
        return _fused(qkv, scale, causal=limits.triangular)
    if limits.plain_causal and not biased and _fits_flash_attention(qkv):
        return _flash_attention(qkv, scale, limits.ranges)
    if mask.fits_flex_attention:
        return _flex()(*qkv, block_mask=mask.block_mask(), scale=scale, enable_gqa=qkv.grouped)

    if qkv.pairs <= MAX_DENSE_ENTRIES:
        return _fused(qkv, scale, mask=_match_dtype(mask.dense(), qkv.q))

    def attend_block(part: QKV, queries: slice, keys: slice) -> Tensor:
        return _fused(part, scale, mask=_match_dtype(mask.part(queries, keys), part.q))

    return _by_query_blocks(qkv, mask, attend_block)


def dropout_attention(qkv: QKV, mask: AttentionMask, scoring: Scoring) -> Tensor:
    """Compute attention with dropout of the probabilities, by weft's kernels where they fit, else by the formula.
    PyTorch's fused kernels draw dropout from a row's index in the batch of one process."""
    fits = scoring.kernels and scoring.sinks is None and _dropout_kernels_fit(qkv, mask)
    random_keys = scoring.random_keys(qkv.q.shape[:-1]) if fits else None
    if random_keys is None:
        return attend_by_formula(qkv, mask, scoring)
    limits, rows = mask.mask, qkv.q.shape[0]
    documents = None if limits.documents is None else limits.documents[0].expand(rows, -1).contiguous()
    real = None if limits.real is None else limits.real.expand(rows, -1).contiguous()
    options = limits.causal, limits.window or 0, scoring.scale, scoring.p
    out: Tensor = torch.ops.weft.dropped_attention(*qkv, random_keys, real, documents, *options)[0]
    return out


def attend_by_formula(qkv: QKV, mask: AttentionMask, scoring: Scoring) -> Tensor:
    """Compute `reference_attention`, in blocks of queries where all probabilities would take too much memory."""

    def attend_block(part: QKV, queries: slice, keys: slice) -> Tensor:
        def drop(probabilities: Tensor) -> Tensor:
            return scoring.drop(probabilities.to(part.v.dtype), queries.start, keys.start)

        visible = mask.part(queries, keys)
        options: dict[str, Any] = {"softcap": scoring.softcap, "sinks": scoring.sinks}
        return reference_attention(part, scoring.scale, visible, drop=drop, **options)[0]

    entries = qkv.pairs * (qkv.q.shape[0] * qkv.q.shape[1] if qkv.q.is_cuda else 1)
    if entries <= (MAX_KEPT_ENTRIES if qkv.q.is_cuda else MAX_DENSE_ENTRIES):
        return attend_block(qkv, slice(0, qkv.q.shape[2]), slice(0, qkv.k.shape[2]))
    return _by_query_blocks(qkv, mask, attend_block)


@cache
def load_kernels() -> bool:
    """Register weft's GPU kernels for attention with dropout; return whether there is a GPU and Triton for them."""
    if not torch.cuda.is_available() or not has_triton():
        return False
    import weft.nn.kernels.attention  # noqa: F401 — registers its operations with torch

    return True


def _dropout_kernels_fit(qkv: QKV, mask: AttentionMask) -> bool:
    limits, narrow = mask.mask, qkv.q.dtype in (torch.float16, torch.bfloat16) and qkv.q.shape[-1] <= 128
    by_index = limits.causal or limits.window is not None or limits.documents is not None
    shifted = limits.indices is not None or limits.offset or limits.ranges or limits.globals is not None
    return qkv.q.is_cuda and narrow and qkv.equal_widths and not (by_index and shifted) and not mask.position.biases


def _fused(qkv: QKV, scale: float, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """PyTorch's fused attention. cuDNN is used only without a mask: with one, its gradient may be NaN (torch 2.11)."""
    if qkv.q.is_cuda and mask is not None:  # the kernels that take a mask do not support grouped heads
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(*qkv.repeat_kv(), attn_mask=mask, is_causal=causal, scale=scale)
    return F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=qkv.grouped)


def _fits_flash_attention(qkv: QKV) -> bool:
    q, narrow = qkv.q, qkv.q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and narrow and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and qkv.equal_widths


def _flash_attention(qkv: QKV, scale: float, ranges: Ranges = ()) -> Tensor:
    """Causal attention of the last tokens of a text, or of ranges of its tokens, to all of its keys.

    FlashAttention aligns the causal triangle with the last key. `scaled_dot_product_attention` offers that only through
    torch.nn.attention.bias, which imports torch's compiler: six seconds for the first text.
    """
    if ranges:
        parts = [(qkv.part(tokens, slice(0, indices.stop)), scale) for tokens, indices in range_slices(ranges)]
        return torch.cat([_flash_attention(*part) for part in parts], dim=2)
    return torch.ops.aten._scaled_dot_product_flash_attention(*qkv, is_causal=True, scale=scale)[0]


def _by_query_blocks(qkv: QKV, mask: AttentionMask, attend_block: Callable[[QKV, slice, slice], Tensor]) -> Tensor:
    """Attend block by block of queries, each over the keys it can see; the backward pass recomputes every block."""
    outs, (time, source) = [], (qkv.q.shape[2], qkv.k.shape[2])
    for start in range(0, time, QUERY_BLOCK):
        queries = slice(start, min(start + QUERY_BLOCK, time))
        keys = mask.mask.key_range(queries, source)
        block = qkv.part(queries, keys), queries, keys
        recomputed = torch.is_grad_enabled()
        outs.append(checkpoint(attend_block, *block, use_reentrant=False) if recomputed else attend_block(*block))
    return torch.cat(outs, dim=2)


@cache
def _flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _match_dtype(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
