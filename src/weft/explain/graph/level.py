"""One level of a layered layout (Sugiyama, Tagawa and Toda 1981): what stands directly inside of a group.

All boxes are closed here. A box that is opened, or has more to say, takes more space; `layout.py` and the page
(web/graph_layout.js) make it by moving what stands to the right and below, which needs sums and no search.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from graphlib import TopologicalSorter
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from scipy.optimize import linprog
from scipy.sparse import csr_array

OUTSIDE = -1  # in the place of a child: what is around the group
APART = 18.0  # between neighbours in a layer
NARROW = 12.0  # between a line and its neighbour
PARAMETER_PULL = 0.03  # how much a parameter pulls at what it feeds
MAX_PASSED = 12  # layers that a line passes among boxes; a longer one runs aside of all boxes
LEFT = 1e-4  # how much everything is pulled to the left
ORDERINGS = 8
SAME = 0.3  # places that are no further apart are one
PORT = 1  # of a box's left, port and right
INFINITY = float("inf")


class Size(NamedTuple):
    """A box; lines meet it at `port` from its left."""

    width: float
    port: float


class Trunk(NamedTuple):
    """A line that goes down from the child `start` and branches off to each of `ends`.

    `variable`: what it carries depends on parameters or inputs, unlike a mask or an angle.
    """

    start: int
    ends: tuple[int, ...]
    variable: bool


class Span(NamedTuple):
    """The part of a child's box between two stops: from its left to its port or, `right`, from there to its right."""

    start: int
    end: int
    child: int
    right: bool


class Place(NamedTuple):
    """Where something meets lines: in layer `rank`, at a stop; a child's box, or where a line passes or goes `out`.

    `low`: a box that nothing feeds stands right above what it feeds.
    """

    rank: int
    stop: int
    child: int
    low: bool
    out: bool


class Piece(NamedTuple):
    """A trunk's part from one place to another in the next layer, on the way to those of its ends that it reaches."""

    start: int
    end: int
    trunk: int
    reached: tuple[int, ...]


class Level(NamedTuple):
    """A group's inside.

    From left to right there are stops, each at least a gap after the one before, and further if a box that reaches to
    it wants more: `spans`, in the order of their ends. `entries`: trunks and the places where they come in.
    """

    gaps: tuple[float, ...]
    spans: tuple[Span, ...]
    places: tuple[Place, ...]
    pieces: tuple[Piece, ...]
    entries: tuple[tuple[int, int], ...]


@lru_cache(1024)  # the layers of a model are alike
def level(sizes: tuple[Size, ...], trunks: tuple[Trunk, ...]) -> Level:
    """Lay out boxes of these sizes: ranks by longest path, few crossings, straight lines."""
    spots, pieces = _ranked(sizes, trunks)
    layers: list[list[_Spot]] = [[] for _ in range(max((spot.rank for spot in spots), default=0) + 1)]
    for spot in (spot for spot in spots if spot.aside is None):
        layers[spot.rank].append(spot)
    _uncross(layers, pieces)
    _spread(spots, layers, pieces, trunks)
    fed = {piece.end for piece in pieces}
    gaps, spans, stop_of = _stops(spots)
    number = {spot: n for n, spot in enumerate(spots)}
    places = (Place(at.rank, stop_of[at], at.child, at.boxed and at not in fed, at.leaves) for at in spots)
    numbered = (Piece(number[piece.start], number[piece.end], piece.trunk, piece.reached) for piece in pieces)
    entries = tuple((spot.enters, number[spot]) for spot in spots if spot.enters is not None)
    return Level(gaps, spans, tuple(places), tuple(numbered), entries)


@dataclass(eq=False)
class _Spot:
    """Something with a place in a layer: a child's box, a port of the frame around, or a line that passes."""

    rank: int
    width: float = 0.0
    port: float = 0.0
    child: int = OUTSIDE
    enters: int | None = None  # the trunk of a port at the top
    leaves: bool = False  # a port at the bottom
    aside: int | None = None  # the column to the left of everything that a long line runs in
    x: float = 0.0
    order: int = -1

    @property
    def boxed(self) -> bool:
        return self.child != OUTSIDE

    @property
    def room(self) -> float:
        return APART if self.boxed else NARROW

    @property
    def share(self) -> float:
        """How far to the right of a wide box lines meet it: less than one place."""
        return self.order + (0.9 * (self.port / self.width - 0.5) if self.width else 0.0)


class _Piece(NamedTuple):
    start: _Spot
    end: _Spot
    trunk: int
    reached: tuple[int, ...]


def _ranked(sizes: Sequence[Size], trunks: Sequence[Trunk]) -> tuple[list[_Spot], list[_Piece]]:
    """Ranks by longest path, sources right above the first that uses them; spots for lines that pass layers."""
    after: list[set[int]] = [set() for _ in sizes]
    before: dict[int, set[int]] = {child: set() for child in range(len(sizes))}
    for trunk in trunks:
        for end in trunk.ends if trunk.start != OUTSIDE else ():
            if end != OUTSIDE:
                after[trunk.start].add(end)
                before[end].add(trunk.start)
    fed = {end for trunk in trunks for end in trunk.ends}
    ranks = [int(any(trunk.start == OUTSIDE for trunk in trunks))] * len(sizes)
    order = list(TopologicalSorter(before).static_order())
    for child in order:
        for target in after[child]:
            ranks[target] = max(ranks[target], ranks[child] + 1)
    for child in reversed(order):
        if child not in fed and after[child]:
            ranks[child] = min(ranks[target] for target in after[child]) - 1
    last = max(ranks, default=0) + 1
    boxes = [_Spot(rank, *size, child) for child, (rank, size) in enumerate(zip(ranks, sizes, strict=True))]
    spots, pieces, columns = list(boxes), [], 0
    for number, trunk in enumerate(trunks):
        at = _Spot(0, enters=number) if trunk.start == OUTSIDE else boxes[trunk.start]
        ends = [_Spot(last, leaves=True) if end == OUTSIDE else boxes[end] for end in trunk.ends]
        spots += [spot for spot in (at, *ends) if not spot.boxed]
        ranks_of = {end.rank for end in ends}
        turns, aside = set(range(at.rank + 1, max(ranks_of))), None
        if len(turns) >= MAX_PASSED:
            turns, aside = {at.rank + 1, *(rank - 1 for rank in ranks_of if rank > at.rank + 1)}, columns
            columns += 1
        for rank in sorted(turns | ranks_of):
            pieces += [_Piece(at, end, number, (n,)) for n, end in enumerate(ends) if end.rank == rank]
            further = tuple(n for n, end in enumerate(ends) if end.rank > rank)
            if further and rank in turns:
                spots.append(_Spot(rank, aside=aside))
                pieces.append(_Piece(at, spots[-1], number, further))
                at = spots[-1]
    return spots, pieces


def _uncross(layers: list[list[_Spot]], pieces: Sequence[_Piece]) -> None:
    """Fewer crossings: each layer in the order of the medians of its neighbours, down and up; the best is kept."""
    above: dict[_Spot, list[_Spot]] = {}
    below: dict[_Spot, list[_Spot]] = {}
    for piece in pieces:
        below.setdefault(piece.start, []).append(piece.end)
        above.setdefault(piece.end, []).append(piece.start)
    for layer in layers:
        _number(layer)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, below)
    for turn in range(ORDERINGS):
        if not fewest:
            break
        near = below if turn % 2 else above
        for layer in layers[-2::-1] if turn % 2 else layers[1:]:
            wanted = {at: median(other.share for other in near[at]) if at in near else at.order for at in layer}
            layer.sort(key=wanted.__getitem__)
            _number(layer)
        crossings = _crossings(layers, below)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    for layer, kept in zip(layers, best, strict=True):
        layer[:] = kept
        _number(layer)


def _number(layer: list[_Spot]) -> None:
    for order, spot in enumerate(layer):
        spot.order = order


def _crossings(layers: list[list[_Spot]], below: dict[_Spot, list[_Spot]]) -> int:
    total = 0
    for layer in layers[:-1]:
        ends: list[float] = []
        for spot in layer:
            mine = [end.share for end in below.get(spot, ())]
            total += sum(other > end for end in mine for other in ends)
            ends += mine
    return total


def _spread(
    spots: Sequence[_Spot], layers: list[list[_Spot]], pieces: Sequence[_Piece], trunks: Sequence[Trunk]
) -> None:
    """Places from left to right: lines as straight as the order in layers and the widths allow, by linear programming
    (Gansner et al. 1993, §4.2)."""
    number = {spot: n for n, spot in enumerate(spots)}
    entries: list[tuple[int, int, float]] = []  # of a matrix: what it makes of places and bends is at most `limits`
    limits: list[float] = []
    for left, right in (pair for layer in layers for pair in pairwise(layer)):
        entries += [(len(limits), number[left], 1.0), (len(limits), number[right], -1.0)]
        limits.append(-left.width - max(left.room, right.room))
    for bend, piece in enumerate(pieces, len(spots)):
        for sign in (1.0, -1.0):
            entries += [(len(limits), number[piece.start], sign), (len(limits), number[piece.end], -sign)]
            entries.append((len(limits), bend, -1.0))
            limits.append(-sign * (piece.start.port - piece.end.port))
    if not limits:
        return
    rows, columns, values = zip(*entries, strict=True)
    matrix = csr_array((values, (rows, columns)), shape=(len(limits), len(spots) + len(pieces)))
    # long lines have fixed columns at the left; everything else is to their right
    columns_aside = max((spot.aside + 1 for spot in spots if spot.aside is not None), default=0)
    free: tuple[float, float | None] = NARROW * columns_aside, None
    bounds = [free if spot.aside is None else (NARROW * spot.aside,) * 2 for spot in spots]
    bounds += [(0.0, None)] * len(pieces)
    found = linprog([LEFT] * len(spots) + _weights(pieces, trunks), matrix, limits, bounds=bounds)
    for spot, x in zip(spots, found.x, strict=False):
        spot.x = float(x)


def _weights(pieces: Sequence[_Piece], trunks: Sequence[Trunk]) -> list[float]:
    """How much a bend in each piece costs. Lines that pass several layers want to be straight most of all, then chains
    of boxes; what nothing feeds stands aside."""
    fed = {piece.end for piece in pieces}
    chained = [piece for piece in pieces if piece.start.boxed and piece.end.boxed and piece.start in fed]
    outs, ins = Counter(piece.start for piece in chained), Counter(piece.end for piece in chained)
    found = []
    for piece in pieces:
        if piece.start.boxed and piece.start not in fed:
            weight = PARAMETER_PULL
        elif piece.start.boxed and piece.end.boxed:
            weight = 4.0 if outs[piece.start] == ins[piece.end] == 1 else 1.0
        else:
            weight = 2.0 if piece.start.boxed or piece.end.boxed else 8.0
        found.append(weight if trunks[piece.trunk].variable else weight / 2)
    return found


def _stops(spots: Sequence[_Spot]) -> tuple[tuple[float, ...], tuple[Span, ...], dict[_Spot, int]]:
    """Gaps between all that has a place, spans of boxes, and the stop at which lines meet each spot."""
    sides = ((spot, side) for spot in spots for side in range(3) if spot.boxed or side == PORT)
    edges = [(spot.x + (0.0, spot.port, spot.width)[side], spot, side) for spot, side in sides]
    edges.sort(key=lambda edge: edge[0])
    gaps: list[float] = []
    at: dict[tuple[_Spot, int], int] = {}
    last = -INFINITY
    for x, spot, side in edges:
        if x - last > SAME:
            gaps.append(round(x - last, 1) if gaps else 0.0)
            last = x
        at[spot, side] = len(gaps) - 1
    halves = ((spot, right) for spot in spots if spot.boxed for right in (False, True))
    spans = [Span(at[spot, PORT - 1 + right], at[spot, PORT + right], spot.child, right) for spot, right in halves]
    return tuple(gaps), tuple(sorted(spans, key=lambda span: span.end)), {spot: at[spot, PORT] for spot in spots}
