"""Tables that translate a model's settings to another program's keys and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from weft.config import Tree
from weft.interop.settings import THEIR_ACTIVATIONS, Flat, Settings, shown

Kind = Literal["integer", "number", "positive", "flag", "activation"]
# short names of settings for `keys`: the setting, and the type of its key
SETTINGS: dict[str, tuple[str, Kind]] = {
    "vocab_size": ("vocab_size", "integer"), "context": ("context", "integer"),
    "source_context": ("source_context", "integer"), "segments": ("segments", "integer"),
    "layers": ("layers", "integer"), "encoder_layers": ("encoder_layers", "integer"), "d_model": ("d_model", "integer"),
    "heads": ("attention.heads", "integer"), "kv_heads": ("attention.kv_heads", "integer"),
    "d_head": ("attention.d_head", "integer"), "d_ff": ("feedforward.d_ff", "integer"),
    "activation": ("feedforward.activation", "activation"), "eps": ("norm.eps", "number"),
    "dropout": ("dropout", "number"), "attention_dropout": ("attention.dropout", "number"),
    "feedforward_dropout": ("feedforward.dropout", "number"), "std": ("init.std", "number"),
    "base": ("position.base", "number"), "buckets": ("position.buckets", "integer"),
    "max_distance": ("position.max_distance", "integer"), "tied": ("head.tied", "flag"),
    "embedding_scale": ("embedding_scale", "flag"), "norm_bias": ("norm.bias", "flag"),
    "feedforward_bias": ("feedforward.bias", "flag"), "experts": ("feedforward.experts", "integer"),
    "chosen": ("feedforward.chosen", "integer"), "shared_d_ff": ("feedforward.shared_d_ff", "integer"),
    "renormalised": ("feedforward.renormalised", "flag"), "expert_scale": ("feedforward.scale", "positive"),
    "beta": ("feedforward.beta", "positive"), "limit": ("feedforward.limit", "positive"),
    "balance_loss": ("feedforward.balance_loss", "number"), "router_jitter": ("feedforward.jitter", "number"),
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """Row of a setting with its own key; it is not written if the model lacks the setting.

    `default` is the other program's default, or a function of the settings read so far; None means that the key is
    required. If `nullable`, null is a value and does not stand for the default. `to_ours` and `to_theirs` convert a
    value, given the model's other settings.
    """

    ours: str
    theirs: str
    default: Any = None
    kind: Kind = field(kw_only=True)
    nullable: bool = False
    written: bool = True
    to_ours: Callable[[Any, Flat], Any] = lambda value, model: value
    to_theirs: Callable[[Any, Flat], Any] = lambda value, model: value

    def read(self, settings: Settings, model: Flat) -> Flat:
        """Read the setting; `model` holds those that earlier rows have read."""
        default = self.default(model) if callable(self.default) else self.default
        if self.nullable and settings.tree.get(settings.prefix + self.theirs, default) is None:
            settings.used.add(settings.prefix + self.theirs)
            return {self.ours: None}
        return {self.ours: self.to_ours(getattr(settings, self.kind)(self.theirs, default), model)}

    def write(self, model: Flat) -> Tree:
        """Return the key and its value."""
        if not self.written or self.ours not in model:
            return {}
        value = self.to_theirs(model[self.ours], model)
        return {self.theirs: THEIR_ACTIVATIONS[value] if self.kind == "activation" else value}


@dataclass(frozen=True)
class Special:
    """Row with custom code for either direction."""

    read: Callable[[Settings, Flat], Flat] = lambda settings, model: {}
    write: Callable[[Flat], Tree] = lambda model: {}


Row = Key | Special  # one or more settings of a model, and the other program's keys for them


def keys(**theirs: str | tuple[str, Any]) -> tuple[Key, ...]:
    """Rows for the short names of SETTINGS: their key, or (key, default). The initial std is read but not written."""
    rows = []
    for short, key in theirs.items():
        (ours, kind), (name, default) = SETTINGS[short], (key, None) if isinstance(key, str) else key
        rows.append(Key(ours, name, default, kind=kind, written=short != "std"))
    return tuple(rows)


def without(rows: tuple[Key, ...], ours: str) -> tuple[Key, ...]:
    """Return the rows except that of one setting."""
    return tuple(row for row in rows if row.ours != ours)


def four_times(model: Flat) -> int:
    """Usual default of d_ff."""
    return int(4 * model["d_model"])


def even_heads(model: Flat) -> int:
    """Default of d_head: d_model divided by the heads."""
    return max(1, model["d_model"] // model["attention.heads"])


def round_factor(factor: float, tolerance: float) -> float:
    """Round a factor to an integer if it differs from one only by rounding errors."""
    return round(factor) if abs(factor - round(factor)) < tolerance else factor


def switch(theirs: str, default: bool, *, on: Flat, off: Flat) -> Special:
    """Row of a boolean key that selects settings; when writing, the first setting of `on` decides its value."""
    first, value = next(iter(on.items()))
    return Special(
        lambda settings, model: on if settings.flag(theirs, default) else off,
        lambda model: {theirs: model.get(first) == value},
    )


def biases(theirs: str, default: bool, kind: str = "all") -> Special:
    """Row of a boolean key that enables the attention biases of `kind`."""
    return switch(theirs, default, on={"attention.bias": kind}, off={"attention.bias": "none"})


def all_biases(theirs: str, default: bool = True, *others: str) -> Special:
    """Row of a boolean key that enables all biases of attention and feed-forward, and other boolean settings."""
    flags = ("feedforward.bias", *others)
    on, off = {"attention.bias": "all", **dict.fromkeys(flags, True)}, dict.fromkeys(flags, False)
    return switch(theirs, default, on=on, off={"attention.bias": "none", **off})


def repeats(theirs: str, ours: str, that_of: str = "") -> Special:
    """Row of a key that must repeat a setting read before, from the key `that_of`, if it is present."""

    def read(settings: Settings, model: Flat) -> Flat:
        settings.repeats(theirs, model[ours], that_of or ours)
        return {}

    return Special(read, lambda model: {theirs: model[ours]})


def decoder_copy(theirs: str, ours: str, default: int) -> Special:
    """Row of a decoder's key that must repeat the encoder's setting `ours`; absent, it is `default`."""

    def read(settings: Settings, model: Flat) -> Flat:
        if settings.integer(theirs, default) != model[ours]:
            absent = f" (absent, it is {default})" if settings.get(theirs) is None else ""
            other = theirs.replace("decoder", "encoder")
            raise settings.error(theirs, f"weft has only one for both sides, and {other} = {model[ours]}{absent}")
        return {}

    return Special(read, lambda model: {theirs: model[ours]})


def embedding_width(theirs: str, default: int | None = None) -> Key:
    """Row of the embeddings' width, None if it is d_model: only then is there no projection.

    If the key is absent, the width is `default`, or d_model.
    """
    return Key(
        "d_embedding",
        theirs,
        lambda model: default or model["d_model"],
        kind="integer",
        to_ours=lambda width, model: None if width == model["d_model"] else width,
        to_theirs=lambda width, model: width or model["d_model"],
    )


def follows(ours: str, other: str) -> Special:
    """Row of a setting without a key that equals another setting."""
    return Special(read=lambda settings, model: {ours: model[other]})


def constant(theirs: str, value: Any) -> Special:
    """Row of a key that is written and not read."""
    return Special(write=lambda model: {theirs: value})


@dataclass(frozen=True)
class SettingsTable:
    """Settings of one kind of model in another program.

    `fixed` are the settings that all such models share, `only` the keys that must have one value if present,
    `defaults` the values of absent keys that differ from the rows' defaults, and `older` the names that keys had.
    """

    rows: tuple[Row, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)

    def settings(self, source: Settings, known: Mapping[str, Any]) -> Flat:
        """Settings of the model; `known` are those that do not come from the keys."""
        present = {key for key, value in source.tree.items() if value is not None}
        present |= {key for key in source.tree if key.removeprefix(source.prefix) not in self.only}  # null is a value
        older = {key: source.tree[name] for key, name in self.older.items() if name in source.tree}
        for key, value in older.items():
            if value is not None and source.get(key, value) != value:
                raise source.error(self.older[key], f"another name of {key}, which is {shown(source.get(key))}")
        values = {**self.defaults, **older}.items()
        absent = {key: value for key, value in values if source.prefix + key not in present}
        completed = replace(source, tree={**source.tree, **absent})
        completed.only(**self.only)
        model = {**self.fixed, **known}
        for row in self.rows:
            model |= row.read(completed, model)
        return model

    def keys(self, model: Flat) -> Tree:
        """Keys of the model, as close as this kind can come to it."""
        tree: Tree = {}
        for row in self.rows:
            tree |= row.write(model)
        return tree
