"""What a server is allowed, as settings."""

from typing import Literal

from pydantic import Field, PositiveInt

from weft.config import Config


class Limits(Config):
    """What a server takes on.

    At most `queue` requests wait for a model, of which one client has at most `per_client` waiting or running. A body
    has at most `body_bytes`, a text at most `max_tokens` tokens, a request at most `choices` texts, and it ends after
    `seconds`. `rows` texts are written at a time, and `quantize_cache` keeps their keys and values in 8 bits.
    """

    queue: PositiveInt = 256
    per_client: PositiveInt = 256
    body_bytes: PositiveInt = 4 << 20
    max_tokens: PositiveInt = 1 << 16
    choices: PositiveInt = 16
    seconds: float = Field(default=600.0, gt=0.0)
    rows: PositiveInt = 64
    quantize_cache: Literal["int8"] | None = None


class Serving(Config):
    """Where a server listens, and whom it answers.

    Without `keys` anybody is answered who reaches it. A request names the host it was sent to; only `hosts` are
    answered, so that no page of another site can reach a server on loopback under a name of its own (DNS rebinding).
    Pages of `origins` may read the answers (CORS).
    """

    keys: tuple[str, ...] = Field(default=(), repr=False)
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    origins: tuple[str, ...] = ()
    root_path: str = ""
    log_prompts: bool = False
    limits: Limits = Limits()
