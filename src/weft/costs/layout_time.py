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

from dataclasses import dataclass

from weft.costs.count import stacks
from weft.costs.layouts import Choice, Job, RankMemory, rank_memory, stage_parameters
from weft.costs.memory import WIDE, narrow
from weft.costs.roofline import OTHER, Part, Seconds

HIDDEN = 0.5  # of the time of tensor parallelism's collectives, where they run beside products
ADAMW = 36  # bytes that an update moves for each parameter: all of them in fp32, and the norm
CASTS = 12  # bytes moved for each weight of a pass: its 16-bit copy, and its gradient back in fp32
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
        self._passes: dict[Part, tuple[list[Seconds], tuple[float, float]]] = {}

    def __call__(self, choice: Choice) -> Prediction:
        """Memory and time."""
        return Prediction(self.job, choice, rank_memory(self.job, choice), self.time(choice))

    def time(self, choice: Choice) -> StepTime:
        """Of a step."""
        job, layout, p = self.job, choice.layout, choice.layout.pipeline
        layers, logits = self._pass(choice)
        depths, m = choice.depths(job), choice.batches(job.rows)
        stacked, depth = list(zip(depths, layers, strict=True)), sum(depths)
        forward = OTHER * sum(d * each.forward for d, each in stacked)
        backward = OTHER * sum(d * (each.backward + each.again(choice.recompute)) for d, each in stacked)
        held = stage_parameters(job, choice, first=True, last=True)
        owned = stage_parameters(job, choice, first=p == 1, last=True)
        parameters = (owned["layers"] + owned["around"]) / layout.shard
        copied = layout.shard == 1 and narrow(job.precision) < WIDE
        casts = job.roofline.move(CASTS * parameters) if copied else 0.0
        compute = forward + backward + OTHER * (sum(logits) + casts)
        tensor = self._tensor(choice)
        context = sum(d * self._ring(choice, each) for d, each in stacked)
        between = self._hidden(choice) / (layout.tensor if layout.sequence else 1)
        send = 2 * choice.chunks * choice.group("pipeline", job.net).send(between) if p > 1 else 0.0
        shard = depth * self._shard(choice, held["layer"], (forward / depth, (compute - forward) / depth))
        # what stands around the layers is gathered before any of them is at work
        shard += choice.group("shard", job.net).gather(narrow(job.precision) * owned["around"])
        return StepTime(
            compute=m * compute,
            tensor=m * tensor,
            context=m * context,
            send=m * send,
            bubble=(p - 1) / choice.chunks * (compute + tensor + context + send),
            shard=shard * (m if p == 1 else 1),
            replicate=self._replicate(choice, parameters, backward),
            update=OTHER * job.roofline.move(ADAMW * parameters),
        )

    def _pass(self, choice: Choice) -> tuple[list[Seconds], tuple[float, float]]:
        """Seconds of one layer of each stack, and of the logits."""
        job, part = self.job, choice.part(self.job.length)
        if part not in self._passes:
            words = -(-job.vocab_size // part.tensor)
            logits = job.roofline.logits(job.model.d_model, words, round(job.predicted * part.tokens))
            self._passes[part] = job.roofline.layers(job.model, part), logits
        return self._passes[part]

    def _hidden(self, choice: Choice) -> float:
        """Bytes of a micro-batch between two layers."""
        return choice.part(self.job.length).tokens * narrow(self.job.precision) * self.job.model.d_model

    def _tensor(self, choice: Choice) -> float:
        """The collectives of a micro-batch: of all sublayers, of the embeddings, and of the logits."""
        if choice.layout.tensor == 1:
            return 0.0
        group, bytes_ = choice.group("tensor", self.job.net), self._hidden(choice)
        each = zip(choice.depths(self.job), stacks(self.job.model), strict=False)
        sublayers = sum(depth * (3 if cross else 2) for depth, (_, _, cross) in each)
        once = 2 * group.gather(bytes_) if choice.layout.sequence else group.reduce(bytes_)
        passes = 3 if choice.recompute == 1 else 2
        return (sublayers * passes + 2) * once * (1 - HIDDEN if self.job.software.hidden_tensor else 1)

    def _ring(self, choice: Choice, layer: Seconds) -> float:
        """What the ring of a layer's keys and values takes longer than its attention, forward and back."""
        c, model, n = choice.layout.context, self.job.model, narrow(self.job.precision)
        if c == 1:
            return 0.0
        group, tokens = choice.group("context", self.job.net), choice.part(self.job.length).tokens
        keys = tokens * 2 * model.attention.groups // choice.layout.tensor * model.d_head
        there = max(0.0, (c - 1) * group.send(n * keys) - layer.attention[0])
        back = max(0.0, (c - 1) * group.send((n + WIDE) * keys) - layer.attention[1])
        return there + back + (there if choice.recompute == 1 else 0.0)

    def _shard(self, choice: Choice, parameters: float, compute: tuple[float, float]) -> float:
        """What gathering and reducing take longer than a layer's passes, for one of a stage's layers."""
        if choice.layout.shard == 1:
            return 0.0
        group, depth = choice.group("shard", self.job.net), sum(choice.depths(self.job))
        gather, reduce = group.gather(narrow(self.job.precision) * parameters), group.gather(WIDE * parameters)
        first, last = gather / depth, reduce / depth  # nothing is at work before the first, or after the last
        regather = gather if choice.layout.pipeline == 1 else 0.0
        return first + last + _beside(gather, compute[0]) + _beside(regather + reduce, compute[1])

    def _replicate(self, choice: Choice, parameters: float, backward: float) -> float:
        """What summing gradients over copies takes longer than the last backward pass, and its last part."""
        bytes_ = WIDE * parameters
        seconds = sum(choice.group(axis, self.job.net).reduce(bytes_) for axis in ("replicate", "context"))
        return _beside(seconds, backward) + seconds / sum(choice.depths(self.job))


def _beside(seconds: float, compute: float) -> float:
    """By how much a collective makes compute longer that runs at the same time."""
    return max(0.0, seconds - compute) + BESIDE * min(seconds, compute)
