"""Why a text ends: the one rule that every way of writing asks after each token.

Tokens become text as they come: whole characters only, and no part of a stop string is ever shown.
"""

from collections.abc import Sequence
from typing import Literal

from weft.decode.config import Rules
from weft.decode.constrain import Constraint
from weft.decode.prompt import Prompt
from weft.text.tokenizer import Tokenizer

Finish = Literal["eos", "stop", "length"]


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


class Ending:
    """Follows one text and says when it ends, and why.

    "eos": the model ended the text itself. "stop": a stop string is complete, one of the prompt's or the rules'
    `stop_ids` came, or the constraint is met and allows nothing more. "length": `limit` tokens are written, which is
    `max_tokens`, the prompt's `most`, or what the model's window leaves.
    """

    def __init__(self, prompt: Prompt, rules: Rules, window: int | None):
        self.eos_id, self.stop_ids = prompt.eos_id, prompt.stop_ids.union(rules.stop_ids)
        # the newest token isn't read, so a full window still gives one
        limits = rules.max_tokens, prompt.most, None if window is None else window - len(prompt.ids) + 1
        self.limit = min(limit for limit in limits if limit is not None)
        self.written = 0
        self.constraint: Constraint | None = None if prompt.grammar is None else prompt.grammar.begin(prompt.begun)
        self.detokenizer: Detokenizer | None = None
        if prompt.tokenizer is not None:
            self.detokenizer = Detokenizer(prompt.tokenizer, rules.stop, prompt.begun)

    def push(self, token: int) -> Finish | None:
        """Count a token that was written; why the text ends with it, if it does."""
        self.written += 1
        finish: Finish | None = "length" if self.written == self.limit else None
        if token == self.eos_id:
            finish = "eos"
        else:
            if token in self.stop_ids or (self.detokenizer is not None and self.detokenizer.push(token)):
                finish = "stop"
            if self.constraint is not None:
                self.constraint.push(token)
                finish = "stop" if self.constraint.over else finish
        # no stop string goes by unseen: what is held back at the end may complete one
        text = self.detokenizer
        if finish is not None and text is not None and not text.stopped and text.end():
            return "stop"
        return finish

    def take(self) -> str:
        """The text that may be shown and hasn't been taken yet; none where only ids are written."""
        return "" if self.detokenizer is None else self.detokenizer.take()

    def copy(self) -> "Ending":
        """For another text that begins as this one did: a beam."""
        other = object.__new__(Ending)
        other.__dict__.update(self.__dict__)
        if self.constraint is not None:
            other.constraint = self.constraint.copy()
        if self.detokenizer is not None:
            other.detokenizer = self.detokenizer.copy()
        return other
