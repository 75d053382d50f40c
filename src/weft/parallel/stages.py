"""A Transformer's layers divided into stages: which of its weights a process of the pipeline axis holds.

Layers stay together in the order in which they are read, about as many on each stage. What is before the first layer
of a stack stands with that layer, and what is after the last one with that one. A table that several stages read, such
as one that tokens are embedded with and logits are made with, is on each of them.
"""

from dataclasses import dataclass, replace

from torch import nn

from weft.config import Config
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models.base import LanguageModel
from weft.models.config import EmbeddingHead, EncoderDecoder, TransformerConfig
from weft.models.heads import TokenHead
from weft.models.stack import Stack
from weft.models.transformer import Transformer
from weft.parallel.mesh import Mesh


def check(model: Config, layout: Layout) -> None:
    """Refuse a model that has no such stages, or a layout that a pipeline doesn't go with."""
    stages = layout.pipeline
    if stages == 1:
        return
    assert isinstance(model, TransformerConfig), "a recipe refuses others"
    layers = max(span.stop for span in _spans(model).values())
    if layers < stages:
        raise ConfigError(f"parallel.pipeline = {stages}: the model has {layers} layers, fewer than stages; lower it")
    if isinstance(getattr(model, "head", None), EmbeddingHead):
        reason = "a loss that compares the rows of a batch can't be had in parts; set parallel.pipeline = 1"
        raise ConfigError(f"parallel.pipeline = {stages}: {reason}")
    for axis in (axis for axis in ("shard", "context") if getattr(layout, axis) > 1):
        reason = f"doesn't go together with parallel.{axis} = {getattr(layout, axis)}"
        cure = "set one of them to 1 (replicate and tensor go with both)"
        raise ConfigError(f"parallel.pipeline = {stages}: {reason}; {cure}")


def _spans(settings: TransformerConfig) -> dict[str, range]:
    """The layers of each stack in the order in which they are read, an encoder's before a decoder's."""
    if isinstance(settings, EncoderDecoder):
        encoders = settings.encoder_layers or settings.layers
        return {"encoder": range(encoders), "decoder": range(encoders, encoders + settings.layers)}
    return {"encoder" if settings.kind == "encoder" else "decoder": range(settings.layers)}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Stage:
    """One of `of` stages: which `layers` of all it has, in `spans` of them; `holders` are the stages of a parameter."""

    number: int
    of: int
    layers: range
    spans: dict[str, range]
    holders: dict[str, tuple[int, ...]]
    tied: bool  # whether logits are made with the table that tokens are embedded with

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.of - 1

    def begins(self, stack: str) -> bool:
        """Whether a stack's first layer is here."""
        return self.spans[stack].start in self.layers

    def ends(self, stack: str) -> bool:
        """Whether a stack's last layer is here."""
        return self.spans[stack].stop - 1 in self.layers

    def within(self, stack: str) -> list[int]:
        """The layers of a stack that are here, by their numbers in it."""
        span = self.spans[stack]
        return [layer - span.start for layer in span if layer in self.layers]

    def holds(self, name: str, biases: bool, shared: bool) -> bool:
        """Whether a parameter of the whole model is read here. `biases`: positions add to the scores of every layer;
        `shared`: source and target have one table."""
        first, _, rest = name.partition(".")
        if first in self.spans:
            part, _, below = rest.partition(".")
            match part:
                case "blocks":
                    return int(below.partition(".")[0]) in self.within(first)
                case "norm":
                    return self.ends(first)
                case "position" if biases:
                    return bool(self.within(first))
            return self.begins(first)
        if first == "output":
            return self.is_last
        if first != "embedding":
            return self.is_first  # segments, and a source's own table
        writes = "decoder" if "decoder" in self.spans else "encoder"
        return self.begins(writes) or (shared and self.is_first) or (self.tied and self.is_last)


def cut(model: LanguageModel, mesh: Mesh) -> Stage:
    """Leave a model with empty weights the layers of this process's stage; parameters keep their names."""
    assert isinstance(model, Transformer)
    spans, of = _spans(model.config), mesh.layout.pipeline
    total = max(span.stop for span in spans.values())
    tied = any(isinstance(module, TokenHead) and module.weight is None for module in model.output.modules())
    biases = any(isinstance(module, Stack) and module.position.biases for module in model.modules())
    shared = model.source_embedding is None and len(spans) == 2
    layers = [range(number * total // of, (number + 1) * total // of) for number in range(of)]
    stages = [Stage(number, of, own, spans, {}, tied) for number, own in enumerate(layers)]
    names = [name for name, _ in model.named_parameters()]
    holders = {name: tuple(stage.number for stage in stages if stage.holds(name, biases, shared)) for name in names}
    here = mesh.axis("pipeline").rank
    for name in names:
        if here not in holders[name]:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_parameter(last, None)
    for name in spans:
        stack, blocks = model.get_submodule(name), nn.ModuleList()
        assert isinstance(stack, Stack)
        for layer in stages[here].within(name):
            blocks.add_module(str(layer), stack.blocks[layer])
        stack.blocks = blocks
        if not stages[here].ends(name):
            stack.norm = None
    return replace(stages[here], holders=holders)
