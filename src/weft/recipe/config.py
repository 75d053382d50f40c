"""The recipe: all settings of a training run, in one file.

Settings that a recipe leaves out are chosen from the text and the machine (`weft.recipe.settle`). The result is a
`SettledRecipe`: complete, never changed again, and saved as the run's config.toml, which repeats the run.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from weft.config import Config
from weft.costs.layouts import indivisible
from weft.data.config import Data
from weft.layout import Layout
from weft.models.config import Model, Recurrent, TransformerConfig
from weft.nn.config import Experts, LoRA
from weft.recipe.objective import AnyObjective, NextToken
from weft.recipe.optimizer import Cosine, Muon, Noam, Optimizer, Schedule
from weft.recipe.synonyms import SYNONYMS
from weft.text.config import TokenizerConfig

SOURCE_TOKENIZER = "source"  # subfolder of a run with the source text's tokenizer
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


def _check_micro(value: object) -> object:
    """Refuse anything but a positive integer or "auto", with one error instead of one per member of the union."""
    if value is None or value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"{value!r}: expected a whole number above 0, or auto")


Micro = Annotated[PositiveInt | Literal["auto"] | None, BeforeValidator(_check_micro)]
Factor = Annotated[float, Field(gt=0.0, le=1.0)]
Text = Annotated[str, Field(min_length=1)]
RunName = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]


class BatchConfig(Config):
    """One step reads `size` sequences of `length` tokens, in micro-batches of `micro` sequences if memory is short.

    Rows of varying length (pairs, labelled texts, conversations) are truncated at `length` and batched with rows of
    similar length. For them, a step can be measured in `tokens`, padding included, instead of `size` rows.

    The gradient is that of the whole batch, regardless of `micro`. `recompute` keeps only the input of each Transformer
    block and runs the block again in the backward pass (Chen et al. 2016): a third more compute, far less memory.

    With `carry` each row of a step continues the same row of the step before, and a recurrent model continues from its
    states there (truncated back-propagation through time), in training and in evaluation.
    """

    size: PositiveInt | None = Field(None, description="sequences per step; chosen if absent")
    tokens: PositiveInt | None = Field(None, description="tokens per step with padding, for rows of varying length")
    micro: Micro = Field(None, description="sequences per micro-batch; auto: as many as fit in memory; absent: chosen")
    length: PositiveInt | None = Field(None, description="tokens per sequence; longer rows are cut; chosen if absent")
    recompute: bool = Field(False, description="recompute activations in the backward pass, to save memory")
    carry: bool | None = Field(None, description="continue rows and recurrent states across steps; chosen if absent")
    vary_length: bool = Field(False, description="vary the length of rows that continue, and the rate in proportion")


class EvaluateConfig(Config):
    """Evaluate every `every` steps, and after the last, on at most `tokens` held-out tokens."""

    every: PositiveInt | None = Field(None, description="steps between evaluations; chosen if absent")
    tokens: PositiveInt | None = Field(None, description="maximum held-out tokens per evaluation; chosen if absent")
    metric: Text = Field("loss", description="metric that decides which checkpoint is the best")
    patience: PositiveInt | None = Field(None, description="stop after this many evaluations without improvement")


class CheckpointConfig(Config):
    """Save a checkpoint every `every` steps, at the end and when interrupted; keep the last `keep` and the best one.

    With `average` the mean of the weights of that many last checkpoints is evaluated at the end. It becomes the best
    checkpoint if it beats all others (Vaswani et al. 2017, §6.1).
    """

    every: PositiveInt | None = Field(None, description="steps between checkpoints; chosen if absent")
    keep: PositiveInt = Field(2, description="number of recent checkpoints to keep, besides the best one")
    average: NonNegativeInt = Field(0, description="number of recent checkpoints to average at the end; 0: none")

    @model_validator(mode="after")
    def _check_average(self) -> Self:
        if self.average > self.keep:
            raise ValueError(f"average = {self.average} of the last checkpoints, but only keep = {self.keep} are kept")
        return self


class LogConfig(Config):
    """Write a line to metrics.jsonl every `every` steps; `tensorboard` also writes event files.

    `wandb` sends the metrics to Weights & Biases (online), or stores them in the run's folder for later (offline).
    """

    every: PositiveInt | None = Field(None, description="steps between lines of metrics.jsonl; chosen if absent")
    tensorboard: bool = Field(False, description="also write event files for TensorBoard")
    wandb: Literal["off", "online", "offline"] = Field("off", description="log to Weights & Biases, now or later")


class GuardConfig(Config):
    """Respond to divergence: discard bad updates, then roll back, then give up.

    An update is discarded if its loss or gradient is not finite, or is more than `spike` deviations above the median
    of the last `window` steps (`spike` 0: any finite value is accepted). When half of the last 2 × `patience` updates
    were discarded, the run rolls back to the last good checkpoint, skips the data read since then, and continues with
    the learning rate times `slower`. An attempt that gets no further than the one before slows down twice as much.
    After `rollbacks` such attempts in a row the run gives up.
    """

    spike: NonNegativeFloat = Field(10.0, description="deviations above the median that are accepted; 0: any number")
    window: Annotated[int, Field(ge=16)] = Field(128, description="number of recent steps in the median")
    patience: PositiveInt = Field(8, description="roll back after this many discarded updates in twice as many steps")
    rollbacks: NonNegativeInt = Field(4, description="give up after this many rollbacks in a row without progress")
    slower: Factor = Field(0.5, description="factor on the learning rate after each rollback")


class Recipe(Config):
    """All settings of a training run. Those that are absent are chosen from the text and the machine at the start."""

    synonyms = SYNONYMS

    name: RunName = Field("run", description="name of the run; its folder is runs/NAME")
    seed: NonNegativeInt = Field(0, description="seed of initial weights, data order, dropout and samples")
    steps: PositiveInt | None = Field(None, description="optimizer steps; chosen if absent")
    precision: Precision | None = Field(None, description="number format of matrix products; chosen if absent")
    compile: bool | None = Field(None, description="compile the model with torch.compile; chosen if absent")
    deterministic: bool = Field(False, description="reproduce runs bit for bit on a GPU too, at some cost in speed")
    data: Data = Field(Data(), description="where the text comes from, and which part of it is held out")
    tokenizer: TokenizerConfig | None = Field(None, description="how text is split into tokens; chosen if absent")
    source_tokenizer: TokenizerConfig | None = Field(None, description="separate tokenizer for the source of pairs")
    init: Text | None = Field(None, description="run whose weights training starts from; absent: fresh weights")
    adapter: LoRA | None = Field(None, description="freeze the weights of `init` and train a small addition (LoRA)")
    model: Model = Field(description="the model to train")
    objective: AnyObjective = Field(NextToken(), description="what is learned; the default depends on the model")
    optimizer: Optimizer | None = Field(None, description="update rule of the weights; chosen if absent")
    schedule: Schedule = Field(Cosine(), description="how the learning rate changes over the steps")
    batch: BatchConfig = Field(BatchConfig(), description="how much text a step reads")
    evaluate: EvaluateConfig = Field(EvaluateConfig(), description="when and on what the model is evaluated")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="when to save checkpoints, how many to keep")
    log: LogConfig = Field(LogConfig(), description="where metrics are written")
    guard: GuardConfig = Field(GuardConfig(), description="what to do when training diverges")
    parallel: Layout = Field(Layout(), description="how the work is divided among processes")

    @property
    def can_carry(self) -> bool:
        """Whether recurrent states can carry over from one step to the next, as one text is read (`batch.carry`)."""
        one_text = len(self.data.parts) <= 1 and not self.data.document_mask
        return self.model.kind == "recurrent" and self.objective.kind == "next-token" and one_text

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        for check in (_schedule_problems, _batch_problems, _model_problems, _layout_problems):
            for problem in check(self):
                raise ValueError(problem)
        return self


def _schedule_problems(recipe: Recipe) -> Iterator[str]:
    lr, schedule = None if recipe.optimizer is None else recipe.optimizer.lr, recipe.schedule
    if isinstance(schedule, Noam):
        if lr is not None:
            yield f"optimizer.lr = {lr}: the noam schedule sets the learning rate; use schedule.scale instead"
    elif recipe.steps is not None and (schedule.warmup or 0) > recipe.steps:
        yield f"schedule.warmup = {schedule.warmup} is longer than the {recipe.steps} steps; set it lower too"


def _batch_problems(recipe: Recipe) -> Iterator[str]:
    batch, objective = recipe.batch, recipe.objective
    if batch.size is not None and isinstance(batch.micro, int) and batch.micro > batch.size:
        yield f"batch.micro = {batch.micro} is more than batch.size = {batch.size}"
    if batch.vary_length and (not recipe.can_carry or batch.carry is False or (batch.length or 14) < 14):
        yield "batch.vary_length: for rows of at least 14 tokens that continue each other (batch.carry), as in lstm"
    if batch.tokens is not None and objective.reads != "rows":
        yield f"batch.tokens: objective '{objective.kind}' reads rows of equal length; set batch.size instead"
    if batch.tokens is not None and batch.size is not None:
        yield "batch.tokens and batch.size: set only one of them"
    if not objective.divisible and batch.micro is not None:
        yield f"batch.micro: objective '{objective.kind}' compares the rows of a batch, so the batch can't be split"
    max_length = getattr(recipe.model, "longest", None)
    if max_length is not None and batch.length is not None and batch.length > max_length:
        yield f"batch.length = {batch.length}: the model's positions end at model.context = {max_length}"


def _model_problems(recipe: Recipe) -> Iterator[str]:
    objective, model = recipe.objective, recipe.model
    if isinstance(objective, NextToken) and objective.penalised and not isinstance(model, Recurrent):
        yield "objective.activation_penalty and temporal_penalty: for the hidden states of a recurrent model"
    if recipe.adapter is not None and recipe.init is None:
        yield "adapter: an adapter adds to trained weights; name their run with init="
    if isinstance(recipe.model, TransformerConfig):
        return
    kind = recipe.model.kind
    if isinstance(recipe.model, Recurrent) and recipe.model.weight_drop and recipe.data.document_mask:
        yield "data.document_mask: packed documents are read without model.weight_drop; leave one of them out"
    if recipe.batch.recompute:
        yield f"batch.recompute: only a Transformer has blocks to recompute, not a '{kind}' model"
    if isinstance(recipe.optimizer, Muon):
        yield f"optimizer.kind = 'muon': only for Transformer blocks; use adamw for '{kind}'"


def _layout_problems(recipe: Recipe) -> Iterator[str]:
    layout, model = recipe.parallel, recipe.model
    if not layout.splits:
        if layout.sequence:
            yield "parallel.sequence: sequence parallelism extends tensor parallelism; set parallel.tensor too"
        return
    tensor = layout.tensor
    if layout.experts > 1:
        yield from _expert_problems(layout, model)
    if model.kind in ("ngram", "word2vec", "glove"):
        yield f"parallel: a model of kind '{model.kind}' is trained by one process; leave it out"
    elif isinstance(model, TransformerConfig):
        if (reason := indivisible(model, tensor)) is not None:
            yield f"parallel.tensor = {tensor}: {reason}"
        if layout.experts == 1 and not model.divisible:
            unsupported = "d_embedding, ngrams, distinct_layers, and disentangled or concatenated positions"
            yield f"parallel: {unsupported} can't be split; use replicas only"
    elif layout.pipeline > 1 or layout.context > 1:
        axis = "pipeline" if layout.pipeline > 1 else "context"
        yield f"parallel.{axis}: only a Transformer can be split this way, not a '{model.kind}' model"
    if recipe.batch.micro == "auto":
        yield "batch.micro = 'auto': only one process alone can try what fits; with parallel.* set a number"
    if recipe.adapter is not None and (tensor > 1 or layout.pipeline > 1):
        yield "adapter: the matrices it adds to can't be split over parallel.tensor or parallel.pipeline; use shard"
    if recipe.precision == "fp8" and tensor > 1:
        yield "precision = 'fp8': FP8 products can't be split over parallel.tensor; use shard, or bf16"


def _expert_problems(layout: Layout, model: Config) -> Iterator[str]:
    key, inner = f"parallel.experts = {layout.experts}", getattr(model, "feedforward", None)
    if not isinstance(inner, Experts):
        yield f"{key}: the model has no mixture of experts; use replicas, or parallel.shard"
    elif inner.experts % layout.experts:
        yield f"{key}: does not divide model.feedforward.experts = {inner.experts}"
    others = [axis for axis in ("shard", "tensor", "context", "pipeline") if getattr(layout, axis) > 1]
    if others:
        yield f"{key}: can't be combined with parallel.{others[0]}; experts and replicate divide the processes"


class SettledBatch(BatchConfig):
    length: PositiveInt

    @model_validator(mode="after")
    def _check_size(self) -> Self:
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
    """Complete recipe, as in a run's config.toml."""

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
    def _check_rate(self) -> Self:
        rates = {"optimizer.lr": self.optimizer.lr, "schedule.warmup": self.schedule.warmup}
        missing = [key for key, value in rates.items() if value is None]
        if missing and not isinstance(self.schedule, Noam):
            raise ValueError(f"{missing[0]}: missing")
        return self
