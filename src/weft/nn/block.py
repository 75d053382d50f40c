"""One layer of a Transformer, and the skip connection and norm around each of its sublayers."""

from collections.abc import Callable

from torch import Tensor, nn

from weft.nn import feedforward, norm
from weft.nn.attention import AttentionMask, CrossAttention, SelfAttention
from weft.nn.cache import Past
from weft.nn.config import Block as BlockConfig
from weft.nn.dropout import Dropout


class Sublayer(nn.Module):
    """f with its norm and skip: x + f(norm(x)) (pre), norm(x + f(x)) (post; Vaswani et al. 2017), or x + f(x)."""

    def __init__(self, settings: BlockConfig):
        super().__init__()
        self.norm = norm.build(settings.norm, settings.d_model) if settings.placement != "none" else None
        self.pre = settings.placement == "pre"
        self.residual = settings.residual
        self.dropout = Dropout(settings.dropout)

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model)."""
        y = f(self.norm(x) if self.norm is not None and self.pre else x)
        y = x + self.dropout(y) if self.residual else self.dropout(y)
        # under autocast a norm returns fp32; what the next sublayer reads keeps the type of x
        return self.norm(y).to(x.dtype) if self.norm is not None and not self.pre else y


class Block(nn.Module):
    """Self-attention, cross-attention where there is a source, feed-forward."""

    def __init__(self, settings: BlockConfig, cross: bool):
        super().__init__()
        d_model, d_head = settings.d_model, settings.d_head
        self.attention = SelfAttention(settings.attention, d_model, d_head, settings.position)
        self.attention_skip = Sublayer(settings)
        self.cross = CrossAttention(settings.attention, d_model, d_head) if cross else None
        self.cross_skip = Sublayer(settings) if cross else None
        self.feedforward = feedforward.build(settings.feedforward, d_model)
        self.feedforward_skip = Sublayer(settings)

    def forward(
        self,
        x: Tensor,
        where: AttentionMask,
        past: Past | None = None,
        source: tuple[tuple[Tensor, Tensor], AttentionMask] | None = None,
    ) -> Tensor:
        """x (batch, time, d_model) → (batch, time, d_model).

        `source` is what cross-attention reads: this layer's keys and values of the source, and the mask over them.
        """
        x = self.attention_skip(x, lambda h: self.attention(h, where, past))
        if self.cross is not None and self.cross_skip is not None:
            assert source is not None
            attend, (keys_values, over) = self.cross, source
            x = self.cross_skip(x, lambda h: attend(h, keys_values, over))
        return self.feedforward_skip(x, self.feedforward)
