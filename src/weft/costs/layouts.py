"""Layouts over many devices: which ones a model allows, and the memory of a device under each.

A `TrainingJob` is a model and the devices that train it. A `LayoutChoice` is how: the mesh sizes (`weft.layout`), the
micro-batch, and the share of the layers that is recomputed in the backward pass.

A device holds (Rajbhandari et al. 2020; Korthikanti et al. 2022), in bytes per parameter, 4 of weights, 4 of gradients
and the optimizer's moments, split over `tensor` inside layers, over `pipeline` by layers, and over `shard`. Products
read 16-bit copies: of all weights if they aren't sharded; otherwise of the current layer, the next one, and the weights
outside the layers. Pipeline stages gather their weights once per step, and hold them and full gradients until its end.

Activations are those of `memory.py`. Tensor parallelism splits what is between the first and the last matrix of a
sublayer; with `sequence` also the residual stream, but not the input of the first matrix, which is gathered. The first
of p stages holds p micro-batches at a time (1F1B).

Gradients appear as activations are freed, so at the peak of a step of one micro-batch there are none.
"""

from dataclasses import dataclass, field
from functools import cached_property

from weft.costs import memory
from weft.costs.count import Count, count
from weft.costs.devices import Device, DeviceGroup, Interconnect
from weft.costs.linears import block_linears, stacks
from weft.costs.memory import WIDE, LayerBytes, around_bytes, layer_bytes, moments, narrow
from weft.costs.roofline import MicroBatch, Roofline, Software
from weft.layout import AXES, Layout
from weft.models import config
from weft.nn.config import Experts


@dataclass(frozen=True)
class TrainingJob:
    """Model in training: `rows` sequences of `length` tokens per step, over `gpus` devices."""

    model: config.TransformerConfig
    rows: int
    length: int
    device: Device
    net: Interconnect
    gpus: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    software: Software = field(default_factory=Software)
    predicted: float = 1.0  # share of the positions at which logits are computed

    @cached_property
    def cost(self) -> Count:
        return count(self.model, self.length)

    @cached_property
    def roofline(self) -> Roofline:
        return Roofline(self.device, self.precision, self.software)

    @cached_property
    def layers(self) -> int:
        """Number of layers of all stacks."""
        return sum(depth for depth, _, _ in stacks(self.model))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Numbers of parameters. Tensor parallelism splits the "layers" (the largest is a "layer") and the weights
        "below" and "above" them, but not the "replicated" ones of a layer (norms, biases of row-split matrices) nor
        "positions". Expert parallelism splits the "experts" in the layers, "layer_experts" in the largest. A "tied"
        embedding is also needed by the last pipeline stage."""
        parts = {part.name: part.parameters for part in self.cost.components}
        blocks = [
            block_linears(self.model, cross, layer=layer)
            for depth, _, cross in stacks(self.model)
            for layer in range(depth)
        ]
        biases = [sum(sum(spec.heights) for spec in block if spec.bias and spec.by_rows) for block in blocks]
        split = [sum(spec.parameters for spec in block) - bias for block, bias in zip(blocks, biases, strict=True)]
        return {
            "layer": max(split),
            "layers": sum(split),
            "layer_experts": max(sum(spec.parameters for spec in block if spec.experts > 1) for block in blocks),
            "experts": sum(spec.parameters for block in blocks for spec in block if spec.experts > 1),
            "replicated": parts.get("norms", 0) // self.layers + max(biases),
            "positions": parts.get("positions", 0),
            "below": parts.get("embeddings", 0),
            "above": parts.get("logits", 0) + parts.get("head", 0),
            "tied": 0 if parts.get("logits", 0) >= self.vocab_size * self.model.d_model else parts.get("embeddings", 0),
        }

    @cached_property
    def activations(self) -> list[LayerBytes]:
        """Activations of a layer of each stack, in bytes per token."""
        return layer_bytes(self.model, self.length, narrow(self.precision), compiled=self.software.compiled)

    @cached_property
    def vocab_size(self) -> int:
        """Number of logits per position; 0 if the model has no LM head."""
        has_logits = any(part.name == "logits" for part in self.cost.components)
        return int(getattr(self.model, "vocab_size", 0)) if has_logits else 0


@dataclass(frozen=True)
class LayoutChoice:
    """Layout of a job, with its micro-batch."""

    layout: Layout
    micro: int = 1  # sequences
    recompute: float = 0.0  # share of the layers' products that is recomputed
    chunks: int = 1  # interleaved pipeline stages per device (Narayanan et al. 2021, §2.2)

    def micro_batch(self, length: int) -> MicroBatch:
        layout = self.layout
        return MicroBatch(self.micro, length, layout.tensor, sequence=layout.sequence, context=layout.context)

    def batches(self, rows: int) -> int:
        """Return the number of micro-batches per step."""
        return rows // (self.layout.readers * self.micro)

    def group(self, axis: str, net: Interconnect) -> DeviceGroup:
        """Return the devices along an axis of the mesh; devices of later axes are between neighbours."""
        sizes, stride = self.layout.sizes, 1
        for inner in AXES[AXES.index(axis) + 1 :]:
            stride *= sizes[inner]
        return DeviceGroup(sizes[axis], stride, net)

    def depths(self, job: TrainingJob) -> list[int]:
        """Return the layers of each stack on one device; in a pipeline, of the largest stage."""
        depths = [depth for depth, _, _ in stacks(job.model)]
        return depths if self.layout.pipeline == 1 else [-(-job.layers // self.layout.pipeline)]

    def parameters(self, job: TrainingJob, *, first: bool, last: bool) -> dict[str, float]:
        """Return the parameters on one device before sharding: in "layers", "around" them, and of one "layer"."""
        sizes, t = job.sizes, self.layout.tensor
        elsewhere = 1 - 1 / self.layout.experts
        layer = sizes["layer"] / t + sizes["replicated"] - elsewhere * sizes["layer_experts"]
        layers = sum(self.depths(job)) * layer
        if self.layout.pipeline == 1:  # layers of two stacks may differ in size
            layers = sizes["layers"] / t + job.layers * sizes["replicated"] - elsewhere * sizes["experts"]
        around = (sizes["below"] / t + sizes["positions"]) * first + sizes["above"] / t * last
        around += sizes["tied"] / t if last and not first else 0.0
        return {"layers": layers, "around": around, "layer": layer}


def indivisible(model: config.TransformerConfig, tensor: int) -> str | None:
    """Say why a model can't be split over `tensor` devices; None if it can."""
    attention = model.attention
    if tensor > 1 and isinstance(model.feedforward, Experts):
        return "mixture of experts can't be split by tensor parallelism; choose 1"
    sizes = {"attention.heads": attention.heads, "attention.kv_heads": attention.groups}
    for key, size in {**sizes, "feedforward.d_ff": model.feedforward.d_ff}.items():
        if size % tensor:
            fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            hint = f"; choose one of {fitting}" if key in sizes else ""
            return f"model.{key} = {size} can't be divided by it{hint}"
    if tensor > 1 and attention.qk_norm is not None and attention.qk_norm_over != "head":
        return f"model.attention.qk_norm_over = '{attention.qk_norm_over}' needs all heads on one device"
    return None


def refusal(job: TrainingJob, choice: LayoutChoice) -> str | None:
    """Say why a layout is impossible; None if it is possible."""
    layout = choice.layout
    if (reason := indivisible(job.model, layout.tensor)) is not None:
        return f"tensor = {layout.tensor}: {reason}"
    inner = job.model.feedforward
    if layout.experts > 1 and (not isinstance(inner, Experts) or inner.experts % layout.experts):
        return f"experts = {layout.experts} does not divide the experts of the model"
    if layout.sequence and layout.tensor == 1:
        return "sequence parallelism splits over the devices of tensor, which is 1"
    if job.length % (layout.context * (layout.tensor if layout.sequence else 1)):
        sizes = f"context {layout.context}" + (f" × tensor {layout.tensor}" if layout.sequence else "")
        return f"{sizes} does not divide {job.length} tokens"
    if layout.pipeline > 1 and len(stacks(job.model)) > 1:
        return "pipeline needs one stack of layers, but this model has two"
    if layout.pipeline * choice.chunks > job.layers:
        return f"pipeline {layout.pipeline * choice.chunks} is more than {job.layers} layers"
    if job.rows % (layout.readers * choice.micro):
        readers = f"replicate × shard × experts = {layout.readers}"
        micro = f" × micro = {choice.micro}" if choice.micro > 1 else ""
        return f"{job.rows} rows per step are not divisible by {readers}{micro}"
    return None


@dataclass(frozen=True)
class RankMemory:
    """Memory of the fullest device in bytes; `passing` is the temporary memory of gathering and reducing."""

    weights: float
    copies: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    passing: float
    accumulates: bool  # whether gradients and activations exist at the same time

    @property
    def peak(self) -> float:
        activations = self.activations + self.logits
        variable = activations + self.gradients if self.accumulates else max(activations, self.gradients)
        return self.weights + self.copies + self.optimizer + self.passing + variable


def rank_memory(job: TrainingJob, choice: LayoutChoice) -> RankMemory:
    """Return the memory of the fullest device: in a pipeline the first stage, or the last, which has the logits."""
    ends = [(True, True)] if choice.layout.pipeline == 1 else [(True, False), (False, True)]
    return max((_stage(job, choice, first=first, last=last) for first, last in ends), key=lambda memory: memory.peak)


def _stage(job: TrainingJob, choice: LayoutChoice, *, first: bool, last: bool) -> RankMemory:
    parts, n = choice.parameters(job, first=first, last=last), narrow(job.precision)
    s, p = choice.layout.shard, choice.layout.pipeline
    parameters = parts["layers"] + parts["around"]
    gathered = parameters if p > 1 else min(parameters, 2 * parts["layer"] + parts["around"])
    batches = choice.batches(job.rows)
    # micro-batches that the first stage holds (Korthikanti et al. 2022, §4.2.3, for interleaved stages)
    in_flight = p if choice.chunks == 1 else p * (1 + (p - 1) / (p * choice.chunks))
    full_gradients = WIDE * parameters if s > 1 and p > 1 else 0.0  # until they are reduced, once per step
    return RankMemory(
        weights=WIDE * parameters / s,
        copies=n * gathered if s > 1 else (n * parameters if n < WIDE else 0.0),
        gradients=WIDE * parameters / s + full_gradients,
        optimizer=WIDE * moments(job.optimizer, parameters, parts["layers"]) / s,
        activations=_activations(job, choice, min(batches, in_flight) if first and p > 1 else 1),
        logits=_logits(job, choice) if last else 0.0,
        passing=(2 * n + WIDE) * parts["layer"] if s > 1 else 0.0,
        accumulates=batches > 1 or p > 1,
    )


def _activations(job: TrainingJob, choice: LayoutChoice, in_flight: float) -> float:
    """Return the activations of the micro-batches in a stage's layers, and of the current one outside the layers and in
    a recomputed layer."""
    n, layout, share = narrow(job.precision), choice.layout, choice.recompute
    along, depths = layout.tensor if layout.sequence else 1, choice.depths(job)
    per_layer = [layer.along / along + layer.inputs + layer.inside / layout.tensor for layer in job.activations]
    full = sum(depth * layer for depth, layer in zip(depths, per_layer, strict=True))
    layers = in_flight * ((1 - share) * full + share * (sum(depths) * n * job.model.d_model / along))
    current = around_bytes(job.model, n) / along + share * max(per_layer)
    return choice.micro_batch(job.length).tokens * (layers + current)


def _logits(job: TrainingJob, choice: LayoutChoice) -> float:
    tokens, V = round(job.predicted * choice.micro_batch(job.length).tokens), -(-job.vocab_size // choice.layout.tensor)
    if not V:
        return 0.0
    if narrow(job.precision) < WIDE:
        return memory.logits_bytes(V, job.model.d_model, tokens, gpu_memory=job.device.memory)
    return 2 * WIDE * min(tokens * V, max(memory.MAX_LOGITS, V))
