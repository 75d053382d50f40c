"""The bytes that one device holds under a layout (Rajbhandari et al. 2020; Korthikanti et al. 2022).

For each parameter: 4 bytes of weight, 4 of gradient and the optimizer's moments, split over `tensor` inside layers,
over `pipeline` by layers, and over `shard`. Products read 16-bit copies: of all weights where they are not sharded;
where they are, of the layer at work, the next one, and what stands around the layers. Stages of a pipeline gather their
weights once a step, and keep them and whole gradients until its end.

Activations are those of `memory.py`. Tensor parallelism divides what lies between a sublayer's first matrix and its
last; with `sequence` also what runs along the skip connections, but not what the first matrix reads, which is gathered.
The first of p stages keeps p micro-batches at a time (1F1B).

Gradients come as activations go, so at the peak of a step of one micro-batch there are none.
"""

from dataclasses import dataclass

from weft.costs.count import stacks
from weft.costs.layouts import Choice, Job
from weft.costs.memory import (
    LOGITS_AT_A_TIME,
    MOMENTS,
    WIDE,
    around_bytes,
    logits_bytes,
    narrow,
)


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
        """The most that is there at a time."""
        used = self.activations + self.logits
        held = used + self.gradients if self.accumulates else max(used, self.gradients)
        return self.weights + self.copies + self.optimizer + self.passing + held


def rank_memory(job: Job, choice: Choice) -> RankMemory:
    """What the fullest device holds: that of the first stage of a pipeline, or of the last, which has the logits."""
    ends = [(True, True)] if choice.pipeline == 1 else [(True, False), (False, True)]
    return max((_stage(job, choice, first, last) for first, last in ends), key=lambda memory: memory.peak)


def stage_layers(job: Job, choice: Choice) -> int:
    """Layers on one device, at most."""
    return -(-job.layers // choice.pipeline)


def stage_parameters(job: Job, choice: Choice, first: bool, last: bool) -> dict[str, float]:
    """Parameters on one device before `shard` divides them: in "layers", "around" them, and of one "layer"."""
    sizes, t = job.sizes, choice.layout.tensor
    layer = sizes["layer"] / t + sizes["besides"]
    layers = stage_layers(job, choice) * layer
    if choice.pipeline == 1:  # where stacks differ, so do their layers
        layers = sizes["layers"] / t + job.layers * sizes["besides"]
    around = (sizes["below"] / t + sizes["positions"]) * first + sizes["above"] / t * last
    if last and not first:
        around += sizes["tied"] / t
    return {"layers": layers, "around": around, "layer": layer}


def _stage(job: Job, choice: Choice, first: bool, last: bool) -> RankMemory:
    parts, s, n = stage_parameters(job, choice, first, last), choice.layout.shard, narrow(job.precision)
    held = parts["layers"] + parts["around"]
    moments = MOMENTS[job.optimizer] * held - (parts["layers"] if job.optimizer == "muon" else 0)
    gathered = held if choice.pipeline > 1 else min(held, 2 * parts["layer"] + parts["around"])
    copies = n * gathered if s > 1 else (n * held if n < WIDE else 0.0)
    passing = (2 * n + WIDE) * parts["layer"] if s > 1 else 0.0
    batches = choice.batches(job.rows)
    in_flight = min(batches, _in_flight(choice)) if first and choice.pipeline > 1 else 1
    whole = WIDE * held if s > 1 and choice.pipeline > 1 else 0.0  # until they are reduced, once a step
    return RankMemory(
        weights=WIDE * held / s,
        copies=copies,
        gradients=WIDE * held / s + whole,
        optimizer=WIDE * moments / s,
        activations=_activations(job, choice, in_flight),
        logits=_logits(job, choice) if last else 0.0,
        passing=passing,
        accumulates=batches > 1 or choice.pipeline > 1,
    )


def _in_flight(choice: Choice) -> float:
    """Micro-batches that the first stage keeps (Korthikanti et al. 2022, §4.2.3, where stages take turns)."""
    p = choice.pipeline
    return p if choice.chunks == 1 else p * (1 + (p - 1) / (p * choice.chunks))


def _activations(job: Job, choice: Choice, in_flight: float) -> float:
    """Of so many micro-batches in one stage's layers, and of the one at work around them and in a layer run again."""
    n, layout, model = narrow(job.precision), choice.layout, job.model
    t, along = layout.tensor, layout.tensor if layout.sequence else 1
    each = [kept.along / along + kept.inputs + kept.inside / t for kept in job.kept]
    depths = [depth for depth, _, _ in stacks(model)] if choice.pipeline == 1 else [stage_layers(job, choice)]
    kept_all = sum(depth * kept for depth, kept in zip(depths, each, strict=True))
    inputs = sum(depths) * n * model.d_model / along
    layers = in_flight * ((1 - choice.again) * kept_all + choice.again * inputs)
    once = around_bytes(model, n) / along + choice.again * max(each)
    return choice.part(job.length).tokens * (layers + once)


def _logits(job: Job, choice: Choice) -> float:
    tokens, V = round(job.predicted * choice.part(job.length).tokens), -(-job.vocab_size // choice.layout.tensor)
    if not V:
        return 0.0
    if narrow(job.precision) < WIDE:
        return logits_bytes(V, job.model.d_model, tokens, job.device.memory)
    return 2 * WIDE * min(tokens * V, max(LOGITS_AT_A_TIME, V))
