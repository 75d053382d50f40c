"""The named models and what each costs, as one list."""

from typing import Any, NamedTuple

from weft.costs.count import count
from weft.models.config import EncoderDecoder, NGram, TransformerConfig
from weft.models.presets import PRESETS


class PresetRow(NamedTuple):
    """A preset at a glance. `flops_per_token` is forward, at the whole context."""

    name: str
    kind: str
    parameters: int
    shape: str
    context: int | None
    flops_per_token: float
    origin: str


def rows() -> list[PresetRow]:
    """Every preset, in the order of `weft.models.presets`."""
    return [_row(name, make(), origin) for name, (make, origin) in PRESETS.items()]


def _row(name: str, model: Any, origin: str) -> PresetRow:
    cost = count(model)
    kind = model.cell if model.kind == "recurrent" else model.kind
    context = getattr(model, "context", None)
    return PresetRow(name, kind, cost.parameters, _shape(model), context, cost.forward, origin)


def _shape(model: Any) -> str:
    match model:
        case NGram():
            return f"order {model.order}"
        case TransformerConfig():
            layers = f"{model.encoder_layers or model.layers}+" if isinstance(model, EncoderDecoder) else ""
            grouped = f"/{model.attention.groups}" if model.attention.groups != model.attention.heads else ""
            return f"{layers}{model.layers} × {model.d_model} ({model.attention.heads}{grouped})"
        case _:
            return f"{model.layers} × {model.d_model}"
