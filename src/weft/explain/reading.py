"""A text as a model reads it, token by token, with the tokens as a person reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weft.errors import DataError, ModelError
from weft.figures.shaded import WHITE, Token
from weft.models.base import LanguageModel, device_of
from weft.models.heads import PretrainingPair, TokenHead
from weft.models.hidden import context_of
from weft.models.transformer import Transformer
from weft.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class SourceTokens:
    """What an encoder reads before a decoder writes: tokens (1, source time)."""

    tokens: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class Reading:
    """`ids` are what a model reads of a text, in their frame; the first `before` of them are not the text's own.

    `source` are those of the other text, where the model has one: an encoder–decoder's.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    ids: tuple[int, ...]
    before: int = 0
    source: tuple[int, ...] | None = None
    source_tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if not self.ids:
            raise DataError("the text is empty")
        most = context_of(self.model)
        for ids, what in ((self.ids, "the text"), (self.source or (), "the source")):
            if most is not None and len(ids) > most:
                raise DataError(f"{what} has {len(ids)} tokens, and the model reads {most} (model.context); shorten it")

    @cached_property
    def pieces(self) -> list[str]:
        return pieces(self.tokenizer, self.ids)

    @cached_property
    def source_pieces(self) -> list[str] | None:
        return None if self.source is None else pieces(self.source_tokenizer or self.tokenizer, self.source)

    @property
    def tokens(self) -> Tensor:
        """(1, time)."""
        return torch.tensor([self.ids], device=device_of(self.model))

    @property
    def given(self) -> dict[str, Any]:
        """What else the model is given: `model(reading.tokens, **reading.given)`."""
        if self.source is None:
            return {}
        return {"source": SourceTokens(torch.tensor([self.source], device=device_of(self.model)))}


def lacks(model: LanguageModel, what: str, advice: str) -> ModelError:
    """What to raise where a model of this kind has nothing to show."""
    kind = getattr(model.config, "kind", type(model).__name__)
    return ModelError(f"a model of kind '{kind}' has {what}; {advice}")


def predicts_words(model: LanguageModel) -> bool:
    """Whether a model's head gives every token of the vocabulary a score."""
    return not isinstance(model, Transformer) or isinstance(model.output, TokenHead | PretrainingPair)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """As a person reads them: whitespace as signs, bytes that are no character as \\xNN, special tokens by name."""
    special = set(tokenizer.special_tokens.values())
    return [tokenizer.token(id) if id in special else _piece(tokenizer.token_bytes(id)) for id in ids]


def _piece(raw: bytes) -> str:
    text = raw.decode("utf-8", "backslashreplace")
    shown = "".join(WHITE.get(sign, sign) if sign.isspace() else sign for sign in text)
    return "".join(sign if sign.isprintable() else f"\\x{ord(sign):02x}" for sign in shown)


def running(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Token]:
    """A text's tokens. A character that several tokens spell belongs to the last of them."""
    stream = tokenizer.stream()
    special = set(tokenizer.special_tokens.values())
    texts = ["" if id in special else stream.push(id) for id in ids]
    return [Token(*each) for each in zip(texts, pieces(tokenizer, ids), strict=True)]
