"""Prompts: token ids to continue, with the properties of their vocabulary; from a text or from a conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from weft.data.messages import ROLES
from weft.decode.config import Rules, Sampling
from weft.decode.constrain import Grammar
from weft.decode.contrastive import ContrastiveModel
from weft.decode.sampling import check_rules
from weft.errors import DataError, ModelError, suggestion
from weft.models.base import LanguageModel
from weft.text.tokenizer import Tokenizer

TAIL = 64  # characters, or tokens, that suffice to see how a prompt ends
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, at least one; the text ends with `eos_id`, one of `stop_ids` or after `max_tokens`."""

    ids: Sequence[int]
    tokenizer: Tokenizer | None = None  # without one, only ids are generated, no text
    mid_text: bool = False  # the first word keeps its leading space
    eos_id: int | None = None
    vocab_size: int | None = None  # bounds the ids: a model may have more rows than its tokenizer has tokens
    stop_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None  # which the text follows
    max_tokens: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str | Sequence[int], grammar: Grammar | None = None) -> Self:
        """Return the prompt for a text, with the tokenizer's leading tokens, or for ids; an empty one begins a text."""
        ids = [*tokenizer.leading, *tokenizer.encode(text)] if isinstance(text, str) else text
        return cls(
            ids or [start_token(tokenizer)],
            tokenizer=tokenizer,
            mid_text=ends_mid_text(tokenizer, text),
            eos_id=tokenizer.eos_id,
            vocab_size=tokenizer.vocab_size,
            grammar=grammar,
        )

    def fit(self, window: int | None) -> tuple[list[int], int]:
        """Return the ids that a model with this window reads, and how many of the first of them always stay.

        Leading tokens, such as LLaMA's bos, begin every text in training, so they stay when the window slides.
        """
        lead = () if self.tokenizer is None else self.tokenizer.leading
        keep = len(lead) if window is None or len(lead) < window else 0
        keep = keep if tuple(self.ids[:keep]) == lead[:keep] else 0
        return list(slide(self.ids, window, keep)), keep


Prompts = Sequence[Prompt | Sequence[int]]  # prompts, or ids alone


def as_prompts(prompts: Prompts) -> list[Prompt]:
    return [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]


def slide(ids: Sequence[int], window: int | None, keep: int = 0) -> Sequence[int]:
    """Drop ids after the first `keep` until the others fit into the window, half a window at a time.

    The ids that remain are read again from position 0, and half a window of text can follow before the next slide. So
    the ids read depend on the length of the text alone, not on how much of it was a prompt.
    """
    excess = 0 if window is None else len(ids) - window
    if window is None or excess <= 0:
        return ids
    hop = max(1, (window - keep) // 2)
    return [*ids[:keep], *ids[keep + -(-excess // hop) * hop :]]


def ends_mid_text(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> bool:
    """Return whether a continuation of the prompt is mid-text, so that its first word keeps its leading space.

    Where the prompt ends in a space that the tokenizer drops, that space is the first word's.
    """
    # only the end matters, and a prompt may be long: decode its last words
    first = max(0, len(prompt) - TAIL)
    if isinstance(prompt, str):
        text = tokenizer.decode(tokenizer.encode(prompt[prompt.rfind(" ", 0, first) + 1 :]))
    else:
        text = tokenizer.decode(prompt[first:])
    drops_space = isinstance(prompt, str) and prompt[-1:].isspace() and not text[-1:].isspace()
    return bool(text) and not drops_space


def start_token(tokenizer: Tokenizer) -> int:
    """Return the token that an empty prompt starts from: the one before a text in training.

    That is end-of-text, which separates texts in training; else the begin token, a newline, or the first token.
    """
    special = tokenizer.bos_id if tokenizer.eos_id is None else tokenizer.eos_id
    return [0, *tokenizer.encode("\n")][-1] if special is None else special


def context_window(model: LanguageModel) -> int | None:
    """Return the maximum number of tokens that the model reads, or None if it is unlimited."""
    if isinstance(model, ContrastiveModel):
        both = [context_window(each) for each in (model.expert, model.amateur)]
        return min((window for window in both if window is not None), default=None)
    return getattr(model.config, "longest", None)


def output_vocab_size(model: LanguageModel, vocab_size: int | None) -> int:
    """Return the number of tokens to choose from: the model's, or the tokenizer's `vocab_size` if that is smaller."""
    rows: int = getattr(model.config, "vocab_size", 0)
    return rows if vocab_size is None else min(rows, vocab_size)


def check_prompts(model: LanguageModel, prompts: Sequence[Prompt], rules: Sequence[Rules]) -> None:
    """Refuse prompts that the model can't continue under these rules; a text that slides may exceed the window."""
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
    check_rules(rules, output_vocab_size(model, prompts[0].vocab_size))


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    max_tokens: int | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    continues_last: bool = False,
) -> Prompt:
    """Return the prompt for a reply to {role, content} messages, the last of which is the user's, or a tool's result.

    With a chat template, the reply begins a text, and every special token ends it. Without one, the model continues the
    plain text. If the conversation exceeds `max_tokens`, its oldest turns are dropped, but not the system prompt.
    `tools` are definitions for the template. With `continues_last`, the last message is the beginning of the reply.
    """
    check_messages(messages, continues_last=continues_last)
    if tokenizer.chat_template is None:
        # a reply continues the line of the user's message; every other message begins a line
        lines = ["\n" * (each["role"] != "assistant") + each["content"] for each in messages]
        prompt = Prompt.of(tokenizer, messages[0]["content"] + "".join(lines[1:]))
        lead = len(tokenizer.leading)
        cut = 0 if max_tokens is None else max(0, len(prompt.ids) - max(max_tokens, lead + 1))
        return replace(prompt, ids=[*prompt.ids[:lead], *prompt.ids[lead + cut :]])
    special = frozenset(tokenizer.special_tokens.values())
    reply = messages[-1]["content"] if continues_last else ""
    turns = messages[:-1] if continues_last else messages
    ids = _apply_template(tokenizer, turns, max_tokens, reply=reply, tools=tools)
    return replace(Prompt.of(tokenizer, ids), mid_text=bool(reply), stop_ids=special)


def max_prompt_tokens(window: int | None, reply_tokens: int) -> int | None:
    """Return how many tokens of a conversation fit into the window beside a reply, which gets half of it at most."""
    return None if window is None else max(1, window - min(reply_tokens, window // 2))


def check_messages(messages: Any, *, continues_last: bool = False) -> None:
    """Raise DataError unless messages are a conversation that ends with the user's, or with a reply to continue."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError("messages: expected a list such as [{'role': 'user', 'content': 'Hello'}]")
    for number, message in enumerate(messages, start=1):
        texts = (message.get(key) for key in ("role", "content")) if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"message {number}: expected {{'role': …, 'content': …}}, both text")
        role = message["role"]
        if role not in (*ROLES, "tool"):
            raise DataError(f"message {number}: role = {role!r}: {suggestion(role, ROLES)}")
        if role == "system" and number > 1:
            raise DataError(f"message {number}: only the first message may be the system's")
    last = messages[-1]["role"]
    if continues_last and (last != "assistant" or len(messages) == 1):
        raise DataError(f"the last message is the {last}'s; only a reply to an earlier message can be continued")
    if not continues_last and last not in ("user", "tool"):
        raise DataError(f"the last message is the {last}'s; a reply answers the user's")


def _apply_template(
    tokenizer: Tokenizer, messages: Sequence[Message], max_tokens: int | None, *, reply: str, tools: Sequence[Any]
) -> list[int]:
    messages, tools, reply = tokenizer.to_chat(messages), tokenizer.escape(tools), tokenizer.escape(reply)
    system = messages[:1] if messages[0]["role"] == "system" else []
    turns = messages[len(system) :]
    roles = [turn["role"] for turn in turns]
    for first in [n for n in range(len(turns)) if n == 0 or roles[n - 1 : n + 1] == ["assistant", "user"]]:
        ids = tokenizer.chat_ids(tokenizer.chat([*system, *turns[first:]], tools=tools) + reply)
        if max_tokens is None or len(ids) <= max_tokens:
            return ids
    raise DataError(f"the conversation is {len(ids)} tokens, but the model can read {max_tokens} before it replies")
