"""What a layout over many devices needs and how long its step takes: the settings of a prediction, and what it gives.

A `Job` is what is trained and on what; a `Choice` is how: the sizes of a mesh (`weft.layout`), the rows that one device
reads at a time, and how much of the layers is run again in the backward pass. `refusal` says why a choice can't be.
"""

from dataclasses import dataclass, field
from functools import cached_property

from weft.costs.count import Count, block_linears, count, stacks
from weft.costs.devices import Device
from weft.costs.interconnect import Group, Interconnect
from weft.costs.memory import LayerBytes, layer_bytes, narrow
from weft.costs.roofline import Part, Roofline, Software
from weft.layout import AXES, Layout
from weft.models import config


@dataclass(frozen=True)
class Job:
    """A model in training: `rows` sequences of `length` tokens a step, over `gpus` devices.

    Logits are formed at the share `predicted` of the places.
    """

    model: config.TransformerConfig
    rows: int
    length: int
    device: Device
    net: Interconnect
    gpus: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    software: Software = field(default_factory=Software)
    predicted: float = 1.0

    @cached_property
    def cost(self) -> Count:
        """The model's parameters and operations."""
        return count(self.model, self.length)

    @cached_property
    def roofline(self) -> Roofline:
        """What its passes take."""
        return Roofline(self.device, self.precision, self.software)

    @cached_property
    def layers(self) -> int:
        """Of all stacks together."""
        return sum(depth for depth, _, _ in stacks(self.model))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Parameters. Tensor parallelism divides "layers" (the largest is a "layer"), what stands "below" them and
        "above" them, but not what a layer has "besides" (norms, biases after its sums) nor "positions".

        A "tied" table is needed by the last stage of a pipeline too.
        """
        parts = {part.name: part.parameters for part in self.cost.components}
        each = [block_linears(self.model, cross) for _, _, cross in stacks(self.model)]
        biases = [sum(sum(one.heights) for one in linears if one.bias and one.by_rows) for linears in each]
        split = [sum(one.parameters for one in linears) - bias for linears, bias in zip(each, biases, strict=True)]
        depths = [depth for depth, _, _ in stacks(self.model)]
        untied = parts.get("logits", 0) >= self.vocab_size * self.model.d_model
        return {
            "layer": max(split),
            "layers": sum(depth * size for depth, size in zip(depths, split, strict=True)),
            "besides": parts.get("norms", 0) // self.layers + max(biases),
            "positions": parts.get("positions", 0),
            "below": parts.get("embeddings", 0),
            "above": parts.get("logits", 0) + parts.get("head", 0),
            "tied": 0 if untied else parts.get("embeddings", 0),
        }

    @cached_property
    def kept(self) -> list[LayerBytes]:
        """What one layer of each stack keeps of a token."""
        return layer_bytes(self.model, self.length, narrow(self.precision), self.software.compiled)

    @cached_property
    def vocab_size(self) -> int:
        """Of the logits; 0 where the model has none."""
        words = any(part.name == "logits" for part in self.cost.components)
        return int(getattr(self.model, "vocab_size", 0)) if words else 0


@dataclass(frozen=True)
class Choice:
    """How a job is laid out. `again`: the share of the layers' products that run again in the backward pass.

    `chunks` stages of a pipeline stand on each device, in turn (Narayanan et al. 2021, §2.2).
    """

    layout: Layout
    micro: int = 1
    again: float = 0.0
    chunks: int = 1

    @property
    def pipeline(self) -> int:
        """Stages."""
        return self.layout.pipeline

    def part(self, length: int) -> Part:
        """What one device reads at a time."""
        layout = self.layout
        return Part(self.micro, length, layout.tensor, layout.sequence, layout.context)

    def batches(self, rows: int) -> int:
        """How often a device reads in a step."""
        return rows // (self.layout.readers * self.micro)

    def group(self, axis: str, net: Interconnect) -> Group:
        """The devices along an axis of the mesh; those of later axes stand between neighbours."""
        sizes, stride = self.layout.sizes, 1
        for inner in AXES[AXES.index(axis) + 1 :]:
            stride *= sizes[inner]
        return Group(sizes[axis], stride, net)


def refusal(job: Job, choice: Choice) -> str | None:
    """Why a choice can't be, in a few words, or None where it can."""
    model, layout = job.model, choice.layout
    attention = model.attention
    if attention.heads % layout.tensor or attention.groups % layout.tensor:
        heads = f"{attention.heads} heads"
        if attention.groups != attention.heads:
            heads += f" ({attention.groups} of keys and values)"
        return f"tensor {layout.tensor} does not divide {heads}"
    if layout.tensor > 1 and attention.qk_norm is not None and attention.qk_norm_over != "head":
        return "the norm of queries and keys needs all heads on one device"
    if model.feedforward.d_ff % layout.tensor:
        return f"tensor {layout.tensor} does not divide d_ff {model.feedforward.d_ff}"
    if layout.sequence and layout.tensor == 1:
        return "sequence splits over the devices of tensor, and that is 1"
    if job.length % (layout.context * (layout.tensor if layout.sequence else 1)):
        along = f"context {layout.context}" + (f" × tensor {layout.tensor}" if layout.sequence else "")
        return f"{along} does not divide {job.length} tokens"
    if layout.pipeline > 1 and len(stacks(model)) > 1:
        return "pipeline needs one stack of layers, and this model has two"
    if layout.pipeline * choice.chunks > job.layers:
        return f"pipeline {layout.pipeline * choice.chunks} is more than {job.layers} layers"
    if job.rows % (layout.readers * choice.micro):
        readers = f"replicate × shard = {layout.readers}"
        times = f", {choice.micro} at a time" if choice.micro > 1 else ""
        return f"{job.rows} rows a step do not divide by {readers}{times}"
    return None
