"""The part of a Transformer that knows positions, wherever it acts."""

from typing import Any

from weft.explain.anatomy.parts import Code, Part, code, dims, keys, size
from weft.models.transformer import Stack
from weft.nn import position
from weft.nn.position_config import (
    ALiBi,
    Disentangled,
    Learned,
    NoPosition,
    PositionConfig,
    Relative,
    Rotary,
    Sinusoidal,
    T5Bias,
)


def added_positions(settings: Any, stack: Stack, time: str) -> Part | None:
    """Positions that are added to the embeddings."""
    chosen, D = settings.position, settings.added_width
    source: tuple[Code, ...]
    match chosen:
        case Sinusoidal():
            waves = f"PE(p, 2i) = sin(p/{chosen.base:g}^(2i/{D})), PE(p, 2i + 1) = cos(…)"
            formula, source = f"x + PE[p]; {waves}", (code(position.sinusoids), code(position.Sinusoidal.embed))
            names, detail = keys(settings, "position.kind", "position.layout", "position.base"), "sines and cosines"
        case Learned():
            formula, source = "x + P[p]", (code(position.Learned.embed),)
            names, detail = keys(settings, "position.kind", "context"), f"{settings.context:,} × {D}"
        case T5Bias():
            names = keys(settings, "position.buckets")
            own, read_by = size(stack.position), "b, which the scores of every layer are added to"
            return Part("table of distances", read_by, dims(chosen.buckets, settings.attention.heads), own, names)
        case Disentangled():
            names = keys(settings, "position.buckets", "position.max_distance")
            return Part("table of distances", "Δ, normed", dims(2 * chosen.buckets, D), size(stack.position), names)
        case NoPosition() | Rotary() | ALiBi() | Relative():
            return None
        case _:  # declared elsewhere
            formula, source = type(stack.position).__doc__ or "", (code(type(stack.position).embed),)
            names, detail = keys(settings, "position.kind"), chosen.kind
    shape, own = f"{dims('B', time, D)} → the same", size(stack.position)
    return Part(f"positions, {chosen.kind}", formula, shape, own, names, source, box="+ Positions", detail=detail)


def scored_positions(chosen: PositionConfig, settings: Any, stack: Stack, module: Any) -> Part | None:
    """Positions that act on queries, keys or scores; their table, if it is one for all layers, is counted in none."""
    K, kind = settings.d_head, keys(settings, "position.kind")
    match chosen:
        case Rotary():
            width = chosen.rotated(K)
            formula = f"pairs of q, k rotated by p · θ_i, θ_i = {chosen.base:g}^(−2i/{width})"
            names = keys(settings, "position.kind", "position.base", "position.pairs", "position.scaling.kind")
            sources = (code(position.Rotary.rotate), code(position.Rotary.frequencies))
            over = f"over {K}" if width == K else f"over the first {width} of {K}"
            return Part("positions, rotary", formula, over, settings=names, code=sources)
        case ALiBi():
            formula = "scores − m_h · |i − j|, m_h = 2^(−8/heads), 2^(−16/heads), …"
            return Part("positions, alibi", formula, settings=kind, code=(code(position.ALiBi.bias),))
        case T5Bias():
            names = keys(settings, "position.kind", "position.buckets", "position.max_distance")
            note = "one table for all layers, counted before them"
            sources = (code(position.T5Bias.bias), code(position.T5Bias.bucket))
            return Part("positions, t5", "scores + b[bucket(j − i), head]", settings=names, code=sources, note=note)
        case Disentangled():
            formula, made = "q kᵀ + q k_Δᵀ + q_Δ kᵀ, where q_Δ, k_Δ = Δ W", module.mix
            names = keys(settings, "position.kind", "position.buckets", "position.max_distance")
            sources = (code(made), code(position.Disentangled.distances))
            return Part("positions, disentangled", formula, settings=names, code=sources)
        case Relative():
            own = module.relative_keys.numel() + module.relative_values.numel()
            names, sources = keys(settings, "position.kind", "position.max_distance"), module.mix
            formula = "softmax(q(k + a_k[j − i])ᵀ · scale)(v + a_v[j − i])"
            return Part(
                "positions, relative", formula, f"2 × {dims(chosen.rows, K)}", own, names, (code(sources.__func__),)
            )
        case _:
            return None
