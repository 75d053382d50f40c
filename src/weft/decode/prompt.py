"""What a text continues: its ids, and what belongs to the vocabulary they come from; or a conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from weft.data.messages import ROLES
from weft.decode.config import Rules, Sampling
from weft.decode.constrain import Grammar
from weft.decode.contrastive import Contrasted
from weft.decode.sampling import check_rules
from weft.errors import DataError, ModelError, suggestion
from weft.models.base import LanguageModel
from weft.text.tokenizer import Tokenizer

TAIL = 64  # characters, or tokens, of a prompt that show how it ends
Message = Mapping[str, str]
# How replies are drawn where a checkpoint doesn't say it: at temperature 1 from the whole vocabulary a small model soon
# picks a word that leads nowhere. Other programs do alike (llama.cpp: 0.8 and 0.95, Ollama: 0.8 and 0.9).
GENTLE = {"temperature": 0.7, "top_p": 0.9}


@dataclass(frozen=True)
class Prompt:
    """Ids to continue, at least one.

    Without a `tokenizer` only ids are written; with one, text, which goes on with the prompt's where that has `begun`.
    Only ids below `vocab_size` are chosen: a model may have more rows than its tokenizer has tokens. The text ends with
    `eos_id` or one of `stop_ids`, or when it has `most` tokens, and keeps to the `grammar`.
    """

    ids: Sequence[int]
    tokenizer: Tokenizer | None = None
    begun: bool = False
    eos_id: int | None = None
    vocab_size: int | None = None
    stop_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    most: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str | Sequence[int], grammar: Grammar | None = None) -> Self:
        """A text, or ids; an empty one begins a new text. A text begins as the tokenizer's own file has it begin."""
        ids = [*tokenizer.leading, *tokenizer.encode(text)] if isinstance(text, str) else text
        of = tokenizer, has_begun(tokenizer, text), tokenizer.eos_id, tokenizer.vocab_size
        return cls(ids or [opening(tokenizer)], *of, grammar=grammar)

    def last(self, window: int | None) -> tuple[list[int], int]:
        """The ids that a model with this window reads, and how many of the first of them stay whenever it slides.

        What the tokenizer puts before every text, as LLaMA's does with bos, is part of every text that a model of its
        has seen; so it stays.
        """
        lead = () if self.tokenizer is None else self.tokenizer.leading
        stays = len(lead) if window is None or len(lead) < window else 0
        stays = stays if tuple(self.ids[:stays]) == lead[:stays] else 0
        return list(slid(self.ids, window, stays)), stays


Prompts = Sequence[Prompt | Sequence[int]]  # prompts, or ids alone


def slid(ids: Sequence[int], window: int | None, stays: int = 0) -> Sequence[int]:
    """The last of these ids, after the first that stay, so that they fit into the window.

    As often as they don't, half of the window is left out: the rest is read again, at positions from 0 on, and half a
    window of text can follow before that happens once more. So what is read depends on the text's length alone, not on
    how much of it was a prompt.
    """
    over = 0 if window is None else len(ids) - window
    if window is None or over <= 0:
        return ids
    hop = max(1, (window - stays) // 2)
    return [*ids[:stays], *ids[stays + -(-over // hop) * hop :]]


def has_begun(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> bool:
    """Whether what follows a prompt goes on with a text, so that its first word keeps its leading space. Where the
    prompt ends in a space that the tokenizer doesn't keep, that space is the first word's."""
    # only how it ends matters, and a prompt may be long: its last words will do
    first = max(0, len(prompt) - TAIL)
    if isinstance(prompt, str):
        text = tokenizer.decode(tokenizer.encode(prompt[prompt.rfind(" ", 0, first) + 1 :]))
    else:
        text = tokenizer.decode(prompt[first:])
    lost = isinstance(prompt, str) and prompt[-1:].isspace() and not text[-1:].isspace()
    return bool(text) and not lost


def opening(tokenizer: Tokenizer) -> int:
    """The token an empty prompt starts from: what stands before a text in training.

    In weft's training data an end-of-text token stands between texts, so a new one begins after it. Tokenizers
    without one open with their begin token, a line end, or else their first token.
    """
    special = tokenizer.bos_id if tokenizer.eos_id is None else tokenizer.eos_id
    return [0, *tokenizer.encode("\n")][-1] if special is None else special


def context_window(model: LanguageModel) -> int | None:
    """The most tokens the model can read, or None where nothing limits it."""
    if isinstance(model, Contrasted):
        both = [context_window(each) for each in (model.expert, model.amateur)]
        return min((window for window in both if window is not None), default=None)
    return getattr(model.config, "longest", None)


def choices(model: LanguageModel, vocab_size: int | None) -> int:
    """How many tokens there are to choose from."""
    own: int = getattr(model.config, "vocab_size", 0)
    return own if vocab_size is None else min(own, vocab_size)


def check_prompts(model: LanguageModel, prompts: Sequence[Prompt], rules: Sequence[Rules]) -> None:
    """Refuse what the model can't continue under these rules. Of a text that slides, only the last part has to fit."""
    assert prompts, "nothing to continue"
    if model.training:
        raise ModelError("the model is in training mode, where dropout changes what it writes; call model.eval() first")
    window = context_window(model)
    vocab_size: int = getattr(model.config, "vocab_size", 0)
    for row, (prompt, rule) in enumerate(zip(prompts, rules, strict=True)):
        which = "the prompt" if len(prompts) == 1 else f"prompt {row}"
        slides = isinstance(rule, Sampling) and rule.slide
        if not prompt.ids:
            raise ModelError(f"{which} is empty; it needs at least one token to start from")
        if window is not None and len(prompt.ids) > window and not slides:
            raise ModelError(f"{which} is {len(prompt.ids)} tokens long, but the model reads at most {window}")
        wrong = next((token for token in prompt.ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ModelError(f"{which} holds the id {wrong}, outside the model's vocabulary of {vocab_size}")
    check_rules(rules, choices(model, prompts[0].vocab_size))


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message], most: int | None = None) -> Prompt:
    """What a model reads before it replies to {role, content} messages, of which the last is the user's.

    The tokenizer's chat template frames them, and then the reply is a text of its own, which every special token ends:
    they are part of the frame. Without a template the model goes on with the plain text. Of a conversation of more
    than `most` tokens the oldest turns are left out, but not what the system said.
    """
    check_messages(messages)
    if tokenizer.chat_template is None:
        # a reply goes on with what the user said; everything else begins a line
        lines = ["\n" * (each["role"] != "assistant") + each["content"] for each in messages]
        prompt = Prompt.of(tokenizer, messages[0]["content"] + "".join(lines[1:]))
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
        texts = (message.get(key) for key in ("role", "content")) if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"message {number}: expected {{'role': …, 'content': …}}, both text")
        role = message["role"]
        if role not in ROLES:
            raise DataError(f"message {number}: role = {role!r}: {suggestion(role, ROLES)}")
        if role == "system" and number > 1:
            raise DataError(f"message {number}: only the first message may be the system's")
    if messages[-1]["role"] != "user":
        raise DataError(f"the last message is the {messages[-1]['role']}'s; a reply answers the user's")


def _templated(tokenizer: Tokenizer, messages: Sequence[Message], most: int | None) -> list[int]:
    messages = tokenizer.to_chat(messages)
    system = messages[:1] if messages[0]["role"] == "system" else []
    turns = messages[len(system) :]
    roles = [turn["role"] for turn in turns]
    for first in [n for n in range(len(turns)) if n == 0 or roles[n - 1 : n + 1] == ["assistant", "user"]]:
        ids = tokenizer.chat_ids(tokenizer.chat([*system, *turns[first:]]))
        if most is None or len(ids) <= most:
            return ids
    raise DataError(f"that is {len(ids)} tokens, but the model can read {most} before it replies")
