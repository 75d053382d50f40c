"""`ModelBundle`, the result of importing and the input of exporting: settings, weights, tokenizer and extra files."""

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
    """A model as the reader of a format returns it and its writer takes it; weights have weft's names.

    `origin` names the file and its format in messages. `notes` (JSON values only), `unused` tensors and `files` let a
    writer of the same format reproduce the original: settings that weft lacks, dtypes, file names; tensors that weft
    does not use, and the blocks of quantised ones; small files verbatim.
    `labels` are the label names of a classifier, `length` is the number of tokens that a sentence encoder reads.
    `source_tokenizer` is that of the source if it differs, and `languages` are the settings of a multilingual model
    (`recipe.objective.Languages`).
    `frame` is the ids before and after a text, if its tokenizer does not define them.
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


def lazy_weights(read: Callable[[str], Tensor], names: Iterable[str]) -> LazyWeights:
    """Weights that `read` returns by name when they are used."""
    return {name: partial(read, name) for name in names}


def with_progress(weights: LazyWeights, advance: Callable[[int], None]) -> LazyWeights:
    """Wrap weights so that reading one calls `advance(1)`."""

    def read(name: str) -> Tensor:
        tensor = weights[name]()
        advance(1)
        return tensor

    return lazy_weights(read, weights)


def as_dtype(read: Callable[[], Tensor], dtype: torch.dtype) -> Callable[[], Tensor]:
    """Wrap a lazy weight so that it is converted when read."""
    return lambda: read().to(dtype)


def load_tokenizer(path: Path, vocab_size: int, sizes: Collection[int] = ()) -> Tokenizer:
    """Load the tokenizer that the user named for a model; if `sizes` are given, it must have one of them."""
    tokenizer = Tokenizer.load(path)
    if sizes and tokenizer.vocab_size not in sizes:
        raise InteropError(f"{path}: {tokenizer.vocab_size} tokens, but the model's vocab_size is {vocab_size}")
    return check_vocabulary(tokenizer, vocab_size, str(path))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, location: str) -> Tokenizer:
    """Return the tokenizer; TokenizerError if it has more tokens than the model has embeddings."""
    size = tokenizer.vocab_size
    if size > vocab_size:
        raise TokenizerError(f"{location}: the tokenizer has {size} tokens, the model's vocab_size is {vocab_size}")
    return tokenizer
