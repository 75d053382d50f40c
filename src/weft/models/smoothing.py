"""Settings of n-gram smoothing; `models/ngram_smoothing.py` computes it."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from weft.config import Config


class MaximumLikelihood(Config):
    """Relative frequencies: an unseen n-gram has probability 0."""

    kind: Literal["mle"] = "mle"


class AddK(Config):
    """Every count plus k (Laplace for k = 1)."""

    kind: Literal["add-k"] = "add-k"
    k: PositiveFloat = Field(1.0, description="added to every count")


class StupidBackoff(Config):
    """Relative frequency after the longest seen context, times alpha for each word dropped (Brants et al. 2007)."""

    kind: Literal["stupid-backoff"] = "stupid-backoff"
    alpha: PositiveFloat = Field(0.4, description="factor for each dropped word")


class KneserNey(Config):
    """Interpolated Kneser–Ney (Chen and Goodman 1999); the default discount is n₁/(n₁ + 2n₂) for each order."""

    kind: Literal["kneser-ney"] = "kneser-ney"
    discount: float | None = Field(None, gt=0.0, lt=1.0, description="subtracted from every count; absent: estimated")


class ModifiedKneserNey(Config):
    """Kneser–Ney with three discounts per order, for counts of one, two, and three or more."""

    kind: Literal["modified-kneser-ney"] = "modified-kneser-ney"


AnySmoothing = MaximumLikelihood | AddK | StupidBackoff | KneserNey | ModifiedKneserNey
Smoothing = Annotated[AnySmoothing, Field(discriminator="kind")]
