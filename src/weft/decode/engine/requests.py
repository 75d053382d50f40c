"""One text that was asked of the engine: how far it is, and what has been written of it."""

from weft.decode.config import Sampling
from weft.decode.engine.pool import Key
from weft.decode.prompt import Prompt
from weft.decode.text import Chunk, Completion, Text, completion_of
from weft.errors import WeftError


class Request(Text):
    """A text that was asked for. `read` of its `ids` are in the cache, which never holds more than `longest` of them.

    After its ids come `ahead` more, which the device has chosen and the host hasn't seen yet.
    """

    def __init__(self, number: int, prompt: Prompt, settings: Sampling, window: int | None, seed: int):
        super().__init__(prompt, settings, window, seed)
        self.number = number
        self.read = self.ahead = 0
        self.longest = len(self.ids) + min(self.left, self.until_full) - 1  # the last one is never read
        self.keys: list[Key] = []  # of its full blocks, hashed once
        self.chunks: list[Chunk] = []
        self.ended = False
        self.error: WeftError | None = None

    @property
    def unread(self) -> int:
        """Tokens that have to be read before the next one can be chosen."""
        return len(self.ids) + self.ahead - self.read

    @property
    def stays(self) -> bool:
        """Whether nothing can be read of it before the host has seen what it is ahead: it ends with that, or slides."""
        if not self.ahead:
            return False
        return self.ahead >= self.left or (self.window is not None and len(self.ids) + self.ahead > self.window)

    def completion(self) -> Completion:
        """The whole text, once it has ended."""
        assert self.ended, "the engine is still writing it"
        if self.error is not None:
            raise self.error
        return completion_of(self.chunks, self.prompt)

    def slide(self) -> None:
        """Leave out the oldest ids; it has to be admitted again, to read those that stay."""
        super().slide()
        self.keys = []


Work = list[tuple[Request, int]]  # how many tokens of which requests are read in a step
