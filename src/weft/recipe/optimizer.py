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
    lr: PositiveFloat | None = Field(None, description="the learning rate at its peak; absent: chosen")
    betas: tuple[Momentum, Momentum] = Field((0.9, 0.95), description="how slowly the two moments forget")
    eps: PositiveFloat = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegativeFloat = Field(0.1, description="how much matrices decay, times the learning rate")
    clip: NonNegativeFloat = Field(1.0, description="the largest norm of the gradient; 0: any")
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="the rate of each layer over that of the one above"
    )


class Adam(Config):
    """Kingma and Ba 2015; the defaults are those of the 2017 Transformer (Vaswani et al., §5.3)."""

    kind: Literal["adam"] = "adam"
    lr: PositiveFloat | None = Field(None, description="the learning rate at its peak; absent: chosen")
    betas: tuple[Momentum, Momentum] = Field((0.9, 0.98), description="how slowly the two moments forget")
    eps: PositiveFloat = Field(1e-9, description="added to the root of the second moment")
    clip: NonNegativeFloat = Field(0.0, description="the largest norm of the gradient; 0: any")


class SGD(Config):
    """Stochastic gradient descent with momentum; matrices decay, gains and biases do not."""

    kind: Literal["sgd"] = "sgd"
    lr: PositiveFloat | None = Field(None, description="the learning rate at its peak; absent: chosen")
    momentum: Momentum = Field(0.9, description="how slowly the moving sum of gradients forgets")
    weight_decay: NonNegativeFloat = Field(0.0, description="how much matrices decay, times the learning rate")
    clip: NonNegativeFloat = Field(1.0, description="the largest norm of the gradient; 0: any")


class Muon(Config):
    """Orthogonalised momentum for the matrices inside blocks (Jordan et al. 2024), AdamW for all other weights.

    The orthogonal steps are scaled to be as large as AdamW's (Liu et al. 2025, §2.2), so one `lr` serves both. They
    take `rounds` of Newton and Schulz's iteration, which cost the same however small the batch is: on a processor,
    where batches are small, 3 learn as much as 5 in less time.
    """

    kind: Literal["muon"] = "muon"
    lr: PositiveFloat | None = Field(None, description="the learning rate at its peak; absent: chosen")
    momentum: Momentum = Field(0.95, description="how slowly the moving sum of gradients forgets")
    rounds: PositiveInt = Field(5, description="of Newton and Schulz's iteration")
    betas: tuple[Momentum, Momentum] = Field(
        (0.9, 0.95), description="how slowly the two moments forget, for weights outside the blocks"
    )
    eps: PositiveFloat = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegativeFloat = Field(0.1, description="how much matrices decay, times the learning rate")
    clip: NonNegativeFloat = Field(1.0, description="the largest norm of the gradient; 0: any")


Optimizer = Annotated[AdamW | Adam | SGD | Muon, Field(discriminator="kind")]


class Constant(Config):
    """A linear rise over `warmup` steps, then `optimizer.lr` throughout."""

    kind: Literal["constant"] = "constant"
    warmup: NonNegativeInt | None = Field(None, description="steps of the linear rise; absent: chosen")


class Linear(Config):
    """A linear rise over `warmup` steps, then a straight fall to `floor` times the peak at the last step."""

    kind: Literal["linear"] = "linear"
    warmup: NonNegativeInt | None = Field(None, description="steps of the linear rise; absent: chosen")
    floor: Fraction = Field(0.0, description="the last rate, as a part of the peak")


class Cosine(Config):
    """A linear rise over `warmup` steps, then half a cosine down to `floor` times the peak at the last step."""

    kind: Literal["cosine"] = "cosine"
    warmup: NonNegativeInt | None = Field(None, description="steps of the linear rise; absent: chosen")
    floor: Fraction = Field(0.1, description="the last rate, as a part of the peak")


class WSD(Config):
    """Warm up, stay, then fall straight to `floor` over the last `decay` part of the steps (Hu et al. 2024)."""

    kind: Literal["wsd"] = "wsd"
    warmup: NonNegativeInt | None = Field(None, description="steps of the linear rise; absent: chosen")
    decay: Fraction = Field(0.2, description="the part of the steps in which the rate falls")
    floor: Fraction = Field(0.0, description="the last rate, as a part of the peak")


class StepDecay(Config):
    """`optimizer.lr` for `hold` steps, then `factor` times as much after every `every` steps (Zaremba et al. 2014)."""

    kind: Literal["step"] = "step"
    warmup: NonNegativeInt | None = Field(None, description="steps of the linear rise; absent: chosen")
    hold: NonNegativeInt = Field(description="steps before the first fall")
    every: PositiveInt = Field(description="steps between falls")
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.5, description="what each fall multiplies the rate by")


class Noam(Config):
    """scale · d_model^−0.5 · min(step^−0.5, step · warmup^−1.5) (Vaswani et al. 2017, §5.3), without `optimizer.lr`."""

    kind: Literal["noam"] = "noam"
    warmup: PositiveInt = Field(4000, description="steps of the linear rise")
    scale: PositiveFloat = Field(1.0, description="what the formula is multiplied by")


Schedule = Annotated[Constant | Linear | Cosine | WSD | StepDecay | Noam, Field(discriminator="kind")]
