"""Settings of a server."""

from typing import Literal

from pydantic import Field, PositiveInt

from weft.config import Config
from weft.serve.stories import Story


class Limits(Config):
    """Limits of a server, per model, client or request."""

    queue: PositiveInt = Field(default=256, description="Requests that may wait for a model.")
    per_client: PositiveInt = Field(default=256, description="Texts of one client that may wait or be in progress.")
    body_bytes: PositiveInt = Field(default=4 << 20, description="Size of a request's body.")
    max_tokens: PositiveInt = Field(default=1 << 16, description="Tokens of one text.")
    max_input_tokens: PositiveInt = Field(default=1 << 17, description="Tokens of the texts that one request sends.")
    choices: PositiveInt = Field(default=16, description="Texts per prompt in one request.")
    seconds: float = Field(default=600.0, gt=0.0, description="Duration of a request.")
    rows: PositiveInt = Field(default=64, description="Texts that a model writes at the same time.")
    quantize_cache: Literal["int8"] | None = Field(default=None, description="Quantise the KV cache to 8 bits.")


class Serving(Config):
    """Which requests a server answers.

    Without `keys`, it answers everybody who can reach it. The Host header of a request must name one of `hosts`:
    otherwise a web page could reach a server on loopback through its own DNS name (DNS rebinding). Web pages of
    `origins` may read the responses (CORS). `root_path` is the path prefix that a proxy adds. The Explorer can play
    `stories` in addition to those of the package.
    """

    keys: tuple[str, ...] = Field(default=(), repr=False)
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    origins: tuple[str, ...] = ()
    root_path: str = ""
    log_prompts: bool = False
    limits: Limits = Limits()
    stories: dict[str, Story] = Field(default_factory=dict)
