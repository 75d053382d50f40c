"""A layout over many devices: what it asks of a model, and the bytes that one device holds under it.

A `Job` is what is trained and on what; a `Choice` is how: the sizes of a mesh (`weft.layout`), the rows that one device
reads at a time, and how much of the layers is recomputed in the backward pass.

The bytes of a device (Rajbhandari et al. 2020; Korthikanti et al. 2022) are, for each parameter, 4 of weight, 4 of
gradient and the optimizer's moments, split over `tensor` inside layers, over `pipeline` by layers, and over `shard`.
Products read 16-bit copies: of all weights where they are not sharded; where they are, of the layer at work, the next
one, and what stands around the layers. Stages of a pipeline gather their weights once a step, and keep them and whole
gradients until its end.

Activations are those of `memory.py`. Tensor parallelism divides what lies between a sublayer's first matrix and its
last; with `sequence` also what runs along the skip connections, but not what the first matrix reads, which is gathered.
The first of p stages keeps p micro-batches at a time (1F1B).

Gradients come as activations go, so at the peak of a step of one micro-batch there are none.
"""

from dataclasses import dataclass, field
from functools import cached_property

from weft.costs import memory
from weft.costs.count import Count, block_linears, count, stacks
from weft.costs.devices import Device, Group, Interconnect
from weft.costs.memory import WIDE, LayerBytes, around_bytes, layer_bytes, moments, narrow
from weft.costs.roofline import Part, Roofline, Software
from weft.layout import AXES, Layout
from weft.models import config


@dataclass(frozen=True)
class Job:
    """A model in training: `rows` sequences of `length` tokens a step, over `gpus` devices."""

    model: config.TransformerConfig
    rows: int
    length: int
    device: Device
    net: Interconnect
    gpus: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    software: Software = field(default_factory=Software)
    predicted: float = 1.0  # the share of the places at which logits are formed

    @cached_property
    def cost(self) -> Count:
        return count(self.model, self.length)

    @cached_property
    def roofline(self) -> Roofline:
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
    """How a job is laid out. `recompute`: the share of the layers' products that run again in the backward pass.

    `chunks` stages of a pipeline stand on each device, in turn (Narayanan et al. 2021, §2.2).
    """

    layout: Layout
    micro: int = 1
    recompute: float = 0.0
    chunks: int = 1

    def part(self, length: int) -> Part:
        layout = self.layout
        return Part(self.micro, length, layout.tensor, layout.sequence, layout.context)

    def batches(self, rows: int) -> int:
        return rows // (self.layout.readers * self.micro)

    def group(self, axis: str, net: Interconnect) -> Group:
        """The devices along an axis of the mesh; those of later axes stand between neighbours."""
        sizes, stride = self.layout.sizes, 1
        for inner in AXES[AXES.index(axis) + 1 :]:
            stride *= sizes[inner]
        return Group(sizes[axis], stride, net)

    def depths(self, job: Job) -> list[int]:
        """Layers on one device, of each stack; in a pipeline, of the largest stage."""
        whole = [depth for depth, _, _ in stacks(job.model)]
        return whole if self.layout.pipeline == 1 else [-(-job.layers // self.layout.pipeline)]


def indivisible(model: config.TransformerConfig, tensor: int) -> str | None:
    """What of a model can't be split over `tensor` devices, or None if all of it can."""
    attention = model.attention
    sizes = {"attention.heads": attention.heads, "attention.kv_heads": attention.groups}
    for key, size in {**sizes, "feedforward.d_ff": model.feedforward.d_ff}.items():
        if size % tensor:
            fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            choose = f"; choose one of {fitting}" if key in sizes else ""
            return f"model.{key} = {size} can't be divided by it{choose}"
    if tensor > 1 and attention.qk_norm is not None and attention.qk_norm_over != "head":
        return f"model.attention.qk_norm_over = '{attention.qk_norm_over}' needs all heads on one device"
    return None


def refusal(job: Job, choice: Choice) -> str | None:
    """Why a choice is impossible, in a few words, or None if it is possible."""
    layout = choice.layout
    if (reason := indivisible(job.model, layout.tensor)) is not None:
        return f"tensor = {layout.tensor}: {reason}"
    if layout.sequence and layout.tensor == 1:
        return "sequence splits over the devices of tensor, and that is 1"
    if job.length % (layout.context * (layout.tensor if layout.sequence else 1)):
        along = f"context {layout.context}" + (f" × tensor {layout.tensor}" if layout.sequence else "")
        return f"{along} does not divide {job.length} tokens"
    if layout.pipeline > 1 and len(stacks(job.model)) > 1:
        return "pipeline needs one stack of layers, and this model has two"
    if layout.pipeline * choice.chunks > job.layers:
        return f"pipeline {layout.pipeline * choice.chunks} is more than {job.layers} layers"
    if job.rows % (layout.readers * choice.micro):
        readers = f"replicate × shard = {layout.readers}"
        times = f", {choice.micro} at a time" if choice.micro > 1 else ""
        return f"{job.rows} rows a step do not divide by {readers}{times}"
    return None


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the fullest device; `passing` is what gathering and reducing hold for a moment."""

    weights: float
    copies: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    passing: float
    accumulates: bool  # gradients are there while activations are

    @property
    def peak(self) -> float:
        used = self.activations + self.logits
        held = used + self.gradients if self.accumulates else max(used, self.gradients)
        return self.weights + self.copies + self.optimizer + self.passing + held


def rank_memory(job: Job, choice: Choice) -> RankMemory:
    """What the fullest device holds: that of the first stage of a pipeline, or of the last, which has the logits."""
    ends = [(True, True)] if choice.layout.pipeline == 1 else [(True, False), (False, True)]
    return max((_stage(job, choice, first, last) for first, last in ends), key=lambda each: each.peak)


def stage_parameters(job: Job, choice: Choice, first: bool, last: bool) -> dict[str, float]:
    """Parameters on one device before `shard` divides them: in "layers", "around" them, and of one "layer"."""
    sizes, t = job.sizes, choice.layout.tensor
    layer = sizes["layer"] / t + sizes["besides"]
    layers = sum(choice.depths(job)) * layer
    if choice.layout.pipeline == 1:  # where stacks differ, so do their layers
        layers = sizes["layers"] / t + job.layers * sizes["besides"]
    around = (sizes["below"] / t + sizes["positions"]) * first + sizes["above"] / t * last
    if last and not first:
        around += sizes["tied"] / t
    return {"layers": layers, "around": around, "layer": layer}


def _stage(job: Job, choice: Choice, first: bool, last: bool) -> RankMemory:
    parts, n = stage_parameters(job, choice, first, last), narrow(job.precision)
    s, p = choice.layout.shard, choice.layout.pipeline
    held = parts["layers"] + parts["around"]
    gathered = held if p > 1 else min(held, 2 * parts["layer"] + parts["around"])
    batches = choice.batches(job.rows)
    # those that the first stage keeps (Korthikanti et al. 2022, §4.2.3, where stages take turns)
    in_flight = p if choice.chunks == 1 else p * (1 + (p - 1) / (p * choice.chunks))
    whole = WIDE * held if s > 1 and p > 1 else 0.0  # until they are reduced, once a step
    return RankMemory(
        weights=WIDE * held / s,
        copies=n * gathered if s > 1 else (n * held if n < WIDE else 0.0),
        gradients=WIDE * held / s + whole,
        optimizer=WIDE * moments(job.optimizer, held, parts["layers"]) / s,
        activations=_activations(job, choice, min(batches, in_flight) if first and p > 1 else 1),
        logits=_logits(job, choice) if last else 0.0,
        passing=(2 * n + WIDE) * parts["layer"] if s > 1 else 0.0,
        accumulates=batches > 1 or p > 1,
    )


def _activations(job: Job, choice: Choice, in_flight: float) -> float:
    """Of the micro-batches in a stage's layers, and of the one at work around them and in a recomputed layer."""
    n, layout, again = narrow(job.precision), choice.layout, choice.recompute
    along, depths = layout.tensor if layout.sequence else 1, choice.depths(job)
    each = [kept.along / along + kept.inputs + kept.inside / layout.tensor for kept in job.kept]
    kept_all = sum(depth * kept for depth, kept in zip(depths, each, strict=True))
    inputs = sum(depths) * n * job.model.d_model / along
    layers = in_flight * ((1 - again) * kept_all + again * inputs)
    once = around_bytes(job.model, n) / along + again * max(each)
    return choice.part(job.length).tokens * (layers + once)


def _logits(job: Job, choice: Choice) -> float:
    tokens, V = round(job.predicted * choice.part(job.length).tokens), -(-job.vocab_size // choice.layout.tensor)
    if not V:
        return 0.0
    if narrow(job.precision) < WIDE:
        return memory.logits_bytes(V, job.model.d_model, tokens, job.device.memory)
    return 2 * WIDE * min(tokens * V, max(memory.LOGITS_AT_A_TIME, V))
