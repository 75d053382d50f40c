"""Rotary positions in config.json, as all families of transformers write them: in the older spelling (rope_theta,
rope_scaling) or the newer one (rope_parameters)."""

import math
from collections.abc import Callable
from typing import Any

from weft.config import Tree
from weft.interop.families.layers import FULL, WINDOWED, kinds_of
from weft.interop.settings import Flat, Settings, repeated
from weft.interop.table import Special

# their kind of scaling → ours
KINDS = {
    "linear": "linear",
    "dynamic": "dynamic-ntk",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
# the settings of each of ours, under their names
NAMES: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic-ntk": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
        "original_context": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "original_context": "original_max_position_embeddings",
        "fast": "beta_fast",
        "slow": "beta_slow",
        "whole_pairs": "truncate",
        "attention_factor": "attention_factor",
    },
    "longrope": {
        "short": "short_factor",
        "long": "long_factor",
        "original_context": "original_max_position_embeddings",
        "attention_factor": "attention_factor",
    },
}


def table_of(settings: Settings) -> tuple[dict[str, Any], str]:
    """The table of rotary settings, and its key."""
    key = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
    given = settings.get(key) or {}
    if not isinstance(given, dict):
        raise settings.refusal(key, "expected a table of settings")
    return given, key


def read_scaling(rope: Settings, model: Flat, original: int | None) -> dict[str, Any] | None:
    """How positions are stretched, by a table of rotary settings; `original` is a context that stands beside it."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        raise rope.refusal("rope_type", f"weft scales rotary positions by {', '.join(dict.fromkeys(KINDS))}")
    context = rope.whole("original_max_position_embeddings", original or model["context"])
    match KINDS[kind]:
        case "llama3":
            numbers = {name: rope.number(theirs) for name, theirs in list(NAMES["llama3"].items())[:3]}
            return {"kind": "llama3", **numbers, "original_context": rope.whole("original_max_position_embeddings")}
        case "yarn":
            factor = rope.number("factor", model["context"] / context)
            return {
                "kind": "yarn",
                "factor": factor,
                "original_context": context,
                "fast": rope.number("beta_fast", 32.0),
                "slow": rope.number("beta_slow", 1.0),
                "whole_pairs": rope.flag("truncate", True),
                "attention_factor": _yarn_factor(rope, factor),
            }
        case "longrope":
            found: dict[str, Any] = {"kind": "longrope", "original_context": context}
            for name in ("short", "long"):
                values = rope.get(NAMES["longrope"][name])
                fits = isinstance(values, list) and all(type(value) in (int, float) for value in values)
                if not fits or not all(0 < value < math.inf for value in values):
                    raise rope.refusal(NAMES["longrope"][name], "expected a list of numbers above 0")
                found[name] = values
            stretch = rope.number("factor", model["context"] / context)
            usual = math.sqrt(1 + math.log(stretch) / math.log(context)) if stretch > 1 and context > 1 else 1.0
            return found | {"attention_factor": rope.number("attention_factor", usual)}
        case same:
            return {"kind": same, "factor": rope.number("factor")}


def _yarn_factor(rope: Settings, factor: float) -> float | None:
    """What sharpens the scores, where it is not the usual number."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    sharper, all_sharper = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if not sharper or not all_sharper or factor <= 1:
        return None
    return (0.1 * sharper * math.log(factor) + 1) / (0.1 * all_sharper * math.log(factor) + 1)


def write_scaling(scaling: dict[str, Any] | None) -> Tree | None:
    """The table of one of our scalings."""
    if scaling is None:
        return None
    ours = scaling["kind"]
    theirs = next(name for name, kind in KINDS.items() if kind == ours)
    given = {key: scaling[name] for name, key in NAMES[ours].items() if scaling.get(name) is not None}
    return {"rope_type": theirs, **given}


def scaling_of(model: Flat) -> dict[str, Any] | None:
    """A model's scaling as a table."""
    inside = "position.scaling."
    found = {key.removeprefix(inside): value for key, value in model.items() if key.startswith(inside)}
    return found or None


def rotary(base: float = 10000.0, fraction: float | None = None, keys: tuple[str, str] | None = None) -> Special:
    """The rows of rotary positions. `base` is taken where none is given; `fraction` too, in families that may rotate a
    part of each head; `keys` are what a family calls both, if not rope_theta and partial_rotary_factor."""
    theta, part = keys or ("rope_theta", "partial_rotary_factor")

    def read(settings: Settings, model: Flat) -> Flat:
        given, key = table_of(settings)
        if any(isinstance(value, dict) for value in given.values()):
            raise settings.refusal(key, "weft has one kind of rotary positions for all layers of this family")
        rope = Settings(given, f"{settings.where}: {key}")
        found: Flat = {"position.base": rope.number("rope_theta", settings.number(theta, base))}
        if fraction is None:
            settings.only(partial_rotary_factor=1.0)
            rope.only(partial_rotary_factor=1.0)
        else:
            found["position.fraction"] = rope.number("partial_rotary_factor", settings.number(part, fraction))
        original = settings.get("original_max_position_embeddings")
        scaling = read_scaling(rope, model, original if isinstance(original, int) and original > 0 else None)
        return found | {f"position.scaling.{name}": value for name, value in (scaling or {}).items()}

    def write(model: Flat) -> Tree:
        if model["position.kind"] != "rotary":
            return {}
        tree: Tree = {theta: model["position.base"], "rope_scaling": write_scaling(scaling_of(model))}
        return tree if fraction is None else {**tree, part: model["position.fraction"]}

    return Special(read, write)


# ---- layers with a window and layers without, each with a base of their own


def _base(rope: Settings, default: float) -> float:
    base = rope.number("rope_theta", default)
    if base <= 0:
        raise rope.refusal("rope_theta", "expected a number above 0")
    return base


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
                raise settings.refusal(key, f"expected a table of settings under {side}")
            ropes[side] = Settings(table, f"{settings.where}: {key}")
            ropes[side].only(partial_rotary_factor=1.0)
        base, own = (_base(ropes[side], settings.number(*keys)) for side, keys in ((FULL, full), (WINDOWED, local)))
        scaling = read_scaling(ropes[FULL], model, None)
        position = {"kind": "rotary", "base": own, "scaling": read_scaling(ropes[WINDOWED], model, None)}
        windowed, size = read_kinds(settings, model)
        alike = position == {"kind": "rotary", "base": base, "scaling": scaling}
        narrow, wide = {"window": size, "position": None if alike else position}, {"window": None, "position": None}
        found = {"position.base": base, **repeated([narrow if there else wide for there in windowed])}
        return found | {f"position.scaling.{name}": value for name, value in (scaling or {}).items()}

    def write(model: Flat) -> Tree:
        position = next((kind["position"] for kind in kinds_of(model) if kind["window"]), None) or {}
        tree = {full[0]: model.get("position.base"), "rope_scaling": write_scaling(scaling_of(model))}
        return {**tree, local[0]: position.get("base", model.get("position.base")), **write_kinds(model)}

    return Special(read, write)
