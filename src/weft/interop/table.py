"""Tables that translate a model's settings to another program's keys, and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from weft.config import Tree
from weft.interop.settings import THEIR_ACTIVATIONS, Flat, Settings


class Row(Protocol):
    """One or more settings of a model, and the other program's keys for them."""

    def read(self, settings: Settings, model: Flat) -> Flat:
        """Settings of the model, given those that earlier rows have read."""

    def write(self, model: Flat) -> Tree:
        """Keys and their values."""


@dataclass(frozen=True)
class Key:
    """A setting that has a key of its own; a setting that the model does not have is not written."""

    ours: str
    theirs: str
    default: Any = None  # what the other program takes, or a function of the settings read so far; None: required
    written: bool = True
    kind: Literal["whole", "number", "flag", "activation"] = field(kw_only=True)

    def read(self, settings: Settings, model: Flat) -> Flat:
        default = self.default(model) if callable(self.default) else self.default
        return {self.ours: getattr(settings, self.kind)(self.theirs, default)}

    def write(self, model: Flat) -> Tree:
        if not self.written or self.ours not in model:
            return {}
        value = model[self.ours]
        return {self.theirs: THEIR_ACTIVATIONS[value] if self.kind == "activation" else value}


# rows of a table by what they hold: a whole number above 0, a number, true or false, the name of an activation
whole = partial(Key, kind="whole")
number = partial(Key, kind="number")
flag = partial(Key, kind="flag")
activation = partial(Key, kind="activation")


def even_heads(model: Flat) -> int:
    """The default of d_head: the heads share d_model evenly."""
    return max(1, model["d_model"] // model["attention.heads"])


@dataclass(frozen=True)
class Special:
    """A row that takes code of its own, in either direction."""

    read: Callable[[Settings, Flat], Flat] = lambda settings, model: {}
    write: Callable[[Flat], Tree] = lambda model: {}


def same(theirs: str, ours: str) -> Special:
    """A key that must repeat a setting read before."""

    def read(settings: Settings, model: Flat) -> Flat:
        settings.only(**{theirs: model[ours]})
        return {}

    return Special(read, lambda model: {theirs: model[ours]})


def embedding_width(theirs: str, default: int | None = None) -> Special:
    """The width of the embeddings; a projection stands between them and the layers only where their widths differ.

    Where it is absent, it is `default`, or the layers' own.
    """

    def read(settings: Settings, model: Flat) -> Flat:
        width = settings.whole(theirs, default or model["d_model"])
        return {"d_embedding": None if width == model["d_model"] else width}

    return Special(read, lambda model: {theirs: model.get("d_embedding") or model["d_model"]})


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

    def read(self, settings: Settings, known: Mapping[str, Any]) -> Flat:
        """The model's settings; `known` are those that do not come from the keys."""
        absent = {key: value for key, value in self.defaults.items() if settings.get(key) is None}
        asked = Settings({**settings.tree, **absent}, settings.where, settings.prefix)
        asked.asked = settings.asked
        asked.only(**self.only)
        model = {**self.fixed, **known}
        for row in self.rows:
            model |= row.read(asked, model)
        return model

    def write(self, model: Flat) -> Tree:
        """The keys, as near as this kind can come to the model."""
        tree: Tree = {}
        for row in self.rows:
            tree |= row.write(model)
        return tree
