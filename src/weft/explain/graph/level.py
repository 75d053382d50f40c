"""One level of a layered layout (Sugiyama, Tagawa and Toda 1981): what stands directly inside of a group.

All boxes are closed here. A box that is opened, or has more to say, takes more space; `layout.py` and the page
(web/graph.js) make it by moving what stands to the right and below, which needs sums and no search.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from statistics import median
from typing import NamedTuple

OUTSIDE = -1  # in the place of a child: what is around the group
APART = 18.0  # between neighbours in a layer
NARROW = 12.0  # between a line and its neighbour
ASIDE = 0.03  # how much a parameter pulls at what it feeds
ORDERINGS = 8
SWEEPS = 40  # the last quarter of them make lines exactly straight where that is possible
SAME = 0.3  # places that are no further apart are one
PORT = 1  # of a box's left, port and right
INFINITY = float("inf")


class Size(NamedTuple):
    """A box; lines meet it at `port` from its left."""

    width: float
    port: float


class Trunk(NamedTuple):
    """A line that goes down from the child `start` and branches off to each of `ends`."""

    start: int
    ends: tuple[int, ...]


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


@cache  # the layers of a model are alike
def level(sizes: tuple[Size, ...], trunks: tuple[Trunk, ...]) -> Level:
    """Lay out boxes of these sizes: ranks by longest path, few crossings, straight lines."""
    spots, pieces = _ranked(sizes, trunks)
    layers: list[list[_Spot]] = [[] for _ in range(max((spot.rank for spot in spots), default=0) + 1)]
    for spot in spots:
        layers[spot.rank].append(spot)
    _uncross(layers, pieces)
    _spread(layers, pieces)
    fed = {piece.end for piece in pieces}
    gaps, spans, stop_of = _stops(spots)
    number = {spot: n for n, spot in enumerate(spots)}
    return Level(
        gaps,
        spans,
        tuple(
            Place(spot.rank, stop_of[spot], spot.child, spot.boxed and spot not in fed, spot.leaves) for spot in spots
        ),
        tuple(Piece(number[piece.start], number[piece.end], piece.trunk, piece.reached) for piece in pieces),
        tuple((spot.enters, number[spot]) for spot in spots if spot.enters is not None),
    )


@dataclass(eq=False)
class _Spot:
    """Something with a place in a layer: a child's box, a port of the frame around, or a line that passes."""

    rank: int
    width: float = 0.0
    port: float = 0.0
    child: int = OUTSIDE
    enters: int | None = None  # the trunk of a port at the top
    leaves: bool = False  # a port at the bottom
    x: float = 0.0
    order: int = 0

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

    @property
    def shift(self) -> float:
        """How much further right than its start's left the left of its end is, if the line is straight."""
        return self.start.port - self.end.port


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
    spots, pieces = list(boxes), []
    for number, trunk in enumerate(trunks):
        at = _Spot(0, enters=number) if trunk.start == OUTSIDE else boxes[trunk.start]
        ends = [_Spot(last, leaves=True) if end == OUTSIDE else boxes[end] for end in trunk.ends]
        spots += [spot for spot in (at, *ends) if not spot.boxed]
        for rank in range(at.rank + 1, max(end.rank for end in ends) + 1):
            pieces += [_Piece(at, end, number, (n,)) for n, end in enumerate(ends) if end.rank == rank]
            further = tuple(n for n, end in enumerate(ends) if end.rank > rank)
            if further:
                spots.append(_Spot(rank))
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
            wanted = {
                spot: median(other.share for other in near[spot]) if spot in near else spot.order for spot in layer
            }
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


def _spread(layers: list[list[_Spot]], pieces: Sequence[_Piece]) -> None:
    """Places from left to right: each layer as near to what it is joined to as its order and widths allow."""
    near: dict[_Spot, list[tuple[_Spot, float, float]]] = {}
    fed = {piece.end for piece in pieces}
    for piece in pieces:
        # lines that pass several layers want to be straight most of all; what nothing feeds stands aside
        weight = (8.0, 2.0, 1.0)[piece.start.boxed + piece.end.boxed]
        weight *= ASIDE if piece.start.boxed and piece.start not in fed else 1.0
        near.setdefault(piece.end, []).append((piece.start, piece.shift, weight))
        near.setdefault(piece.start, []).append((piece.end, -piece.shift, weight))
    for layer in layers:
        x = 0.0
        for spot in layer:
            spot.x = x
            x += spot.width + spot.room
    for sweep in range(SWEEPS):
        falling = sweep % 2 == 0
        for layer in layers if falling else layers[::-1]:
            wanted, weights = [], []
            for spot in layer:
                pulls = near.get(spot, [])
                if sweep < 2:  # at first only from the side that is already placed
                    side = spot.rank + (-1 if falling else 1)
                    pulls = [pull for pull in pulls if pull[0].rank == side] or pulls
                weight = sum(pull[2] for pull in pulls)
                places = [(other.x + shift, w) for other, shift, w in pulls]
                if not places:
                    wanted.append(spot.x)
                elif sweep < SWEEPS * 3 // 4:
                    wanted.append(sum(x * w for x, w in places) / weight)
                else:
                    wanted.append(_weighted_median(places, spot.x))
                weights.append(weight or 0.1)
            _fit(layer, wanted, weights)
    _straighten(layers, pieces)


def _weighted_median(places: list[tuple[float, float]], now: float) -> float:
    """Of all places between two that are as good, the nearest to the one now."""
    places = sorted(places)
    half, passed = sum(w for _, w in places) / 2, 0.0
    for n, (x, weight) in enumerate(places):
        passed += weight
        if passed > half:
            return x
        if passed == half:
            return min(max(now, x), places[n + 1][0])
    return now


def _fit(layer: list[_Spot], wanted: list[float], weights: list[float]) -> None:
    """The places nearest to the wanted ones, by least squares, that keep the order and the room between neighbours:
    an isotonic regression, by pooling adjacent violators."""
    offsets = [0.0]
    for here, after in pairwise(layer):
        offsets.append(offsets[-1] + here.width + max(here.room, after.room))
    pools: list[list[float]] = []  # sum of weighted places, weight, how many
    for x, weight, offset in zip(wanted, weights, offsets, strict=False):
        pools.append([(x - offset) * weight, weight, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            top = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], top, strict=True)]
    at = (total / weight for total, weight, count in pools for _ in range(int(count)))
    for spot, offset, x in zip(layer, offsets, at, strict=False):
        spot.x = x + offset


def _straighten(layers: list[list[_Spot]], pieces: Sequence[_Piece]) -> None:
    """Chains, and lines that pass several layers, in few straight stretches: as far as their place is free."""
    after = _chains(pieces)
    later = {piece.end for piece in after.values()}
    for head in [spot for layer in layers for spot in layer if spot in after and spot not in later]:
        run: list[tuple[_Spot, float]] = []
        low, high, shift = -INFINITY, INFINITY, 0.0
        for spot, further in _followed(head, after):
            shift += further
            left, right = _free(layers[spot.rank], spot)
            left, right = min(left, spot.x), max(right, spot.x)  # rounding may leave no room at all
            if max(low, left - shift) > min(high, right - shift):
                _align(run, low, high)
                run, low, high, shift = [], -INFINITY, INFINITY, 0.0
            run.append((spot, shift))
            low, high = max(low, left - shift), min(high, right - shift)
        _align(run, low, high)


def _chains(pieces: Sequence[_Piece]) -> dict[_Spot, _Piece]:
    """What leads on straight below a spot: the rest of a line, or to what alone is computed from it alone, parameters
    aside."""
    fed = {piece.end for piece in pieces}
    main = [piece for piece in pieces if not piece.start.boxed or piece.start in fed]
    # lines that pass beside a chain of boxes, such as a skip connection, don't end it
    direct = [piece for piece in main if piece.start.boxed and piece.end.boxed]
    above, below = {piece.start for piece in direct}, {piece.end for piece in direct}
    main = [
        piece
        for piece in main
        if (piece.start.boxed or piece.end not in below) and (piece.end.boxed or piece.start not in above)
    ]
    outs, ins = Counter(piece.start for piece in main), Counter(piece.end for piece in main)
    return {
        piece.start: piece
        for piece in main
        if not (piece.start.boxed or piece.end.boxed) or outs[piece.start] == ins[piece.end] == 1
    }


def _followed(head: _Spot, after: dict[_Spot, _Piece]) -> Iterator[tuple[_Spot, float]]:
    """A chain's spots, each with how much further right it is than the one before."""
    yield head, 0.0
    while head in after:
        piece = after[head]
        head = piece.end
        yield head, piece.shift


def _free(layer: list[_Spot], spot: _Spot) -> tuple[float, float]:
    """Between which places a spot can be moved."""
    left = layer[spot.order - 1] if spot.order else None
    right = layer[spot.order + 1] if spot.order + 1 < len(layer) else None
    return (
        -INFINITY if left is None else left.x + left.width + max(left.room, spot.room),
        INFINITY if right is None else right.x - spot.width - max(right.room, spot.room),
    )


def _align(run: list[tuple[_Spot, float]], low: float, high: float) -> None:
    x = min(max(median(spot.x - shift for spot, shift in run), low), high)
    for spot, shift in run:
        spot.x = x + shift


def _stops(spots: Sequence[_Spot]) -> tuple[tuple[float, ...], tuple[Span, ...], dict[_Spot, int]]:
    """Gaps between all that has a place, spans of boxes, and the stop at which lines meet each spot."""
    edges = [
        (spot.x + x, spot, side)
        for spot in spots
        for side, x in enumerate((0.0, spot.port, spot.width))
        if spot.boxed or side == PORT
    ]
    edges.sort(key=lambda edge: edge[0])
    gaps: list[float] = []
    at: dict[tuple[_Spot, int], int] = {}
    last = -INFINITY
    for x, spot, side in edges:
        if x - last > SAME:
            gaps.append(round(x - last, 1) if gaps else 0.0)
            last = x
        at[spot, side] = len(gaps) - 1
    spans = [
        Span(at[spot, PORT - 1 + right], at[spot, PORT + right], spot.child, right)
        for spot in spots
        if spot.boxed
        for right in (False, True)
    ]
    return tuple(gaps), tuple(sorted(spans, key=lambda span: span.end)), {spot: at[spot, PORT] for spot in spots}
