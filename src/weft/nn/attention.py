"""Multi-head attention (Vaswani et al. 2017, §3.2): project, split into heads, score, mask, softmax, mix, project.

`scaled_dot_product.py` has the formula, and `attention_paths.py` chooses the kernel that computes it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn import norm
from weft.nn.activations import apply_softcap
from weft.nn.attention_paths import Scoring, attend, load_kernels
from weft.nn.cache import Past
from weft.nn.config import Attention as AttentionConfig
from weft.nn.config import Block as BlockConfig
from weft.nn.dropout import Dropout, RowRng
from weft.nn.init import Initialiser
from weft.nn.linear import Linear
from weft.nn.mask import AttentionMask
from weft.nn.position import Disentangled
from weft.nn.position_config import LayeredT5, Relative
from weft.nn.scaled_dot_product import QKV, Probabilities, masked_softmax


class Heads(nn.Module):
    """Common part of self- and cross-attention: sizes, and the computation from queries, keys and values on."""

    def __init__(self, settings: AttentionConfig, d_model: int, d_head: int):
        super().__init__()
        self.heads, self.kv_heads = settings.heads, settings.groups
        self.d_head, self.d_v = d_head, settings.d_v or d_head
        self.first_head = 0  # index of the first head here, if tensor parallelism divides the heads
        self.scale = settings.scale or d_head**-0.5
        self.softcap, self.clip = settings.softcap, settings.clip
        self.out = Linear(self.heads * self.d_v, d_model, bias=settings.biased[1], into_residual=True)
        self.norm_heads = settings.qk_norm_over == "heads"  # one norm over all heads of a token
        self.norm_rotated = settings.qk_norm_rotated
        self.q_norm, self.k_norm = (_norm(settings, heads, d_head) for heads in (self.heads, self.kv_heads))
        self.probabilities = Probabilities()
        self.dropout = Dropout(settings.dropout)
        self.kernels = bool(settings.dropout) and load_kernels()

    def split(self, x: Tensor, heads: int, norm: nn.Module | None = None) -> Tensor:
        """(batch, time, heads · width) → (batch, heads, time, width), normalised if there is a norm. The width is
        d_head, or d_v for values."""
        x = norm(x) if norm is not None and self.norm_heads else x
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        return x if norm is None or self.norm_heads else norm(x)

    def clip_projection(self, x: Tensor) -> Tensor:
        """Projected values (batch, time, width), clamped to ±`clip` if it is set."""
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def scoring(self, rng: RowRng | None) -> Scoring:
        if not self.dropout.drops:
            return Scoring(self.scale, self.softcap)
        p, number, first = self.dropout.p, self.dropout.number, self.first_head
        return Scoring(self.scale, self.softcap, p=p, rng=rng, number=number, first_head=first, kernels=self.kernels)

    def scores(self, qkv: QKV, mask: AttentionMask) -> Tensor:
        """Scores of each query against each key, (batch, heads, time, source time), before masking."""
        return self.scoring(None).scores(qkv)

    def mix(self, qkv: QKV, mask: AttentionMask, rng: RowRng | None) -> Tensor:
        """Values weighted by the attention probabilities → (batch, heads, time, d_v)."""
        return attend(qkv, mask, self.scoring(rng), tap=self.probabilities)

    def attend(self, qkv: QKV, mask: AttentionMask, rng: RowRng | None) -> Tensor:
        """Attention output after the last projection, (batch, time, d_model)."""
        return self.out(self.mix(qkv, mask, rng).transpose(1, 2).flatten(2), rng=rng)


def _norm(settings: AttentionConfig, heads: int, d_head: int) -> nn.Module | None:
    if settings.qk_norm is None:
        return None
    if settings.qk_norm_over == "each-head":
        return norm.HeadNorm(settings.qk_norm, heads, d_head)
    return norm.build(settings.qk_norm, d_head if settings.qk_norm_over == "head" else heads * d_head)


class SelfAttention(Heads):
    """Attention of each token to the tokens of its own sequence. One matrix projects queries, keys and values."""

    def __init__(self, settings: AttentionConfig, d_model: int, d_head: int):
        super().__init__(settings, d_model, d_head)
        self.widths = [self.heads * d_head, self.kv_heads * d_head, self.kv_heads * self.d_v]
        self.qkv = Linear(d_model, *self.widths, bias=settings.biased[0])

    def forward(self, x: Tensor, mask: AttentionMask, *, past: Past | None = None, rng: RowRng | None = None) -> Tensor:
        """x (batch, time, d_model) → (batch, time, d_model); `past` adds the keys and values of other tokens."""
        q, k, v = self.rotate(self.project(x, rng), mask)
        if past is not None:
            k, v = past.extend(k, v)
        return self.attend(QKV(q, k, v), mask, rng)

    def project(self, x: Tensor, rng: RowRng | None = None) -> QKV:
        """Queries, keys and values of x (batch, time, d_model), before rotation."""
        q, k, v = self.clip_projection(self.qkv(x, rng=rng)).split(self.widths, -1)
        q_norm, k_norm = (None, None) if self.norm_rotated else (self.q_norm, self.k_norm)
        q, k = self.split(q, self.heads, q_norm), self.split(k, self.kv_heads, k_norm)
        return QKV(q, k, self.split(v, self.kv_heads))

    def rotate(self, qkv: QKV, mask: AttentionMask) -> QKV:
        """Rotate queries and keys by their positions, if the position encoding is rotary, and normalise them if their
        norms come after it."""
        q, k, v = qkv
        if mask.angles is not None:
            q, k = mask.position.rotate(q, mask.angles), mask.position.rotate(k, mask.angles)
        if self.norm_rotated and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(q.dtype), self.k_norm(k).to(k.dtype)
        return QKV(q, k, v)


class CrossAttention(Heads):
    """Attention of each token to the tokens of another sequence (Bahdanau et al. 2015; Vaswani et al. 2017)."""

    def __init__(self, settings: AttentionConfig, d_model: int, d_head: int):
        super().__init__(settings, d_model, d_head)
        self.q = Linear(d_model, self.heads * d_head, bias=settings.biased[0])
        self.kv = Linear(d_model, self.kv_heads * d_head, self.kv_heads * self.d_v, bias=settings.biased[0])

    def keys_values(self, source: Tensor, rng: RowRng | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (batch, kv_heads, source time, d_head or d_v) of source (batch, source time, d_model)."""
        widths = [self.kv_heads * width for width in (self.d_head, self.d_v)]
        k, v = self.clip_projection(self.kv(source, rng=rng)).split(widths, -1)
        return self.split(k, self.kv_heads, self.k_norm), self.split(v, self.kv_heads)

    def forward(
        self, x: Tensor, source: tuple[Tensor, Tensor], mask: AttentionMask, *, rng: RowRng | None = None
    ) -> Tensor:
        """x (batch, time, d_model), attending to the source's keys and values → (batch, time, d_model)."""
        # adjacent rows may share a source row (beams): they are then one row with more queries
        queries = self.clip_projection(self.q(x.reshape(source[0].shape[0], -1, x.shape[-1]), rng=rng))
        return self.attend(QKV(self.split(queries, self.heads, self.q_norm), *source), mask, rng).view(x.shape)


class ScoredAttention(SelfAttention):
    """Self-attention by the formula; subclasses define `scores`."""

    def probabilities_of(self, scores: Tensor, mask: AttentionMask, rng: RowRng | None) -> Tensor:
        """Attention probabilities after dropout, from scores (batch, heads, time, source time)."""
        probabilities = masked_softmax(scores, mask.dense())
        return self.scoring(rng).drop(self.probabilities(probabilities))

    def mix(self, qkv: QKV, mask: AttentionMask, rng: RowRng | None) -> Tensor:
        return self.probabilities_of(self.scores(qkv, mask), mask, rng) @ qkv.repeat_kv().v


class BiasedAttention(ScoredAttention):
    """Scores q · k + b with a bias b per head and bucket of distances, which this layer has for itself (UMT5)."""

    def __init__(self, settings: BlockConfig, buckets: int):
        super().__init__(settings.attention, settings.d_model, settings.d_head)
        self.relative_bias = nn.Parameter(torch.empty(buckets, settings.attention.heads))

    def reset_parameters(self, init: Initialiser) -> None:
        """Draw the biases like the token embeddings."""
        init.table(self.relative_bias)

    def scores(self, qkv: QKV, mask: AttentionMask) -> Tensor:
        buckets = mask.position.distances(mask.queries, mask.keys)
        return super().scores(qkv, mask) + F.embedding(buckets, self.relative_bias).permute(0, 3, 1, 2)


class RelativeAttention(ScoredAttention):
    """softmax(q(k + a_k)ᵀ)(v + a_v) with vectors a of clipped distances (Shaw et al. 2018, eq. 3–4)."""

    def __init__(self, settings: BlockConfig, distances: int):
        super().__init__(settings.attention, settings.d_model, settings.d_head)
        self.relative_keys = nn.Parameter(torch.empty(distances, settings.d_head))
        self.relative_values = nn.Parameter(torch.empty(distances, settings.d_head))

    def reset_parameters(self, init: Initialiser) -> None:
        """Draw the relative vectors by Xavier's rule, whatever `init` says about other weights."""
        nn.init.xavier_uniform_(self.relative_keys)
        nn.init.xavier_uniform_(self.relative_values)

    def scores(self, qkv: QKV, mask: AttentionMask) -> Tensor:
        (q, k, _), relative_keys = qkv.repeat_kv(), self._gather(self.relative_keys, mask)
        scores = q @ k.mT + torch.einsum("bhtd,btsd->bhts", q, relative_keys.expand(q.shape[0], -1, -1, -1))
        return apply_softcap(scores * self.scale, self.softcap)

    def _gather(self, table: Tensor, mask: AttentionMask) -> Tensor:
        """Vector of every pair's distance, (batch or 1, time, source time, d_head)."""
        return F.embedding(mask.position.distances(mask.queries, mask.keys), table)

    def mix(self, qkv: QKV, mask: AttentionMask, rng: RowRng | None) -> Tensor:
        (q, _, v), relative_values = qkv.repeat_kv(), self._gather(self.relative_values, mask)
        probabilities = self.probabilities_of(self.scores(qkv, mask), mask, rng)
        relative_values = relative_values.expand(q.shape[0], -1, -1, -1)
        return probabilities @ v + torch.einsum("bhts,btsd->bhtd", probabilities, relative_values)


class DisentangledAttention(ScoredAttention):
    """Scores q · k + q · k_δ + q_δ · k, with queries q_δ and keys k_δ of distances δ (He et al. 2021, eq. 4). The layer
    projects the distances' vectors with the same weights as its tokens."""

    def scores(self, qkv: QKV, mask: AttentionMask) -> Tensor:
        assert isinstance(mask.position, Disentangled)
        q, k, _ = qkv.repeat_kv()
        rows = mask.position.distances(mask.queries, mask.keys)[:, None].expand(q.shape[0], q.shape[1], -1, -1)
        vectors = mask.position.vectors().to(q.dtype)  # (distances, d_model)
        projected = self.clip_projection(self.qkv(vectors[None])).split(self.widths, -1)
        q_distance = self.split(projected[0], self.heads, self.q_norm)
        k_distance = self.split(projected[1], self.kv_heads, self.k_norm)
        q_distance, k_distance, _ = QKV(q_distance, k_distance, k_distance).repeat_kv()
        scores = q @ k.mT + ((q @ k_distance.mT).gather(-1, rows) + (k @ q_distance.mT).gather(-1, rows.mT).mT)
        return apply_softcap(scores * self.scale, self.softcap)


def build(settings: BlockConfig) -> SelfAttention:
    """Build the self-attention of a block, as its position encoding requires."""
    if isinstance(settings.position, Relative):
        return RelativeAttention(settings, settings.position.rows)
    if isinstance(settings.position, LayeredT5):
        return BiasedAttention(settings, settings.position.buckets)
    kind = DisentangledAttention if settings.position.projected else SelfAttention
    return kind(settings.attention, settings.d_model, settings.d_head)
