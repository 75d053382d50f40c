"""One pass of a Transformer over a text, with all intermediate tensors.

They come from `capture`. Queries, keys and scores, which the kernels do not keep, are recomputed by the attention's
methods from its arguments in that pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor

from weft.explain.capture import Captured, capture, stack_input, taps
from weft.explain.reading import Reading
from weft.explain.step.stage import StageList
from weft.models.stack import Stack
from weft.models.transformer import Transformer
from weft.nn.mask import AttentionMask
from weft.nn.scaled_dot_product import QKV

Arguments = dict[str, list[tuple[Any, ...]]]  # of every call of an attention module, by its name
SUBLAYERS = ("attention", "cross", "feedforward")


class AttentionInputs(NamedTuple):
    """Queries, keys and values of an attention, before and after rotation, its mask, and the keys' tokens."""

    plain: QKV
    rotated: QKV
    mask: AttentionMask
    keys: Sequence[str]


@dataclass(frozen=True)
class FollowedToken:
    """Position of a reading that is followed through one stack of its model, recording `stages`."""

    stages: StageList
    reading: Reading
    captured: Captured
    arguments: Arguments
    name: str  # of the stack
    position: int
    opened: int  # layer shown in detail

    @property
    def model(self) -> Transformer:
        assert isinstance(self.reading.model, Transformer)
        return self.reading.model

    @property
    def embedding(self) -> str:
        """Group of the stages below the first layer."""
        return "source_embedding" if self.name == "encoder" and self.reading.source is not None else "embedding"

    @property
    def ids(self) -> Sequence[int]:
        return self.reading.ids if self.embedding == "embedding" else self.reading.source or ()

    @property
    def pieces(self) -> Sequence[str]:
        return self.reading.pieces if self.embedding == "embedding" else self.source_pieces

    @property
    def source_pieces(self) -> Sequence[str]:
        return self.reading.source_pieces or ()

    @property
    def stack(self) -> Stack:
        return cast(Stack, getattr(self.model, self.name))

    @property
    def block(self) -> Any:
        """Block of the opened layer."""
        return self.stack.layers[self.opened]

    @property
    def begin(self) -> str:
        """Name of the captured vectors that the first layer reads."""
        return stack_input(self.name, self.stack)

    def at(self, name: str) -> Tensor:
        """Return the captured tensor `name` at the position, (width,)."""
        return self.captured[name][0, self.position].float()

    def sublayer_input(self, part: str, layer: int) -> Tensor:
        """Return the input that a sublayer's skip connection carries past it."""
        block: Any = self.stack.layers[layer]
        earlier = [name for name in SUBLAYERS[: SUBLAYERS.index(part)] if getattr(block, name) is not None]
        if earlier and not block.parallel:
            return self.at(f"{self.name}.{layer}.{earlier[-1]}_skip")
        return self.at(f"{self.name}.{layer - 1}.residual" if layer else self.begin)

    def sublayer_read(self, part: str) -> Tensor:
        """Return the vector that a sublayer of the opened layer computes from."""
        skip = getattr(self.block, f"{part}_skip")
        if skip.norm is not None and skip.pre:
            return self.at(f"{self.name}.{self.opened}.{part}_skip.norm")
        if self.block.parallel and part != "attention":  # without a norm, it reads the other sublayer's
            return self.sublayer_read("attention")
        return self.sublayer_input(part, self.opened)

    def sublayer_output(self, part: str, layer: int) -> Tensor:
        """Return the vector that a sublayer adds to the residual stream."""
        skip = getattr(self.stack.layers[layer], f"{part}_skip")
        return self.at(f"{self.name}.{layer}.{part if skip.norm_out is None else f'{part}_skip.norm_out'}") * skip.scale

    def attention_inputs(self, part: str, position: int | None = None) -> AttentionInputs:
        """Return the queries, keys and values of the opened layer's attention; global tokens have their own, so that
        they depend on the position of the query, by default the followed token's."""
        block, call = divmod(self.opened, self.stack.sharing)
        module, arguments = getattr(self.block, part), self.arguments[f"{self.name}.{block}.{part}"][call]
        if part == "attention":
            mask, wide = arguments[1], arguments[1].mask.globals
            is_wide = wide is not None and bool(wide[0, self.position if position is None else position])
            plain = module.project(arguments[0], by=module.global_qkv if is_wide else None)
            mask = mask.without_window() if is_wide else mask
            return AttentionInputs(plain, module.rotate(plain, mask), mask, self.pieces)
        queries = module.split(module.q(arguments[0]), module.heads, module.q_norm)
        plain = QKV(queries, *arguments[1])
        return AttentionInputs(plain, plain, arguments[2], self.source_pieces)


@contextmanager
def watched(model: Transformer) -> Iterator[tuple[Captured, Arguments]]:
    """Capture every tensor of a pass that has a name, and the arguments of every attention."""
    arguments: Arguments = {}
    with ExitStack() as exits:
        for name in ("encoder", "decoder"):
            blocks = () if (stack := getattr(model, name)) is None else stack.blocks
            for part, number, block in ((p, n, b) for p in ("attention", "cross") for n, b in enumerate(blocks)):
                if (module := getattr(block, part)) is not None:
                    calls = arguments.setdefault(f"{name}.{number}.{part}", [])
                    hook = module.register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args))
                    exits.callback(hook.remove)
        yield exits.enter_context(capture(model, *taps(model))), arguments
