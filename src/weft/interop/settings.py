"""Settings of another program, read key by key with type checks, and those of a weft model as a flat dictionary.

A model's settings are flat here: {"d_model": 64, "attention.heads": 4, …}. To find out whether a format can express a
model, it is written in that format (`table.py`), read again and compared.
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
from weft.nn.config import Activation, Experts

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_fast": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid", "silu": "silu", "swish": "silu", "tanh": "tanh",
}  # fmt: skip
# of several names, the first is written
THEIR_ACTIVATIONS: dict[str, str] = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
THEIR_ACTIVATIONS["xielu"] = "xielu"  # which only Apertus reads

ONLY_IN_TRAINING = {"dropout", "balance_loss", "z_loss", "capacity", "choice_bias"}
MAX_SIZE = 2**28  # of any dimension: one row of this many fp32 values is a gigabyte

Transformer = Decoder | Encoder | EncoderDecoder
Flat = dict[str, Any]

_short = Repr()  # any value of a file fits into a line
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxdict, _short.maxlist = 3, 80, 80, 8, 8


def shown(value: Any) -> str:
    """Representation of a setting's value for a message, shortened."""
    return _short.repr(value)


@dataclass
class Settings:
    """Settings of a file, read key by key; a value of the wrong type is refused with its key.

    `location` names the file in errors, `prefix` precedes all its keys, and `used` collects the keys that were read.
    """

    tree: Mapping[str, Any]
    location: str
    prefix: str = ""
    used: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of any type; null counts as absent."""
        self.used.add(self.prefix + key)
        value = self.tree.get(self.prefix + key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """Integer from 1 to MAX_SIZE."""
        value = self._required(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "expected a whole number above 0")
        if value > MAX_SIZE:
            raise self.error(key, f"expected {MAX_SIZE:,} at most")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Finite number."""
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
        """Finite number above 0."""
        number = self.number(key, default)
        if number <= 0:
            raise self.error(key, "expected a number above 0")
        return number

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Boolean."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "expected true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """String; `default` if it is absent or empty."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "expected a string")
        return value or default

    def activation(self, key: str, default: str | None = None) -> Activation:
        """Activation function, by weft's name."""
        value = self._required(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(key, f"weft has {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def only(self, **allowed: Any) -> None:
        """Raise InteropError if a key is present with another value than the only one that weft supports."""
        for key, value in allowed.items():
            if self.get(key) not in (None, value):
                raise self.error(key, f"weft has only {value!r}")

    def repeats(self, key: str, value: int, other: str) -> None:
        """Raise InteropError if `key` is present with another value than that of the key `other`."""
        if self.get(key) not in (None, value):
            raise self.error(key, f"weft has only the value of {other}, {value}")

    def error(self, key: str, reason: str) -> InteropError:
        """Return, for the caller to raise, an error about a key and its value."""
        key = self.prefix + key
        value = shown(self.tree[key]) if key in self.tree else "missing"
        return InteropError(f"{self.location}: {key} = {value}: {reason}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise InteropError(f"{self.location}: {self.prefix}{key} is missing")
        return value


def flat(model: Transformer) -> Flat:
    """Settings of a model by dotted key, with computed defaults filled in."""
    tree = model.model_dump(mode="json")
    tree["attention"] |= {"kv_heads": model.attention.groups, "d_head": model.d_head}
    tree["attention"]["d_v"] = None if model.d_v == model.d_head else model.d_v
    tree["attention"]["scale"] = model.attention.scale or model.d_head**-0.5
    depth = model.layers
    if isinstance(inner := model.feedforward, Experts):
        dense = [layer for layer in range(depth) if inner.is_dense(layer)]
        tree["feedforward"] |= {"first_dense": 0, "every": 1, "dense_layers": dense}
        tree["feedforward"] |= {"shared_d_ff": inner.shared_width or None} | ({} if dense else {"dense": None})
        if inner.kept_groups in (None, inner.groups):
            tree["feedforward"] |= {"groups": 1, "kept_groups": None, "group_score": "best-two"}
    if isinstance(model, EncoderDecoder):
        tree["encoder_layers"] = model.encoder_layers or model.layers
        depth = max(depth, tree["encoder_layers"])
    kinds = [kind.model_dump(mode="json") for kind in model.layer_kinds(depth)]
    if all(kind == kinds[0] for kind in kinds):
        tree["attention"]["window"], tree["position"] = kinds[0]["window"], kinds[0]["position"]
    kinds = [{**kind, "position": None if kind["position"] == tree["position"] else kind["position"]} for kind in kinds]
    tree["pattern"] = layer_pattern(kinds).get("pattern", [])
    return config.flat(tree)


def count_experts(model: Transformer) -> int:
    """Number of experts of a layer; 0 if the model is no mixture."""
    return model.feedforward.experts if isinstance(model.feedforward, Experts) else 0


def layer_pattern(kinds: Sequence[dict[str, Any]]) -> Flat:
    """Settings for layers of these kinds: the shortest pattern that repeats to them, or one window for all layers."""
    if all(kind == kinds[0] for kind in kinds) and kinds[0].get("position") is None and not kinds[0].get("chunk"):
        return {"attention.window": kinds[0].get("window")}
    for length in range(1, len(kinds) + 1):
        if all(kind == kinds[layer % length] for layer, kind in enumerate(kinds)):
            return {"pattern": list(kinds[:length])}
    raise AssertionError("the whole list is a pattern of itself")


def nested(model: Flat) -> Tree:
    """Nest flat settings for validation as a config; values that equal a computed default are left out."""
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
    """Settings in which two models would compute differently: (dotted key, ours, theirs).

    If a component has different kinds, only the kinds are listed, not the settings of either.
    """
    left, right = _computed(ours), _computed(theirs)
    different = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    kinds = {key.removesuffix("kind") for key in different if key.endswith(".kind")}
    return [
        (key, left.get(key), right.get(key))
        for key in different
        if key.endswith(".kind") or not any(key.startswith(kind) for kind in kinds)
    ]


def _computed(model: Transformer) -> Flat:
    """Settings that affect the output of a model in evaluation mode."""
    settings = flat(model)
    unused = {"head.activation"} if not settings.get("head.pooler", True) else set()
    return {
        key: value
        for key, value in settings.items()
        if key not in unused and not key.startswith("init.") and key.rpartition(".")[2] not in ONLY_IN_TRAINING
    } | {"choice_bias": settings.get("feedforward.choice_bias") is not None}


def first_lossless(model: Transformer, round_trips: Mapping[str, Callable[[], Transformer]], what: str) -> str:
    """Name of the first candidate that a model survives unchanged.

    `round_trips` write the model as a candidate would and read it again. If none is lossless, the error explains what
    the nearest one lacks; `what` is the candidates' common name.
    """
    nearest: tuple[int, str] | None = None
    for name, round_trip in round_trips.items():
        try:
            different = differences(model, round_trip())
        except WeftError as error:
            reasons = [str(error)]
        else:
            if not different:
                return name
            reasons = [f"model.{key} = {ours!r}, where {name} has {theirs!r}" for key, ours, theirs in different]
            if len(reasons) <= 3:
                reasons[-1] += f"; to export such a model, train it {_advice(different)}"
        if nearest is None or len(reasons) < nearest[0]:
            nearest = len(reasons), "; ".join(reasons[:3]) + (" …" if len(reasons) > 3 else "")
    assert nearest is not None
    raise InteropError(f"no {what} can hold this model; the nearest one fails for {nearest[1]}")


def _advice(different: Sequence[tuple[str, Any, Any]]) -> str:
    """Command-line settings that would have avoided the differences; pooling belongs to the objective."""
    named = [("objective.pooling" if key == "head.pooling" else f"model.{key}", theirs) for key, _, theirs in different]
    changes = [f"{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in named if v is not None]
    lists = {"with": changes, "without": [key for key, value in named if value is None]}
    return " and ".join(f"{word} {' '.join(items)}" for word, items in lists.items() if items)
