"""From tokens to text as they come: whole characters only, and no part of a stop string is ever shown."""

from collections.abc import Sequence

from weft.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one text into text that may be shown, and notices stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], begun: bool):
        self.stream = tokenizer.stream(begun=begun)
        self.stop = stop
        self.held = ""  # written, but it may be the beginning of a stop string
        self.ready = ""  # may be shown
        self.stopped = False  # a stop string is complete

    def push(self, token: int) -> bool:
        """Read a token; True if a stop string is complete."""
        return self._add(self.stream.push(token))

    def end(self) -> bool:
        """No token follows: what was held back is text after all, unless it completes a stop string."""
        stopped = self._add(self.stream.flush())
        if not stopped:
            self.ready += self.held
            self.held = ""
        return stopped

    def take(self) -> str:
        """The text that may be shown and hasn't been taken yet."""
        text, self.ready = self.ready, ""
        return text

    def copy(self) -> "Detokenizer":
        """Another text that begins as this one did."""
        other = object.__new__(Detokenizer)  # a beam search makes many of them
        other.__dict__.update(self.__dict__)
        other.stream = self.stream.copy()
        return other

    def _add(self, text: str) -> bool:
        self.held += text
        found = [place for stop in self.stop if (place := self.held.find(stop)) >= 0]
        if found:
            self.ready += self.held[: min(found)]
            self.held = ""
            self.stopped = True
            return True
        keep = max((_overlap(self.held, stop) for stop in self.stop), default=0)
        self.ready += self.held[: len(self.held) - keep]
        self.held = self.held[len(self.held) - keep :]
        return False


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
