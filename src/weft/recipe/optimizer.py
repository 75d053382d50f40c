"""How weights change, as settings: optimizers (`clip` is the largest gradient norm, 0: any), and rates over time."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from weft.config import Config

Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


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


class Adam(Config):
    """Kingma and Ba 2015; the defaults are those of the 2017 Transformer (Vaswani et al., §5.3)."""

    kind: Literal["adam"] = "adam"
    lr: PositiveFloat | None = None
    betas: tuple[Momentum, Momentum] = (0.9, 0.98)
    eps: PositiveFloat = 1e-9
    clip: NonNegativeFloat = 0.0


class SGD(Config):
    """Stochastic gradient descent with momentum; matrices decay, gains and biases do not."""

    kind: Literal["sgd"] = "sgd"
    lr: PositiveFloat | None = None
    momentum: Momentum = 0.9
    weight_decay: NonNegativeFloat = 0.0
    clip: NonNegativeFloat = 1.0


class Muon(Config):
    """Orthogonalised momentum for the matrices inside blocks (Jordan et al. 2024), AdamW for all other weights.

    The orthogonal steps are scaled to be as large as AdamW's (Liu et al. 2025, §2.2), so one `lr` serves both. They
    take `rounds` of Newton and Schulz's iteration, which cost the same however small the batch is: on a processor,
    where batches are small, 3 learn as much as 5 in less time.
    """

    kind: Literal["muon"] = "muon"
    lr: PositiveFloat | None = None
    momentum: Momentum = 0.95
    rounds: PositiveInt = 5
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip: NonNegativeFloat = 1.0


Optimizer = Annotated[AdamW | Adam | SGD | Muon, Field(discriminator="kind")]


class Constant(Config):
    """A linear rise over `warmup` steps, then `optimizer.lr` throughout."""

    kind: Literal["constant"] = "constant"
    warmup: NonNegativeInt | None = None


class Linear(Config):
    """A linear rise over `warmup` steps, then a straight fall to `floor` times the peak at the last step."""

    kind: Literal["linear"] = "linear"
    warmup: NonNegativeInt | None = None
    floor: Fraction = 0.0


class Cosine(Config):
    """A linear rise over `warmup` steps, then half a cosine down to `floor` times the peak at the last step."""

    kind: Literal["cosine"] = "cosine"
    warmup: NonNegativeInt | None = None
    floor: Fraction = 0.1


class WSD(Config):
    """Warm up, stay, then fall straight to `floor` over the last `decay` part of the steps (Hu et al. 2024)."""

    kind: Literal["wsd"] = "wsd"
    warmup: NonNegativeInt | None = None
    decay: Fraction = 0.2
    floor: Fraction = 0.0


class StepDecay(Config):
    """`optimizer.lr` for `hold` steps, then `factor` times as much after every `every` steps (Zaremba et al. 2014)."""

    kind: Literal["step"] = "step"
    warmup: NonNegativeInt | None = None
    hold: NonNegativeInt
    every: PositiveInt
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5


class Noam(Config):
    """scale · d_model^−0.5 · min(step^−0.5, step · warmup^−1.5) (Vaswani et al. 2017, §5.3), without `optimizer.lr`."""

    kind: Literal["noam"] = "noam"
    warmup: PositiveInt = 4000
    scale: PositiveFloat = 1.0


Schedule = Annotated[Constant | Linear | Cosine | WSD | StepDecay | Noam, Field(discriminator="kind")]
