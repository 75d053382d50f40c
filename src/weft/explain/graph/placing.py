"""Place boxes and connectors on the plane, once their sizes are known.

An open group is a frame: its content is placed first, then the frame like one large box, with ports where lines enter
and leave. Connectors run straight down through layers and bend only in the gaps between them, so none crosses a box.
web/graph_layout.js is the same rule for the page, where groups open and the browser measures the text;
tests/explain/test_graph_layout.py compares the two.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.explain.graph.layered import LINE_GAP, OUTSIDE, GroupLayout, LayeredLayout, Vertex

PAD = 12.0  # between a frame and its content
TITLE_HEIGHT = 24.0
LAYER_GAP = 30.0  # between two layers of boxes
PASSING_GAP = 18.0  # between two layers, one of which only lines pass
SLOPE, MAX_EXTRA_GAP = 0.06, 46.0  # a layer gap grows with the longest horizontal distance of a connector, up to this


@dataclass
class Box:
    """Rectangle to place; of an open frame, which has boxes inside, placing sets the size as well."""

    key: int
    width: float = 0.0
    height: float = 0.0
    port: float = 0.0  # lines meet it here, from its left
    inside: "list[Box] | None" = None
    group: GroupLayout | None = None
    title: float = 0.0  # width of a frame's title
    x: float = 0.0  # left and top, in the parent's coordinates until `place` returns
    y: float = 0.0
    title_x: float = PAD
    entries: dict[int, float] = field(default_factory=dict)  # by node: the x at which its line enters the frame
    exits: dict[int, float] = field(default_factory=dict)


class Connector(NamedTuple):
    """Line from (x, y) down to `bend`, in a curve to (to_x, straight), and down to `to_y`."""

    x: float
    y: float
    bend: float
    to_x: float
    straight: float
    to_y: float
    leaves: bool  # starts at a closed box, not at a port or another connector
    arrives: bool  # ends at a closed box
    sources: tuple[int, ...]  # nodes whose edges it belongs to
    targets: tuple[int, ...]

    def moved(self, dx: float, dy: float) -> "Connector":
        heights: Any = {name: getattr(self, name) + dy for name in ("y", "bend", "straight", "to_y")}
        return self._replace(x=self.x + dx, to_x=self.to_x + dx, **heights)


def place(root: Box) -> list[Connector]:
    """Place everything in `root`, an open box without a frame: absolute x and y, and root's size."""
    connectors = _place_inside(root, frame=False)
    _to_absolute(root, 0.0, 0.0)
    return connectors


def _to_absolute(box: Box, x: float, y: float) -> None:
    box.x, box.y = box.x + x, box.y + y
    for child in box.inside or ():
        _to_absolute(child, box.x, box.y)


def _place_inside(box: Box, *, frame: bool) -> list[Connector]:
    """Place the content of an open box in its coordinates, and set its size and ports."""
    assert box.inside is not None and box.group is not None
    (layout, bundles, main), children, vertices = box.group, box.inside, box.group.layout.vertices
    nested = [[] if child.inside is None else _place_inside(child, frame=True) for child in children]
    columns = [x + PAD * frame for x in _column_positions(layout, children)]
    for vertex in vertices:
        if vertex.child != OUTSIDE:
            children[vertex.child].x = columns[vertex.column] - children[vertex.child].port
        if vertex.entry is not None:
            box.entries |= dict.fromkeys(bundles[vertex.entry].sources, columns[vertex.column])

    def start_x(vertex: Vertex, source: int) -> float:
        child = children[vertex.child]
        return columns[vertex.column] if vertex.child == OUTSIDE else child.x + child.exits.get(source, child.port)

    def end_x(vertex: Vertex, source: int) -> float:
        if vertex.child == OUTSIDE:
            return box.exits[source] if vertex.exit else columns[vertex.column]
        child = children[vertex.child]
        return child.x + child.entries.get(source, child.port)

    # A line leaves the frame right below the box that it comes from.
    leaving = [(vertices[s.start], n) for s in layout.segments if vertices[s.end].exit for n in bundles[s.edge].sources]
    below = {source: start_x(vertex, source) for vertex, source in leaving}
    last = -PAD
    apart = {x: (last := max(x, last + LINE_GAP)) for x in sorted(set(below.values()))}
    box.exits |= {source: apart[x] for source, x in below.items()}
    joins: list[dict[tuple[float, float], list[int]]] = [{} for _ in layout.segments]  # sources by both ends' x
    for segment, ends in zip(layout.segments, joins, strict=True):
        for source in bundles[segment.edge].sources:
            x, to_x = start_x(vertices[segment.start], source), end_x(vertices[segment.end], source)
            ends.setdefault((x, to_x), []).append(source)
    tops, bottoms = _layer_positions(layout, children, joins, top=TITLE_HEIGHT * frame)
    for vertex in vertices:
        if vertex.child != OUTSIDE:
            child = children[vertex.child]
            child.y = bottoms[vertex.layer] - child.height if vertex.bottom else tops[vertex.layer]
    connectors = []
    for segment, ends in zip(layout.segments, joins, strict=True):
        start, end = vertices[segment.start], vertices[segment.end]
        above = None if start.child == OUTSIDE else children[start.child]
        under = None if end.child == OUTSIDE else children[end.child]
        top = 0.0 if frame and start.layer == 0 else tops[start.layer]
        connectors += [
            Connector(
                x=x,
                y=top if above is None else above.y + above.height,
                bend=bottoms[start.layer],
                to_x=to_x,
                straight=tops[end.layer],
                to_y=tops[end.layer] if under is None else under.y,
                leaves=above is not None and above.inside is None,
                arrives=under is not None and under.inside is None,
                sources=tuple(sources),
                targets=tuple(node for n in segment.reached for node in bundles[segment.edge].targets[n]),
            )
            for (x, to_x), sources in ends.items()
        ]
    for child, inner in zip(children, nested, strict=True):
        connectors += [connector.moved(child.x, child.y) for connector in inner]
    box.width, box.height = max([*columns, *box.exits.values()], default=0.0), bottoms[-1]
    if frame:
        box.title_x = _title_position(sorted(set(box.entries.values())), box.title)
        box.width = max(box.width, box.title_x + box.title) + PAD
        box.height += 0.0 if box.exits else PAD
        box.port = (box.exits | box.entries).get(main, box.width / 2)
    return connectors


def _column_positions(layout: LayeredLayout, children: Sequence[Box]) -> list[float]:
    positions: list[float] = []
    spans = list(layout.spans[::-1])
    for number, gap in enumerate(layout.gaps):
        x = gap + (positions[-1] if positions else 0.0)
        while spans and spans[-1].end == number:
            span = spans.pop()
            child = children[span.child]
            x = max(x, positions[span.start] + (child.width - child.port if span.right else child.port))
        positions.append(x)
    return positions


def _layer_positions(
    layout: LayeredLayout, children: Sequence[Box], joins: Sequence[Iterable[tuple[float, float]]], *, top: float
) -> tuple[list[float], list[float]]:
    """Return the top and the bottom of every layer, the first of which begins at `top`."""
    layers = max((vertex.layer for vertex in layout.vertices), default=0) + 1
    heights, distances = [0.0] * layers, [0.0] * layers
    for vertex in layout.vertices:
        if vertex.child != OUTSIDE:
            heights[vertex.layer] = max(heights[vertex.layer], children[vertex.child].height)
    for segment, ends in zip(layout.segments, joins, strict=True):
        layer = layout.vertices[segment.end].layer
        distances[layer] = max(distances[layer], *(abs(x - to_x) for x, to_x in ends))
    tops, bottoms = [], []
    for layer, height in enumerate(heights):
        if layer:
            gap = LAYER_GAP if height and heights[layer - 1] else PASSING_GAP
            top += gap + min(MAX_EXTRA_GAP, SLOPE * distances[layer])
        tops.append(top)
        top += height
        bottoms.append(top)
    return tops, bottoms


def _title_position(entries: Sequence[float], width: float) -> float:
    """Return the first x at which a title of this width fits between the lines that enter."""
    x = PAD
    for entry in entries:
        if entry - 6.0 >= x + width:
            break
        x = max(x, entry + 8.0)
    return x
