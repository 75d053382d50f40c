"""Layered layout of every group of a folded graph, with its children closed (Sugiyama, Tagawa and Toda 1981).

The result fixes the layers, the order in each layer and the minimum distances. A child that is opened or has more lines
of text takes more space; `placing.py` and the page (web/graph_layout.js) then shift what is to its right and below it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from graphlib import TopologicalSorter
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from scipy.optimize import linprog
from scipy.sparse import csr_array

OUTSIDE = -1  # replaces the index of a child: the surroundings of the group
BOX_GAP = 18.0  # minimum distance of neighbouring boxes in a layer
LINE_GAP = 12.0  # minimum distance of a line from its neighbour
MAX_PASSED_LAYERS = 12  # a line that passes at least this many layers runs in a track at the left of all boxes
PARAMETER_WEIGHT = 0.03  # cost of a bend between a parameter and its user
LEFT_WEIGHT = 1e-4  # cost of every vertex's distance from the left
ORDERING_PASSES = 8
MERGE_DISTANCE = 0.3  # x coordinates no further apart than this share a column


class Size(NamedTuple):
    """Width of a box; lines meet it at `port` from its left."""

    width: float
    port: float


class Hyperedge(NamedTuple):
    """Line from the child `source` that branches to each of `targets`."""

    source: int
    targets: tuple[int, ...]
    differentiable: bool  # the value depends on parameters or inputs, unlike a mask or an angle


class BoxSpan(NamedTuple):
    """Columns of a child's left edge and port or, if `right`, of its port and right edge."""

    start: int
    end: int
    child: int
    right: bool


class Vertex(NamedTuple):
    """Point where lines meet, in a layer and a column: a child's port, or a point where a line passes."""

    layer: int
    child: int = OUTSIDE
    column: int = -1
    bottom: bool = False  # the child has no inputs and is aligned with the bottom of its layer, right above its user
    entry: int | None = None  # the hyperedge that enters the group here
    exit: bool = False  # a line leaves the group here


class Segment(NamedTuple):
    """Part of hyperedge number `edge` between two vertices, on its way to the targets with the indices `reached`."""

    start: int
    end: int
    edge: int
    reached: tuple[int, ...]


class LayeredLayout(NamedTuple):
    """Vertices and segments, and the minimum distances of columns."""

    gaps: tuple[float, ...]  # of each column from the previous one
    spans: tuple[BoxSpan, ...]  # sorted by their end, which may need a larger distance
    vertices: tuple[Vertex, ...]
    segments: tuple[Segment, ...]


@lru_cache(1024)  # a model's layers are mostly identical
def layered_layout(sizes: tuple[Size, ...], edges: tuple[Hyperedge, ...]) -> LayeredLayout:
    """Lay out closed boxes of these sizes: layers by longest path, few crossings, straight lines."""
    vertices, segments, tracks = _assign_layers(sizes, edges)
    layers: list[list[int]] = [[] for _ in range(max((vertex.layer for vertex in vertices), default=0) + 1)]
    for number, vertex in enumerate(vertices):
        if number not in tracks:
            layers[vertex.layer].append(number)
    boxes = [Size(0.0, 0.0) if vertex.child == OUTSIDE else sizes[vertex.child] for vertex in vertices]
    _reduce_crossings(layers, segments, boxes)
    x = _coordinates(layers, segments, boxes, tracks=tracks, bend_costs=_bend_costs(vertices, segments, edges))
    gaps, column_of = _columns(vertices, boxes, x)
    spans, fed = [], {segment.end for segment in segments}
    for n, vertex in enumerate(vertices):
        boxed = vertex.child != OUTSIDE
        vertices[n] = vertex._replace(column=column_of[n, 1], bottom=boxed and n not in fed)
        for right in (0, 1) if boxed else ():
            spans.append(BoxSpan(column_of[n, right], column_of[n, 1 + right], vertex.child, bool(right)))
    return LayeredLayout(gaps, tuple(sorted(spans, key=lambda span: span.end)), tuple(vertices), tuple(segments))


def _assign_layers(
    sizes: Sequence[Size], edges: Sequence[Hyperedge]
) -> tuple[list[Vertex], list[Segment], dict[int, int]]:
    """Return vertices (the children's first), segments, and the track of each vertex of a long line."""
    users: list[set[int]] = [set() for _ in sizes]
    inputs: dict[int, set[int]] = {child: set() for child in range(len(sizes))}
    for edge in edges:
        for target in edge.targets if edge.source != OUTSIDE else ():
            if target != OUTSIDE:
                users[edge.source].add(target)
                inputs[target].add(edge.source)
    fed = {target for edge in edges for target in edge.targets}
    child_layers = [int(any(edge.source == OUTSIDE for edge in edges))] * len(sizes)
    order = list(TopologicalSorter(inputs).static_order())
    for child in order:  # layers follow from the longest path
        for user in users[child]:
            child_layers[user] = max(child_layers[user], child_layers[child] + 1)
    for child in reversed(order):  # a child without inputs is right above its first user
        if child not in fed and users[child]:
            child_layers[child] = min(child_layers[user] for user in users[child]) - 1
    last = max(child_layers, default=0) + 1
    vertices = [Vertex(layer, child) for child, layer in enumerate(child_layers)]
    segments: list[Segment] = []
    tracks: dict[int, int] = {}

    def add(vertex: Vertex) -> int:
        vertices.append(vertex)
        return len(vertices) - 1

    long_lines = 0
    for number, edge in enumerate(edges):
        at = add(Vertex(0, entry=number)) if edge.source == OUTSIDE else edge.source
        ends = [add(Vertex(last, exit=True)) if target == OUTSIDE else target for target in edge.targets]
        first_layer, end_layers = vertices[at].layer, [vertices[end].layer for end in ends]
        passed, is_long = set(range(first_layer + 1, max(end_layers))), False
        if len(passed) >= MAX_PASSED_LAYERS:  # it leaves the track only right above its targets
            passed = {first_layer + 1, *(layer - 1 for layer in end_layers if layer > first_layer + 1)}
            is_long = True
        for layer in sorted(passed | set(end_layers)):
            segments += [Segment(at, end, number, (n,)) for n, end in enumerate(ends) if end_layers[n] == layer]
            further = tuple(n for n, end_layer in enumerate(end_layers) if end_layer > layer)
            if further and layer in passed:
                point = add(Vertex(layer))
                if is_long:
                    tracks[point] = long_lines
                segments.append(Segment(at, point, number, further))
                at = point
        long_lines += is_long
    return vertices, segments, tracks


def _reduce_crossings(layers: list[list[int]], segments: Sequence[Segment], boxes: Sequence[Size]) -> None:
    """Sort each layer by the medians of its neighbours, down and up in turns; keep the order with fewest crossings."""
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    for segment in segments:
        below.setdefault(segment.start, []).append(segment.end)
        above.setdefault(segment.end, []).append(segment.start)
    # Where a line meets a wide box shifts it by less than one place in the order.
    shift = [0.9 * (port / width - 0.5) if width else 0.0 for width, port in boxes]
    rank = [-1.0] * len(boxes)

    def number(layer: Sequence[int]) -> None:
        for place, vertex in enumerate(layer):
            rank[vertex] = place + shift[vertex]

    for layer in layers:
        number(layer)
    best, fewest = list(map(list, layers)), _crossings(layers, below, rank)
    for turn in range(ORDERING_PASSES):
        if not fewest:
            break
        near = below if turn % 2 else above
        for layer in layers[-2::-1] if turn % 2 else layers[1:]:
            places = {vertex: place for place, vertex in enumerate(layer)}
            medians = {v: median(rank[n] for n in near[v]) if v in near else places[v] for v in layer}
            layer.sort(key=medians.__getitem__)
            number(layer)
        crossings = _crossings(layers, below, rank)
        if crossings < fewest:
            best, fewest = list(map(list, layers)), crossings
    layers[:] = best


def _crossings(layers: Sequence[Sequence[int]], below: dict[int, list[int]], rank: Sequence[float]) -> int:
    total = 0
    for layer in layers[:-1]:
        seen: list[float] = []
        for vertex in layer:
            ends = [rank[end] for end in below.get(vertex, ())]
            total += sum(other > end for end in ends for other in seen)
            seen += ends
    return total


def _coordinates(
    layers: Sequence[Sequence[int]],
    segments: Sequence[Segment],
    boxes: Sequence[Size],
    *,
    tracks: dict[int, int],
    bend_costs: Sequence[float],
) -> list[float]:
    """Return the x of every vertex's left, for straight lines, by linear programming (Gansner et al. 1993, §4.2)."""
    # the unknowns z are the vertices' x and the segments' bends
    entries: list[tuple[int, int, float]] = []  # row, column, value of A in the constraints A z ≤ limits
    limits: list[float] = []
    for left, right in (pair for layer in layers for pair in pairwise(layer)):
        entries += [(len(limits), left, 1.0), (len(limits), right, -1.0)]
        limits.append(-boxes[left].width - (BOX_GAP if boxes[left].width or boxes[right].width else LINE_GAP))
    for bend, segment in enumerate(segments, len(boxes)):
        for sign in (1.0, -1.0):
            entries += [(len(limits), segment.start, sign), (len(limits), segment.end, -sign)]
            entries.append((len(limits), bend, -1.0))
            limits.append(-sign * (boxes[segment.start].port - boxes[segment.end].port))
    if not limits:
        return [0.0] * len(boxes)
    rows, columns, values = zip(*entries, strict=True)
    matrix = csr_array((values, (rows, columns)), shape=(len(limits), len(boxes) + len(segments)))
    free: tuple[float, float | None] = LINE_GAP * max((track + 1 for track in tracks.values()), default=0), None
    bounds = [(LINE_GAP * tracks[n],) * 2 if n in tracks else free for n in range(len(boxes))]
    bounds += [(0.0, None)] * len(segments)
    solution = linprog([LEFT_WEIGHT] * len(boxes) + list(bend_costs), matrix, limits, bounds=bounds)
    return [float(x) for x in solution.x[: len(boxes)]]


def _bend_costs(vertices: Sequence[Vertex], segments: Sequence[Segment], edges: Sequence[Hyperedge]) -> list[float]:
    """Return the cost of a bend in each segment: highest for lines that pass layers, then for chains of boxes."""
    fed = {segment.end for segment in segments}
    boxed = [vertex.child != OUTSIDE for vertex in vertices]
    chained = [segment for segment in segments if boxed[segment.start] and boxed[segment.end] and segment.start in fed]
    outputs, inputs = Counter(segment.start for segment in chained), Counter(segment.end for segment in chained)
    costs = []
    for start, end, edge, _ in segments:
        if boxed[start] and start not in fed:
            cost = PARAMETER_WEIGHT
        elif boxed[start] and boxed[end]:
            cost = 4.0 if outputs[start] == inputs[end] == 1 else 1.0
        else:
            cost = 2.0 if boxed[start] or boxed[end] else 8.0
        costs.append(cost if edges[edge].differentiable else cost / 2)
    return costs


def _columns(
    vertices: Sequence[Vertex], boxes: Sequence[Size], x: Sequence[float]
) -> tuple[tuple[float, ...], dict[tuple[int, int], int]]:
    """Return the gaps between columns, and the column of each vertex's left (0), port (1) and right (2)."""
    ends = [(n, side) for n, vertex in enumerate(vertices) for side in ((0, 1, 2) if vertex.child != OUTSIDE else (1,))]
    sides = [(x[n] + (0.0, boxes[n].port, boxes[n].width)[side], n, side) for n, side in ends]
    gaps: list[float] = []
    column_of: dict[tuple[int, int], int] = {}
    last = float("-inf")
    for at, n, side in sorted(sides, key=lambda each: each[0]):
        if at - last > MERGE_DISTANCE:
            gaps.append(round(at - last, 1) if gaps else 0.0)
            last = at
        column_of[n, side] = len(gaps) - 1
    return tuple(gaps), column_of


# The uses of values in one group. Key: the child that a value comes from, its origin outside the group, and its node;
# value: the nodes that use it, by the child that contains them.
_Uses = dict[tuple[int, int, int], dict[int, list[int]]]


class Bundle(NamedTuple):
    """Nodes that a hyperedge stands for: the `sources`, whose values share one line, and the nodes at each target."""

    sources: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]


class GroupLayout(NamedTuple):
    """Layout of a group's children while they are closed."""

    layout: LayeredLayout
    bundles: tuple[Bundle, ...]  # one per hyperedge
    main: int  # node of the main input or, without inputs, output: the port of the open group is there


def group_layouts(
    children: Mapping[int, Sequence[int]],
    edges: Iterable[tuple[int, int]],
    sizes: Mapping[int, Size],
    *,
    differentiable: Sequence[bool],
) -> dict[int, GroupLayout]:
    """Return the layout of every group in `children` (outermost first); edges are between nodes, sizes of closed boxes.

    Values of one origin that go to the same children share a hyperedge. The main value is the last differentiable one,
    rather than a mask or an angle.
    """
    parent = {child: group for group, members in children.items() for child in members}
    index = {child: n for members in children.values() for n, child in enumerate(members)}
    uses: dict[int, _Uses] = {group: {} for group in children}
    for a, b in edges:
        starts, ends = _child_by_group(a, parent), _child_by_group(b, parent)
        origin = next(child for group, child in reversed(starts.items()) if ends.get(group) != child)
        for group in dict.fromkeys((*starts, *ends)):
            start, end = (index[path[group]] if group in path else OUTSIDE for path in (starts, ends))
            if start != end:
                targets = uses[group].setdefault((start, origin if start == OUTSIDE else start, a), {})
                targets.setdefault(end, []).append(b)
    return {
        group: _group_layout(tuple(sizes[child] for child in members), uses[group], differentiable)
        for group, members in children.items()
    }


def _child_by_group(node: int, parent: Mapping[int, int]) -> dict[int, int]:
    """Return, for every group around a node, the child that contains it; innermost first."""
    path = {}
    while node in parent:
        path[parent[node]] = node
        node = parent[node]
    return path


def _group_layout(sizes: tuple[Size, ...], uses: _Uses, differentiable: Sequence[bool]) -> GroupLayout:
    members: dict[tuple[int, Hyperedge], list[tuple[int, dict[int, list[int]]]]] = {}
    for (start, origin, source), targets in uses.items():
        edge = Hyperedge(start, tuple(sorted(targets)), differentiable[source])
        members.setdefault((origin, edge), []).append((source, targets))
    bundles = []
    for (_, edge), values in members.items():
        users = ([node for _, targets in values for node in targets[end]] for end in edge.targets)
        bundles.append(Bundle(tuple(source for source, _ in values), tuple(tuple(dict.fromkeys(to)) for to in users)))
    inputs = [source for start, _, source in uses if start == OUTSIDE]
    outputs = [source for (_, _, source), targets in uses.items() if OUTSIDE in targets]
    main = max(inputs or outputs, key=lambda source: (differentiable[source], source), default=OUTSIDE)
    return GroupLayout(layered_layout(sizes, tuple(edge for _, edge in members)), tuple(bundles), main)
