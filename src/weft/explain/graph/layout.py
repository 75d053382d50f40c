"""Boxes that may hold boxes, on a plane: the levels of all open groups put together.

Each open group is a frame, laid out by itself and then one large box for what is around it; where a line enters or
leaves it, it has a port. Lines run straight down through the layers and bend only in the empty gaps between them, so
that no line crosses a box or a label. The page does the same sums for a group that is opened (web/graph_layout.js).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.explain.graph.level import NARROW, OUTSIDE, Level, Piece, Size, Trunk, level

PAD = 12.0  # between a frame and what is inside
HEAD = 24.0  # the strip of a frame that holds its name
GAP = 30.0  # between layers, and more where lines run far sideways
SLOPE, MAX_MORE = 0.06, 46.0


class Bundle(NamedTuple):
    """What one trunk of a level stands for: nodes whose values go to the same places, and the nodes at each end."""

    sources: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]


class Inside(NamedTuple):
    """What is inside of a group: how its children are laid out, what its trunks stand for, and the `main` value that
    comes in, or goes out: open, the group stands where its line is."""

    level: Level
    bundles: tuple[Bundle, ...]
    main: int


@dataclass
class Box:
    """A rectangle to place; lines meet it at `port` from its left.

    An open frame has something `inside`, and a name that is `title` wide; its size is found.
    """

    key: int
    width: float = 0.0
    height: float = 0.0
    port: float = 0.0
    inside: "list[Box] | None" = None
    laid: Inside | None = None
    title: float = 0.0
    x: float = 0.0  # its left and top, once placed
    y: float = 0.0
    title_x: float = PAD  # where a frame's name begins
    entries: dict[int, float] = field(default_factory=dict)  # where the line of a node comes in, and goes out
    exits: dict[int, float] = field(default_factory=dict)


class Line(NamedTuple):
    """From (x, y) down to `bend`, from there in a curve to (to_x, straight) and down to to_y.

    `leaves` and `arrives`: it begins or ends at a box, and not at a port or in the midst of a longer line. It is a
    piece of the lines from the nodes `sources` to `targets`.
    """

    x: float
    y: float
    bend: float
    to_x: float
    straight: float
    to_y: float
    leaves: bool
    arrives: bool
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def moved(self, x: float, y: float) -> "Line":
        down: Any = {"y": self.y + y, "bend": self.bend + y, "straight": self.straight + y, "to_y": self.to_y + y}
        return self._replace(x=self.x + x, to_x=self.to_x + x, **down)


def insides(
    children: Mapping[int, Sequence[int]],
    edges: Iterable[tuple[int, int]],
    sizes: Mapping[int, Size],
    variable: Sequence[bool],
) -> dict[int, Inside]:
    """The insides of all groups: `children` by group, from the whole on; edges are between nodes; `sizes` when closed.

    Values of one origin that go to the same children share a trunk. The main one of several is the last that is
    `variable`, rather than a mask or an angle.
    """
    around = {child: group for group, members in children.items() for child in members}
    number = {child: n for members in children.values() for n, child in enumerate(members)}
    uses: dict[int, _Uses] = {group: {} for group in children}
    for a, b in edges:
        starts, ends = _path(a, around), _path(b, around)
        origin = next(child for group, child in reversed(starts.items()) if ends.get(group) != child)
        for group in dict.fromkeys((*starts, *ends)):
            start, end = (number[path[group]] if group in path else OUTSIDE for path in (starts, ends))
            if start != end:
                found = uses[group].setdefault((start, origin if start == OUTSIDE else start, a), {})
                found.setdefault(end, []).append(b)
    closed = {group: tuple(sizes[child] for child in members) for group, members in children.items()}
    return {group: _inside(closed[group], uses[group], variable) for group in children}


def _path(node: int, around: Mapping[int, int]) -> dict[int, int]:
    found = {}
    while node in around:
        found[around[node]] = node
        node = around[node]
    return found


# what a group's trunks are made of: by child that a value comes from, origin around the group, and node, the nodes that
# use it, by the child that they are in
_Uses = dict[tuple[int, int, int], dict[int, list[int]]]


def _inside(sizes: tuple[Size, ...], uses: _Uses, variable: Sequence[bool]) -> Inside:
    trunks: dict[tuple[int, Trunk], list[tuple[int, dict[int, list[int]]]]] = {}
    for (start, origin, source), ends in uses.items():
        trunk = Trunk(start, tuple(sorted(ends)), variable[source])
        trunks.setdefault((origin, trunk), []).append((source, ends))
    bundles = [
        Bundle(
            tuple(source for source, _ in members),
            tuple(tuple(dict.fromkeys(node for _, ends in members for node in ends[end])) for end in trunk.ends),
        )
        for (_, trunk), members in trunks.items()
    ]
    coming = [source for start, _, source in uses if start == OUTSIDE]
    going = [source for (_, _, source), ends in uses.items() if OUTSIDE in ends]
    main = max(coming or going, key=lambda source: (variable[source], source), default=OUTSIDE)
    return Inside(level(sizes, tuple(trunk for _, trunk in trunks)), tuple(bundles), main)


def arrange(root: Box) -> list[Line]:
    """Place everything in `root`, an open box: absolute x and y, root's size."""
    lines = _place(root, frame=False)
    _settle(root, 0.0, 0.0)
    return lines


def _settle(box: Box, x: float, y: float) -> None:
    """From places within the box around to places on the page."""
    box.x, box.y = box.x + x, box.y + y
    for child in box.inside or ():
        _settle(child, box.x, box.y)


def _place(box: Box, frame: bool = True) -> list[Line]:
    """Put the inside of an open box together; the lines in its own coordinates."""
    assert box.inside is not None and box.laid is not None
    (laid, bundles, main), children = box.laid, box.inside
    within = [[] if child.inside is None else _place(child) for child in children]
    stops = [x + PAD * frame for x in _stops(laid, children)]
    for place in laid.places:
        if place.child != OUTSIDE:
            children[place.child].x = stops[place.stop] - children[place.child].port
    for trunk, number in laid.entries:
        box.entries |= dict.fromkeys(bundles[trunk].sources, stops[laid.places[number].stop])

    def leaves(piece: Piece, source: int) -> float:
        place = laid.places[piece.start]
        child = children[place.child]
        return stops[place.stop] if place.child == OUTSIDE else child.x + child.exits.get(source, child.port)

    def arrives(piece: Piece, source: int) -> float:
        place = laid.places[piece.end]
        child = children[place.child]
        if place.child != OUTSIDE:
            return child.x + child.entries.get(source, child.port)
        return box.exits[source] if place.out else stops[place.stop]

    # what goes out does so right below where it comes from
    out = {
        source: leaves(piece, source)
        for piece in laid.pieces
        if laid.places[piece.end].out
        for source in bundles[piece.trunk].sources
    }
    free = -PAD
    apart = {x: (free := max(x, free + NARROW)) for x in sorted(set(out.values()))}
    box.exits |= {source: apart[x] for source, x in out.items()}
    joins: list[dict[tuple[float, float], list[int]]] = [{} for _ in laid.pieces]
    for piece, ends in zip(laid.pieces, joins, strict=True):
        for source in bundles[piece.trunk].sources:
            ends.setdefault((leaves(piece, source), arrives(piece, source)), []).append(source)
    tops, bottoms = _heights(laid, children, joins, HEAD * frame)
    for place in laid.places:
        if place.child != OUTSIDE:
            child = children[place.child]
            child.y = bottoms[place.rank] - child.height if place.low else tops[place.rank]
    lines = []
    for piece, ends in zip(laid.pieces, joins, strict=True):
        start, end = laid.places[piece.start], laid.places[piece.end]
        above = None if start.child == OUTSIDE else children[start.child]
        below = None if end.child == OUTSIDE else children[end.child]
        top = 0.0 if frame and start.rank == 0 and above is None else tops[start.rank]
        targets = tuple(target for n in piece.reached for target in bundles[piece.trunk].targets[n])
        y, bend = top if above is None else above.y + above.height, bottoms[start.rank]
        straight, to_y = tops[end.rank], tops[end.rank] if below is None else below.y
        at_boxes = above is not None and above.inside is None, below is not None and below.inside is None
        lines += [
            Line(x, y, bend, to_x, straight, to_y, *at_boxes, tuple(sources), targets)
            for (x, to_x), sources in ends.items()
        ]
    for child, inner in zip(children, within, strict=True):
        lines += [line.moved(child.x, child.y) for line in inner]
    box.width, box.height = max([*stops, *box.exits.values()], default=0.0), bottoms[-1]
    if frame:
        box.title_x = _title(sorted(set(box.entries.values())), box.title)
        box.width = max(box.width, box.title_x + box.title) + PAD
        box.height += 0.0 if box.exits else PAD
        box.port = (box.exits | box.entries).get(main, box.width / 2)
    return lines


def _stops(laid: Level, children: Sequence[Box]) -> list[float]:
    found: list[float] = []
    spans = list(laid.spans[::-1])
    for number, gap in enumerate(laid.gaps):
        x = gap + (found[-1] if found else 0.0)
        while spans and spans[-1].end == number:
            span = spans.pop()
            child = children[span.child]
            x = max(x, found[span.start] + (child.width - child.port if span.right else child.port))
        found.append(x)
    return found


def _heights(
    laid: Level, children: Sequence[Box], joins: Sequence[Iterable[tuple[float, float]]], y: float
) -> tuple[list[float], list[float]]:
    ranks = max((place.rank for place in laid.places), default=0) + 1
    highs, far = [0.0] * ranks, [0.0] * ranks
    for place in laid.places:
        if place.child != OUTSIDE:
            highs[place.rank] = max(highs[place.rank], children[place.child].height)
    for piece, ends in zip(laid.pieces, joins, strict=True):
        rank = laid.places[piece.end].rank
        far[rank] = max(far[rank], *(abs(x - to_x) for x, to_x in ends))
    tops, bottoms = [], []
    for rank, high in enumerate(highs):
        if rank:
            y += (GAP if high and highs[rank - 1] else 0.6 * GAP) + min(MAX_MORE, SLOPE * far[rank])
        tops.append(y)
        y += high
        bottoms.append(y)
    return tops, bottoms


def _title(ports: Sequence[float], width: float) -> float:
    """Where a frame's name of this width fits between the lines that come in."""
    at = PAD
    for port in ports:
        if port - 6.0 >= at + width:
            break
        at = max(at, port + 8.0)
    return at
