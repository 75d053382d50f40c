"""One layer of a Transformer, and the skip connection and norm around each of its sublayers."""

from collections.abc import Callable

from torch import Tensor, nn

from weft.nn import feedforward, norm, relative_attention
from weft.nn.attention import CrossAttention
from weft.nn.cache import Past
from weft.nn.config import Block as BlockConfig
from weft.nn.dropout import Dropout, RowRng
from weft.nn.linear import Linear
from weft.nn.mask import AttentionMask


class Sublayer(nn.Module):
    """f with its norms and skip: x + f(norm(x)) (pre), norm(x + f(x)) (post; Vaswani et al. 2017), x + norm_out(f(x))
    (res-post), x + norm_out(f(norm(x))) (sandwich), or x + f(x)."""

    def __init__(self, settings: BlockConfig, normed: bool = True):
        super().__init__()
        made = [norm.build(settings.norm, settings.d_model) if there else None for there in (
            settings.placement in ("pre", "post", "sandwich") and normed,
            settings.placement in ("res-post", "sandwich"),
        )]  # fmt: skip
        self.norm, self.norm_out = made
        self.pre = settings.placement != "post"
        self.residual, self.scale = settings.residual, settings.residual_scale
        self.dropout = Dropout(settings.dropout)

    def read(self, x: Tensor) -> Tensor:
        """What f reads, (batch, time, d_model)."""
        return self.norm(x) if self.norm is not None and self.pre else x

    def write(self, x: Tensor, y: Tensor, rng: RowRng | None) -> Tensor:
        """x (batch, time, d_model) with what f has made of it, y, added."""
        # under autocast a norm returns fp32; what the next sublayer reads keeps the type of x
        y = y if self.norm_out is None else self.norm_out(y).to(x.dtype)
        y = y if self.scale == 1.0 else y * self.scale
        y = x + self.dropout(y, rng) if self.residual else self.dropout(y, rng)
        return self.norm(y).to(x.dtype) if self.norm is not None and not self.pre else y

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor], rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model)."""
        return self.write(x, f(self.read(x)), rng)


class Block(nn.Module):
    """Self-attention, cross-attention where there is a source, feed-forward: one after the other or, without a source,
    side by side. `kind` is the number of its layer's kind in the stack's pattern; without `normed`, no norm precedes
    attention."""

    def __init__(self, settings: BlockConfig, cross: bool, kind: int = 0, normed: bool = True):
        super().__init__()
        self.kind = kind
        d_model, d_head = settings.d_model, settings.d_head
        self.attention = relative_attention.build(settings)
        self.attention_skip = Sublayer(settings, normed)
        self.cross = CrossAttention(settings.attention, d_model, d_head) if cross else None
        self.cross_skip = Sublayer(settings) if cross else None
        self.feedforward = feedforward.build(settings.feedforward, d_model)
        self.parallel = settings.sublayers != "sequential"
        self.feedforward_skip = Sublayer(settings, normed=settings.sublayers != "parallel")

    def forward(
        self,
        x: Tensor,
        *,
        mask: AttentionMask,
        past: Past | None = None,
        source: tuple[tuple[Tensor, Tensor], AttentionMask] | None = None,
        rng: RowRng | None = None,
    ) -> Tensor:
        """x (batch, time, d_model) → (batch, time, d_model). `source` is what cross-attention reads: this layer's keys
        and values of the source, and the mask over them."""
        if self.parallel:
            h = self.attention_skip.read(x)
            also = h if self.feedforward_skip.norm is None else self.feedforward_skip.read(x)
            x = self.attention_skip.write(x, self.attention(h, mask, past, rng), rng)
            return self.feedforward_skip.write(x, self.feedforward(also, rng), rng)
        x = self.attention_skip(x, lambda h: self.attention(h, mask, past, rng), rng)
        if self.cross is not None and self.cross_skip is not None:
            assert source is not None
            attend, (keys_values, over) = self.cross, source
            x = self.cross_skip(x, lambda h: attend(h, keys_values, over, rng), rng)
        return self.feedforward_skip(x, lambda h: self.feedforward(h, rng), rng)


def block_linears(model: nn.Module) -> dict[str, Linear]:
    """The linear layers inside Transformer blocks, by name."""
    blocks = [(prefix, block) for prefix, block in model.named_modules() if isinstance(block, Block)]
    inside = [named for prefix, block in blocks for named in block.named_modules(prefix=prefix)]
    return {name: part for name, part in inside if isinstance(part, Linear)}
