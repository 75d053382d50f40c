"""One pass of a Transformer over a text, of which everything is kept.

What is shown of it comes from `capture`. Queries, keys and scores, which no kernel keeps, are computed again by the
attention's own methods from what it was given in that pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.explain.capture import Seen, capture, taps
from weft.models.stack import Stack
from weft.models.transformer import Transformer
from weft.nn.mask import AttentionMask
from weft.nn.scaled_dot_product import QKV

NAMES = {"attention": "self-attention", "cross": "attention to the source", "feedforward": "the feed-forward layer"}


@dataclass(frozen=True)
class Compared:
    """What an attention compares: before positions rotate it and after, the mask, and the keys' names."""

    plain: QKV
    rotated: QKV
    mask: AttentionMask
    keys: Sequence[str]


@dataclass(frozen=True)
class Followed:
    """A stack of a model that has read a text, and the place whose way through it is followed.

    `given` is what the attentions of each block were given, `opened` the layer whose inside is shown, `embedding` the
    name of the stages before the first, and `other` the tokens that cross-attention reads.
    """

    model: Transformer
    seen: Seen
    given: dict[str, list[tuple[Any, ...]]]
    name: str
    ids: Sequence[int]
    pieces: Sequence[str]
    place: int
    opened: int
    embedding: str = "embedding"
    other: Sequence[str] = ()

    @property
    def stack(self) -> Stack:
        stack = getattr(self.model, self.name)
        assert isinstance(stack, Stack)
        return stack

    def block(self, layer: int) -> Any:
        return self.stack.layers[layer]

    def at(self, name: str) -> Tensor:
        """What passed at the place, (width,)."""
        return self.seen[name][0, self.place].float()

    def layer(self, part: str, layer: int | None = None) -> Tensor:
        """The same in a layer, by default in the one that is opened."""
        return self.at(f"{self.name}.{self.opened if layer is None else layer}.{part}")

    def before(self, part: str, layer: int | None = None) -> Tensor:
        """What a sublayer's skip connection carries past it."""
        layer = self.opened if layer is None else layer
        block, names = self.block(layer), ["attention", "cross", "feedforward"]
        earlier = [name for name in names[: names.index(part)] if getattr(block, name) is not None]
        if earlier and not block.parallel:
            return self.layer(f"{earlier[-1]}_skip", layer)
        if layer:
            return self.layer("residual", layer - 1)
        narrow = self.stack.projection is not None and self.stack.narrow
        return self.at(f"{self.name}.{'projection' if narrow else 'dropout'}")

    def added(self, part: str, layer: int | None = None) -> Tensor:
        """What a sublayer adds to the residual stream."""
        layer = self.opened if layer is None else layer
        skip = getattr(self.block(layer), f"{part}_skip")
        return self.layer(part if skip.norm_out is None else f"{part}_skip.norm_out", layer) * skip.scale

    def compared(self, part: str) -> Compared:
        """What the opened layer's attention compares."""
        block, turn = divmod(self.opened, self.stack.sharing)
        module, given = getattr(self.block(self.opened), part), self.given[f"{self.name}.{block}.{part}"][turn]
        if part == "attention":
            plain = module.project(given[0])
            return Compared(plain, module.rotate(plain, given[1]), given[1], self.pieces)
        queries = module.split(module.clip_projection(module.q(given[0])), module.heads, module.q_norm)
        plain = QKV(queries, *given[1])
        return Compared(plain, plain, given[2], self.other)


@contextmanager
def watched(model: Transformer) -> Iterator[tuple[Seen, dict[str, list[tuple[Any, ...]]]]]:
    """Keep all that passes the model's places, and what its attentions are given."""
    given: dict[str, list[tuple[Any, ...]]] = {}
    with ExitStack() as stack:
        for name in ("encoder", "decoder"):
            blocks = () if (found := getattr(model, name)) is None else found.blocks
            for part, number, block in ((p, n, b) for p in ("attention", "cross") for n, b in enumerate(blocks)):
                if (module := getattr(block, part)) is not None:
                    kept = given.setdefault(f"{name}.{number}.{part}", [])
                    hook = module.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args))
                    stack.callback(hook.remove)
        yield stack.enter_context(capture(model, *taps(model))), given
