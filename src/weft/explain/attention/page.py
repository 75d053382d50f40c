"""Attention maps of a text in the compact form that a page holds.

A probability is stored as one byte, its square root times `levels`; under a causal mask only the lower triangle is
stored. All bytes are deflated together (the browser inflates them). Maps of more than 128 tokens are pooled: a cell is
the maximum of a block, and every query's strongest keys are stored in addition, token by token.
"""

import base64
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.explain.attention.lines import Probabilities
from weft.figures.heatmap import max_pool

# Cells per side, levels of a probability, and strongest keys per query of a pooled map; the first that fits is used.
QUALITIES = (
    *((128, 255, 6), (128, 127, 5), (128, 63, 4), (100, 63, 4), (80, 63, 3), (64, 63, 3)),
    *((48, 63, 3), (32, 31, 2), (16, 15, 1), (8, 15, 1)),
)


def pack(probabilities: Probabilities, *, max_characters: int, causal: bool) -> tuple[dict[str, Any], str]:
    """Return maps (layers, heads, time, source time) for the page's script, and a note on their precision.

    They take at most `max_characters` if any quality allows it.
    """
    layers, heads, queries, keys = probabilities.shape
    # (rank, layers, heads, time): neighbouring queries have similar strongest keys, so rank-major order deflates well
    strongest = torch.from_numpy(probabilities).topk(min(QUALITIES[0][2], keys))
    best, best_probabilities = (each.movedim(-1, 0).numpy() for each in (strongest.indices, strongest.values))
    maps, block = probabilities, 1
    packed: dict[str, Any] = {}
    for cells, levels, count in QUALITIES:
        if max(maps.shape[-2:]) > cells:
            maps, block = max_pool(probabilities, cells)
        rows, columns = maps.shape[-2:]
        quantised = _quantise(maps, levels)
        weights = _deflate(quantised[:, :, *np.tril_indices(rows)] if causal else quantised)
        packed = {"layers": layers, "heads": heads, "block": block, "rows": rows, "columns": columns}
        packed |= {"past": causal, "levels": levels, "weights": weights}
        if block > 1:
            indices, values = best[:count], best_probabilities[:count]
            packed |= {"count": len(indices), "best": _deflate(indices & 255, indices >> 8, _quantise(values, levels))}
        if len(weights) + len(packed.get("best", "")) <= max_characters:
            break
    note = f"Probabilities on this page are rounded, by up to {0.5 / packed['levels']:.3f} for one of 0.25."
    if block > 1:
        note = (
            f"{queries} tokens are too many for one map: a cell is the largest probability of a block of {block} × "
            f"{block} tokens. The lines and the list of the strongest keys are exact to the token. {note}"
        )
    return packed, note


def _quantise(probabilities: Probabilities, levels: int) -> NDArray[np.uint8]:
    return np.rint(np.sqrt(probabilities) * levels).astype(np.uint8)


def _deflate(*arrays: NDArray[Any]) -> str:
    data = b"".join(np.ascontiguousarray(each, dtype=np.uint8).tobytes() for each in arrays)
    return base64.b64encode(zlib.compress(data)).decode()
