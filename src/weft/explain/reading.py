"""A text as a model reads it, token by token, with readable names of the tokens."""

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
    """Source of an encoder–decoder: tokens (1, source time)."""

    tokens: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class Reading:
    """Token ids that a model reads for a text, framed by special tokens."""

    model: LanguageModel
    tokenizer: Tokenizer
    ids: tuple[int, ...]
    before: int = 0  # ids that precede the text
    source: tuple[int, ...] | None = None  # ids of an encoder–decoder's source
    source_tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if not self.ids:
            raise DataError("the text is empty")
        context = context_of(self.model)
        for ids, name in ((self.ids, "the text"), (self.source or (), "the source")):
            if context is not None and len(ids) > context:
                limit = f"the model reads {context} (model.context)"
                raise DataError(f"{name} has {len(ids)} tokens, and {limit}; shorten it")

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
    def model_kwargs(self) -> dict[str, Any]:
        """Further arguments of the forward pass: `model(reading.tokens, **reading.model_kwargs)`."""
        if self.source is None:
            return {}
        return {"source": SourceTokens(torch.tensor([self.source], device=device_of(self.model)))}


def unsupported(model: LanguageModel, lack: str, advice: str) -> ModelError:
    """Return the error for a view that this kind of model does not have."""
    kind = getattr(model.config, "kind", type(model).__name__)
    return ModelError(f"a model of kind '{kind}' has {lack}; {advice}")


def predicts_tokens(model: LanguageModel) -> bool:
    """Return whether a model's head gives a logit for every token of the vocabulary."""
    return not isinstance(model, Transformer) or isinstance(model.output, TokenHead | PretrainingPair)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return readable tokens: visible whitespace, invalid bytes as \\xNN, special tokens by name."""
    special = set(tokenizer.special_tokens.values())
    return [tokenizer.token(id) if id in special else _piece(tokenizer.token_bytes(id)) for id in ids]


def _piece(raw: bytes) -> str:
    text = raw.decode("utf-8", "backslashreplace")
    visible = "".join(WHITE.get(char, char) if char.isspace() else char for char in text)
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in visible)


def text_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Token]:
    """Return a text's tokens. A character spelled by several tokens belongs to the last of them."""
    stream = tokenizer.stream()
    special = set(tokenizer.special_tokens.values())
    texts = ["" if id in special else stream.push(id) for id in ids]
    return [Token(*pair) for pair in zip(texts, pieces(tokenizer, ids), strict=True)]
