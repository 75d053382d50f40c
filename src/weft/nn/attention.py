"""Multi-head attention (Vaswani et al. 2017, §3.2): project, split into heads, score, mask, softmax, mix, project.

`scaled_dot_product.py` has the formula, and `attention_paths.py` chooses the kernel that computes it.
"""

from torch import Tensor, nn

from weft.nn import norm
from weft.nn.attention_paths import AttentionDropout, Scoring, attend, load_kernels
from weft.nn.cache import Past
from weft.nn.config import Attention as AttentionConfig
from weft.nn.dropout import Dropout, RowRng
from weft.nn.linear import Linear
from weft.nn.mask import AttentionMask
from weft.nn.scaled_dot_product import QKV, Probabilities


class Heads(nn.Module):
    """Common part of self- and cross-attention: sizes, and the computation from queries, keys and values on."""

    def __init__(self, settings: AttentionConfig, d_model: int, d_head: int):
        super().__init__()
        self.heads, self.kv_heads, self.d_head = settings.heads, settings.groups, d_head
        self.first_head = 0  # index of the first head here, if tensor parallelism divides the heads
        self.scale = settings.scale or d_head**-0.5
        self.softcap, self.clip = settings.softcap, settings.clip
        self.out = Linear(self.heads * d_head, d_model, bias=settings.biased[1], into_residual=True)
        self.norm_heads = settings.qk_norm_over == "heads"  # one norm over all heads of a token
        self.q_norm, self.k_norm = (_norm(settings, heads, d_head) for heads in (self.heads, self.kv_heads))
        self.probabilities = Probabilities()
        self.dropout = Dropout(settings.dropout)
        self.kernels = bool(settings.dropout) and load_kernels()

    def split(self, x: Tensor, heads: int, norm: nn.Module | None = None) -> Tensor:
        """(batch, time, heads · d_head) → (batch, heads, time, d_head), normalised if there is a norm."""
        x = norm(x) if norm is not None and self.norm_heads else x
        x = x.unflatten(-1, (heads, self.d_head)).transpose(1, 2)
        return x if norm is None or self.norm_heads else norm(x)

    def clip_projection(self, x: Tensor) -> Tensor:
        """Projected values (batch, time, width), clamped to ±`clip` if it is set."""
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def scoring(self, rng: RowRng | None) -> Scoring:
        dropout = AttentionDropout(
            self.dropout.p, rng=rng, number=self.dropout.number, first_head=self.first_head, kernels=self.kernels
        )
        return Scoring(self.scale, self.softcap, dropout if self.dropout.drops else None)

    def scores(self, qkv: QKV, mask: AttentionMask) -> Tensor:
        """Scores of each query against each key, (batch, heads, time, source time), before masking."""
        return self.scoring(None).scores(qkv)

    def mix(self, qkv: QKV, mask: AttentionMask, rng: RowRng | None) -> Tensor:
        """Values weighted by the attention probabilities → (batch, heads, time, d_head)."""
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
        self.widths = [heads * d_head for heads in (self.heads, self.kv_heads, self.kv_heads)]
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
        q, k = self.split(q, self.heads, self.q_norm), self.split(k, self.kv_heads, self.k_norm)
        return QKV(q, k, self.split(v, self.kv_heads))

    def rotate(self, qkv: QKV, mask: AttentionMask) -> QKV:
        """Rotate queries and keys by their positions, if the position encoding is rotary."""
        if mask.angles is None:
            return qkv
        return QKV(mask.position.rotate(qkv.q, mask.angles), mask.position.rotate(qkv.k, mask.angles), qkv.v)


class CrossAttention(Heads):
    """Attention of each token to the tokens of another sequence (Bahdanau et al. 2015; Vaswani et al. 2017)."""

    def __init__(self, settings: AttentionConfig, d_model: int, d_head: int):
        super().__init__(settings, d_model, d_head)
        keys = self.kv_heads * d_head
        self.q = Linear(d_model, self.heads * d_head, bias=settings.biased[0])
        self.kv = Linear(d_model, keys, keys, bias=settings.biased[0])

    def keys_values(self, source: Tensor, rng: RowRng | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values, each (batch, kv_heads, source time, d_head), of source (batch, source time, d_model)."""
        k, v = self.clip_projection(self.kv(source, rng=rng)).chunk(2, dim=-1)
        return self.split(k, self.kv_heads, self.k_norm), self.split(v, self.kv_heads)

    def forward(
        self, x: Tensor, source: tuple[Tensor, Tensor], mask: AttentionMask, *, rng: RowRng | None = None
    ) -> Tensor:
        """x (batch, time, d_model), attending to the source's keys and values → (batch, time, d_model)."""
        # adjacent rows may share a source row (beams): they are then one row with more queries
        queries = self.clip_projection(self.q(x.reshape(source[0].shape[0], -1, x.shape[-1]), rng=rng))
        return self.attend(QKV(self.split(queries, self.heads, self.q_norm), *source), mask, rng).view(x.shape)
