"""A recipe: everything that decides what a training run does, in one file.

What a recipe leaves out is chosen from the text and the machine (`weft.train.choose`), said aloud, and written
into the run's config.toml; so a saved recipe has nothing left to choose and repeats the run.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
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

from weft.config import Config, Tree, assignments, merge, read_toml, validate
from weft.data.config import Data
from weft.errors import ConfigError, suggestion
from weft.models.config import Model, TransformerConfig
from weft.models.presets import PRESETS, preset
from weft.text.config import TokenizerConfig

if TYPE_CHECKING:
    from torch import nn, optim

    from weft.train.objective import Objective

Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


# ---- what is learned


class NextToken(Config):
    """Each token from those before it: −log p, summed over the places that the loss mask keeps.

    `smoothing` moves that much probability from the target to all tokens alike (Szegedy et al. 2016);
    `z_loss` times log²Z keeps the softmax's normaliser near 1 (Chowdhery et al. 2022).
    """

    kind: Literal["next-token"] = "next-token"
    smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    z_loss: NonNegativeFloat = 0.0

    def build(self, compiled: bool = False) -> "Objective":
        from weft.train.objective import next_token

        return next_token(self, compiled)


# ---- optimizers (`clip` is the largest gradient norm, 0 for any)


class AdamW(Config):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019). Matrices decay, gains and biases do not."""

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat | None = None
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip: NonNegativeFloat = 1.0

    def build(self, model: "nn.Module") -> "optim.Optimizer":
        from weft.train.optimizer import adamw

        return adamw(self, model)


class Adam(Config):
    """Kingma and Ba 2015; the defaults are those of the 2017 Transformer (Vaswani et al., §5.3)."""

    kind: Literal["adam"] = "adam"
    lr: PositiveFloat | None = None
    betas: tuple[Momentum, Momentum] = (0.9, 0.98)
    eps: PositiveFloat = 1e-9
    clip: NonNegativeFloat = 0.0

    def build(self, model: "nn.Module") -> "optim.Optimizer":
        from weft.train.optimizer import adam

        return adam(self, model)


class SGD(Config):
    """Stochastic gradient descent with momentum; matrices decay, gains and biases do not."""

    kind: Literal["sgd"] = "sgd"
    lr: PositiveFloat | None = None
    momentum: Momentum = 0.9
    weight_decay: NonNegativeFloat = 0.0
    clip: NonNegativeFloat = 1.0

    def build(self, model: "nn.Module") -> "optim.Optimizer":
        from weft.train.optimizer import sgd

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
        from weft.train.optimizer import muon

        return muon(self, model)


Optimizer = Annotated[AdamW | Adam | SGD | Muon, Field(discriminator="kind")]


# ---- learning rates over time

Rate = Callable[[int], float]


class Constant(Config):
    """A linear rise over `warmup` steps, then `optimizer.lr` throughout."""

    kind: Literal["constant"] = "constant"
    warmup: NonNegativeInt | None = None

    def build(self, lr: float, steps: int, d_model: int) -> Rate:
        from weft.train.schedule import constant

        return lambda step: constant(step, lr, self.warmup or 0)


class Linear(Config):
    """A linear rise over `warmup` steps, then a straight fall to `floor` times the peak at the last step."""

    kind: Literal["linear"] = "linear"
    warmup: NonNegativeInt | None = None
    floor: Fraction = 0.0

    def build(self, lr: float, steps: int, d_model: int) -> Rate:
        from weft.train.schedule import linear

        return lambda step: linear(step, steps, lr, self.warmup or 0, self.floor)


class Cosine(Config):
    """A linear rise over `warmup` steps, then half a cosine down to `floor` times the peak at the last step."""

    kind: Literal["cosine"] = "cosine"
    warmup: NonNegativeInt | None = None
    floor: Fraction = 0.1

    def build(self, lr: float, steps: int, d_model: int) -> Rate:
        from weft.train.schedule import cosine

        return lambda step: cosine(step, steps, lr, self.warmup or 0, self.floor)


class WSD(Config):
    """Warm up, stay, then fall straight to `floor` over the last `decay` part of the steps (Hu et al. 2024)."""

    kind: Literal["wsd"] = "wsd"
    warmup: NonNegativeInt | None = None
    decay: Fraction = 0.2
    floor: Fraction = 0.0

    def build(self, lr: float, steps: int, d_model: int) -> Rate:
        from weft.train.schedule import wsd

        return lambda step: wsd(step, steps, lr, self.warmup or 0, self.decay, self.floor)


class Noam(Config):
    """scale · d_model^−0.5 · min(step^−0.5, step · warmup^−1.5) (Vaswani et al. 2017, §5.3), without `optimizer.lr`."""

    kind: Literal["noam"] = "noam"
    warmup: PositiveInt = 4000
    scale: PositiveFloat = 1.0

    def build(self, lr: float, steps: int, d_model: int) -> Rate:
        from weft.train.schedule import noam

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

    The gradient is that of the whole batch however it is cut. `recompute` keeps the input of each Transformer block
    alone and runs the block again in the backward pass (Chen et al. 2016): a third more work, far less memory.
    """

    size: PositiveInt | None = None
    micro: Annotated[PositiveInt | Literal["auto"] | None, BeforeValidator(_pieces)] = None
    length: PositiveInt | None = None
    recompute: bool = False


class EvaluateConfig(Config):
    """Every `every` steps, and after the last, the loss on at most `tokens` held-out tokens (GPU: absent is all)."""

    every: PositiveInt | None = None
    tokens: PositiveInt | None = None


class CheckpointConfig(Config):
    """A checkpoint every `every` steps, at the end and when interrupted; the last `keep` and the best one stay."""

    every: PositiveInt | None = None
    keep: PositiveInt = 2


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
    """A training run. What is absent is chosen from the text and the machine before the run starts."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")] = "run"
    seed: NonNegativeInt = 0
    steps: PositiveInt | None = None
    precision: Precision | None = None
    compile: bool | None = None
    deterministic: bool = False
    data: Data = Data()
    tokenizer: TokenizerConfig | None = None
    model: Model
    objective: NextToken = NextToken()
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


# ---- from a name or a file to a recipe


def resolve(source: str, changes: Iterable[str] | Tree = (), data: Sequence[str] = ()) -> Recipe:
    """The recipe that `source` names, with `changes` laid over it and `data` as its text.

    `source` is a .toml file, a run's folder, a recipe that comes with weft, or a preset; `changes` are key=value words
    or a table. `model` may be a preset's name, or a table with `preset = "…"` and what differs from it; for a setting
    that comes in kinds, the kind's name alone will do (`tokenizer=char`).
    """
    tree, where = _find(source)
    above = dict(changes) if isinstance(changes, Mapping) else assignments(changes)
    tree = merge(_expand(tree, where), _expand(above, "model"))
    if data:
        kept = {
            key: value for key, value in tree.get("data", {}).items() if key not in ("sources", "prepared", "mixture")
        }
        tree["data"] = {**kept, "sources": list(data)}
    return validate(Recipe, merge(_kinds(tree), tree), "" if above else where)


def recipe_names() -> list[str]:
    """The recipes that come with weft."""
    return sorted(entry.name.removesuffix(".toml") for entry in _shipped().iterdir() if entry.name.endswith(".toml"))


def _shipped() -> Traversable:
    return resources.files("weft") / "recipes"


def _find(source: str) -> tuple[Tree, str]:
    """The tables that a name stands for, and what to call them in errors."""
    path = Path(source)
    if path.suffix == ".toml" or path.is_file():
        return {"name": _name(path.stem), **read_toml(path)}, source
    if (path / "config.toml").is_file():
        return read_toml(path / "config.toml"), source
    if source in recipe_names():
        with resources.as_file(_shipped() / f"{source}.toml") as file:
            return {"name": source, **read_toml(file)}, source
    if source in PRESETS:
        return {"name": source, "model": source}, source
    raise ConfigError(f"'{source}': no such recipe or preset; {suggestion(source, [*recipe_names(), *PRESETS])}")


def _name(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", stem).strip("-._+") or "run"


def _expand(tree: Tree, where: str) -> Tree:
    """`model = "llama-tiny"` and `model.preset = "llama-tiny"` written out, and bare kinds as tables."""
    tree = dict(tree)
    for key in ("objective", "optimizer", "schedule", "tokenizer"):
        if isinstance(tree.get(key), str):
            tree[key] = {"kind": tree[key]}
    model = tree.get("model")
    if isinstance(model, str):
        model = {"preset": model}
    if isinstance(model, Mapping) and "preset" in model:
        rest = {key: value for key, value in model.items() if key != "preset"}
        if not isinstance(model["preset"], str):
            raise ConfigError(f"{where}: model.preset = {model['preset']!r}: expected a preset's name")
        tree["model"] = merge(preset(model["preset"]).model_dump(mode="json", exclude_none=True), rest)
    return tree


def _kinds(tree: Tree) -> Tree:
    """The default kinds, so that `optimizer.lr=…` alone changes the default optimizer."""
    kinds: Tree = {"optimizer": {"kind": "adamw"}, "schedule": {"kind": "cosine"}}
    if "tokenizer" in tree:
        kinds["tokenizer"] = {"kind": "bpe"}
    if "validation" in tree.get("data", {}):
        kinds["data"] = {"validation": {"kind": "hash"}}
    return kinds
