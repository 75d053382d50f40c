"""Low-rank adaptation: a frozen matrix and a small trained one beside it (Hu et al. 2022)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention import CrossAttention, SelfAttention
from weft.nn.block import Block
from weft.nn.config import LoRA
from weft.nn.feedforward import Gated


def block_linears(model: nn.Module) -> dict[str, list[int]]:
    """The linear layers inside Transformer blocks by name, each with the heights of the matrices that lie in it.

    Queries, keys and values are one layer (`qkv`), as are the gate and what it gates (`gate_up`).
    """
    heights: dict[str, list[int]] = {}
    for prefix, block in model.named_modules():
        if not isinstance(block, Block):
            continue
        stacked: dict[nn.Module, list[int]] = {}
        for part in block.modules():
            if isinstance(part, SelfAttention):
                stacked[part.qkv] = [heads * part.d_head for heads in (part.heads, part.kv_heads, part.kv_heads)]
            elif isinstance(part, CrossAttention):
                stacked[part.kv] = [part.kv_heads * part.d_head] * 2
            elif isinstance(part, Gated):
                stacked[part.gate_up] = [part.gate_up.out_features // 2] * 2
        for name, part in block.named_modules(prefix=prefix):
            if isinstance(part, nn.Linear):
                heights[name] = stacked.get(part, [part.out_features])
    return heights


class LowRank(nn.Linear):
    """W x + (alpha / rank) B A x, where A and B learn and W, with its bias, does not (Hu et al. 2022, §4.1).

    B begins as zeros, so that the layer begins as it was. Where several matrices lie in one (`heights`), each has an A
    and a B of its own: `a` (matrices · rank, in_features) and `b` (out_features, rank) hold them one above the other.
    The weight keeps its name, so that the model's own weights are found where they were.
    """

    def __init__(self, linear: nn.Linear, heights: Sequence[int], settings: LoRA):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        assert sum(heights) == linear.out_features
        self.weight, self.bias = linear.weight, linear.bias  # the same ones, not copies
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.heights = list(heights)
        self.rank, self.scale = settings.rank, settings.alpha / settings.rank
        self.dropout = nn.Dropout(settings.dropout)
        self.a = nn.Parameter(self.weight.new_empty(len(heights) * self.rank, self.in_features))
        self.b = nn.Parameter(self.weight.new_zeros(self.out_features, self.rank))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)  # as nn.Linear begins

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) → (…, out_features)."""
        inner = F.linear(self.dropout(x), self.a) * self.scale
        parts = zip(inner.split(self.rank, dim=-1), self.b.split(self.heights), strict=True)
        return super().forward(x) + torch.cat([F.linear(part, b) for part, b in parts], dim=-1)

    def difference(self) -> Tensor:
        """(alpha / rank) B A, (out_features, in_features)."""
        parts = zip(self.b.split(self.heights), self.a.split(self.rank), strict=True)
        return torch.cat([b @ a for b, a in parts]) * self.scale

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        """A plain layer with the weight W + (alpha / rank) B A. This one stays as it is."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        plain.weight = nn.Parameter(self.weight + self.difference().to(self.weight.dtype))
        plain.bias = None if self.bias is None else nn.Parameter(self.bias.clone())
        return plain
