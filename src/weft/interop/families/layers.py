"""Layers that differ from each other, in config.json: which have a window, and which know no positions."""

from collections.abc import Sequence
from typing import Any

from weft.config import Tree
from weft.interop.settings import Flat, Settings, repeated

WINDOWED, FULL = "sliding_attention", "full_attention"
DEEPEST = 2**10  # more layers than any model has: a list of them is made before anything is checked


def depth(model: Flat) -> int:
    """How many layers a list has to describe."""
    return min(int(model["layers"]), DEEPEST)


def layer_types(settings: Settings, model: Flat, usual: Sequence[bool]) -> list[bool]:
    """Which layers have a window: by layer_types where it is given, else the family's `usual`."""
    given = settings.get("layer_types")
    if given is None:
        return list(usual)
    known = isinstance(given, list) and all(kind in (WINDOWED, FULL) for kind in given if isinstance(kind, str))
    if not known or len(given) != model["layers"] or not all(isinstance(kind, str) for kind in given):
        raise settings.refusal("layer_types", f"expected '{WINDOWED}' or '{FULL}' for each of {model['layers']} layers")
    return [kind == WINDOWED for kind in given]


def window(settings: Settings, default: int | None, key: str = "sliding_window") -> int | None:
    """A window, where null is none; `default` where the key is absent."""
    if settings.tree.get(key, default) is None:
        return None
    return settings.whole(key, default)


def with_windows(windowed: Sequence[bool], size: int | None) -> Flat:
    """A window in some layers."""
    return repeated([{"window": size if there else None} for there in windowed])


def windows_of(model: Flat) -> list[int | None]:
    """The window of each layer."""
    return [kind["window"] for kind in kinds_of(model)]


def kinds_of(model: Flat) -> list[dict[str, Any]]:
    """What each layer has of its own."""
    kinds = model["pattern"] or [{"window": model["attention.window"], "position": None}]
    return [kinds[layer % len(kinds)] for layer in range(model["layers"])]


def write_windows(model: Flat, key: str = "sliding_window") -> Tree:
    """The window and the layers that have it. Of several sizes one is written; what is read then differs, and shows."""
    sizes = windows_of(model)
    return {key: next((size for size in sizes if size), None), "layer_types": [WINDOWED if s else FULL for s in sizes]}
