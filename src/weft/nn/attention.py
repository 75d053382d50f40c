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
from weft.nn.position_config import Disentangled as DisentangledConfig
from weft.nn.position_config import LayeredT5, Relative
from weft.nn.scaled_dot_product import QKV, Probabilities, changed, masked_softmax


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
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if settings.sinks else None
        self.probabilities = Probabilities()
        self.dropout = Dropout(settings.dropout)
        self.kernels = bool(settings.dropout) and load_kernels()

    def split(self, x: Tensor, heads: int, norm: nn.Module | None = None) -> Tensor:
        """(batch, time, heads · width) → (batch, heads, time, width), clamped to ±`clip` if that is set, normalised if
        there is a norm; a norm over all heads comes first (OLMoE). The width is d_head, or d_v for values."""
        x = norm(x) if norm is not None and self.norm_heads else x
        x = x if self.clip is None else x.clamp(-self.clip, self.clip)
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        return x if norm is None or self.norm_heads else norm(x)

    def reset_parameters(self, init: Initialiser) -> None:
        """Zero the sinks, whatever `init` says about other weights."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def scoring(self, rng: RowRng | None) -> Scoring:
        plain = Scoring(self.scale, self.softcap, sinks=self.sinks)
        if not self.dropout.drops:
            return plain
        p, number, first = self.dropout.p, self.dropout.number, self.first_head
        return plain._replace(p=p, rng=rng, number=number, first_head=first, kernels=self.kernels)

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

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Vectors of the KV cache per token and head, heads of this process, and width."""
        return 2, self.kv_heads, max(self.d_head, self.d_v)

    def forward(self, x: Tensor, mask: AttentionMask, *, past: Past | None = None, rng: RowRng | None = None) -> Tensor:
        """x (batch, time, d_model) → (batch, time, d_model); `past` adds the keys and values of other tokens."""
        q, k, v = self.rotate(self.project(x, rng), mask)
        if past is not None:
            k, v = past.extend(k, v)
        return self.attend(QKV(q, k, v), mask, rng)

    def project(self, x: Tensor, rng: RowRng | None = None, by: Linear | None = None) -> QKV:
        """Queries, keys and values of x (batch, time, d_model), before rotation; `by` replaces the projection."""
        q, k, v = (by or self.qkv)(x, rng=rng).split(self.widths, -1)
        q_norm, k_norm = (None, None) if self.norm_rotated else (self.q_norm, self.k_norm)
        q, k = self.split(q, self.heads, q_norm), self.split(k, self.kv_heads, k_norm)
        return QKV(q, k, self.split(v, self.kv_heads))

    def rotate(self, qkv: QKV, mask: AttentionMask) -> QKV:
        """Rotate queries and keys by their positions, if the position encoding is rotary, and normalise them if their
        norms come after it; otherwise, scale the queries if the encoding does."""
        q, k, v = qkv
        if mask.angles is None:
            return QKV(mask.position.scale_queries(q, mask.queries), k, v)
        q, k = mask.position.rotate(q, mask.angles), mask.position.rotate(k, mask.angles)
        if self.norm_rotated and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(q.dtype), self.k_norm(k).to(k.dtype)
        return QKV(q, k, v)


class LatentAttention(SelfAttention):
    """Attention whose keys and values are computed from one vector per token (DeepSeek-AI 2024, §2.1).

    The last `rotated` coordinates of a head are those with positions, whose key all heads share. Whole sequences expand
    the vectors to keys and values. Against a cache, the matrices of keys and values multiply queries and outputs
    instead, so that all heads read the cached vectors themselves.
    """

    def __init__(self, settings: BlockConfig):
        latent, d_model, d_head = settings.attention.latent, settings.d_model, settings.d_head
        assert latent is not None
        Heads.__init__(self, settings.attention, d_model, d_head)
        self.rotated, self.rank, bias = settings.rotated, latent.rank, settings.attention.biased[0]
        self.kept = d_head - self.rotated  # coordinates without positions
        inputs, self.query_rank = latent.query_rank or d_model, latent.query_rank
        if latent.query_rank is not None:
            self.q_down = Linear(d_model, latent.query_rank, bias=bias)
            self.q_latent_norm = norm.RMSNorm(latent.query_rank, latent.eps)
        self.q_up = Linear(inputs, self.heads * d_head, bias=False)
        self.kv_down = Linear(d_model, self.rank, self.rotated, bias=bias)
        self.kv_latent_norm = norm.RMSNorm(self.rank, latent.eps)
        self.kv_up = Linear(self.rank, self.heads * (self.kept + self.d_v), bias=False)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return 1, 1, self.rank + self.rotated

    def forward(self, x: Tensor, mask: AttentionMask, *, past: Past | None = None, rng: RowRng | None = None) -> Tensor:
        if past is None:
            return super().forward(x, mask, rng=rng)
        q, (latent, shared) = self._rotate(self.queries(x, rng), mask), self.compress(x, rng)
        cached, _ = past.extend(torch.cat((latent, self._rotate(shared, mask)), dim=-1), shared[..., :0])
        latent, shared = cached.split([self.rank, self.rotated], dim=-1)
        if cached.shape[2] == x.shape[1] or type(self.kv_up) is not Linear:
            return self.attend(QKV(q, *self.expand(latent, shared, rng)), mask, rng)
        keys, values = self.kv_up.weight.unflatten(0, (self.heads, -1)).split([self.kept, self.d_v], dim=1)
        kept, rotated = q.split([self.kept, self.rotated], dim=-1)
        mixed = self.mix(QKV(torch.cat((kept @ keys, rotated), dim=-1), cached, latent), mask, rng) @ values.mT
        return self.out(mixed.transpose(1, 2).flatten(2), rng=rng)

    def queries(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        """Queries (batch, heads, time, d_head) of x (batch, time, d_model), before rotation."""
        if self.query_rank is not None:
            x = self.q_latent_norm(self.q_down(x, rng=rng)).to(x.dtype)
        return self.split(self.q_up(x, rng=rng), self.heads)

    def compress(self, x: Tensor, rng: RowRng | None = None) -> tuple[Tensor, Tensor]:
        """Normalised vectors and rotary keys before rotation, (batch, 1, time, rank or rotated)."""
        latent, shared = self.kv_down(x, rng=rng)[:, None].split([self.rank, self.rotated], dim=-1)
        return self.kv_latent_norm(latent).to(x.dtype), shared

    def expand(self, latent: Tensor, shared: Tensor, rng: RowRng | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (batch, heads, time, d_head or d_v) of vectors and rotary keys (batch, 1, time, …)."""
        both = self.split(self.kv_up(latent[:, 0], rng=rng), self.heads)
        kept, values = both.split([self.kept, self.d_v], dim=-1)
        return torch.cat((kept, shared.expand(-1, self.heads, -1, -1)), dim=-1), values

    def project(self, x: Tensor, rng: RowRng | None = None, by: Linear | None = None) -> QKV:
        assert by is None, "only global tokens have other projections"
        return QKV(self.queries(x, rng), *self.expand(*self.compress(x, rng), rng))

    def rotate(self, qkv: QKV, mask: AttentionMask) -> QKV:
        """Rotate the last coordinates of queries and keys by their positions."""
        return QKV(self._rotate(qkv.q, mask), self._rotate(qkv.k, mask), qkv.v)

    def _rotate(self, x: Tensor, mask: AttentionMask) -> Tensor:
        assert mask.angles is not None
        kept, rotated = x.split([x.shape[-1] - self.rotated, self.rotated], dim=-1)
        return torch.cat((kept, mask.position.rotate(rotated, mask.angles)), dim=-1)


class CrossAttention(Heads):
    """Attention of each token to the tokens of another sequence (Bahdanau et al. 2015; Vaswani et al. 2017)."""

    def __init__(self, settings: AttentionConfig, d_model: int, d_head: int):
        super().__init__(settings, d_model, d_head)
        self.q = Linear(d_model, self.heads * d_head, bias=settings.biased[0])
        self.kv = Linear(d_model, self.kv_heads * d_head, self.kv_heads * self.d_v, bias=settings.biased[0])

    def keys_values(self, source: Tensor, rng: RowRng | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (batch, kv_heads, source time, d_head or d_v) of source (batch, source time, d_model)."""
        widths = [self.kv_heads * width for width in (self.d_head, self.d_v)]
        k, v = self.kv(source, rng=rng).split(widths, -1)
        return self.split(k, self.kv_heads, self.k_norm), self.split(v, self.kv_heads)

    def forward(
        self, x: Tensor, source: tuple[Tensor, Tensor], mask: AttentionMask, *, rng: RowRng | None = None
    ) -> Tensor:
        """x (batch, time, d_model), attending to the source's keys and values → (batch, time, d_model)."""
        # adjacent rows may share a source row (beams): they are then one row with more queries
        queries = self.q(x.reshape(source[0].shape[0], -1, x.shape[-1]), rng=rng)
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
    projects the distances' vectors with the same weights as its tokens, or with separate ones. A bias of k_δ would be
    the same for all keys, so there is none."""

    def __init__(self, settings: BlockConfig, separate: bool):
        super().__init__(settings.attention, settings.d_model, settings.d_head)
        self.separate, width = separate, self.heads * settings.d_head
        if separate:
            self.distance_queries = nn.Parameter(torch.empty(width, settings.d_model))
            self.distance_keys = nn.Parameter(torch.empty(width, settings.d_model))
            self.distance_bias = nn.Parameter(torch.empty(width))  # of the queries

    def reset_parameters(self, init: Initialiser) -> None:
        """Draw separate projections like other matrices."""
        if self.separate:
            init.matrix(self.distance_queries, False)
            init.matrix(self.distance_keys, False)
            nn.init.zeros_(self.distance_bias)

    def project_distances(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (1, heads, distances, d_head) of the distances' vectors (distances, d_model)."""
        if self.separate:
            q, k = F.linear(vectors, self.distance_queries, self.distance_bias), F.linear(vectors, self.distance_keys)
            return self.split(q[None], self.heads), self.split(k[None], self.kv_heads)
        q, k, _ = self.qkv(vectors[None]).split(self.widths, -1)
        return self.split(q, self.heads, self.q_norm), self.split(k, self.kv_heads, self.k_norm)

    def scores(self, qkv: QKV, mask: AttentionMask) -> Tensor:
        assert isinstance(mask.position, Disentangled)
        q, k, _ = qkv.repeat_kv()
        rows = mask.position.distances(mask.queries, mask.keys)[:, None].expand(q.shape[0], q.shape[1], -1, -1)
        q_distance, k_distance = self.project_distances(mask.position.vectors().to(q.dtype))
        scores = q @ k.mT + ((q @ k_distance.mT).gather(-1, rows) + (k @ q_distance.mT).gather(-1, rows.mT).mT)
        return apply_softcap(scores * self.scale, self.softcap)


class GlobalAttention(SelfAttention):
    """Attention within a window, beside global tokens, which see all others by separate projections and are seen by
    all (Beltagy et al. 2020, §3.1)."""

    def __init__(self, settings: AttentionConfig, d_model: int, d_head: int):
        super().__init__(settings, d_model, d_head)
        self.global_qkv = Linear(d_model, *self.widths, bias=settings.biased[0])

    def forward(self, x: Tensor, mask: AttentionMask, *, past: Past | None = None, rng: RowRng | None = None) -> Tensor:
        qkv, chosen = self.rotate(self.project(x, rng), mask), mask.mask.globals
        if chosen is None:
            return self.attend(qkv, mask, rng)
        everywhere, chosen = mask.without_window(), chosen[:, None, :, None]
        wide = self.rotate(self.project(x, rng, self.global_qkv), mask)
        mixed = None
        if self.probabilities.watchers:
            pairs = ((wide, everywhere), (qkv, mask))
            rows = [masked_softmax(self.scores(each, limits), limits.dense()) for each, limits in pairs]
            replaced = self.probabilities(probabilities := torch.where(chosen, rows[0], rows[1]))
            if changed(replaced, probabilities):
                kept = self.scoring(rng).drop(replaced)
                mixed = torch.where(chosen, kept @ wide.repeat_kv().v, kept @ qkv.repeat_kv().v)
        if mixed is None:
            scoring = self.scoring(rng)  # attended without the tap, which has seen the probabilities
            mixed = torch.where(chosen, attend(wide, everywhere, scoring), attend(qkv, mask, scoring))
        return self.out(mixed.transpose(1, 2).flatten(2), rng=rng)


def build(settings: BlockConfig, *, has_globals: bool = False) -> SelfAttention:
    """Build the self-attention of a block, as its position encoding requires, or with global tokens."""
    if has_globals:
        return GlobalAttention(settings.attention, settings.d_model, settings.d_head)
    if settings.attention.latent is not None:
        return LatentAttention(settings)
    if isinstance(settings.position, Relative):
        return RelativeAttention(settings, settings.position.rows)
    if isinstance(settings.position, LayeredT5):
        return BiasedAttention(settings, settings.position.buckets)
    if isinstance(settings.position, DisentangledConfig):
        return DisentangledAttention(settings, settings.position.separate)
    return SelfAttention(settings.attention, settings.d_model, settings.d_head)
