"""A conversation, which may be longer than a model's window, and what of it the model reads next."""

from collections.abc import Sequence
from dataclasses import replace

from weft.decode.prompt import Prompt
from weft.errors import DataError
from weft.text.tokenizer import Tokenizer


class Conversation:
    """Turns of a person and a model, as the tokenizer's chat template writes them.

    Without a template the model continues the plain text so far. `window` is what the model
    can read, of which `reserve` tokens stay free for the reply; the oldest turns are left out when they don't fit.
    """

    def __init__(self, tokenizer: Tokenizer, window: int | None, reserve: int, system: str | None = None):
        self.tokenizer = tokenizer
        self.most = None if window is None else max(1, window - min(reserve, window // 2))
        self.system = system
        self.turns: list[tuple[str, str]] = []  # what the person said, what the model replied

    @property
    def templated(self) -> bool:
        return self.tokenizer.chat_template is not None

    def prompt(self, line: str) -> Prompt:
        """What the model reads before it replies to `line`.

        Under a template the reply is a text of its own, which every special token ends: they are part of the frame.
        """
        if not self.templated:
            return Prompt.of(self.tokenizer, self._plain(line))
        frame = frozenset(self.tokenizer.special_tokens.values())
        return replace(Prompt.of(self.tokenizer, self._templated(line)), begun=False, stop_ids=frame)

    def add(self, line: str, reply: str) -> None:
        """Remember a turn."""
        self.turns.append((line, reply))

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns.clear()

    def _templated(self, line: str) -> list[int]:
        for first in range(len(self.turns) + 1):
            text = self.tokenizer.chat(self._messages(self.turns[first:], line))
            ids = self.tokenizer.encode(text, specials=True)
            if self.most is None or len(ids) <= self.most:
                return ids
        raise DataError(f"that is {len(ids)} tokens, but the model can read {self.most} before it replies")

    def _messages(self, turns: Sequence[tuple[str, str]], line: str) -> list[dict[str, str]]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for said, reply in turns:
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
        return [*messages, {"role": "user", "content": line}]

    def _plain(self, line: str) -> list[int]:
        before = [] if self.system is None else [self.system]
        text = "\n".join([*before, *[said + reply for said, reply in self.turns], line])
        ids = self.tokenizer.encode(text)
        return ids if self.most is None else ids[-self.most :]
