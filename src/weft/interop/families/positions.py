"""Positions in config.json, and layers that differ: which have a window, and which know no positions.

Rotary positions are read as all families of transformers write them: in the older spelling (rope_theta, rope_scaling)
or the newer one (rope_parameters).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from weft.config import Tree
from weft.interop.settings import Flat, Settings, repeated
from weft.interop.table import Key, Special, even_heads

WINDOWED, FULL = "sliding_attention", "full_attention"
MAX_LAYERS = 2**10  # that are told apart, more than any model has: a list of them is made before anything is checked


def depth(model: Flat) -> int:
    """How many layers a list has to describe."""
    return min(int(model["layers"]), MAX_LAYERS)


def all_but_every(step: int, model: Flat) -> list[bool]:
    """Which layers are not a `step`-th one; all where that is 0."""
    return [step == 0 or (layer + 1) % step != 0 for layer in range(depth(model))]


def layer_types(settings: Settings, model: Flat, usual: Sequence[bool]) -> list[bool]:
    """Which layers have a window: by layer_types where it is given, else the family's `usual`."""
    if (given := settings.get("layer_types")) is None:
        return list(usual)
    known = isinstance(given, list) and all(isinstance(kind, str) and kind in (WINDOWED, FULL) for kind in given)
    if not known or len(given) != model["layers"]:
        raise settings.error("layer_types", f"expected '{WINDOWED}' or '{FULL}' for each of {model['layers']} layers")
    return [kind == WINDOWED for kind in given]


def one_window(default: int | None = None) -> Key:
    """A window that all layers have."""
    return Key("attention.window", "sliding_window", default, kind="whole", none=True)


def window(settings: Settings, default: int | None) -> int | None:
    """The window of some layers; `default` where the key is absent."""
    found: int | None = one_window(default).read(settings, {})["attention.window"]
    return found


def with_windows(windowed: Sequence[bool], size: int | None, position: dict[str, Any] | None = None) -> Flat:
    """A window in some layers, which may have a position of their own."""
    narrow, wide = {"window": size, "position": position}, {"window": None, "position": None}
    return repeated([narrow if there else wide for there in windowed])


def kinds_of(model: Flat) -> list[dict[str, Any]]:
    """What each layer has of its own."""
    kinds = model["pattern"] or [{"window": model["attention.window"], "position": None}]
    return [kinds[layer % len(kinds)] for layer in range(model["layers"])]


def windows_of(model: Flat) -> list[int | None]:
    """The window of each layer."""
    return [kind["window"] for kind in kinds_of(model)]


def write_windows(model: Flat, key: str = "sliding_window") -> Tree:
    """The window and the layers that have it. Of several sizes one is written; what is read then differs, and shows."""
    sizes = windows_of(model)
    return {key: next((size for size in sizes if size), None), "layer_types": [WINDOWED if s else FULL for s in sizes]}


# their kind of scaling → ours
KINDS = {
    "linear": "linear", "dynamic": "dynamic-ntk", "llama3": "llama3", "yarn": "yarn", "longrope": "longrope",
    "su": "longrope",
}  # fmt: skip
# what is said of a scaling, under their names
NAMES = {
    "factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor", "short": "short_factor",
    "long": "long_factor", "original_context": "original_max_position_embeddings", "fast": "beta_fast",
    "slow": "beta_slow", "whole_pairs": "truncate", "attention_factor": "attention_factor",
}  # fmt: skip


def rotated_part(theirs: str, default: Any) -> Key:
    """How many coordinates of each head are rotated."""

    def width(model: Flat) -> int:
        return int(model.get("attention.d_head") or even_heads(model))

    return Key(
        *("position.fraction", theirs, default),
        kind="whole",
        to_ours=lambda rotated, model: rotated / width(model),
        to_theirs=lambda fraction, model: round(fraction * width(model)),
    )


def table_of(settings: Settings, absent: Tree | None = None) -> tuple[dict[str, Any], str]:
    """The table of rotary settings, the `absent` one where none is given, and its key."""
    key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"  # the older one counts, if both do
    given = settings.get(key) or {}
    if not isinstance(given, dict):
        raise settings.error(key, "expected a table of settings")
    return given or absent or {}, key


def read_scaling(rope: Settings, model: Flat, original: int | None) -> dict[str, Any] | None:
    """How positions are stretched, by a table of rotary settings; `original` is a context that stands beside it, and
    counts before that in the table."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        raise rope.error("rope_type", f"weft scales rotary positions by {', '.join(KINDS)}")
    context = original or rope.whole("original_max_position_embeddings", model["context"])
    match KINDS[kind]:
        case "llama3":
            numbers = {name: rope.number(NAMES[name]) for name in ("factor", "low", "high")}
            return {"kind": "llama3", **numbers, "original_context": context}
        case "yarn":
            factor = rope.number("factor", model["context"] / context)
            ramp = {"fast": rope.number("beta_fast", 32.0), "slow": rope.number("beta_slow", 1.0)}
            own = {"whole_pairs": rope.flag("truncate", True), "attention_factor": _yarn_factor(rope, factor)}
            return {"kind": "yarn", "factor": factor, "original_context": context, **ramp, **own}
        case "longrope":
            found: dict[str, Any] = {"kind": "longrope", "original_context": context}
            for name in ("short", "long"):
                values = rope.get(NAMES[name])
                fits = isinstance(values, list) and all(type(value) in (int, float) for value in values)
                if not fits or not all(0 < value < math.inf for value in values):
                    raise rope.error(NAMES[name], "expected a list of numbers above 0")
                found[name] = values
            stretch = rope.number("factor", model["context"] / context)
            usual = math.sqrt(1 + math.log(stretch) / math.log(context)) if stretch > 1 and context > 1 else 1.0
            return found | {"attention_factor": rope.number("attention_factor", usual)}
        case same:
            return {"kind": same, "factor": rope.number("factor")}


def _yarn_factor(rope: Settings, factor: float) -> float | None:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    sharper, all_sharper = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if not sharper or not all_sharper or factor <= 1:
        return None
    return (0.1 * sharper * math.log(factor) + 1) / (0.1 * all_sharper * math.log(factor) + 1)


def write_scaling(model: Flat) -> Tree | None:
    """The table of a model's scaling; None where positions are not scaled."""
    if (ours := model.get("position.scaling.kind")) is None:
        return None
    theirs = next(name for name, kind in KINDS.items() if kind == ours)
    given = {key: model.get(f"position.scaling.{name}") for name, key in NAMES.items()}
    return {"rope_type": theirs, **{key: value for key, value in given.items() if value is not None}}


def rotary(
    base: float = 10000.0,
    fraction: float | None = None,
    keys: tuple[str, str] | None = None,
    original: int | None = None,
    absent: Tree | None = None,
) -> Special:
    """The rows of rotary positions. `base` is taken where none is given; `fraction` too, in families that may rotate a
    part of each head; `keys` are what a family calls both, if not rope_theta and partial_rotary_factor; `original` is
    the original context of a family that has a key for it, where that is absent; `absent` the table where none is."""
    theta, part = keys or ("rope_theta", "partial_rotary_factor")

    def read(settings: Settings, model: Flat) -> Flat:
        given, key = table_of(settings, absent)
        if any(isinstance(value, dict) for value in given.values()):
            raise settings.error(key, "weft has one kind of rotary positions for all layers of this family")
        rope = Settings(given, f"{settings.place}: {key}")
        found: Flat = {"position.base": rope.number("rope_theta", settings.number(theta, base))}
        if fraction is None:
            settings.only(partial_rotary_factor=1.0)
            rope.only(partial_rotary_factor=1.0)
        else:
            inside = rope.get("partial_rotary_factor") is not None
            where, name = (rope, "partial_rotary_factor") if inside else (settings, part)
            found["position.fraction"] = where.number(name, fraction)
            if found["position.fraction"] > 1:
                raise where.error(name, "expected 1 at most")
        beside = original is not None or settings.get(NAMES["original_context"]) is not None
        scaling = read_scaling(rope, model, settings.whole(NAMES["original_context"], original) if beside else None)
        return found | {f"position.scaling.{name}": value for name, value in (scaling or {}).items()}

    def write(model: Flat) -> Tree:
        if model["position.kind"] != "rotary":
            return {}
        tree: Tree = {theta: model["position.base"], "rope_scaling": write_scaling(model)}
        if original is not None:
            tree[NAMES["original_context"]] = model.get("position.scaling.original_context", original)
        return tree if fraction is None else {**tree, part: model["position.fraction"]}

    return Special(read, write)


def two_bases(
    full: tuple[str, float],
    local: tuple[str, float],
    read_kinds: Callable[[Settings, Flat], tuple[list[bool], int | None]],
    write_kinds: Callable[[Flat], Tree],
) -> Special:
    """The rows of rotary positions of both kinds of layers, in either spelling.

    `full` and `local` are the older keys of the two bases and what is taken where none is given; `read_kinds` says
    which layers have a window and how large it is, and `write_kinds` is its inverse.
    """

    def read(settings: Settings, model: Flat) -> Flat:
        given, key = table_of(settings)
        sides: dict[str, Any] = {FULL: given, WINDOWED: {}}
        if given.keys() & sides.keys():
            sides = {side: given.get(side) or {} for side in sides}
        ropes = {}
        for side, table in sides.items():
            if not isinstance(table, dict):
                raise settings.error(key, f"expected a table of settings under {side}")
            ropes[side] = Settings(table, f"{settings.place}: {key}")
            ropes[side].only(partial_rotary_factor=1.0)
        base = ropes[FULL].positive("rope_theta", settings.number(*full))
        own = ropes[WINDOWED].positive("rope_theta", settings.number(*local))
        scaling = read_scaling(ropes[FULL], model, None)
        position = {"kind": "rotary", "base": own, "scaling": read_scaling(ropes[WINDOWED], model, None)}
        windowed, size = read_kinds(settings, model)
        alike = position == {"kind": "rotary", "base": base, "scaling": scaling}
        found = {"position.base": base, **with_windows(windowed, size, None if alike else position)}
        return found | {f"position.scaling.{name}": value for name, value in (scaling or {}).items()}

    def write(model: Flat) -> Tree:
        position = next((kind["position"] for kind in kinds_of(model) if kind["window"]), None) or {}
        tree = {full[0]: model.get("position.base"), "rope_scaling": write_scaling(model)}
        return {**tree, local[0]: position.get("base", model.get("position.base")), **write_kinds(model)}

    return Special(read, write)
