"""Attention on a page: all heads of a text, packed so small that the page can hold them.

A weight is kept as a byte, its square root times `levels`; where every query sees its past alone, only that half is
kept. All bytes together are deflated (the browser inflates them). A text of more than 128 tokens is pooled: a cell is
the largest weight of a block, and beside that every query has its strongest keys, token by token.
"""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.explain.attention_figure import NAMES, KindMaps, Weights, pooled
from weft.figures.page import data, template

MOST_BYTES = 2_000_000  # of a part, as text: a page of many pictures stays within 3 MB
# Cells of a side, levels of a weight, and keys that a query of a pooled map keeps, from the finest: the first that
# fits is taken.
QUALITIES = (
    *((128, 255, 6), (128, 127, 5), (128, 63, 4), (100, 63, 4), (80, 63, 3), (64, 63, 3)),
    *((48, 63, 3), (32, 31, 2), (16, 15, 1), (8, 15, 1)),
)


def part_of_page(parts: Sequence[KindMaps]) -> str:
    """The part of a page in which a kind, a layer, a head and a token are chosen."""
    share = MOST_BYTES / sum(part.weights[..., 0, 0].size for part in parts)
    packed = [_packed(part, int(share * part.weights[..., 0, 0].size)) for part in parts]
    notes = list(dict.fromkeys(_note(each) for each in packed))
    return template("attention.html").render(data=data("att-data", packed), kinds=NAMES, parts=packed, notes=notes)


def _packed(part: KindMaps, most: int) -> dict[str, Any]:
    """A kind of attention for the page's script, in at most so many characters if any quality allows that."""
    layers, heads, queries, keys = part.weights.shape
    past = part.kind == "decoder"
    best = _strongest(part.weights) if max(queries, keys) > QUALITIES[-1][0] else None
    small, block = part.weights, 1
    kept: dict[str, Any] = {}
    for cells, levels, count in QUALITIES:
        if max(small.shape[-2:]) > cells:
            small, block = pooled(part.weights, cells)
        rows, columns = small.shape[-2:]
        rooted = _bytes(small, levels)
        kept = {
            "kind": part.kind,
            "name": NAMES[part.kind],
            "layers": layers,
            "heads": heads,
            "queries": part.queries,
            "keys": part.keys,
            "block": block,
            "rows": rows,
            "columns": columns,
            "past": past,
            "levels": levels,
            "weights": _text(rooted[:, :, *np.tril_indices(rows)] if past else rooted),
        }
        if best is not None and block > 1:
            places, found = best[0][:count], best[1][:count]
            kept |= {"count": len(places), "best": _text(places & 255, places >> 8, _bytes(found, levels))}
        if len(kept["weights"]) + len(kept.get("best", "")) <= most:
            break
    return kept


def _strongest(weights: Weights) -> tuple[NDArray[np.int64], Weights]:
    """The keys with the largest weights of every query, and these, (rank, layers, heads, time) each.

    Those of neighbouring queries are alike, so that one rank after the other packs well.
    """
    found = torch.from_numpy(weights).topk(min(QUALITIES[0][2], weights.shape[-1]))
    return found.indices.movedim(-1, 0).numpy(), found.values.movedim(-1, 0).numpy()


def _bytes(weights: Weights, levels: int) -> NDArray[np.uint8]:
    return np.rint(np.sqrt(weights) * levels).astype(np.uint8)


def _text(*arrays: NDArray[Any]) -> str:
    whole = b"".join(np.ascontiguousarray(each, dtype=np.uint8).tobytes() for each in arrays)
    return base64.b64encode(zlib.compress(whole)).decode()


def _note(packed: dict[str, Any]) -> str:
    """What a reader has to know of the precision."""
    exact = f"Weights on this page are rounded, by up to {0.5 / packed['levels']:.3f} for a weight of 0.25."
    if packed["block"] == 1:
        return exact
    block = packed["block"]
    return (
        f"{len(packed['queries'])} tokens are too many for one map: a cell is the largest weight of a block of "
        f"{block} × {block} tokens. The lines and the list of the strongest keys know each token. {exact}"
    )
