"""One text that was asked of the engine: how far it is, and what has been written of it."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from queue import SimpleQueue

from torch import Tensor

from weft.decode.completion import Completion, completion_of
from weft.decode.config import Sampling
from weft.decode.ending import Finish
from weft.decode.engine.pool import Key
from weft.decode.prompt import Prompt
from weft.decode.text import Chunk, Text
from weft.errors import ModelError, WeftError

_numbers = count(1)


@dataclass
class OneSource:
    """What one text is written from: tokens (1, source time)."""

    tokens: Tensor
    mask: Tensor | None = None


class Request(Text):
    """A text that was asked for. `read` of its `ids` are in the cache, which never holds more than `longest` of them.

    After its ids come `ahead` more, which the device has chosen and the host hasn't seen yet. Iterate to wait for its
    chunks as they are written; to leave early cancels it.
    """

    def __init__(
        self, prompt: Prompt, settings: Sampling, window: int | None, seed: int, source: OneSource | None = None
    ):
        super().__init__(prompt, settings, window, seed)
        self.number, self.source = next(_numbers), source
        self.read = self.ahead = 0
        self.longest = len(self.ids) + min(self.left, self.until_full) - 1  # the last one is never read
        # what its keys and values depend on beside its tokens
        self.salt = blake2b(b"" if source is None else source.tokens.cpu().numpy().tobytes(), digest_size=16).digest()
        self.keys: list[Key] = []  # of its full blocks, hashed once
        self.chunks: list[Chunk] = []
        self.finish: Finish | None = None  # why it ended; None while it is being written, and where it failed
        self.error: WeftError | None = None
        self.cancelled = False
        self.ended = threading.Event()
        self._queue: SimpleQueue[Chunk | None] = SimpleQueue()

    @property
    def unread(self) -> int:
        """Tokens that have to be read before the next one can be chosen."""
        return len(self.ids) + self.ahead - self.read

    @property
    def needs_host(self) -> bool:
        """Whether its next token can be chosen, or reported, only by what the host knows of it."""
        return self.changes_logits or self.settings.logprobs is not None

    @property
    def stays(self) -> bool:
        """Whether nothing can be read of it before the host has seen what it is ahead: it ends with that, or slides."""
        if not self.ahead:
            return False
        return self.ahead >= self.left or (self.window is not None and len(self.ids) + self.ahead > self.window)

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks, waiting for each; once through. Another thread has to step the engine meanwhile."""
        try:
            while (chunk := self._queue.get()) is not None:
                yield chunk
        finally:
            self.cancel()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Ask the engine to write no more of it: it leaves before the next step. One that has ended stays as it is."""
        self.cancelled = self.cancelled or not self.ended.is_set()

    def completion(self) -> Completion:
        """The whole text, once it has ended."""
        if self.error is not None:
            raise self.error
        if self.finish is None or self.finish == "cancelled":
            state = "is still being written" if self.finish is None else "was cancelled"
            raise ModelError(f"request {self.number} {state} after {len(self.chunks)} tokens")
        return completion_of(self.chunks, self.prompt)

    def add(self, chunk: Chunk) -> None:
        """Hand on what was written."""
        self.chunks.append(chunk)
        self.finish = chunk.finish
        self._queue.put(chunk)

    def slide(self) -> None:
        """Leave out the oldest ids; it has to be admitted again, to read those that stay."""
        super().slide()
        self.keys = []

    def end(self, error: WeftError | None = None) -> None:
        """Nothing follows: the text is complete, cancelled, or has failed."""
        self.error = error
        if self.finish is None and error is None:
            self.finish = "cancelled"
        self.ended.set()
        self._queue.put(None)
