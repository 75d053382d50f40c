"""Self-attention whose scores depend on distances between tokens, by the formula: fused kernels have none of these."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.activations import apply_softcap
from weft.nn.attention import SelfAttention
from weft.nn.config import Block as BlockConfig
from weft.nn.dropout import RowRng
from weft.nn.init import Initialiser
from weft.nn.mask import AttentionMask
from weft.nn.position import Disentangled
from weft.nn.position_config import Relative
from weft.nn.scaled_dot_product import QKV, masked_softmax


class ScoredAttention(SelfAttention):
    """Self-attention by the formula; subclasses define `scores`."""

    def probabilities_of(self, scores: Tensor, mask: AttentionMask, rng: RowRng | None) -> Tensor:
        """Attention probabilities after dropout, from scores (batch, heads, time, source time)."""
        probabilities = masked_softmax(scores, mask.dense())
        return self.scoring(rng).drop(self.probabilities(probabilities))


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
    """Scores q · k + q · k_δ + q_δ · k, with queries q_δ and keys k_δ of distances δ (He et al. 2021, eq. 4).

    The layer projects the distances' vectors with the same weights as its tokens.
    """

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

    def mix(self, qkv: QKV, mask: AttentionMask, rng: RowRng | None) -> Tensor:
        return self.probabilities_of(self.scores(qkv, mask), mask, rng) @ qkv.repeat_kv().v


def build(settings: BlockConfig) -> SelfAttention:
    """Build the self-attention of a block, as its position encoding requires."""
    if isinstance(settings.position, Relative):
        return RelativeAttention(settings, settings.position.rows)
    kind = DisentangledAttention if settings.position.projected else SelfAttention
    return kind(settings.attention, settings.d_model, settings.d_head)
