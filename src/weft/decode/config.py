"""How text is drawn from a model, as settings."""

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from weft.config import Config

StopString = Annotated[str, Field(min_length=1)]


class Sampling(Config):
    """How the next token is chosen, and when to stop.

    `temperature = 0` takes the likeliest token each time (greedy). `top_k`, `top_p` and `min_p` each drop unlikely
    tokens before one is drawn; without them and with `temperature = 1` the draw follows the model exactly.
    """

    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_k: PositiveInt | None = None
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    min_p: float | None = Field(default=None, gt=0.0, le=1.0)
    max_tokens: PositiveInt = 128
    seed: int = Field(default=0, ge=0, lt=2**63)
    stop: tuple[StopString, ...] = ()

    @model_validator(mode="after")
    def _greedy_has_no_choice(self) -> Self:
        if self.temperature == 0.0 and (self.top_k or self.top_p or self.min_p):
            raise ValueError("greedy decoding (temperature = 0) draws nothing, so top_k, top_p and min_p don't apply")
        return self
