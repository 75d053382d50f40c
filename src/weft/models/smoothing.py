"""How the counts of n-grams are smoothed, as settings; `models/ngram_smoothing.py` computes it."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from weft.config import Config


class MaximumLikelihood(Config):
    """Relative frequencies: what was never seen has probability zero."""

    kind: Literal["mle"] = "mle"


class AddK(Config):
    """k added to every count (Laplace for k = 1)."""

    kind: Literal["add-k"] = "add-k"
    k: PositiveFloat = Field(1.0, description="what is added to every count")


class StupidBackoff(Config):
    """Relative frequency of the longest seen context, times alpha for each word dropped (Brants et al. 2007)."""

    kind: Literal["stupid-backoff"] = "stupid-backoff"
    alpha: PositiveFloat = Field(0.4, description="the factor for each word dropped")


class KneserNey(Config):
    """Interpolated Kneser–Ney (Chen and Goodman 1999); without `discount`, n₁/(n₁ + 2n₂) is taken for each order."""

    kind: Literal["kneser-ney"] = "kneser-ney"
    discount: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="subtracted from every count; absent: estimated for each order"
    )


class ModifiedKneserNey(Config):
    """The same with three discounts an order, for n-grams that count one, two, and three or more."""

    kind: Literal["modified-kneser-ney"] = "modified-kneser-ney"


Smoothing = Annotated[
    MaximumLikelihood | AddK | StupidBackoff | KneserNey | ModifiedKneserNey, Field(discriminator="kind")
]
