"""How long a step takes under a layout: compute by the roofline, and the communication that compute does not hide.

tensor      each sublayer sums its result over the devices, forward, and its input's gradient, back: four all-reduces
            a layer (Shoeybi et al. 2019), or with `sequence` as many pairs of a reduce-scatter and an all-gather;
            two more where layers run again. Nothing else can run meanwhile
shard       weights are gathered layer by layer, forward and back, and gradients reduced in fp32, while the layer
            beside is at work (Zhao et al. 2023); a pipeline's stages gather and reduce once a step
replicate   gradients are summed while the last micro-batch runs back
context     keys and values go round a ring, hidden behind the attention over those before (Liu et al. 2023)
pipeline    activations go to the next stage; (p − 1) of m + p − 1 turns are idle (Huang et al. 2019)
"""

from collections.abc import Iterator
from dataclasses import dataclass

from weft.costs.count import stacks
from weft.costs.layout_memory import RankMemory, rank_memory, stage_layers, stage_parameters
from weft.costs.layouts import Choice, Job
from weft.costs.memory import WIDE, narrow
from weft.costs.roofline import OTHER, Seconds

HIDDEN = 0.5  # of the time of tensor parallelism's collectives, where they run beside products
BESIDE = 0.1  # of a hidden collective's time, by which it slows down what hides it


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest device: `compute`, and what waits for others."""

    compute: float
    tensor: float
    context: float
    send: float
    bubble: float
    shard: float
    replicate: float
    update: float

    @property
    def total(self) -> float:
        """All of it."""
        waits = self.tensor + self.context + self.send + self.bubble + self.shard + self.replicate
        return self.compute + waits + self.update


@dataclass(frozen=True)
class Prediction:
    """What a choice needs and takes."""

    job: Job
    choice: Choice
    memory: RankMemory
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether the device has as much memory."""
        return self.memory.peak <= self.job.device.memory

    @property
    def speed(self) -> float:
        """Tokens a second, of all devices."""
        return self.job.rows * self.job.length / self.time.total

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's own operations are (Chowdhery et al. 2022, appendix B)."""
        job = self.job
        return self.speed * job.cost.training() / (job.gpus * job.device.peak(job.precision))


class Predictor:
    """Predicts choices of one job; what several of them share is worked out once."""

    def __init__(self, job: Job):
        self.job = job
        self._passes: dict[tuple[int, int, bool, int], tuple[list[Seconds], tuple[float, float]]] = {}

    def __call__(self, choice: Choice) -> Prediction:
        """Memory and time."""
        return Prediction(self.job, choice, rank_memory(self.job, choice), self.time(choice))

    def time(self, choice: Choice) -> StepTime:
        """Of a step."""
        job, layout, p = self.job, choice.layout, choice.pipeline
        layers, logits = self._pass(choice)
        depths = [depth for depth, _, _ in stacks(job.model)] if p == 1 else [stage_layers(job, choice)]
        depth, m = sum(depths), choice.batches(job.rows)
        forward = OTHER * sum(d * each.forward for d, each in zip(depths, layers, strict=True))
        backward = OTHER * sum(
            d * (each.backward + each.again(choice.again)) for d, each in zip(depths, layers, strict=True)
        )
        held = stage_parameters(job, choice, first=True, last=True)
        owned = stage_parameters(job, choice, first=p == 1, last=True)
        parameters = (owned["layers"] + owned["around"]) / layout.shard
        casts = job.roofline.casts(parameters) if layout.shard == 1 else 0.0
        compute = forward + backward + OTHER * (sum(logits) + casts)
        tensor = self._tensor(choice, sum(self._sublayers(choice, depths)))
        context = sum(d * self._ring(choice, each) for d, each in zip(depths, layers, strict=True))
        send = 2 * choice.chunks * choice.group("pipeline", job.net).send(self._between(choice)) if p > 1 else 0.0
        one = compute + tensor + context + send
        shard = depth * self._shard(choice, held["layer"], (forward / depth, (compute - forward) / depth))
        # what stands around the layers is gathered before any of them is at work
        shard += choice.group("shard", job.net).gather(narrow(job.precision) * owned["around"])
        shard *= m if p == 1 else 1
        return StepTime(
            compute=m * compute,
            tensor=m * tensor,
            context=m * context,
            send=m * send,
            bubble=(p - 1) / choice.chunks * one,
            shard=shard,
            replicate=self._replicate(choice, parameters, backward),
            update=OTHER * job.roofline.update(parameters),
        )

    def _pass(self, choice: Choice) -> tuple[list[Seconds], tuple[float, float]]:
        part = choice.part(self.job.length)
        key = (part.rows, part.tensor, part.sequence, part.context)
        if key not in self._passes:
            job, words = self.job, -(-self.job.vocab_size // part.tensor)
            logits = job.roofline.logits(job.model.d_model, words, round(job.predicted * part.tokens))
            self._passes[key] = job.roofline.layers(job.model, part), logits
        return self._passes[key]

    def _between(self, choice: Choice) -> float:
        """Bytes of a micro-batch between two layers, on one device."""
        whole = choice.part(self.job.length).tokens * narrow(self.job.precision) * self.job.model.d_model
        return whole / (choice.layout.tensor if choice.layout.sequence else 1)

    def _sublayers(self, choice: Choice, depths: list[int]) -> Iterator[int]:
        for depth, (_, _, cross) in zip(depths, stacks(self.job.model), strict=False):
            yield depth * (3 if cross else 2)

    def _tensor(self, choice: Choice, sublayers: int) -> float:
        """The collectives of a micro-batch: of all sublayers, of the embeddings, and of the logits."""
        if choice.layout.tensor == 1:
            return 0.0
        group, whole = choice.group("tensor", self.job.net), choice.part(self.job.length).tokens
        bytes_ = whole * narrow(self.job.precision) * self.job.model.d_model
        once = 2 * group.gather(bytes_) if choice.layout.sequence else group.reduce(bytes_)
        passes = 3 if choice.again == 1 else 2
        return (sublayers * passes + 2) * once * (1 - HIDDEN if self.job.software.hidden_tensor else 1)

    def _ring(self, choice: Choice, layer: Seconds) -> float:
        """What the ring of a layer's keys and values takes longer than its attention, forward and back."""
        c, model = choice.layout.context, self.job.model
        if c == 1:
            return 0.0
        group, tokens = choice.group("context", self.job.net), choice.part(self.job.length).tokens
        keys = tokens * 2 * model.attention.groups // choice.layout.tensor * model.d_head
        there = (c - 1) * group.send(narrow(self.job.precision) * keys)
        back = (c - 1) * group.send((narrow(self.job.precision) + WIDE) * keys)
        again = max(0.0, there - layer.attention[0]) if choice.again == 1 else 0.0
        return max(0.0, there - layer.attention[0]) + max(0.0, back - layer.attention[1]) + again

    def _shard(self, choice: Choice, parameters: float, compute: tuple[float, float]) -> float:
        """What gathering and reducing take longer than a layer's passes, for one of a stage's layers."""
        if choice.layout.shard == 1:
            return 0.0
        group, depth = choice.group("shard", self.job.net), stage_layers(self.job, choice)
        gather, reduce = group.gather(narrow(self.job.precision) * parameters), group.gather(WIDE * parameters)
        first, last = gather / depth, reduce / depth  # nothing is at work before the first, or after the last
        regather = gather if choice.pipeline == 1 else 0.0
        return first + last + _beside(gather, compute[0]) + _beside(regather + reduce, compute[1])

    def _replicate(self, choice: Choice, parameters: float, backward: float) -> float:
        """What summing gradients over copies takes longer than the last backward pass, and its last part."""
        bytes_ = WIDE * parameters
        seconds = sum(choice.group(axis, self.job.net).reduce(bytes_) for axis in ("replicate", "context"))
        return _beside(seconds, backward) + seconds / stage_layers(self.job, choice)


def _beside(seconds: float, compute: float) -> float:
    """By how much a collective makes compute longer that runs at the same time."""
    return max(0.0, seconds - compute) + BESIDE * min(seconds, compute)
