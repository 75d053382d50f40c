"""Why a text ends: the one rule that every way of writing asks after each token."""

from typing import Literal

from weft.decode.config import Rules
from weft.decode.constrain import Constraint
from weft.decode.detokenize import Detokenizer
from weft.decode.prompt import Prompt

Finish = Literal["eos", "stop", "length"]


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
