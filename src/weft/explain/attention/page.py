"""Attention on a page: all heads of a text, packed so small that the page can hold them.

A probability is kept as a byte, its square root times `levels`; where every query sees its past alone, only that half
is kept. All bytes together are deflated (the browser inflates them). A text of more than 128 tokens is pooled: a cell
is the largest of a block, and beside that every query has its strongest keys, token by token.
"""

import base64
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.explain.attention.lines import Probabilities
from weft.figures.heatmap import pooled

# Cells of a side, levels of a probability, and keys that a query of a pooled map keeps, from the finest: the first that
# fits is taken.
QUALITIES = (
    *((128, 255, 6), (128, 127, 5), (128, 63, 4), (100, 63, 4), (80, 63, 3), (64, 63, 3)),
    *((48, 63, 3), (32, 31, 2), (16, 15, 1), (8, 15, 1)),
)


def packed(probabilities: Probabilities, most: int, past: bool) -> tuple[dict[str, Any], str]:
    """Maps (layers, heads, time, source time) for the page's script, in at most so many characters if any quality
    allows that, and what a reader has to know of the precision. `past`: queries see nothing that comes later."""
    layers, heads, queries, keys = probabilities.shape
    # the strongest keys of every query, (rank, layers, heads, time): those of neighbouring queries are alike, so that
    # one rank after the other packs well
    strongest = torch.from_numpy(probabilities).topk(min(QUALITIES[0][2], keys))
    best, shares = (each.movedim(-1, 0).numpy() for each in (strongest.indices, strongest.values))
    small, block = probabilities, 1
    kept: dict[str, Any] = {}
    for cells, levels, count in QUALITIES:
        if max(small.shape[-2:]) > cells:
            small, block = pooled(probabilities, cells)
        rows, columns = small.shape[-2:]
        rooted = _bytes(small, levels)
        kept = {"layers": layers, "heads": heads, "block": block, "rows": rows, "columns": columns}
        weights = _text(rooted[:, :, *np.tril_indices(rows)] if past else rooted)
        kept |= {"past": past, "levels": levels, "weights": weights}
        if block > 1:
            places, found = best[:count], shares[:count]
            kept |= {"count": len(places), "best": _text(places & 255, places >> 8, _bytes(found, levels))}
        if len(weights) + len(kept.get("best", "")) <= most:
            break
    note = f"Probabilities on this page are rounded, by up to {0.5 / kept['levels']:.3f} for one of 0.25."
    if block > 1:
        note = (
            f"{queries} tokens are too many for one map: a cell is the largest probability of a block of {block} × "
            f"{block} tokens. The lines and the list of the strongest keys know each token. {note}"
        )
    return kept, note


def _bytes(probabilities: Probabilities, levels: int) -> NDArray[np.uint8]:
    return np.rint(np.sqrt(probabilities) * levels).astype(np.uint8)


def _text(*arrays: NDArray[Any]) -> str:
    whole = b"".join(np.ascontiguousarray(each, dtype=np.uint8).tobytes() for each in arrays)
    return base64.b64encode(zlib.compress(whole)).decode()
