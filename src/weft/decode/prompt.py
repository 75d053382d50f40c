"""What a text continues: its ids, and what belongs to the vocabulary they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from weft.decode.constrain import Grammar
from weft.errors import ModelError
from weft.models.base import LanguageModel
from weft.text.tokenizer import Tokenizer

TAIL = 64  # characters, or tokens, of a prompt that show how it ends


@dataclass(frozen=True)
class Prompt:
    """Ids to continue, at least one.

    Without a `tokenizer` only ids are written; with one, text, which goes on with the prompt's where that has `begun`.
    Only ids below `vocab_size` are chosen: a model may have more rows than its tokenizer has tokens. The text ends with
    `eos_id` or one of `stop_ids`, and keeps to the `grammar`.
    """

    ids: Sequence[int]
    tokenizer: Tokenizer | None = None
    begun: bool = False
    eos_id: int | None = None
    vocab_size: int | None = None
    stop_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str | Sequence[int], grammar: Grammar | None = None) -> Self:
        """A text, or ids; an empty one begins a new text. A text begins as the tokenizer's own file has it begin."""
        ids = [*tokenizer.leading, *tokenizer.encode(text)] if isinstance(text, str) else text
        begun = has_begun(tokenizer, text)
        vocabulary = tokenizer.eos_id, tokenizer.vocab_size
        return cls(ids or [opening(tokenizer)], tokenizer, begun, *vocabulary, grammar=grammar)


def has_begun(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> bool:
    """Whether what follows a prompt goes on with a text, so that its first word keeps its leading space.

    Where the prompt ends in a space that the tokenizer doesn't keep, that space is the first word's.
    """
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
    if tokenizer.eos_id is not None:
        return tokenizer.eos_id
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id
    newline = tokenizer.encode("\n")
    return newline[-1] if newline else 0


def context_window(model: LanguageModel) -> int | None:
    """The most tokens the model can read, or None where nothing limits it."""
    return getattr(model.config, "longest", None)


def choices(model: LanguageModel, vocab_size: int | None) -> int:
    """How many tokens there are to choose from."""
    own: int = getattr(model.config, "vocab_size", 0)
    return own if vocab_size is None else min(own, vocab_size)


def check_prompts(model: LanguageModel, prompts: Sequence[Prompt]) -> None:
    """Refuse what the model can't continue."""
    assert prompts, "nothing to continue"
    if model.training:
        raise ModelError("the model is in training mode, where dropout changes what it writes; call model.eval() first")
    window = context_window(model)
    vocab_size: int = getattr(model.config, "vocab_size", 0)
    for row, prompt in enumerate(prompts):
        which = "the prompt" if len(prompts) == 1 else f"prompt {row}"
        if not prompt.ids:
            raise ModelError(f"{which} is empty; it needs at least one token to start from")
        if window is not None and len(prompt.ids) > window:
            raise ModelError(f"{which} is {len(prompt.ids)} tokens long, but the model reads at most {window}")
        wrong = next((token for token in prompt.ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ModelError(f"{which} holds the id {wrong}, outside the model's vocabulary of {vocab_size}")
