"""A recipe: everything that decides what a training run does, in one file.

What a recipe leaves out is chosen from the text and the machine (`weft.recipe.settle`), said aloud, and written
into the run's config.toml; so a saved recipe has nothing left to choose and repeats the run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from weft.config import Config
from weft.data.config import Data
from weft.models.config import Model, TransformerConfig
from weft.nn.config import LoRA
from weft.recipe.objective import AnyGoal, NextToken, Twins
from weft.text.config import TokenizerConfig

if TYPE_CHECKING:
    from torch import nn, optim

SOURCE_TOKENIZER = "source"  # the folder in a run's that holds it
Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


# ---- optimizers (`clip` is the largest gradient norm, 0 for any)


class AdamW(Config):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019). Matrices decay, gains and biases do not.

    With `layer_decay` below 1 each layer learns that many times slower than the one above it, as suits weights that
    were trained before (Howard and Ruder 2018, §3.2).
    """

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat | None = None
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip: NonNegativeFloat = 1.0
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0

    def build(self, model: "nn.Module") -> "optim.Optimizer":
        from weft.training.optimizer import adamw

        return adamw(self, model)


class Adam(Config):
    """Kingma and Ba 2015; the defaults are those of the 2017 Transformer (Vaswani et al., §5.3)."""

    kind: Literal["adam"] = "adam"
    lr: PositiveFloat | None = None
    betas: tuple[Momentum, Momentum] = (0.9, 0.98)
    eps: PositiveFloat = 1e-9
    clip: NonNegativeFloat = 0.0

    def build(self, model: "nn.Module") -> "optim.Optimizer":
        from weft.training.optimizer import adam

        return adam(self, model)


class SGD(Config):
    """Stochastic gradient descent with momentum; matrices decay, gains and biases do not."""

    kind: Literal["sgd"] = "sgd"
    lr: PositiveFloat | None = None
    momentum: Momentum = 0.9
    weight_decay: NonNegativeFloat = 0.0
    clip: NonNegativeFloat = 1.0

    def build(self, model: "nn.Module") -> "optim.Optimizer":
        from weft.training.optimizer import sgd

        return sgd(self, model)


class Muon(Config):
    """Orthogonalised momentum for the matrices inside blocks (Jordan et al. 2024), AdamW for all other weights.

    The orthogonal steps are scaled to be as large as AdamW's (Liu et al. 2025, §2.2), so one `lr` serves both.
    """

    kind: Literal["muon"] = "muon"
    lr: PositiveFloat | None = None
    momentum: Momentum = 0.95
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip: NonNegativeFloat = 1.0

    def build(self, model: "nn.Module") -> "optim.Optimizer":
        from weft.training.optimizer import muon

        return muon(self, model)


Optimizer = Annotated[AdamW | Adam | SGD | Muon, Field(discriminator="kind")]


# ---- learning rates over time

Rate = Callable[[int], float]


class Constant(Config):
    """A linear rise over `warmup` steps, then `optimizer.lr` throughout."""

    kind: Literal["constant"] = "constant"
    warmup: NonNegativeInt | None = None

    def build(self, lr: float, steps: int, d_model: int) -> Rate:
        from weft.training.schedule import constant

        return lambda step: constant(step, lr, self.warmup or 0)


class Linear(Config):
    """A linear rise over `warmup` steps, then a straight fall to `floor` times the peak at the last step."""

    kind: Literal["linear"] = "linear"
    warmup: NonNegativeInt | None = None
    floor: Fraction = 0.0

    def build(self, lr: float, steps: int, d_model: int) -> Rate:
        from weft.training.schedule import linear

        return lambda step: linear(step, steps, lr, self.warmup or 0, self.floor)


class Cosine(Config):
    """A linear rise over `warmup` steps, then half a cosine down to `floor` times the peak at the last step."""

    kind: Literal["cosine"] = "cosine"
    warmup: NonNegativeInt | None = None
    floor: Fraction = 0.1

    def build(self, lr: float, steps: int, d_model: int) -> Rate:
        from weft.training.schedule import cosine

        return lambda step: cosine(step, steps, lr, self.warmup or 0, self.floor)


class WSD(Config):
    """Warm up, stay, then fall straight to `floor` over the last `decay` part of the steps (Hu et al. 2024)."""

    kind: Literal["wsd"] = "wsd"
    warmup: NonNegativeInt | None = None
    decay: Fraction = 0.2
    floor: Fraction = 0.0

    def build(self, lr: float, steps: int, d_model: int) -> Rate:
        from weft.training.schedule import wsd

        return lambda step: wsd(step, steps, lr, self.warmup or 0, self.decay, self.floor)


class Noam(Config):
    """scale · d_model^−0.5 · min(step^−0.5, step · warmup^−1.5) (Vaswani et al. 2017, §5.3), without `optimizer.lr`."""

    kind: Literal["noam"] = "noam"
    warmup: PositiveInt = 4000
    scale: PositiveFloat = 1.0

    def build(self, lr: float, steps: int, d_model: int) -> Rate:
        from weft.training.schedule import noam

        return lambda step: noam(step, d_model, self.warmup, self.scale)


Schedule = Annotated[Constant | Linear | Cosine | WSD | Noam, Field(discriminator="kind")]


# ---- sizes and rhythms


def _pieces(given: object) -> object:
    """One error for both kinds of value, instead of one for each."""
    if given is None or given == "auto" or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    raise ValueError(f"{given!r}: expected a whole number above 0, or auto")


class BatchConfig(Config):
    """`size` sequences of `length` tokens a step, read `micro` at a time where memory is short ("auto": what fits).

    Rows of their own length (pairs, labelled texts, conversations) are cut at `length` and put with others of about
    the same length; instead of `size` rows, `tokens` of them, padding included, can make a step.

    The gradient is that of the whole batch however it is cut. `recompute` keeps the input of each Transformer block
    alone and runs the block again in the backward pass (Chen et al. 2016): a third more work, far less memory.
    """

    size: PositiveInt | None = None
    tokens: PositiveInt | None = None
    micro: Annotated[PositiveInt | Literal["auto"] | None, BeforeValidator(_pieces)] = None
    length: PositiveInt | None = None
    recompute: bool = False


class EvaluateConfig(Config):
    """Every `every` steps, and after the last, the loss on at most `tokens` held-out tokens (GPU: absent is all).

    `metric` decides which checkpoint is the best: the loss, or another of the evaluation's figures. With `patience`
    the run ends early, once so many evaluations in a row were no better than the best.
    """

    every: PositiveInt | None = None
    tokens: PositiveInt | None = None
    metric: Annotated[str, Field(min_length=1)] = "loss"
    patience: PositiveInt | None = None


class CheckpointConfig(Config):
    """A checkpoint every `every` steps, at the end and when interrupted; the last `keep` and the best one stay.

    With `average` the mean of the weights of so many last checkpoints is tried at the end, and taken if it is better
    than the best of them (Vaswani et al. 2017, §6.1).
    """

    every: PositiveInt | None = None
    keep: PositiveInt = 2
    average: NonNegativeInt = 0

    @model_validator(mode="after")
    def _are_there(self) -> Self:
        if self.average > self.keep:
            raise ValueError(f"average = {self.average} of the last checkpoints, but keep = {self.keep} of them stay")
        return self


class LogConfig(Config):
    """A line in metrics.jsonl every `every` steps; `tensorboard` writes event files beside it.

    `wandb` sends the lines to Weights & Biases, or keeps them in the run's folder to be sent later (offline).
    """

    every: PositiveInt | None = None
    tensorboard: bool = False
    wandb: Literal["off", "online", "offline"] = "off"


class GuardConfig(Config):
    """What to do when training goes wrong.

    An update whose loss or gradient is no number, or lies more than `spike` deviations above the median of the last
    `window` steps, is not made (`spike` 0: any number will do). When half of the last 2 × `patience` steps went wrong,
    the run goes back to the last good checkpoint, skips the text it met since, and goes on with the learning rate times
    `slower`; a try that gets no further than the one before is followed by one that slows down twice as hard. After
    `rollbacks` such tries in a row the run gives up.
    """

    spike: NonNegativeFloat = 10.0
    window: Annotated[int, Field(ge=16)] = 128
    patience: PositiveInt = 8
    rollbacks: NonNegativeInt = 4
    slower: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5


class Recipe(Config):
    """A training run. What is absent is chosen from the text and the machine before the run starts.

    `init` names a run whose weights are the beginning; `adapter` leaves them as they are and learns a small addition.
    `source_tokenizer` gives the source of a pair a vocabulary of its own.
    """

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")] = "run"
    seed: NonNegativeInt = 0
    steps: PositiveInt | None = None
    precision: Precision | None = None
    compile: bool | None = None
    deterministic: bool = False
    data: Data = Data()
    tokenizer: TokenizerConfig | None = None
    source_tokenizer: TokenizerConfig | None = None
    init: Annotated[str, Field(min_length=1)] | None = None
    adapter: LoRA | None = None
    model: Model
    objective: AnyGoal = NextToken()
    optimizer: Optimizer = AdamW()
    schedule: Schedule = Cosine()
    batch: BatchConfig = BatchConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    guard: GuardConfig = GuardConfig()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if isinstance(self.schedule, Noam):
            if self.optimizer.lr is not None:
                raise ValueError(
                    f"optimizer.lr = {self.optimizer.lr}: the noam schedule sets the rate; use schedule.scale instead"
                )
        elif self.steps is not None and (self.schedule.warmup or 0) > self.steps:
            raise ValueError(f"schedule.warmup = {self.schedule.warmup} is longer than the {self.steps} steps")
        size, micro = self.batch.size, self.batch.micro
        if size is not None and isinstance(micro, int) and micro > size:
            raise ValueError(f"batch.micro = {micro} is more than batch.size = {size}")
        if self.batch.tokens is not None and self.objective.reads != "rows":
            raise ValueError(f"batch.tokens: '{self.objective.kind}' reads rows of one length; set batch.size instead")
        if self.batch.tokens is not None and size is not None:
            raise ValueError("batch.tokens and batch.size: a step is measured by one of them")
        if self.adapter is not None and self.init is None:
            raise ValueError("adapter: it adds to weights that were trained before; name their run with init=")
        if isinstance(self.objective, Twins) and micro is not None:
            raise ValueError("batch.micro: the rows of a batch are each other's wrong answers, so it can't be cut")
        if not isinstance(self.model, TransformerConfig):
            kind = self.model.kind
            if self.batch.recompute:
                raise ValueError(f"batch.recompute: only a Transformer has blocks to run again, not a '{kind}' model")
            if isinstance(self.optimizer, Muon):
                raise ValueError(f"optimizer.kind = 'muon': made for Transformer blocks; use adamw for '{kind}'")
        longest = getattr(self.model, "longest", None)
        if longest is not None and self.batch.length is not None and self.batch.length > longest:
            raise ValueError(
                f"batch.length = {self.batch.length}: the model's positions end at model.context = {longest}"
            )
        return self
