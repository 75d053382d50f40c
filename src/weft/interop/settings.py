"""Another program's settings, asked for key by key with their types checked, and a model's own in one flat table.

A model's settings are flat in here: {"d_model": 64, "attention.heads": 4, …}. What a format cannot express shows when a
model is written in it (`table.py`) and read again.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any

from weft import config
from weft.config import Tree
from weft.errors import InteropError, WeftError
from weft.models.config import Decoder, Encoder, EncoderDecoder
from weft.nn.config import Activation

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_fast": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu",
    "sigmoid": "sigmoid", "silu": "silu", "swish": "silu", "tanh": "tanh",
}  # fmt: skip
# the first name of each is the one that is written
THEIR_ACTIVATIONS: dict[Activation, str] = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}

MAX_SIZE = 2**28  # of any dimension: a single row of that many fp32 numbers is a gigabyte

Transformer = Decoder | Encoder | EncoderDecoder
Flat = dict[str, Any]

_short = Repr()  # whatever a file holds, it fits into a line
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxdict, _short.maxlist = 3, 80, 80, 8, 8


def shown(value: Any) -> str:
    """A setting's value as a message shows it."""
    return _short.repr(value)


@dataclass
class Settings:
    """The settings of a file, asked key by key; a value of the wrong type is refused with its key.

    `place` names the file in errors, `prefix` precedes every key in it, and `asked` collects the keys asked for.
    """

    tree: Mapping[str, Any]
    place: str
    prefix: str = ""
    asked: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """A value of any type; null is the same as absent."""
        self.asked.add(self.prefix + key)
        value = self.tree.get(self.prefix + key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number above 0, of a size that a model may have."""
        value = self._required(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "expected a whole number above 0")
        if value > MAX_SIZE:
            raise self.error(key, f"expected {MAX_SIZE:,} at most")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; neither infinite nor NaN."""
        value = self._required(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, "expected a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.error(key, "expected a finite number")
        return number

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        number = self.number(key, default)
        if number <= 0:
            raise self.error(key, "expected a number above 0")
        return number

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "expected true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A text; `default` where it is absent or empty."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "expected a text")
        return value or default

    def activation(self, key: str, default: str | None = None) -> Activation:
        """The name of an activation function."""
        value = self._required(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(key, f"weft has {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def only(self, **allowed: Any) -> None:
        """Refuse a key that is there with another value than the one that weft can express; null means absent."""
        for key, value in allowed.items():
            if self.get(key) not in (None, value):
                raise self.error(key, f"weft has only {value!r}")

    def error(self, key: str, reason: str) -> InteropError:
        """The error about a key."""
        key = self.prefix + key
        value = shown(self.tree[key]) if key in self.tree else "missing"
        return InteropError(f"{self.place}: {key} = {value}: {reason}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise InteropError(f"{self.place}: {self.prefix}{key} is missing")
        return value


def flat(model: Transformer) -> Flat:
    """A model's settings by dotted key; what is left to a default is filled in."""
    tree = model.model_dump(mode="json")
    tree["attention"] |= {"kv_heads": model.attention.groups, "d_head": model.d_head}
    tree["attention"]["scale"] = model.attention.scale or model.d_head**-0.5
    depth = model.layers
    if isinstance(model, EncoderDecoder):
        tree["encoder_layers"] = model.encoder_layers or model.layers
        depth = max(depth, tree["encoder_layers"])
    kinds = [kind.model_dump(mode="json") for kind in model.layer_kinds(depth)]
    if all(kind == kinds[0] for kind in kinds):
        tree["attention"]["window"], tree["position"] = kinds[0]["window"], kinds[0]["position"]
    own = [{**kind, "position": None if kind["position"] == tree["position"] else kind["position"]} for kind in kinds]
    tree["pattern"] = repeated(own).get("pattern", [])
    return config.flat(tree)


def repeated(kinds: Sequence[dict[str, Any]]) -> Flat:
    """The kind of every layer as the shortest pattern that repeats to it; as the window of all if that is the same."""
    if all(kind == kinds[0] for kind in kinds) and kinds[0].get("position") is None:
        return {"attention.window": kinds[0].get("window")}
    for length in range(1, len(kinds) + 1):
        if all(kind == kinds[layer % length] for layer, kind in enumerate(kinds)):
            return {"pattern": list(kinds[:length])}
    raise AssertionError("the whole list repeats once")


def nested(model: Flat) -> Tree:
    """Flat settings as the tree that a config is validated from; what equals the default is left to it."""
    tree: Tree = {}
    for key, value in model.items():
        *tables, last = key.split(".")
        inner = tree
        for name in tables:
            inner = inner.setdefault(name, {})
        inner[last] = value
    attention = tree["attention"]
    if attention.get("d_head") is not None and attention["d_head"] * attention["heads"] == tree["d_model"]:
        attention["d_head"] = None
    if attention.get("kv_heads") == attention["heads"]:
        attention["kv_heads"] = None
    if tree.get("encoder_layers") == tree["layers"]:
        tree["encoder_layers"] = None
    return tree


def differences(ours: Transformer, theirs: Transformer) -> list[tuple[str, Any, Any]]:
    """The settings in which two models would compute differently: dotted key, ours, theirs.

    Where a part is of another kind, that is the difference, and not what either kind has settings for.
    """
    left, right = _computes(ours), _computes(theirs)
    different = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    kinds = {key.removesuffix("kind") for key in different if key.endswith(".kind")}
    return [
        (key, left.get(key), right.get(key))
        for key in different
        if key.endswith(".kind") or not any(key.startswith(kind) for kind in kinds)
    ]


def _computes(model: Transformer) -> Flat:
    settings = flat(model)
    unused = {"head.activation"} if not settings.get("head.pooler", True) else set()
    return {
        key: value
        for key, value in settings.items()
        if key not in unused and not key.startswith("init.") and key.rpartition(".")[2] != "dropout"
    }


def first_that_holds(model: Transformer, read_again: Mapping[str, Callable[[], Transformer]], what: str) -> str:
    """The first candidate that a model comes back from unchanged, by its name.

    `read_again` writes the model as a candidate would and reads it again. Where none holds the model, the error says
    what the nearest one lacks; `what` is the candidates' common name.
    """
    nearest: tuple[int, str] | None = None
    for name, again in read_again.items():
        try:
            different = differences(model, again())
        except WeftError as error:
            reasons = [str(error)]
        else:
            if not different:
                return name
            reasons = [f"model.{key} = {ours!r}, where {name} has {theirs!r}" for key, ours, theirs in different]
            if len(reasons) <= 3:
                reasons[-1] += f"; to export such a model, train it {_cure(different)}"
        if nearest is None or len(reasons) < nearest[0]:
            nearest = len(reasons), "; ".join(reasons[:3]) + (" …" if len(reasons) > 3 else "")
    assert nearest is not None
    raise InteropError(f"no {what} can hold this model; the nearest one fails for {nearest[1]}")


def _cure(different: Sequence[tuple[str, Any, Any]]) -> str:
    """The words on the command line that would have removed the differences; pooling is the objective's."""
    named = [("objective.pooling" if key == "head.pooling" else f"model.{key}", theirs) for key, _, theirs in different]
    given = [f"{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in named if v is not None]
    words = {"with": given, "without": [key for key, value in named if value is None]}
    return " and ".join(f"{word} {' '.join(each)}" for word, each in words.items() if each)
