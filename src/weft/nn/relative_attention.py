"""Self-attention whose scores and values know distances, by the formula: no fused kernel has products with them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.activations import capped
from weft.nn.attention import SelfAttention
from weft.nn.config import Attention as AttentionConfig
from weft.nn.config import Block as BlockConfig
from weft.nn.dropout import RowRng
from weft.nn.init import Initialiser
from weft.nn.mask import AttentionMask
from weft.nn.position import Disentangled
from weft.nn.position_config import Relative
from weft.nn.scaled_dot_product import QKV, masked_softmax


class ScoredAttention(SelfAttention):
    """Self-attention by the formula, with scores of its own."""

    def probabilities_of(self, scores: Tensor, mask: AttentionMask, rng: RowRng | None) -> Tensor:
        """scores (batch, heads, time, source time) → the probabilities, with some dropped."""
        found = masked_softmax(scores, mask.dense())
        return self.scoring(rng).drop(self.probabilities(found))


class RelativeAttention(ScoredAttention):
    """softmax(q(k + a_k)ᵀ)(v + a_v) with vectors a of clipped distances (Shaw et al. 2018, eq. 3–4)."""

    def __init__(self, settings: AttentionConfig, d_model: int, d_head: int, rows: int):
        super().__init__(settings, d_model, d_head)
        self.relative_keys = nn.Parameter(torch.empty(rows, d_head))
        self.relative_values = nn.Parameter(torch.empty(rows, d_head))

    def reset_parameters(self, init: Initialiser) -> None:
        """Draw the relative vectors from Xavier's range, however the other weights are drawn."""
        nn.init.xavier_uniform_(self.relative_keys)
        nn.init.xavier_uniform_(self.relative_values)

    def scores(self, qkv: QKV, mask: AttentionMask) -> Tensor:
        (q, k, _), near_keys = qkv.repeated(), self._near(self.relative_keys, mask)
        scores = q @ k.mT + torch.einsum("bhtd,btsd->bhts", q, near_keys.expand(q.shape[0], -1, -1, -1))
        return capped(scores * self.scale, self.softcap)

    def _near(self, table: Tensor, mask: AttentionMask) -> Tensor:
        """The table's vector of every pair's distance, (batch or 1, time, source time, d_head)."""
        return F.embedding(mask.position.distances(mask.queries, mask.keys), table)

    def mix(self, qkv: QKV, mask: AttentionMask, rng: RowRng | None) -> Tensor:
        (q, _, v), near_values = qkv.repeated(), self._near(self.relative_values, mask)
        used = self.probabilities_of(self.scores(qkv, mask), mask, rng)
        return used @ v + torch.einsum("bhts,btsd->bhtd", used, near_values.expand(q.shape[0], -1, -1, -1))


class DisentangledAttention(ScoredAttention):
    """Scores q · k + q · k_δ + q_δ · k with queries and keys q_δ, k_δ of the distances' vectors, which the layer makes
    as it makes those of tokens (He et al. 2021, eq. 4)."""

    def scores(self, qkv: QKV, mask: AttentionMask) -> Tensor:
        assert isinstance(mask.position, Disentangled)
        q, k, _ = qkv.repeated()
        rows = mask.position.distances(mask.queries, mask.keys)[:, None].expand(q.shape[0], q.shape[1], -1, -1)
        vectors = mask.position.vectors().to(q.dtype)  # (distances, d_model)
        near = self.clipped(self.qkv(vectors[None])).split(self.widths, -1)
        near_q, near_k = self.split(near[0], self.heads, self.q_norm), self.split(near[1], self.kv_heads, self.k_norm)
        near_q, near_k, _ = QKV(near_q, near_k, near_k).repeated()
        scores = q @ k.mT + ((q @ near_k.mT).gather(-1, rows) + (k @ near_q.mT).gather(-1, rows.mT).mT)
        return capped(scores * self.scale, self.softcap)

    def mix(self, qkv: QKV, mask: AttentionMask, rng: RowRng | None) -> Tensor:
        return self.probabilities_of(self.scores(qkv, mask), mask, rng) @ qkv.repeated().v


def build(settings: BlockConfig) -> SelfAttention:
    """The self-attention of a block, as its positions need it."""
    sizes = settings.attention, settings.d_model, settings.d_head
    if isinstance(settings.position, Relative):
        return RelativeAttention(*sizes, settings.position.rows)
    return DisentangledAttention(*sizes) if settings.position.projected else SelfAttention(*sizes)
