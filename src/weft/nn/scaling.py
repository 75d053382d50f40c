"""How rotary positions are stretched for texts that are longer than those a model was trained on, as settings."""

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from weft.config import Config


class LinearScaling(Config):
    """Positions divided by `factor` (Chen et al. 2023)."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat


class DynamicNTK(Config):
    """The base grows with the sequence once it is longer than the trained context."""

    kind: Literal["dynamic-ntk"] = "dynamic-ntk"
    factor: PositiveFloat


class Llama3Scaling(Config):
    """Slow wavelengths divided by `factor`, fast ones kept, a ramp between (LLaMA 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat = 8.0
    low: PositiveFloat = 1.0
    high: PositiveFloat = 4.0
    original_context: PositiveInt = 8192


class YaRN(Config):
    """The same with the ramp over pairs of coordinates, and sharper scores (Peng et al. 2023).

    What turns more than `fast` times within the original context is kept, what turns less than `slow` times is divided
    by `factor`; the ramp begins and ends at whole pairs if `whole_pairs`. Queries and keys are multiplied by
    `attention_factor`, 0.1 ln(factor) + 1 where it is not given.
    """

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_context: PositiveInt
    fast: PositiveFloat = 32.0
    slow: PositiveFloat = 1.0
    whole_pairs: bool = True
    attention_factor: PositiveFloat | None = None

    @property
    def sharpening(self) -> float:
        """What queries and keys are multiplied by."""
        return self.attention_factor or max(1.0, 0.1 * math.log(self.factor) + 1.0)


class LongRoPE(Config):
    """Each pair's frequency divided by a factor of its own, of `long` once a text exceeds the original context (Ding
    et al. 2024); queries and keys are multiplied by `attention_factor`."""

    kind: Literal["longrope"] = "longrope"
    short: tuple[PositiveFloat, ...]
    long: tuple[PositiveFloat, ...]
    original_context: PositiveInt
    attention_factor: PositiveFloat = 1.0

    @property
    def sharpening(self) -> float:
        """What queries and keys are multiplied by."""
        return self.attention_factor


Scaling = Annotated[LinearScaling | DynamicNTK | Llama3Scaling | YaRN | LongRoPE, Field(discriminator="kind")]
