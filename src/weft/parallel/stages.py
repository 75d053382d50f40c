"""The stages of a pipeline: which layers and parameters of a Transformer each process of the pipeline axis holds.

Stages are contiguous ranges of layers, in the order in which they run, of about equal size. What precedes the first
layer of a stack is on that layer's stage, and what follows the last layer on that one's. A table that several stages
read, such as an embedding tied to the LM head, is on each of them.
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
    """Refuse a model that can't be divided into these stages, or a layout that excludes a pipeline."""
    stages = layout.pipeline
    if stages == 1:
        return
    assert isinstance(model, TransformerConfig), "a recipe refuses others"
    layers = max(span.stop for span in _spans(model).values())
    if layers < stages:
        raise ConfigError(f"parallel.pipeline = {stages}: the model has {layers} layers, fewer than stages; lower it")
    if isinstance(getattr(model, "head", None), EmbeddingHead):
        reason = "a loss that compares the rows of a batch can't be computed in parts; set parallel.pipeline = 1"
        raise ConfigError(f"parallel.pipeline = {stages}: {reason}")
    for axis in (axis for axis in ("shard", "context") if getattr(layout, axis) > 1):
        reason = f"can't be combined with parallel.{axis} = {getattr(layout, axis)}"
        cure = "set one of them to 1 (replicate and tensor can be combined with both)"
        raise ConfigError(f"parallel.pipeline = {stages}: {reason}; {cure}")


def _spans(settings: TransformerConfig) -> dict[str, range]:
    """Return the layers of each stack, numbered in the order in which they run, an encoder's before a decoder's."""
    if isinstance(settings, EncoderDecoder):
        encoders = settings.encoder_layers or settings.layers
        return {"encoder": range(encoders), "decoder": range(encoders, encoders + settings.layers)}
    return {"encoder" if settings.kind == "encoder" else "decoder": range(settings.layers)}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Stage:
    """Stage `number` of `of`: its `layers` of all those in `spans`; `holders` are the stages that hold a parameter."""

    number: int
    of: int
    layers: range
    spans: dict[str, range]
    holders: dict[str, tuple[int, ...]]
    tied: bool  # whether the LM head shares the embedding

    @property
    def is_last(self) -> bool:
        return self.number == self.of - 1

    def begins(self, stack: str) -> bool:
        """Return whether a stack's first layer is here."""
        return self.spans[stack].start in self.layers

    def ends(self, stack: str) -> bool:
        """Return whether a stack's last layer is here."""
        return self.spans[stack].stop - 1 in self.layers

    def within(self, stack: str) -> list[int]:
        """Return the layers of a stack that are here, numbered within the stack."""
        span = self.spans[stack]
        return [layer - span.start for layer in span if layer in self.layers]

    def holds(self, name: str, biases: bool, shared: bool) -> bool:
        """Return whether this stage reads a parameter, given `biases` on all scores and a `shared` embedding."""
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
            return self.number == 0  # segments, and a separate embedding of the source
        writes = "decoder" if "decoder" in self.spans else "encoder"
        return self.begins(writes) or (shared and self.number == 0) or (self.tied and self.is_last)


def keep_stage(model: LanguageModel, mesh: Mesh) -> Stage:
    """Remove all but this process's stage from a model with empty weights; parameters keep their names."""
    assert isinstance(model, Transformer)
    spans, of = _spans(model.config), mesh.layout.pipeline
    total = max(span.stop for span in spans.values())
    tied = any(isinstance(module, TokenHead) and module.weight is None for module in model.output.modules())
    biases = any(isinstance(module, Stack) and module.position.biases for module in model.modules())
    shared = model.source_embedding is None and len(spans) == 2
    ranges = [range(number * total // of, (number + 1) * total // of) for number in range(of)]
    stages = [Stage(number, of, layers, spans=spans, holders={}, tied=tied) for number, layers in enumerate(ranges)]
    names = [name for name, _ in model.named_parameters()]
    holders = {name: tuple(stage.number for stage in stages if stage.holds(name, biases, shared)) for name in names}
    here = stages[mesh.axis("pipeline").rank]
    for name in names:
        if here.number not in holders[name]:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_parameter(last, None)
    for name in spans:
        stack, blocks = model.get_submodule(name), nn.ModuleList()
        assert isinstance(stack, Stack)
        for layer in here.within(name):
            blocks.add_module(str(layer), stack.blocks[layer])
        stack.blocks = blocks
        if not here.ends(name):
            stack.norm = None
    return replace(here, holders=holders)
