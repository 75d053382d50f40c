"""A trained model on its way in or out: settings, weights under weft's names, tokenizer, and what came with it."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.config import Tree
from weft.errors import InteropError, TokenizerError
from weft.models.config import Model
from weft.storage.tensors import LazyWeights
from weft.text.tokenizer import Ids, Tokenizer


@dataclass(frozen=True)
class ModelBundle:
    """What the reader of a format returns and its writer takes.

    `origin` names the file and its format for messages; `notes` (JSON values only) is what a writer of the same format
    needs to reproduce what was read: settings that weft does not have, the dtypes of the weights, file names.
    `unused` holds tensors that weft has no place for, and the blocks that quantized ones came in; `files` holds small
    files as they were, for the same purpose.
    `labels` are a classifier's label names, and `length` is how many tokens of a text a sentence encoder reads.
    `source_tokenizer` is for models that read with another tokenizer, and `languages` how a model of several is told
    which ones to read and write (as settings, `recipe.objective.Languages`).
    `frame`, ids before and after a text, is what a run reads around one where its tokenizer doesn't say.
    """

    model: Model
    weights: LazyWeights
    tokenizer: Tokenizer | None
    origin: str
    notes: dict[str, Any] = field(default_factory=dict)
    unused: LazyWeights = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    length: int | None = None
    source_tokenizer: Tokenizer | None = None
    languages: Tree | None = None
    frame: tuple[Ids, Ids] | None = None


def lazily(read: Callable[[str], Tensor], names: Iterable[str]) -> LazyWeights:
    """Weights that `read` gets by name when they are asked for."""
    return {name: partial(read, name) for name in names}


def counted(weights: LazyWeights, advance: Callable[[int], None]) -> LazyWeights:
    """The same weights; each moves a progress bar on by one when it is read."""

    def read(name: str) -> Tensor:
        tensor = weights[name]()
        advance(1)
        return tensor

    return lazily(read, weights)


def as_dtype(read: Callable[[], Tensor], dtype: torch.dtype) -> Callable[[], Tensor]:
    """A weight that is converted when it is read."""
    return lambda: read().to(dtype)


def named_tokenizer(path: Path, vocab_size: int, sizes: Collection[int] = ()) -> Tokenizer:
    """The tokenizer that the user named for a model; of formats without one of their own, it has one of these sizes."""
    tokenizer = Tokenizer.load(path)
    if sizes and tokenizer.vocab_size not in sizes:
        raise InteropError(f"{path}: {tokenizer.vocab_size} tokens, but the model's vocab_size is {vocab_size}")
    return fitting(tokenizer, vocab_size, str(path))


def fitting(tokenizer: Tokenizer, vocab_size: int, place: str) -> Tokenizer:
    """The tokenizer, if each of its tokens has an embedding."""
    found = tokenizer.vocab_size
    if found > vocab_size:
        raise TokenizerError(f"{place}: the tokenizer has {found} entries, but the model's vocab_size is {vocab_size}")
    return tokenizer
