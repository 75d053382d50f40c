"""Attention(Q, K, V) = softmax(QKᵀ/√d_k)V over many heads (Vaswani et al. 2017, §3.2).

`reference_attention` is the formula and returns the probabilities; `fast_attention` gives the same result through
fused kernels, with memory that does not grow with the square of the length. A forward hook on an attention's
`weights` is all it takes to see the probabilities, or to replace them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from weft.machine import has_triton
from weft.nn import norm
from weft.nn.attention_mask import DENSE_ENTRIES, AttentionMask
from weft.nn.cache import Past
from weft.nn.config import Attention as AttentionConfig
from weft.nn.dropout import dropped, next_call, place_keys
from weft.nn.init import Initialiser
from weft.nn.linear import Linear
from weft.nn.position import Disentangled
from weft.nn.position_config import Relative
from weft.nn.runs import Runs, spans
from weft.nn.softcap import capped

QUERY_BLOCK = 512
# On a GPU more probabilities than this, over all rows and heads, are not kept for the backward pass.
KEPT_ENTRIES = 2**28


class QKV(NamedTuple):
    """q (batch, heads, time, d_head); k and v (batch, kv_heads, source time, d_head).

    Each head of keys and values is shared by heads / kv_heads heads of queries.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def pairs(self) -> int:
        """Queries times keys."""
        return self.q.shape[2] * self.k.shape[2]

    @property
    def grouped(self) -> bool:
        """Several heads of queries share one of keys and values."""
        return self.q.shape[1] != self.k.shape[1]

    def repeated(self) -> "QKV":
        """The same with a head of keys and values for each of queries."""
        if not self.grouped:
            return self
        repeats = self.q.shape[1] // self.k.shape[1]
        return QKV(self.q, *(x.repeat_interleave(repeats, dim=1) for x in (self.k, self.v)))

    def part(self, queries: slice, keys: slice) -> "QKV":
        """Some queries, keys and their values."""
        return QKV(self.q[:, :, queries], self.k[:, :, keys], self.v[:, :, keys])


def reference_attention(
    qkv: QKV,
    scale: float,
    mask: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] = lambda weights: weights,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale)v and the probabilities, by the formula.

    mask bool (True is seen) or float (added). → (batch, heads, time, d_head), (batch, heads, time, source time).
    A query that sees nothing gets zeros. `drop` is applied to the probabilities, `softcap` to the scores.
    """
    q, k, v = qkv.repeated()
    weights = drop(probabilities(capped(q @ k.mT * scale, softcap), mask))
    return weights @ v, weights


def probabilities(scores: Tensor, mask: Tensor | None) -> Tensor:
    """softmax over the keys that `mask` leaves, (batch, heads, time, source time); zeros where it leaves none."""
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.dtype == torch.bool:
        blind = ~mask.any(dim=-1, keepdim=True)
        return scores.masked_fill(~(mask | blind), float("-inf")).softmax(dim=-1).masked_fill(blind, 0.0)
    scores = scores + mask.to(scores.dtype)
    blind = scores.isneginf().all(dim=-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)


def fast_attention(qkv: QKV, scale: float, where: AttentionMask) -> Tensor:
    """The same as `reference_attention`, shape by shape, through the kernels that fit the mask."""
    mask, biased = where.mask, where.position.biases
    if not biased and (mask.triangular or mask.full):
        return _fused(qkv, scale, None, mask.triangular)
    if mask.continued and not biased and _flashes(qkv.q):
        return _continued(qkv, scale, mask.runs)
    if where.flexes:
        return _flex()(*qkv, block_mask=where.blocks(), scale=scale, enable_gqa=qkv.grouped)
    if qkv.pairs <= DENSE_ENTRIES:
        return _fused(qkv, scale, _as(where.dense(), qkv.q))
    return _by_query_blocks(
        qkv, where, lambda part, queries, keys: _fused(part, scale, _as(where.part(queries, keys), part.q))
    )


def dropped_attention(qkv: QKV, scale: float, where: AttentionMask, dropout: float, first_head: int = 0) -> Tensor:
    """The same with dropout of the probabilities, which PyTorch's fused kernels draw in an order of their own.

    By our own kernels where they fit, else by the formula.
    """
    call = next_call()
    fits = _kernels_fit(qkv, where)
    keys = place_keys(qkv.q.shape[:-1], call, (first_head,), device=qkv.q.device) if fits else None
    if keys is not None:
        mask, rows = where.mask, qkv.q.shape[0]
        documents = None if mask.documents is None else mask.documents[0].expand(rows, -1).contiguous()
        real = None if mask.real is None else mask.real.expand(rows, -1).contiguous()
        options = [int(mask.causal), mask.window or 0], [scale, dropout]
        out: Tensor = torch.ops.weft.dropped_attention(*qkv, keys, real, documents, *options)[0]
        return out

    return by_formula(qkv, scale, where, None, Dropping(dropout, call, first_head))


class Dropping(NamedTuple):
    """Dropout of probabilities: the share that is lost, the number of the call, the heads that come before these."""

    share: float
    call: int
    first_head: int = 0

    def of(self, weights: Tensor, queries: slice, keys: slice) -> Tensor:
        """weights (batch, heads, time, source time) of some queries and keys, with some lost."""
        first = (self.first_head, queries.start)
        places = place_keys(weights.shape[:-1], self.call, first, device=weights.device)
        return dropped(weights, self.share, places, keys.start)


def by_formula(
    qkv: QKV, scale: float, where: AttentionMask, softcap: float | None, dropping: Dropping | None
) -> Tensor:
    """What no kernel of PyTorch's has, by `reference_attention`; a few queries at a time where all probabilities would
    be too many to keep."""

    def one(part: QKV, queries: slice, keys: slice) -> Tensor:
        def drop(weights: Tensor) -> Tensor:
            weights = weights.to(part.v.dtype)
            return weights if dropping is None else dropping.of(weights, queries, keys)

        return reference_attention(part, scale, where.part(queries, keys), drop, softcap)[0]

    whole = slice(0, qkv.q.shape[2]), slice(0, qkv.k.shape[2])
    entries = qkv.pairs * (qkv.q.shape[0] * qkv.q.shape[1] if qkv.q.is_cuda else 1)
    most = KEPT_ENTRIES if qkv.q.is_cuda else DENSE_ENTRIES
    return one(qkv, *whole) if entries <= most else _by_query_blocks(qkv, where, one)


_kernels = False  # whether `attention_kernel` has been loaded


def _load_kernels() -> None:
    """Load the GPU kernels for dropout, where there is a GPU and Triton to compile them."""
    global _kernels
    if not _kernels and torch.cuda.is_available() and has_triton():
        import weft.nn.kernels.attention  # noqa: F401 — it registers its operations with torch

        _kernels = True


def _kernels_fit(qkv: QKV, where: AttentionMask) -> bool:
    mask, narrow = where.mask, qkv.q.dtype in (torch.float16, torch.bfloat16) and qkv.q.shape[-1] <= 128
    placed = mask.causal or mask.window is not None or mask.documents is not None
    moved = mask.places is not None or mask.offset or mask.runs
    plain = mask.prefix is None and not (placed and moved) and not where.position.biases
    return _kernels and qkv.q.is_cuda and narrow and plain


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


def _continued(qkv: QKV, scale: float, runs: Runs = ()) -> Tensor:
    """The last tokens of a text attend to all of it, each up to its own place; or several runs of its tokens.

    FlashAttention draws its triangle from the end, which `scaled_dot_product_attention` can ask of it only through
    torch.nn.attention.bias, and that imports torch's compiler: six seconds for the first text.
    """
    if runs:
        return torch.cat([_continued(qkv.part(own, slice(0, run.stop)), scale) for own, run in spans(runs)], dim=2)
    return torch.ops.aten._scaled_dot_product_flash_attention(*qkv, is_causal=True, scale=scale)[0]


def _by_query_blocks(qkv: QKV, where: AttentionMask, one: Callable[[QKV, slice, slice], Tensor]) -> Tensor:
    """A few queries at a time, each block with its own strip of the mask, over the keys that it can see; in the
    backward pass each is computed again."""
    outs, (time, source) = [], (qkv.q.shape[2], qkv.k.shape[2])
    for start in range(0, time, QUERY_BLOCK):
        queries = slice(start, min(start + QUERY_BLOCK, time))
        keys = where.mask.key_range(queries, source)
        given = qkv.part(queries, keys), queries, keys
        outs.append(checkpoint(one, *given, use_reentrant=False) if torch.is_grad_enabled() else one(*given))
    return torch.cat(outs, dim=2)


@cache
def _flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _as(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)


class _Heads(nn.Module):
    """What self- and cross-attention have in common: the sizes, the output projection, and the choice of path."""

    def __init__(self, settings: AttentionConfig, d_model: int, d_head: int):
        super().__init__()
        self.heads, self.kv_heads, self.d_head = settings.heads, settings.groups, d_head
        self.first_head = 0  # where several processes divide the heads: how many come before these
        self.scale = settings.scale or d_head**-0.5
        self.softcap, self.clip = settings.softcap, settings.clip
        self.dropout = settings.dropout
        self.out = Linear(self.heads * d_head, d_model, bias=settings.biased[1], into_residual=True)
        self.norm_heads = settings.qk_norm_over == "heads"  # all heads of a token together
        self.q_norm, self.k_norm = (_norm(settings, heads, d_head) for heads in (self.heads, self.kv_heads))
        if settings.dropout:
            _load_kernels()
        self.weights = nn.Identity()  # the probabilities pass through here, where a forward hook can see them
        self.always_reference = False

    def split(self, x: Tensor, heads: int, norm: nn.Module | None = None) -> Tensor:
        """(batch, time, heads · d_head) → (batch, heads, time, d_head), normed where there is a norm."""
        if norm is None:
            return x.unflatten(-1, (heads, self.d_head)).transpose(1, 2)
        if self.norm_heads:
            return norm(x).unflatten(-1, (heads, self.d_head)).transpose(1, 2)
        return norm(x.unflatten(-1, (heads, self.d_head)).transpose(1, 2))

    def clipped(self, x: Tensor) -> Tensor:
        """What a projection gives, (batch, time, width), cut off where there is a bound."""
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def attend(self, qkv: QKV, where: AttentionMask) -> Tensor:
        """Heads of queries over heads of keys and values → (batch, time, d_model)."""
        dropout = self.dropout if self.training else 0.0
        mixed = None
        if self.always_reference:
            mixed = self.reference(qkv, where, dropout)
        elif self.weights._forward_hooks:
            mixed = self.watched(qkv, where, dropout)
        if mixed is None and self.softcap is not None:
            dropping = Dropping(dropout, next_call(), self.first_head) if dropout else None
            mixed = by_formula(qkv, self.scale, where, self.softcap, dropping)
        if mixed is None:
            fast = (qkv, self.scale, where)
            mixed = dropped_attention(*fast, dropout, self.first_head) if dropout else fast_attention(*fast)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def reference(self, qkv: QKV, where: AttentionMask, dropout: float) -> Tensor:
        """`reference_attention` with dropout; the probabilities pass through `weights`."""
        return reference_attention(
            qkv, self.scale, where.dense(), lambda weights: self.drop(self.weights(weights), dropout), self.softcap
        )[0]

    def watched(self, qkv: QKV, where: AttentionMask, dropout: float) -> Tensor | None:
        """The probabilities by the formula pass through `weights`, where hooks see them.

        None where these leave them as they are: then the usual kernels give the result, the same to the last bit as
        if nobody had looked. Else the result follows from what the hooks have made of them.
        """
        q, k, v = qkv.repeated()
        found = probabilities(capped(q @ k.mT * self.scale, self.softcap), where.dense())
        used = self.weights(found)
        return None if used is found else self.drop(used, dropout) @ v

    def drop(self, weights: Tensor, dropout: float) -> Tensor:
        """Dropout of the probabilities (batch, heads, time, source time)."""
        if not dropout:
            return weights
        first = (self.first_head,)
        return dropped(weights, dropout, place_keys(weights.shape[:-1], next_call(), first, device=weights.device))


def _norm(settings: AttentionConfig, heads: int, d_head: int) -> nn.Module | None:
    """The norm of so many heads of queries or of keys."""
    if settings.qk_norm is None:
        return None
    if settings.qk_norm_over == "each-head":
        return norm.HeadNorm(settings.qk_norm, heads, d_head)
    return norm.build(settings.qk_norm, d_head if settings.qk_norm_over == "head" else heads * d_head)


class SelfAttention(_Heads):
    """Each token attends to the tokens of its own sequence. Queries, keys and values are one matrix, in this order."""

    def __init__(self, settings: AttentionConfig, d_model: int, d_head: int, position: Any = None):
        super().__init__(settings, d_model, d_head)
        self.widths = [heads * d_head for heads in (self.heads, self.kv_heads, self.kv_heads)]
        self.qkv = Linear(d_model, *self.widths, bias=settings.biased[0])
        self.relative_keys = self.relative_values = None
        # no fused kernel has relative values, which the probabilities weight, nor products with distances
        self.always_reference = isinstance(position, Relative) or getattr(position, "projected", False)
        if isinstance(position, Relative):
            self.relative_keys = nn.Parameter(torch.empty(position.rows, d_head))
            self.relative_values = nn.Parameter(torch.empty(position.rows, d_head))

    def reset_parameters(self, init: Initialiser) -> None:
        """Draw the relative vectors from Xavier's range, however the other weights are drawn."""
        for table in (self.relative_keys, self.relative_values):
            if table is not None:
                nn.init.xavier_uniform_(table)

    def forward(self, x: Tensor, where: AttentionMask, past: Past | None = None) -> Tensor:
        """x (batch, time, d_model) → (batch, time, d_model); `past` gives keys and values that aren't these tokens'."""
        q, k, v = self.clipped(self.qkv(x)).split(self.widths, -1)
        q, k = self.split(q, self.heads, self.q_norm), self.split(k, self.kv_heads, self.k_norm)
        v = self.split(v, self.kv_heads)
        if where.angles is not None:
            q, k = where.position.rotate(q, where.angles), where.position.rotate(k, where.angles)
        if past is not None:
            k, v = past.extend(k, v)
        return self.attend(QKV(q, k, v), where)

    def reference(self, qkv: QKV, where: AttentionMask, dropout: float) -> Tensor:
        """The reference path; with relative vectors, softmax(q(k + a_k)ᵀ)(v + a_v) (Shaw et al. 2018, eq. 3–4)."""
        q, k, v = qkv.repeated()
        distances = where.position.distances(where.queries, where.keys)
        if distances is None:
            return super().reference(qkv, where, dropout)
        if isinstance(where.position, Disentangled):
            scores = q @ k.mT + self._by_distance(q, k, where.position.vectors().to(q.dtype), distances)
            scores = capped(scores * self.scale, self.softcap)
            return self.drop(self.weights(probabilities(scores, where.dense())), dropout) @ v
        assert self.relative_keys is not None and self.relative_values is not None
        near_keys = F.embedding(distances, self.relative_keys)  # (B or 1, T, S, d_head)
        near_values = F.embedding(distances, self.relative_values)
        scores = q @ k.mT + torch.einsum("bhtd,btsd->bhts", q, near_keys.expand(q.shape[0], -1, -1, -1))
        scores = capped(scores * self.scale, self.softcap)
        kept = self.drop(self.weights(probabilities(scores, where.dense())), dropout)
        return kept @ v + torch.einsum("bhts,btsd->bhtd", kept, near_values.expand(q.shape[0], -1, -1, -1))

    def _by_distance(self, q: Tensor, k: Tensor, vectors: Tensor, rows: Tensor) -> Tensor:
        """q · k_δ + q_δ · k with queries and keys q_δ, k_δ of the distances' vectors (He et al. 2021, eq. 4).

        vectors (distances, d_model); rows (batch or 1, time, source time) of them → (batch, heads, time, source time).
        """
        near = self.clipped(self.qkv(vectors[None])).split(self.widths, -1)
        near_q, near_k = self.split(near[0], self.heads, self.q_norm), self.split(near[1], self.kv_heads, self.k_norm)
        near_q, near_k, _ = QKV(near_q, near_k, near_k).repeated()
        rows = rows[:, None].expand(q.shape[0], q.shape[1], -1, -1)
        return (q @ near_k.mT).gather(-1, rows) + (k @ near_q.mT).gather(-1, rows.mT).mT


class CrossAttention(_Heads):
    """Each token of one sequence attends to those of another (Bahdanau et al. 2015; Vaswani et al. 2017)."""

    def __init__(self, settings: AttentionConfig, d_model: int, d_head: int):
        super().__init__(settings, d_model, d_head)
        keys = self.kv_heads * d_head
        self.q = Linear(d_model, self.heads * d_head, bias=settings.biased[0])
        self.kv = Linear(d_model, keys, keys, bias=settings.biased[0])

    def keys_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """source (batch, source time, d_model) → its keys and values, each (batch, kv_heads, source time, d_head)."""
        k, v = self.clipped(self.kv(source)).chunk(2, dim=-1)
        return self.split(k, self.kv_heads, self.k_norm), self.split(v, self.kv_heads)

    def forward(self, x: Tensor, source: tuple[Tensor, Tensor], where: AttentionMask) -> Tensor:
        """x (batch, time, d_model) attends to a source's keys and values → (batch, time, d_model)."""
        # rows side by side may share a source, which then has fewer: to it they are one row of more queries
        queries = self.clipped(self.q(x.reshape(source[0].shape[0], -1, x.shape[-1])))
        return self.attend(QKV(self.split(queries, self.heads, self.q_norm), *source), where).view(x.shape)
