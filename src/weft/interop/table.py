"""Tables that translate a model's settings to another program's keys, and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.config import Tree
from weft.interop.settings import THEIR_ACTIVATIONS, Flat, Settings

Kind = Literal["whole", "number", "positive", "flag", "activation"]
# the settings that most tables have, by a short word: the setting, and what its key holds
WORDS: dict[str, tuple[str, Kind]] = {
    "vocab_size": ("vocab_size", "whole"), "context": ("context", "whole"), "segments": ("segments", "whole"),
    "layers": ("layers", "whole"), "encoder_layers": ("encoder_layers", "whole"), "d_model": ("d_model", "whole"),
    "heads": ("attention.heads", "whole"), "kv_heads": ("attention.kv_heads", "whole"),
    "d_head": ("attention.d_head", "whole"), "d_ff": ("feedforward.d_ff", "whole"),
    "activation": ("feedforward.activation", "activation"), "eps": ("norm.eps", "number"),
    "dropout": ("dropout", "number"), "attention_dropout": ("attention.dropout", "number"),
    "feedforward_dropout": ("feedforward.dropout", "number"), "std": ("init.std", "number"),
    "base": ("position.base", "number"), "buckets": ("position.buckets", "whole"),
    "max_distance": ("position.max_distance", "whole"), "tied": ("head.tied", "flag"),
    "embedding_scale": ("embedding_scale", "flag"), "norm_bias": ("norm.bias", "flag"),
    "feedforward_bias": ("feedforward.bias", "flag"),
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """A setting that has a key of its own; a setting that the model does not have is not written.

    `default` is what the other program takes where the key is absent, or a function of the settings read so far; None
    means that it is required. Where there may be `none`, null says so, and does not stand for the default.
    `to_ours` and `to_theirs` convert a value, given the model's other settings.
    """

    ours: str
    theirs: str
    default: Any = None
    kind: Kind = field(kw_only=True)
    none: bool = False
    written: bool = True
    to_ours: Callable[[Any, Flat], Any] = lambda value, model: value
    to_theirs: Callable[[Any, Flat], Any] = lambda value, model: value

    def read(self, settings: Settings, model: Flat) -> Flat:
        """Settings of the model, given those that earlier rows have read."""
        default = self.default(model) if callable(self.default) else self.default
        if self.none and settings.tree.get(settings.prefix + self.theirs, default) is None:
            settings.asked.add(settings.prefix + self.theirs)
            return {self.ours: None}
        return {self.ours: self.to_ours(getattr(settings, self.kind)(self.theirs, default), model)}

    def write(self, model: Flat) -> Tree:
        """Keys and their values."""
        if not self.written or self.ours not in model:
            return {}
        value = self.to_theirs(model[self.ours], model)
        return {self.theirs: THEIR_ACTIVATIONS[value] if self.kind == "activation" else value}


@dataclass(frozen=True)
class Special:
    """A row that takes code of its own, in either direction."""

    read: Callable[[Settings, Flat], Flat] = lambda settings, model: {}
    write: Callable[[Flat], Tree] = lambda model: {}


Row = Key | Special  # one or more settings of a model, and the other program's keys for them


def keys(**theirs: str | tuple[str, Any]) -> tuple[Key, ...]:
    """Rows by WORDS: their key, or their key with its default. How weights were drawn at first is not written."""
    rows = []
    for word, given in theirs.items():
        (ours, kind), (name, default) = WORDS[word], (given, None) if isinstance(given, str) else given
        rows.append(Key(ours, name, default, kind=kind, written=word != "std"))
    return tuple(rows)


def without(rows: tuple[Key, ...], ours: str) -> tuple[Key, ...]:
    """The rows less that of one setting."""
    return tuple(row for row in rows if row.ours != ours)


def four_times(model: Flat) -> int:
    """The usual default of d_ff."""
    return int(4 * model["d_model"])


def even_heads(model: Flat) -> int:
    """The default of d_head: the heads share d_model evenly."""
    return max(1, model["d_model"] // model["attention.heads"])


def round_factor(factor: float, close: float) -> float:
    """A factor that was computed from a whole one, as that."""
    return round(factor) if abs(factor - round(factor)) < close else factor


def switch(theirs: str, default: bool, on: Flat, off: Flat) -> Special:
    """A key, true or false, that decides settings; the first of `on` tells which it was."""
    first, value = next(iter(on.items()))
    return Special(
        lambda settings, model: on if settings.flag(theirs, default) else off,
        lambda model: {theirs: model.get(first) == value},
    )


def biases(theirs: str, default: bool, kind: str = "all") -> Special:
    """A key that gives attention all its biases, or those of `kind`."""
    return switch(theirs, default, {"attention.bias": kind}, {"attention.bias": "none"})


def all_biases(theirs: str, default: bool = True, *more: str) -> Special:
    """A key that gives attention and feed-forward all their biases, and turns on `more` settings with them."""
    on, off = (dict.fromkeys(("feedforward.bias", *more), each) for each in (True, False))
    return switch(theirs, default, {"attention.bias": "all", **on}, {"attention.bias": "none", **off})


def same(theirs: str, ours: str, default: int | None = None) -> Special:
    """A key that must repeat a setting read before; where it is absent, the other program takes the default if there is
    one."""

    def read(settings: Settings, model: Flat) -> Flat:
        if default is None:
            settings.only(**{theirs: model[ours]})
        elif settings.whole(theirs, default) != model[ours]:
            absent = f" (absent, it is {default})" if settings.get(theirs) is None else ""
            other = theirs.replace("decoder", "encoder")
            raise settings.error(theirs, f"weft has only that of both sides, and {other} = {model[ours]}{absent}")
        return {}

    return Special(read, lambda model: {theirs: model[ours]})


def embedding_width(theirs: str, default: int | None = None) -> Key:
    """The width of the embeddings; a projection stands between them and the layers only where their widths differ.

    Where it is absent, it is `default`, or the layers' own.
    """
    return Key(
        "d_embedding",
        theirs,
        lambda model: default or model["d_model"],
        kind="whole",
        to_ours=lambda width, model: None if width == model["d_model"] else width,
        to_theirs=lambda width, model: width or model["d_model"],
    )


def follows(ours: str, other: str) -> Special:
    """A setting without a key, which is the same as another one."""
    return Special(read=lambda settings, model: {ours: model[other]})


def constant(theirs: str, value: Any) -> Special:
    """A key that is written and not read."""
    return Special(write=lambda model: {theirs: value})


@dataclass(frozen=True)
class Table:
    """A kind of model in another program.

    `fixed` are the settings that all such models have, `only` the keys that have to have one value where they are
    there, and `defaults` what this kind has for absent keys where it differs from the rows' own defaults.
    """

    rows: tuple[Row, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, given: Settings, known: Mapping[str, Any]) -> Flat:
        """The model's settings; `known` are those that do not come from the keys."""
        defaults, there = self.defaults.items(), {key for key, value in given.tree.items() if value is not None}
        there |= {key for key in given.tree if key.removeprefix(given.prefix) not in self.only}  # where null is a value
        absent = {key: value for key, value in defaults if given.prefix + key not in there}
        asked = Settings({**given.tree, **absent}, given.place, given.prefix, given.asked)
        asked.only(**self.only)
        model = {**self.fixed, **known}
        for row in self.rows:
            model |= row.read(asked, model)
        return model

    def keys(self, model: Flat) -> Tree:
        """The keys, as near as this kind can come to the model."""
        tree: Tree = {}
        for row in self.rows:
            tree |= row.write(model)
        return tree
