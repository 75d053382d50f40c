"""What a family of Hugging Face models is: its names for weights, and its settings in both directions."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any

from weft.config import Tree
from weft.errors import InteropError
from weft.interop.weight_map import Rule
from weft.models.config import Decoder, Encoder, EncoderDecoder, Model
from weft.nn.config import Activation

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
THEIR_ACTIVATIONS: dict[Activation, str] = {
    "gelu": "gelu",
    "gelu-tanh": "gelu_new",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "tanh": "tanh",
}

LARGEST = 2**28  # of any size: a single row of so many numbers is a gigabyte

Transformer = Decoder | Encoder | EncoderDecoder

_short = Repr()  # whatever a file holds fits into a line
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxdict, _short.maxlist = 3, 80, 80, 8, 8


def shown(value: Any) -> str:
    """A setting's value as a message shows it."""
    return _short.repr(value)


class Settings:
    """A config.json that is asked key by key. A value of the wrong kind is refused with its key."""

    def __init__(self, tree: Mapping[str, Any], where: str):
        self.tree = tree
        self.where = where

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number above 0, of a size that a model may have."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(key, "expected a whole number above 0")
        if value > LARGEST:
            raise self.refusal(key, f"expected {LARGEST:,} at most")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; neither infinite nor NaN."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refusal(key, "expected a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.refusal(key, "expected a finite number")
        return number

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "expected true or false")
        return value

    def activation(self, key: str, default: str) -> Activation:
        """A nonlinearity."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.refusal(key, f"weft has {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def only(self, **allowed: Any) -> None:
        """Refuse a key that is there with another value than the one that weft can express; null means absent."""
        for key, value in allowed.items():
            if self.tree.get(key) not in (None, value):
                raise self.refusal(key, f"weft has only {value!r}")

    def refusal(self, key: str, reason: str) -> InteropError:
        """The error about a key."""
        value = shown(self.tree[key]) if key in self.tree else "missing"
        return InteropError(f"{self.where}: {key} = {value}: {reason}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.tree.get(key)
        if value is None:
            if default is None:
                raise InteropError(f"{self.where}: {key} is missing")
            return default
        return value


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json.

    `architectures` maps each that weft can read to the kind of head it has. `read` gives the model of a config.json,
    its architecture and the names of the stored tensors; `write` gives the architecture and the config.json of a model,
    as near as the family can come: what it cannot say shows when that is read again. Names of tensors are those of the
    whole model; a file that holds the base model alone leaves `prefix` out. `copies` are tensors that repeat another
    one, `idle` are patterns of tensors that weft does not need, and `fillers` gives the size of those that the other
    program misses when they are not there.
    """

    kind: str
    title: str
    models: str  # the kind of weft's model
    architectures: Mapping[str, str]
    rules: Callable[[Model], tuple[Rule, ...]]
    read: Callable[[Settings, str, Collection[str]], Transformer]
    write: Callable[[Any], tuple[str, Tree]]
    prefix: str = ""
    copies: Callable[[Model], Mapping[str, str]] = lambda model: {}
    idle: tuple[str, ...] = ()
    fillers: Callable[[Any], Mapping[str, tuple[int, ...]]] = lambda model: {}
    renames: Mapping[str, str] = field(default_factory=dict)  # an old ending of a name → the present one
