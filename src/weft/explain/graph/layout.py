"""Layers from top to bottom (Sugiyama, Tagawa and Toda 1981), for boxes that may hold boxes.

Each open box is laid out by itself and is then one large box for what is around it; where a line enters or leaves
it, it has a port. Lines run straight down through the layers and bend only in the empty gaps between them, so that
no line crosses a box or a label. The same steps, in the same order, are in web/graph_layout.js.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.explain.graph.layers import PAD, Box, Piece, Spot, ranked, spread, uncross

HEAD = 24.0  # the strip of a frame that holds its name
GAP = 30.0  # between layers, and more where lines run far sideways


@dataclass(frozen=True)
class Line:
    """From (x, y) down to `bend`, from there in a curve to (to_x, straight) and down to to_y.

    `leaves` and `arrives`: it begins or ends at a box, and not at a port or in the midst of a longer line. It is a
    piece of the lines from `source` to `targets`.
    """

    x: float
    y: float
    bend: float
    to_x: float
    straight: float
    to_y: float
    leaves: bool
    arrives: bool
    source: int
    targets: frozenset[int]

    def moved(self, x: float, y: float) -> "Line":
        """The same elsewhere."""
        return Line(
            self.x + x,
            self.y + y,
            self.bend + y,
            self.to_x + x,
            self.straight + y,
            self.to_y + y,
            self.leaves,
            self.arrives,
            self.source,
            self.targets,
        )


def arrange(root: Box, edges: Sequence[tuple[int, int]]) -> list[Line]:
    """Place everything in `root`, an open box, whose keys the edges are between: absolute x and y, root's size."""
    above: dict[int, list[Box]] = {}

    def note(box: Box, chain: list[Box]) -> None:
        above[box.key] = chain
        for child in box.inside or ():
            note(child, [*chain, box])

    note(root, [])
    joined: dict[int, list[tuple[int, Box | None, Box | None, int]]] = {}
    for a, b in dict.fromkeys(edges):
        mine, other = [*above[a], _box(above, root, a)], [*above[b], _box(above, root, b)]
        same = 0
        while mine[same] is other[same]:
            same += 1
        for n in range(same, len(mine) - 1):
            joined.setdefault(mine[n].key, []).append((a, mine[n + 1], None, b))
        joined.setdefault(mine[same - 1].key, []).append((a, mine[same], other[same], b))
        for n in range(same, len(other) - 1):
            joined.setdefault(other[n].key, []).append((a, None, other[n + 1], b))
    lines = _place(root, joined, frame=False)
    _settle(root, 0.0, 0.0)
    return lines


def _box(above: dict[int, list[Box]], root: Box, key: int) -> Box:
    inside = above[key][-1].inside if above[key] else [root]
    return next(box for box in inside or () if box.key == key)


def _settle(box: Box, x: float, y: float) -> None:
    """From places within the box around to places on the page."""
    box.x, box.y = box.x + x, box.y + y
    for child in box.inside or ():
        _settle(child, box.x, box.y)


def _place(
    box: Box, joined: dict[int, list[tuple[int, Box | None, Box | None, int]]], frame: bool = True
) -> list[Line]:
    """Lay out the inside of an open box; the lines in its own coordinates."""
    assert box.inside is not None
    within = {child.key: _place(child, joined) for child in box.inside if child.inside is not None}
    layers, pieces = ranked(box.inside, joined.get(box.key, ()))
    uncross(layers, pieces)
    spread(layers, pieces)
    lines = _draw(box, layers, pieces, frame)
    for child in box.inside:
        lines += [line.moved(child.x, child.y) for line in within.get(child.key, ())]
    return lines


def _draw(box: Box, layers: list[list[Spot]], pieces: list[Piece], frame: bool) -> list[Line]:
    """Heights, the frame's size, its ports, and the lines."""
    pad = PAD if frame else 0.0
    spots = [spot for layer in layers for spot in layer]
    left = min((spot.x for spot in spots), default=0.0)
    if frame:
        ports = sorted(spot.x - left + PAD for spot in spots if spot.entry is not None)
        box.title_x = _title(ports, box.port)
        left -= max(0.0, -box.title_x)
        box.title_x = max(box.title_x, PAD)
    for spot in spots:
        spot.x += pad - left
    widest = max((spot.x + spot.width for spot in spots), default=0.0)
    box.width = max(widest + pad, box.title_x + box.port + PAD) if frame else widest
    tops, bottoms = [], []
    y = HEAD if frame else 0.0
    for rank, layer in enumerate(layers):
        if rank:
            far = [abs(p.start.x + p.start_x() - p.end.x - p.end_x()) for p in pieces if p.end.rank == rank]
            ports_only = all(spot.box is None for spot in layer) or all(s.box is None for s in layers[rank - 1])
            y += (GAP * 0.6 if ports_only else GAP) + min(46.0, 0.06 * max(far, default=0.0))
        tops.append(y)
        y += max((spot.box.height for spot in layer if spot.box is not None), default=0.0)
        bottoms.append(y)
    ported = bool(layers) and all(spot.exit is not None for spot in layers[-1]) and bool(layers[-1])
    box.height = y + (0.0 if ported or not frame else pad)
    fed = {id(piece.end) for piece in pieces}
    for spot in spots:
        if spot.box is not None:
            # what nothing feeds stands right above what it feeds
            low = id(spot) not in fed
            spot.box.x = spot.x
            spot.box.y = bottoms[spot.rank] - spot.box.height if low else tops[spot.rank]
        elif spot.entry is not None:
            box.entries[spot.entry] = spot.x
        elif spot.exit is not None:
            box.exits[spot.exit] = spot.x
    lines = []
    for piece in pieces:
        start, end = piece.start, piece.end
        y = 0.0 if start.entry is not None and frame else tops[start.rank]
        y = start.box.y + start.box.height if start.box is not None else y
        lines.append(
            Line(
                start.x + piece.start_x(),
                y,
                bottoms[start.rank],
                end.x + piece.end_x(),
                tops[end.rank],
                end.box.y if end.box is not None else tops[end.rank],
                start.box is not None and start.box.inside is None,
                end.box is not None and end.box.inside is None,
                piece.source,
                frozenset(piece.targets),
            )
        )
    return lines


def _title(ports: list[float], width: float) -> float:
    """Where a frame's name of this width fits between the lines that come in; below 0: so much room is wanted."""
    at = PAD
    for port in ports:
        if port - 6.0 >= at + width:
            return at
        at = max(at, port + 8.0)
    inner = ports[-1] + 8.0 if ports else PAD
    return inner if len(ports) <= 6 and inner < 420.0 else -(width + PAD)
