"""Positions in config.json, and layers that differ: some have a window, some have no positions.

Rotary positions are read in the older form of transformers (rope_theta, rope_scaling) and in the newer one
(rope_parameters).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from weft.config import Tree
from weft.interop.settings import MAX_SIZE, Flat, Settings, layer_pattern
from weft.interop.table import Key, Special, even_heads

WINDOWED, FULL = "sliding_attention", "full_attention"
MAX_LAYERS = 2**10  # bounds lists of layers that are made before `layers` is checked; more than any model has


def depth(model: Flat) -> int:
    """Number of layers, at most MAX_LAYERS."""
    return min(int(model["layers"]), MAX_LAYERS)


def all_but_every(step: int, model: Flat) -> list[bool]:
    """False for every `step`-th layer and True for the others; all True if `step` is 0."""
    return [step == 0 or (layer + 1) % step != 0 for layer in range(depth(model))]


def layer_types(settings: Settings, model: Flat, default: Sequence[bool], *, narrow: str = WINDOWED) -> list[bool]:
    """Whether each layer has a window (or is otherwise `narrow`), by layer_types or, if it is absent, by `default`."""
    if (kinds := settings.get("layer_types")) is None:
        return list(default)
    valid = isinstance(kinds, list) and all(isinstance(kind, str) and kind in (narrow, FULL) for kind in kinds)
    if not valid or len(kinds) != model["layers"]:
        raise settings.error("layer_types", f"expected '{narrow}' or '{FULL}' for each of {model['layers']} layers")
    return [kind == narrow for kind in kinds]


def one_window(default: int | None = None) -> Key:
    """Row of a window of all layers."""
    return Key("attention.window", "sliding_window", default, kind="integer", nullable=True)


def window(settings: Settings, default: int | None) -> int | None:
    """Size of sliding_window; `default` if the key is absent."""
    size: int | None = one_window(default).read(settings, {})["attention.window"]
    return size


def with_windows(windowed: Sequence[bool], size: int | None, position: dict[str, Any] | None = None) -> Flat:
    """Settings for a window in some layers, which may also have another position."""
    narrow, wide = {"window": size, "position": position}, {"window": None, "position": None}
    return layer_pattern([narrow if flag else wide for flag in windowed])


def kinds_of(model: Flat) -> list[dict[str, Any]]:
    """Window and position of each layer."""
    kinds = model["pattern"] or [{"window": model["attention.window"], "position": None}]
    return [kinds[layer % len(kinds)] for layer in range(model["layers"])]


def windows_of(model: Flat) -> list[int | None]:
    """Window of each layer."""
    return [kind["window"] for kind in kinds_of(model)]


def write_windows(model: Flat, key: str = "sliding_window") -> Tree:
    """Keys of the window and of the layers that have it. Only one size can be written."""
    sizes = windows_of(model)
    return {key: next((size for size in sizes if size), None), "layer_types": [WINDOWED if s else FULL for s in sizes]}


def windows_around(settings: Settings, layers: int) -> list[Flat]:
    """Kinds of layers of Longformer: `attention_window` is the number of neighbours, for all layers or each of them."""
    sizes = settings.get("attention_window", 512)
    sizes = sizes if isinstance(sizes, list) else [sizes] * min(layers, MAX_SIZE)
    even = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 and size % 2 == 0 for size in sizes)
    if not even or len(sizes) != layers:
        raise settings.error("attention_window", f"expected an even number, or one for each of {layers} layers")
    return [{"window": size // 2 + 1, "position": None} for size in sizes]


# their kind of rotary scaling → ours
KINDS = {
    "linear": "linear", "dynamic": "dynamic-ntk", "llama3": "llama3", "yarn": "yarn", "longrope": "longrope",
    "su": "longrope",
}  # fmt: skip
# our setting of a scaling → their key
NAMES = {
    "factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor", "short": "short_factor",
    "long": "long_factor", "original_context": "original_max_position_embeddings", "fast": "beta_fast",
    "slow": "beta_slow", "whole_pairs": "truncate", "attention_factor": "attention_factor",
}  # fmt: skip


def rotated_part(theirs: str, default: Any) -> Key:
    """Row of the number of rotated coordinates per head."""

    def width(model: Flat) -> int:
        return int(model.get("attention.d_head") or even_heads(model))

    return Key(
        "position.fraction",
        theirs,
        default,
        kind="integer",
        to_ours=lambda rotated, model: rotated / width(model),
        to_theirs=lambda fraction, model: round(fraction * width(model)),
    )


def table_of(settings: Settings, default: Tree | None = None) -> tuple[dict[str, Any], str]:
    """Dictionary of rotary settings, or `default` if there is none, and its key."""
    key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"  # the older key takes precedence
    table = settings.get(key) or {}
    if not isinstance(table, dict):
        raise settings.error(key, "expected a table of settings")
    return table or default or {}, key


def read_scaling(rope: Settings, model: Flat, original: int | None) -> dict[str, Any] | None:
    """Rotary scaling from a dictionary of rotary settings; None if there is none. `original` is the original context
    if config.json has it outside the dictionary, and takes precedence."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        raise rope.error("rope_type", f"weft scales rotary positions by {', '.join(KINDS)}")
    context = original or rope.integer("original_max_position_embeddings", model["context"])
    match KINDS[kind]:
        case "llama3":
            factors = {name: rope.number(NAMES[name]) for name in ("factor", "low", "high")}
            return {"kind": "llama3", **factors, "original_context": context}
        case "yarn":
            factor = rope.number("factor", model["context"] / context)
            ramp = {"fast": rope.number("beta_fast", 32.0), "slow": rope.number("beta_slow", 1.0)}
            whole = rope.flag("truncate", "truncate" not in rope.tree)  # null is false
            options = {"whole_pairs": whole, "attention_factor": _yarn_factor(rope, factor)}
            return {"kind": "yarn", "factor": factor, "original_context": context, **ramp, **options}
        case "longrope":
            scaling: dict[str, Any] = {"kind": "longrope", "original_context": context}
            for name in ("short", "long"):
                values = rope.get(NAMES[name])
                valid = isinstance(values, list) and all(type(value) in (int, float) for value in values)
                if not valid or not all(0 < value < math.inf for value in values):
                    raise rope.error(NAMES[name], "expected a list of numbers above 0")
                scaling[name] = values
            stretch = rope.number("factor", model["context"] / context)
            default = math.sqrt(1 + math.log(stretch) / math.log(context)) if stretch > 1 and context > 1 else 1.0
            return scaling | {"attention_factor": rope.number("attention_factor", default)}
        case plain:
            return {"kind": plain, "factor": rope.number("factor")}


def _yarn_factor(rope: Settings, factor: float) -> float | None:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if not mscale or not mscale_all or factor <= 1:
        return None
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all * math.log(factor) + 1)


def write_scaling(model: Flat) -> Tree | None:
    """Dictionary of a model's rotary scaling; None if there is none."""
    if (ours := model.get("position.scaling.kind")) is None:
        return None
    theirs = next(name for name, kind in KINDS.items() if kind == ours)
    values = {key: model.get(f"position.scaling.{name}") for name, key in NAMES.items()}
    return {"rope_type": theirs, **{key: value for key, value in values.items() if value is not None}}


def rotary(
    base: float = 10000.0,
    *,
    fraction: float | None = None,
    keys: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    original: int | None = None,
    default: Tree | None = None,
) -> Special:
    """Row of rotary positions with defaults: `base`; `fraction`, in families that may rotate part of each head;
    `original`, in families with a key for the original context; and `default`, the dictionary of rotary settings.
    `keys` are those of base and fraction."""
    theta, part = keys

    def read(settings: Settings, model: Flat) -> Flat:
        table, key = table_of(settings, default)
        if any(isinstance(value, dict) for value in table.values()):
            raise settings.error(key, "weft has one kind of rotary positions for all layers of this family")
        rope = Settings(table, f"{settings.location}: {key}")
        position: Flat = {"position.base": rope.number("rope_theta", settings.number(theta, base))}
        if fraction is None:
            settings.only(partial_rotary_factor=1.0)
            rope.only(partial_rotary_factor=1.0)
        else:
            inside = rope.get("partial_rotary_factor") is not None
            source, name = (rope, "partial_rotary_factor") if inside else (settings, part)
            position["position.fraction"] = source.number(name, fraction)
            if position["position.fraction"] > 1:
                raise source.error(name, "expected 1 at most")
        outside = original is not None or settings.get(NAMES["original_context"]) is not None
        scaling = read_scaling(rope, model, settings.integer(NAMES["original_context"], original) if outside else None)
        return position | {f"position.scaling.{name}": value for name, value in (scaling or {}).items()}

    def write(model: Flat) -> Tree:
        if model["position.kind"] != "rotary":
            return {}
        scaling = write_scaling(model) or (default and {"rope_type": "default"})
        tree: Tree = {theta: model["position.base"], "rope_scaling": scaling}
        if original is not None:
            tree[NAMES["original_context"]] = model.get("position.scaling.original_context", original)
        return tree if fraction is None else {**tree, part: model["position.fraction"]}

    return Special(read, write)


def two_bases(
    full: tuple[str, float],
    local: tuple[str, float],
    *,
    read_windows: Callable[[Settings, Flat], tuple[list[bool], int | None]],
    write_windows: Callable[[Flat], Tree],
) -> Special:
    """Row of rotary positions with a separate base in layers with a window.

    `full` and `local` are the older keys of the two bases with their defaults; `read_windows` returns whether each
    layer has a window, and its size; `write_windows` is its inverse.
    """

    def read(settings: Settings, model: Flat) -> Flat:
        table, key = table_of(settings)
        sides: dict[str, Any] = {FULL: table, WINDOWED: {}}
        if table.keys() & sides.keys():
            sides = {side: table.get(side) or {} for side in sides}
        ropes = {}
        for side, values in sides.items():
            if not isinstance(values, dict):
                raise settings.error(key, f"expected a table of settings under {side}")
            ropes[side] = Settings(values, f"{settings.location}: {key}")
            ropes[side].only(partial_rotary_factor=1.0)
        base = ropes[FULL].positive("rope_theta", settings.number(*full))
        local_base = ropes[WINDOWED].positive("rope_theta", settings.number(*local))
        scaling = read_scaling(ropes[FULL], model, None)
        position = {"kind": "rotary", "base": local_base, "scaling": read_scaling(ropes[WINDOWED], model, None)}
        windowed, size = read_windows(settings, model)
        same = position == {"kind": "rotary", "base": base, "scaling": scaling}
        result = {"position.base": base, **with_windows(windowed, size, None if same else position)}
        return result | {f"position.scaling.{name}": value for name, value in (scaling or {}).items()}

    def write(model: Flat) -> Tree:
        position = next((kind["position"] for kind in kinds_of(model) if kind["window"]), None) or {}
        tree = {full[0]: model.get("position.base"), "rope_scaling": write_scaling(model)}
        return {**tree, local[0]: position.get("base", model.get("position.base")), **write_windows(model)}

    return Special(read, write)
