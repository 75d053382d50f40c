"""A model that was made elsewhere, before it becomes a run: settings, weights under weft's names, tokenizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from weft.models.config import Model
from weft.text.tokenizer import Tokenizer

Weights = Mapping[str, Callable[[], Tensor]]  # a tensor is read, and converted, when it is asked for


@dataclass(frozen=True)
class Loaded:
    """What a reader of a format gives.

    `origin` names the file and its format for people; `notes` (JSON values alone) is what a writer of the same format
    needs to give back what was read: settings that weft has no word for, the type of the numbers, file names.
    `unused` are tensors that weft has no place for and `files` small files as they were, for the same purpose.
    `labels` are the names of a classifier's answers, `source_tokenizer` is for models that read with another one.
    """

    model: Model
    weights: Weights
    tokenizer: Tokenizer | None
    origin: str
    notes: dict[str, Any] = field(default_factory=dict)
    unused: Weights = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    source_tokenizer: Tokenizer | None = None
