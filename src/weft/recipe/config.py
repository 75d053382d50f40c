"""A recipe: everything that decides what a training run does, in one file.

What a recipe leaves out is chosen from the text and the machine (`weft.recipe.settle`). What comes out of that is a
`SettledRecipe`, which has no gaps and is never changed again: it is saved as the run's config.toml and repeats the run.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from weft.config import Config
from weft.costs.layouts import indivisible
from weft.data.config import Data
from weft.layout import Layout
from weft.models.config import Model, TransformerConfig
from weft.nn.config import LoRA
from weft.recipe.objective import AnyObjective, NextToken
from weft.recipe.optimizer import Cosine, Muon, Noam, Optimizer, Schedule
from weft.recipe.synonyms import SYNONYMS
from weft.text.config import TokenizerConfig

SOURCE_TOKENIZER = "source"  # the folder inside a run's folder that holds it
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


def _rows_at_once(given: object) -> object:
    """One error for both kinds of value, instead of one for each."""
    if given is None or given == "auto" or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    raise ValueError(f"{given!r}: expected a whole number above 0, or auto")


class BatchConfig(Config):
    """`size` sequences of `length` tokens a step, `micro` at a time where memory is short ("auto": as many as fit).

    Rows of varying length (pairs, labelled texts, conversations) are cut at `length` and batched with others of about
    the same length; instead of `size` rows, `tokens` of them, padding included, can make a step.

    The gradient is that of the whole batch however it is divided. `recompute` keeps only the input of each Transformer
    block and runs the block again in the backward pass (Chen et al. 2016): a third more work, far less memory.

    With `carry` the rows of a step continue those of the step before, and a recurrent model goes on from the states it
    had there (truncated back-propagation through time), in training and when it is evaluated.
    """

    size: PositiveInt | None = Field(None, description="sequences a step")
    tokens: PositiveInt | None = Field(
        None, description="tokens a step instead, padding included, where rows vary in length"
    )
    micro: Annotated[PositiveInt | Literal["auto"] | None, BeforeValidator(_rows_at_once)] = Field(
        None, description="sequences at a time, where memory is short; auto: as many as fit"
    )
    length: PositiveInt | None = Field(None, description="tokens a sequence; longer rows are cut")
    recompute: bool = Field(False, description="compute activations again in the backward pass, to save memory")
    carry: bool | None = Field(
        None, description="rows continue those of the step before, and so do a recurrent model's states"
    )


class EvaluateConfig(Config):
    """Every `every` steps, and after the last, the loss on at most `tokens` held-out tokens (absent: on all of them).

    `metric` decides which checkpoint is the best: the loss, or another metric of the evaluation. With `patience`
    the run ends early, after that many evaluations in a row without an improvement.
    """

    every: PositiveInt | None = Field(None, description="steps between evaluations")
    tokens: PositiveInt | None = Field(None, description="held-out tokens that are read; absent: all")
    metric: Annotated[str, Field(min_length=1)] = Field(
        "loss", description="the metric that decides which checkpoint is the best"
    )
    patience: PositiveInt | None = Field(None, description="end after so many evaluations without an improvement")


class CheckpointConfig(Config):
    """A checkpoint every `every` steps, at the end and when interrupted; the last `keep` and the best one are kept.

    With `average` the mean of the weights of that many last checkpoints is evaluated at the end, and becomes the best
    checkpoint if it is better than all of them (Vaswani et al. 2017, §6.1).
    """

    every: PositiveInt | None = Field(None, description="steps between checkpoints")
    keep: PositiveInt = Field(2, description="how many of the last are kept, beside the best")
    average: NonNegativeInt = Field(0, description="how many of the last are averaged at the end; 0: none")

    @model_validator(mode="after")
    def _kept(self) -> Self:
        if self.average > self.keep:
            raise ValueError(f"average = {self.average} of the last checkpoints, but only keep = {self.keep} are kept")
        return self


class LogConfig(Config):
    """A line in metrics.jsonl every `every` steps; `tensorboard` writes event files beside it.

    `wandb` sends the lines to Weights & Biases, or keeps them in the run's folder to be sent later (offline).
    """

    every: PositiveInt | None = Field(None, description="steps between lines of metrics.jsonl")
    tensorboard: bool = Field(False, description="also write event files for TensorBoard")
    wandb: Literal["off", "online", "offline"] = Field(
        "off", description="send the lines to Weights & Biases, or keep them to be sent later"
    )


class GuardConfig(Config):
    """What to do when training goes wrong.

    An update is discarded if its loss or gradient is not finite, or lies more than `spike` deviations above the median
    of the last `window` steps (`spike` 0: any finite value is accepted). When half of the last 2 × `patience` steps
    went wrong, the run rolls back to the last good checkpoint, skips the data it has read since, and continues with the
    learning rate times `slower`; an attempt that gets no further than the one before slows down twice as much. After
    `rollbacks` such attempts in a row the run gives up.
    """

    spike: NonNegativeFloat = Field(
        10.0, description="deviations above the median at which an update is discarded; 0: never"
    )
    window: Annotated[int, Field(ge=16)] = Field(128, description="steps of which the median is taken")
    patience: PositiveInt = Field(
        8, description="how many of twice as many steps may go wrong before the run rolls back"
    )
    rollbacks: NonNegativeInt = Field(4, description="attempts in a row before the run gives up")
    slower: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.5, description="what each rollback multiplies the learning rate by"
    )


class Recipe(Config):
    """A training run. What is absent is chosen from the text and the machine before the run starts.

    `init` names a run whose weights training starts from; `adapter` freezes them and learns a small addition.
    `source_tokenizer` gives the source of a pair a vocabulary of its own.
    """

    synonyms = SYNONYMS

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")] = Field(
        "run", description="the run's name: its folder is runs/NAME"
    )
    seed: NonNegativeInt = Field(0, description="of all that is drawn: weights, order of the text, dropout, samples")
    steps: PositiveInt | None = Field(None, description="updates of the weights")
    precision: Precision | None = Field(None, description="the number format of the products")
    compile: bool | None = Field(None, description="whether torch.compile makes the model's kernels")
    deterministic: bool = Field(False, description="the same bits again on a GPU too, at some cost")
    data: Data = Field(Data(), description="where text comes from, and what of it is held out")
    tokenizer: TokenizerConfig | None = Field(None, description="how text is cut into tokens")
    source_tokenizer: TokenizerConfig | None = Field(
        None, description="a vocabulary of its own for the source of a pair"
    )
    init: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="a run whose weights training starts from"
    )
    adapter: LoRA | None = Field(None, description="freeze the weights of `init` and learn a small addition (LoRA)")
    model: Model = Field(description="what is trained")
    objective: AnyObjective = Field(
        NextToken(), description="what is learned; by default what the kind of model is for"
    )
    optimizer: Optimizer | None = Field(None, description="how weights change")
    schedule: Schedule = Field(Cosine(), description="how the learning rate changes over the steps")
    batch: BatchConfig = Field(BatchConfig(), description="how much a step reads")
    evaluate: EvaluateConfig = Field(EvaluateConfig(), description="when held-out text is measured, and for what")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="when the run is saved, and what is kept")
    log: LogConfig = Field(LogConfig(), description="where metrics go")
    guard: GuardConfig = Field(GuardConfig(), description="what to do when training goes wrong")
    parallel: Layout = Field(Layout(), description="how several processes divide the work")

    @property
    def can_carry(self) -> bool:
        """Whether a model with states reads one text on and on (`batch.carry`)."""
        alone = len(self.data.parts) <= 1 and not self.data.document_mask
        return self.model.kind == "recurrent" and self.objective.kind == "next-token" and alone

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        checks = (_schedule_problems, _batch_problems, _model_problems, _layout_problems)
        for problem in (problem for check in checks for problem in check(self)):
            raise ValueError(problem)
        return self


def _schedule_problems(recipe: Recipe) -> Iterator[str]:
    lr, schedule = None if recipe.optimizer is None else recipe.optimizer.lr, recipe.schedule
    if isinstance(schedule, Noam):
        if lr is not None:
            yield f"optimizer.lr = {lr}: the noam schedule sets the rate; use schedule.scale instead"
    elif recipe.steps is not None and (schedule.warmup or 0) > recipe.steps:
        yield f"schedule.warmup = {schedule.warmup} is longer than the {recipe.steps} steps; set it lower too"


def _batch_problems(recipe: Recipe) -> Iterator[str]:
    batch, objective = recipe.batch, recipe.objective
    if batch.size is not None and isinstance(batch.micro, int) and batch.micro > batch.size:
        yield f"batch.micro = {batch.micro} is more than batch.size = {batch.size}"
    if batch.tokens is not None and objective.reads != "rows":
        yield f"batch.tokens: objective '{objective.kind}' reads rows of one length; set batch.size instead"
    if batch.tokens is not None and batch.size is not None:
        yield "batch.tokens and batch.size: a step is measured by one of them"
    if not objective.divisible and batch.micro is not None:
        yield f"batch.micro: objective '{objective.kind}' compares the rows of a batch, so it can't be divided"
    longest = getattr(recipe.model, "longest", None)
    if longest is not None and batch.length is not None and batch.length > longest:
        yield f"batch.length = {batch.length}: the model's positions end at model.context = {longest}"


def _model_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.adapter is not None and recipe.init is None:
        yield "adapter: it adds to weights that were trained before; name their run with init="
    if isinstance(recipe.model, TransformerConfig):
        return
    kind = recipe.model.kind
    if recipe.batch.recompute:
        yield f"batch.recompute: only a Transformer has blocks to recompute, not a '{kind}' model"
    if isinstance(recipe.optimizer, Muon):
        yield f"optimizer.kind = 'muon': made for Transformer blocks; use adamw for '{kind}'"


def _layout_problems(recipe: Recipe) -> Iterator[str]:
    layout, model = recipe.parallel, recipe.model
    if not layout.splits:
        if layout.sequence:
            yield "parallel.sequence: tokens are divided between matrices that are split; set parallel.tensor too"
        return
    tensor = layout.tensor
    if model.kind == "ngram":
        yield "parallel: an n-gram model is counted by one process; leave it out"
    elif isinstance(model, TransformerConfig):
        if (reason := indivisible(model, tensor)) is not None:
            yield f"parallel.tensor = {tensor}: {reason}"
        if not model.divisible:
            which = "d_embedding, ngrams, distinct_layers and disentangled positions"
            yield f"parallel: {which} can't be split; use replicas alone"
    elif layout.pipeline > 1 or layout.context > 1:
        axis = "pipeline" if layout.pipeline > 1 else "context"
        yield f"parallel.{axis}: only a Transformer can be divided so, not a '{model.kind}' model"
    if recipe.batch.micro == "auto":
        yield "batch.micro = 'auto': what fits is tried by one process alone; with parallel.* name a number"
    if isinstance(recipe.optimizer, Muon):
        yield "optimizer.kind = 'muon': it reads whole matrices, which parallel.* splits; use adamw, or replicas alone"
    if recipe.adapter is not None and (tensor > 1 or layout.pipeline > 1):
        yield "adapter: the matrices it adds to can't be split over parallel.tensor or parallel.pipeline; use shard"
    if recipe.precision == "fp8" and tensor > 1:
        yield "precision = 'fp8': products in eight bits aren't split over parallel.tensor; use shard, or bf16"


class SettledBatch(BatchConfig):
    length: PositiveInt

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self.size is None and self.tokens is None:
            raise ValueError("size is missing")
        return self


class SettledEvaluate(EvaluateConfig):
    every: PositiveInt


class SettledCheckpoint(CheckpointConfig):
    every: PositiveInt


class SettledLog(LogConfig):
    every: PositiveInt


class SettledRecipe(Recipe):
    """A recipe with nothing left open, as a run's config.toml holds it."""

    steps: PositiveInt
    precision: Precision
    compile: bool
    tokenizer: TokenizerConfig
    optimizer: Optimizer
    batch: SettledBatch
    evaluate: SettledEvaluate
    checkpoint: SettledCheckpoint
    log: SettledLog

    @model_validator(mode="after")
    def _has_a_rate(self) -> Self:
        if not isinstance(self.schedule, Noam):
            if self.optimizer.lr is None:
                raise ValueError("optimizer.lr: missing")
            if self.schedule.warmup is None:
                raise ValueError("schedule.warmup: missing")
        return self
