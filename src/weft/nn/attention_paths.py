"""Which kernel computes an attention: one decision, in `attend`.

All paths give what `reference_attention` gives. The fused ones need memory that does not grow with the square of the
length, and never hold the probabilities.
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
from weft.nn.activations import capped
from weft.nn.dropout import RowRng, dropped, place_keys
from weft.nn.mask import MAX_DENSE_ENTRIES, AttentionMask, Ranges, spans
from weft.nn.scaled_dot_product import QKV, Probabilities, masked_softmax, reference_attention

QUERY_BLOCK = 512
MAX_KEPT_ENTRIES = 2**28  # probabilities, over all rows and heads, that a GPU keeps for the backward pass


class Dropping(NamedTuple):
    """Dropout of probabilities: with probability p, by the rows' `rng` and the dropout's number; so many heads of
    other processes come before these. `kernels` says whether our own for GPUs are loaded."""

    p: float
    rng: RowRng | None = None
    number: int = 0
    first_head: int = 0
    kernels: bool = False

    def keys(self, shape: torch.Size, first_query: int = 0) -> Tensor | None:
        """Keys of `shape` (batch, heads, time), for rows that have some."""
        if self.rng is None:
            return None
        return place_keys(self.rng, self.number, shape, (self.first_head, first_query))

    def __call__(self, probabilities: Tensor, first_query: int = 0, first_key: int = 0) -> Tensor:
        """Probabilities (batch, heads, time, source time) of some queries and keys, with some lost."""
        return dropped(probabilities, self.p, self.keys(probabilities.shape[:-1], first_query), first_key)


class Scoring(NamedTuple):
    """What is done to the scores: multiplied by `scale`, bounded by `softcap`; and to their softmax: `dropping`."""

    scale: float
    softcap: float | None = None
    dropping: Dropping | None = None

    def scores(self, qkv: QKV) -> Tensor:
        """(batch, heads, time, source time), before any is masked."""
        q, k, _ = qkv.repeated()
        return capped(q @ k.mT * self.scale, self.softcap)

    def probabilities(self, qkv: QKV, mask: AttentionMask) -> Tensor:
        """(batch, heads, time, source time), before any is dropped."""
        return masked_softmax(self.scores(qkv), mask.dense())

    def drop(self, probabilities: Tensor) -> Tensor:
        """Those of all queries and keys, with some lost."""
        return probabilities if self.dropping is None else self.dropping(probabilities)


def attend(qkv: QKV, mask: AttentionMask, scoring: Scoring, tap: Probabilities | None = None) -> Tensor:
    """→ (batch, heads, time, d_head), by the kernels that fit.

    Where somebody watches the `tap`, the probabilities pass through it. If that leaves them as they are, the usual
    kernels give the result, the same to the last bit as if nobody had looked.
    """
    if tap is not None and tap.watchers:
        found = scoring.probabilities(qkv, mask)
        used = tap(found)
        if used is not found:
            return scoring.drop(used) @ qkv.repeated().v
    if scoring.softcap is not None:
        return by_formula(qkv, mask, scoring)
    if scoring.dropping is not None:
        return dropped_attention(qkv, mask, scoring)
    return fast_attention(qkv, scoring.scale, mask)


def fast_attention(qkv: QKV, scale: float, mask: AttentionMask) -> Tensor:
    """Without dropout, shape by shape, through the kernels that fit the mask."""
    seen, biased = mask.mask, mask.position.biases
    if not biased and (seen.triangular or seen.full):
        if native.attention_fits(*qkv):
            return native.FusedAttention.apply(scale, seen.triangular, *qkv)
        return _fused(qkv, scale, None, seen.triangular)
    if seen.continued and not biased and _flashes(qkv.q):
        return _continued(qkv, scale, seen.ranges)
    if mask.flexes:
        return _flex()(*qkv, block_mask=mask.blocks(), scale=scale, enable_gqa=qkv.grouped)
    if qkv.pairs <= MAX_DENSE_ENTRIES:
        return _fused(qkv, scale, _as(mask.dense(), qkv.q))

    def one(part: QKV, queries: slice, keys: slice) -> Tensor:
        return _fused(part, scale, _as(mask.part(queries, keys), part.q))

    return _by_query_blocks(qkv, mask, one)


def dropped_attention(qkv: QKV, mask: AttentionMask, scoring: Scoring) -> Tensor:
    """With dropout of the probabilities, which PyTorch's fused kernels draw in an order of their own: by our own
    kernels where they fit, else by the formula."""
    assert scoring.dropping is not None
    fits = scoring.dropping.kernels and _kernels_fit(qkv, mask)
    keys = scoring.dropping.keys(qkv.q.shape[:-1]) if fits else None
    if keys is None:
        return by_formula(qkv, mask, scoring)
    seen, rows = mask.mask, qkv.q.shape[0]
    documents = None if seen.documents is None else seen.documents[0].expand(rows, -1).contiguous()
    real = None if seen.real is None else seen.real.expand(rows, -1).contiguous()
    options = [int(seen.causal), seen.window or 0], [scoring.scale, scoring.dropping.p]
    out: Tensor = torch.ops.weft.dropped_attention(*qkv, keys, real, documents, *options)[0]
    return out


def by_formula(qkv: QKV, mask: AttentionMask, scoring: Scoring) -> Tensor:
    """What no kernel of PyTorch's has, by `reference_attention`; a few queries at a time where all probabilities would
    be too many to keep."""

    def one(part: QKV, queries: slice, keys: slice) -> Tensor:
        def drop(found: Tensor) -> Tensor:
            found = found.to(part.v.dtype)
            return found if scoring.dropping is None else scoring.dropping(found, queries.start, keys.start)

        return reference_attention(part, scoring.scale, mask.part(queries, keys), drop, scoring.softcap)[0]

    whole = slice(0, qkv.q.shape[2]), slice(0, qkv.k.shape[2])
    entries = qkv.pairs * (qkv.q.shape[0] * qkv.q.shape[1] if qkv.q.is_cuda else 1)
    most = MAX_KEPT_ENTRIES if qkv.q.is_cuda else MAX_DENSE_ENTRIES
    return one(qkv, *whole) if entries <= most else _by_query_blocks(qkv, mask, one)


@cache
def load_kernels() -> bool:
    """Load the GPU kernels for dropout, where there is a GPU and Triton to compile them; whether they are there."""
    if not torch.cuda.is_available() or not has_triton():
        return False
    import weft.nn.kernels.attention  # noqa: F401 — it registers its operations with torch

    return True


def _kernels_fit(qkv: QKV, mask: AttentionMask) -> bool:
    seen, narrow = mask.mask, qkv.q.dtype in (torch.float16, torch.bfloat16) and qkv.q.shape[-1] <= 128
    placed = seen.causal or seen.window is not None or seen.documents is not None
    moved = seen.places is not None or seen.offset or seen.ranges
    plain = seen.prefix is None and not (placed and moved) and not mask.position.biases
    return qkv.q.is_cuda and narrow and plain


def _fused(qkv: QKV, scale: float, mask: Tensor | None, causal: bool = False) -> Tensor:
    """PyTorch's fused attention. cuDNN's kernels are used without a mask only: with one their gradient may be NaN
    (torch 2.11)."""
    if not qkv.q.is_cuda or mask is None:
        return F.scaled_dot_product_attention(
            *qkv, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=qkv.grouped
        )
    # the kernels that take a mask do not support grouped heads
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(*qkv.repeated(), attn_mask=mask, is_causal=causal, scale=scale)


def _flashes(q: Tensor) -> bool:
    """Whether FlashAttention's kernels take these heads."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _continued(qkv: QKV, scale: float, ranges: Ranges = ()) -> Tensor:
    """The last tokens of a text attend to all of it, each up to its own place; or several ranges of its tokens.

    FlashAttention draws its triangle from the end, which `scaled_dot_product_attention` can ask of it only through
    torch.nn.attention.bias, and that imports torch's compiler: six seconds for the first text.
    """
    if ranges:
        return torch.cat([_continued(qkv.part(own, slice(0, each.stop)), scale) for own, each in spans(ranges)], dim=2)
    return torch.ops.aten._scaled_dot_product_flash_attention(*qkv, is_causal=True, scale=scale)[0]


def _by_query_blocks(qkv: QKV, mask: AttentionMask, one: Callable[[QKV, slice, slice], Tensor]) -> Tensor:
    """A few queries at a time, each block with its own strip of the mask, over the keys that it can see; in the
    backward pass each is computed again."""
    outs, (time, source) = [], (qkv.q.shape[2], qkv.k.shape[2])
    for start in range(0, time, QUERY_BLOCK):
        queries = slice(start, min(start + QUERY_BLOCK, time))
        keys = mask.mask.key_range(queries, source)
        given = qkv.part(queries, keys), queries, keys
        outs.append(checkpoint(one, *given, use_reentrant=False) if torch.is_grad_enabled() else one(*given))
    return torch.cat(outs, dim=2)


@cache
def _flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _as(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
