"""Summaries of the presets, with their costs, and of the recipes that come with weft."""

import re
import tomllib
from typing import Any, NamedTuple

from weft.costs.count import count
from weft.models.config import Bengio, EncoderDecoder, NGram, StaticVectors, TransformerConfig
from weft.models.presets import PRESETS
from weft.recipe.resolve import recipe_names, shipped_recipes


class PresetRow(NamedTuple):
    """Summary of a preset. `flops_per_token` is of a forward pass over the whole context."""

    name: str
    kind: str
    parameters: int
    shape: str
    context: int | None
    flops_per_token: float
    origin: str


class RecipeRow(NamedTuple):
    """Summary of a recipe: what it trains, and the data that it needs."""

    name: str
    about: str
    data: str


def presets() -> list[PresetRow]:
    """Summarise all presets, in the order of `weft.models.presets`."""
    rows = []
    for name, (make, origin) in PRESETS.items():
        model: Any = make()
        cost, context = count(model), getattr(model, "context", None)
        kind = model.cell if model.kind == "recurrent" else model.kind
        size, flops = cost.parameters, cost.forward
        row = PresetRow(name, kind, size, shape=_shape(model), context=context, flops_per_token=flops, origin=origin)
        rows.append(row)
    return rows


def _shape(model: Any) -> str:
    match model:
        case NGram():
            return f"order {model.order}"
        case StaticVectors():
            return f"{model.d_model}"
        case TransformerConfig():
            layers = f"{model.encoder_layers or model.layers}+" if isinstance(model, EncoderDecoder) else ""
            grouped = f"/{model.attention.groups}" if model.attention.groups != model.attention.heads else ""
            return f"{layers}{model.layers} × {model.d_model} ({model.attention.heads}{grouped})"
        case Bengio():
            return f"order {model.order} × {model.d_model}"
        case _:
            return f"{model.layers} × {model.d_model}"


def recipes() -> list[RecipeRow]:
    """Summarise all recipes that come with weft, by name."""
    rows = []
    for name in recipe_names():
        text = (shipped_recipes() / f"{name}.toml").read_text(encoding="utf-8")
        head = " ".join(line.removeprefix("# ") for line in text.split("\n\n")[0].splitlines() if line[:1] == "#")
        about = re.split(r"[:;.] |(?<=\?) ", head)[0]  # the first clause
        sources = tomllib.loads(text).get("data", {}).get("sources", [])
        builtin = all(source.startswith("builtin:") for source in sources)
        data = "--data FILE" if not sources else "built in" if builtin else ", ".join(sources)
        rows.append(RecipeRow(name, about, data))
    return rows
