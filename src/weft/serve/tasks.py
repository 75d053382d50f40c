"""Tasks for a model's thread; their results go to the event loop that waits for them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weft.decode.config import Sampling
from weft.decode.engine.blocks import Request
from weft.decode.prompt import Prompt
from weft.decode.text import Chunk
from weft.models.base import EncoderInput
from weft.serve.errors import RefusedError
from weft.serve.stepped_call import SteppedCall

Output = Chunk | RefusedError
Outputs = asyncio.Queue[tuple[int, Output]]  # of one request: a text's index, and its output


@dataclass(eq=False)
class TextTask:
    """One text to write. Its outputs are put into `outputs`, in the event loop, together with the text's `index`."""

    index: int
    prompt: Prompt
    settings: Sampling
    seed: int
    client: str
    outputs: Outputs
    loop: asyncio.AbstractEventLoop
    source: EncoderInput | None = None
    deadline: float = 0.0
    cancelled: bool = False
    request: Request | None = None  # of the engine
    stream: Iterator[Chunk] | None = None  # for models that the engine doesn't run
    first: SteppedCall | None = None  # which returns the first chunk of the stream


@dataclass(eq=False)
class CallTask:
    """One function to call; it takes turns with other tasks at every `weft.progress.pause`."""

    function: Callable[[], Any]
    client: str
    deadline: float
    loop: asyncio.AbstractEventLoop
    result: "asyncio.Future[Any]"
    cancelled: bool = False
    call: SteppedCall | None = None  # once it has begun

    def resolve(self, value: Any, error: RefusedError | None) -> None:
        """Set the result, or the error, from any thread."""
        call_in_loop(self.loop, self._resolve, value, error)

    def _resolve(self, value: Any, error: RefusedError | None) -> None:
        if not self.result.done():
            self.result.set_exception(error) if error is not None else self.result.set_result(value)


Task = TextTask | CallTask


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    """Schedule a call in another thread's event loop; nothing happens if that loop is closed."""
    with suppress(RuntimeError):  # closed: nobody waits any more
        loop.call_soon_threadsafe(function, *arguments)
