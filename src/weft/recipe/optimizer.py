"""Optimizers and learning-rate schedules, as settings."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from weft.config import Config

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

PeakRate = Annotated[PositiveFloat | None, Field(description="peak learning rate; chosen if absent")]
Momentum = Annotated[Beta, Field(description="decay rate of the moving sum of gradients")]
Betas = Annotated[tuple[Beta, Beta], Field(description="decay rates of the first and second moment")]
Epsilon = Annotated[PositiveFloat, Field(description="added to the square root of the second moment")]
WeightDecay = Annotated[NonNegativeFloat, Field(description="decoupled decay of matrices, times the rate; 0: none")]
Clip = Annotated[NonNegativeFloat, Field(description="maximum norm of the gradient; 0: no clipping")]

Warmup = Annotated[NonNegativeInt | None, Field(description="steps of linear warm-up; chosen if absent")]
Floor = Annotated[Fraction, Field(description="final learning rate, as a fraction of the peak")]


class AdamW(Config):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), of matrices but not of gains and biases.

    With `layer_decay` below 1 each layer's learning rate is this factor times that of the layer above, which suits
    fine-tuning (Howard and Ruder 2018, §3.2).
    """

    kind: Literal["adamw"] = "adamw"
    lr: PeakRate = None
    betas: Betas = (0.9, 0.95)
    eps: Epsilon = 1e-8
    weight_decay: WeightDecay = 0.1
    clip: Clip = 1.0
    layer_decay: float = Field(1.0, gt=0.0, le=1.0, description="learning rate relative to the layer above; 1: equal")


class Adam(Config):
    """Adam (Kingma and Ba 2015), with the defaults of the 2017 Transformer (Vaswani et al., §5.3)."""

    kind: Literal["adam"] = "adam"
    lr: PeakRate = None
    betas: Betas = (0.9, 0.98)
    eps: Epsilon = 1e-9
    clip: Clip = 0.0


class SGD(Config):
    """Stochastic gradient descent with momentum; weight decay applies to matrices, not to gains and biases."""

    kind: Literal["sgd"] = "sgd"
    lr: PeakRate = None
    momentum: Momentum = 0.9
    weight_decay: WeightDecay = 0.0
    clip: Clip = 1.0


class Muon(Config):
    """Orthogonalised momentum for the matrices in blocks (Jordan et al. 2024), AdamW for all other weights.

    The orthogonalised updates are scaled to the size of AdamW's (Liu et al. 2025, §2.2), so one `lr` serves both.
    They take `rounds` Newton–Schulz iterations, whose cost doesn't depend on the batch size. On a CPU, where batches
    are small, 3 iterations learn as much as 5 in less time.
    """

    kind: Literal["muon"] = "muon"
    lr: PeakRate = None
    momentum: Momentum = 0.95
    rounds: PositiveInt = Field(5, description="Newton–Schulz iterations per update")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay rates of AdamW's moments, outside the blocks")
    eps: Epsilon = 1e-8
    weight_decay: WeightDecay = 0.1
    clip: Clip = 1.0


Optimizer = Annotated[AdamW | Adam | SGD | Muon, Field(discriminator="kind")]


class Constant(Config):
    """Warm up linearly over `warmup` steps, then stay at `optimizer.lr`."""

    kind: Literal["constant"] = "constant"
    warmup: Warmup = None


class LinearDecay(Config):
    """Warm up linearly over `warmup` steps, then decay linearly to `floor` times the peak at the last step."""

    kind: Literal["linear"] = "linear"
    warmup: Warmup = None
    floor: Floor = 0.0


class Cosine(Config):
    """Warm up linearly over `warmup` steps, then follow a half cosine to `floor` times the peak at the last step."""

    kind: Literal["cosine"] = "cosine"
    warmup: Warmup = None
    floor: Floor = 0.1


class WSD(Config):
    """Warm up, stay stable, then decay linearly to `floor` over the last `decay` fraction of steps (Hu et al. 2024)."""

    kind: Literal["wsd"] = "wsd"
    warmup: Warmup = None
    decay: Fraction = Field(0.2, description="fraction of the steps in which the learning rate decays")
    floor: Floor = 0.0


class StepDecay(Config):
    """Keep `optimizer.lr` for `hold` steps, then multiply it by `factor` every `every` steps (Zaremba et al. 2014)."""

    kind: Literal["step"] = "step"
    warmup: Warmup = None
    hold: NonNegativeInt = Field(description="steps before the first decay")
    every: PositiveInt = Field(description="steps between decays")
    factor: float = Field(0.5, gt=0.0, lt=1.0, description="factor on the learning rate at each decay")


class Noam(Config):
    """scale · d_model^−0.5 · min(step^−0.5, step · warmup^−1.5) (Vaswani et al. 2017, §5.3), without `optimizer.lr`."""

    kind: Literal["noam"] = "noam"
    warmup: PositiveInt = Field(4000, description="steps of linear warm-up")
    scale: PositiveFloat = Field(1.0, description="factor on the formula's learning rate")


Schedule = Annotated[Constant | LinearDecay | Cosine | WSD | StepDecay | Noam, Field(discriminator="kind")]
