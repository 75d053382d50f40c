"""One layer of a Transformer, with the skip connection and norm around each of its sublayers."""

from collections.abc import Callable

from torch import Tensor, nn

from weft.nn import attention, feedforward, norm
from weft.nn.attention import CrossAttention
from weft.nn.cache import Past
from weft.nn.config import Block as BlockConfig
from weft.nn.config import NoFeedForward
from weft.nn.dropout import Dropout, RowRng
from weft.nn.experts import Experts
from weft.nn.linear import Linear
from weft.nn.mask import AttentionMask


class Sublayer(nn.Module):
    """Norms and skip connection around a sublayer f, by the `placement` of the norm:

    x + f(norm(x)) (pre), norm(x + f(x)) (post; Vaswani et al. 2017), x + norm_out(f(x)) (res-post),
    x + norm_out(f(norm(x))) (sandwich), or x + f(x) (none). `has_norm = False` leaves out `norm`.
    """

    def __init__(self, settings: BlockConfig, has_norm: bool = True):
        super().__init__()
        present = has_norm and settings.placement in ("pre", "post", "sandwich")
        self.norm = norm.build(settings.norm, settings.d_model) if present else None
        after = settings.placement in ("res-post", "sandwich")
        self.norm_out = norm.build(settings.norm, settings.d_model) if after else None
        self.pre = settings.placement != "post"
        self.residual, self.scale = settings.residual, settings.residual_scale
        self.dropout = Dropout(settings.dropout)

    def read(self, x: Tensor) -> Tensor:
        """Input of f, (batch, time, d_model)."""
        return self.norm(x) if self.norm is not None and self.pre else x

    def write(self, x: Tensor, y: Tensor, rng: RowRng | None) -> Tensor:
        """Add the output y of f to x, both (batch, time, d_model)."""
        # under autocast a norm returns fp32; the next sublayer reads the dtype of x
        y = y if self.norm_out is None else self.norm_out(y).to(x.dtype)
        y = y if self.scale == 1.0 else y * self.scale
        y = x + self.dropout(y, rng) if self.residual else self.dropout(y, rng)
        return self.norm(y).to(x.dtype) if self.norm is not None and not self.pre else y

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor], rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model)."""
        return self.write(x, f(self.read(x)), rng)


class Block(nn.Module):
    """Self-attention, cross-attention if there is a source, and feed-forward unless its kind is 'none', in sequence or
    in parallel. `layer` is its number in the stack, and `kind` the index of its kind in the stack's pattern.
    `has_norm = False`: no norm before attention."""

    def __init__(
        self,
        settings: BlockConfig,
        cross: bool,
        *,
        layer: int = 0,
        kind: int = 0,
        has_norm: bool = True,
        has_globals: bool = False,
    ):
        super().__init__()
        self.kind = kind
        d_model, d_head = settings.d_model, settings.d_head
        self.attention = attention.build(settings, has_globals=has_globals)
        self.attention_skip = Sublayer(settings, has_norm)
        self.cross = CrossAttention(settings.attention, d_model, d_head) if cross else None
        self.cross_skip = Sublayer(settings) if cross else None
        inner = settings.feedforward_at(layer)
        self.feedforward = None if isinstance(inner, NoFeedForward) else feedforward.build(inner, d_model)
        self.parallel = settings.sublayers != "sequential"
        fed = self.feedforward is not None
        self.feedforward_skip = Sublayer(settings, has_norm=settings.sublayers != "parallel") if fed else None

    def forward(
        self,
        x: Tensor,
        *,
        mask: AttentionMask,
        past: Past | None = None,
        source: tuple[tuple[Tensor, Tensor], AttentionMask] | None = None,
        rng: RowRng | None = None,
        routing: list[Tensor] | None = None,
    ) -> Tensor:
        """x (batch, time, d_model) → (batch, time, d_model). `source`: this layer's keys and values of the source for
        cross-attention, and the mask over them. A router appends its sums to `routing`."""
        inner, inner_skip = self.feedforward, self.feedforward_skip

        def feed(h: Tensor) -> Tensor:
            assert inner is not None
            if isinstance(inner, Experts):
                return inner(h, rng, real=mask.mask.real, routing=routing)
            return inner(h, rng)

        if self.parallel:
            assert inner is not None and inner_skip is not None
            h = self.attention_skip.read(x)
            feedforward_input = h if inner_skip.norm is None else inner_skip.read(x)
            x = self.attention_skip.write(x, self.attention(h, mask, past=past, rng=rng), rng)
            return inner_skip.write(x, feed(feedforward_input), rng)
        x = self.attention_skip(x, lambda h: self.attention(h, mask, past=past, rng=rng), rng)
        if self.cross is not None and self.cross_skip is not None:
            assert source is not None
            cross, (keys_values, source_mask) = self.cross, source
            x = self.cross_skip(x, lambda h: cross(h, keys_values, source_mask, rng=rng), rng)
        return x if inner is None or inner_skip is None else inner_skip(x, feed, rng)


def block_linears(model: nn.Module) -> dict[str, Linear]:
    """Linear layers inside the Transformer blocks of a model, by name."""
    blocks = [(prefix, block) for prefix, block in model.named_modules() if isinstance(block, Block)]
    inside = [named for prefix, block in blocks for named in block.named_modules(prefix=prefix)]
    return {name: part for name, part in inside if isinstance(part, Linear)}
