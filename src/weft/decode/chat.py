"""A conversation, which may be longer than a model's window, and what of it the model reads before it replies."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.data.messages import ROLES
from weft.decode.prompt import Prompt
from weft.errors import DataError, suggestion
from weft.text.tokenizer import Tokenizer

Message = Mapping[str, str]
# How replies are drawn where a checkpoint doesn't say it: at temperature 1 from the whole vocabulary a small model soon
# picks a word that leads nowhere. Other programs do alike (llama.cpp: 0.8 and 0.95, Ollama: 0.8 and 0.9).
GENTLE = {"temperature": 0.7, "top_p": 0.9}


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message], most: int | None = None) -> Prompt:
    """What a model reads before it replies to {role, content} messages, of which the last is the user's.

    The tokenizer's chat template frames them, and then the reply is a text of its own, which every special token ends:
    they are part of the frame. Without a template the model goes on with the plain text. Of a conversation of more
    than `most` tokens the oldest turns are left out, but not what the system said.
    """
    check_messages(messages)
    if tokenizer.chat_template is None:
        prompt = Prompt.of(tokenizer, _plain(messages))
        lead = len(tokenizer.leading)
        cut = 0 if most is None else max(0, len(prompt.ids) - max(most, lead + 1))
        return replace(prompt, ids=[*prompt.ids[:lead], *prompt.ids[lead + cut :]])
    frame = frozenset(tokenizer.special_tokens.values())
    return replace(Prompt.of(tokenizer, _templated(tokenizer, messages, most)), begun=False, stop_ids=frame)


def before_reply(window: int | None, reply: int) -> int | None:
    """How many tokens of a conversation a model reads that has to have space for a reply of so many."""
    return None if window is None else max(1, window - min(reply, window // 2))


def check_messages(messages: Any) -> None:
    """Refuse what is no conversation that waits for a reply."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError("messages: expected a list such as [{'role': 'user', 'content': 'Hello'}]")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise DataError(f"message {number}: expected {{'role': …, 'content': …}}, both text")
        role = message["role"]
        if role not in ROLES:
            raise DataError(f"message {number}: role = {role!r}: {suggestion(role, ROLES)}")
        if role == "system" and number > 1:
            raise DataError(f"message {number}: only the first message may be the system's")
    if messages[-1]["role"] != "user":
        raise DataError(f"the last message is the {messages[-1]['role']}'s; a reply answers the user's")


def _templated(tokenizer: Tokenizer, messages: Sequence[Message], most: int | None) -> list[int]:
    system = messages[:1] if messages[0]["role"] == "system" else []
    turns = messages[len(system) :]
    starts = [
        n for n, turn in enumerate(turns) if n == 0 or (turn["role"], turns[n - 1]["role"]) == ("user", "assistant")
    ]
    for first in starts:
        ids = tokenizer.encode(tokenizer.chat([*system, *turns[first:]]), specials=True)
        if most is None or len(ids) <= most:
            return ids
    raise DataError(f"that is {len(ids)} tokens, but the model can read {most} before it replies")


def _plain(messages: Sequence[Message]) -> str:
    """A reply goes on with what the user said; everything else begins a line."""
    text = ""
    for number, message in enumerate(messages):
        text += "\n" * (number > 0 and message["role"] != "assistant") + message["content"]
    return text
