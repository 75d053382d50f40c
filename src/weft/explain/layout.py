"""Where the boxes of a directed graph go: ranks from top to bottom, few crossings, short edges.

Sugiyama, Tagawa and Toda 1981: give each node a rank below all it depends on, cut long edges at every rank they
pass, order each rank by the mean place of its neighbours, and pull each node towards them as far as there is room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

GAP, ROW, MARGIN = 18.0, 52.0, 20.0
SWEEPS = 12


@dataclass(frozen=True)
class Layout:
    """x, y of each node's anchor, and the same for the bends that follow the nodes in these lists."""

    x: list[float]
    y: list[float]
    routes: list[list[int]]
    width: float
    height: float

    def paths(self, half: float) -> list[list[tuple[float, float]]]:
        """The points of each edge, from the foot of one box to the head of another; boxes are 2 · half high."""
        lines = []
        for route in self.routes:
            points = [(self.x[i], self.y[i]) for i in route]
            (x0, y0), (x1, y1) = points[0], points[-1]
            bends = [point for x, y in points[1:-1] for point in ((x, y - half), (x, y + half))]
            lines.append([(x0, y0 + half), *bends, (x1, y1 - half)])
        return lines


def arrange(widths: Sequence[float], edges: Sequence[tuple[int, int]], anchors: Sequence[float]) -> Layout:
    """Places for nodes numbered so that every edge goes upwards in number.

    A node takes widths[i] of room, of which anchors[i] lie left of the point where its edges meet.
    """
    ranks = _ranks(len(widths), edges)
    left, right = list(anchors), [w - a for w, a in zip(widths, anchors, strict=True)]
    routes: list[list[int]] = []
    links: list[tuple[int, int]] = []
    for source, target in edges:
        route = [source]
        for rank in range(ranks[source] + 1, ranks[target]):
            route.append(len(ranks))
            ranks.append(rank)
            left.append(0.0)
            right.append(0.0)
        route.append(target)
        routes.append(route)
        links += pairwise(route)
    above: list[list[int]] = [[] for _ in ranks]
    below: list[list[int]] = [[] for _ in ranks]
    for a, b in links:
        above[b].append(a)
        below[a].append(b)
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=0) + 1)]
    for i, rank in enumerate(ranks):
        rows[rank].append(i)

    x = [0.0] * len(ranks)
    for row in rows:
        _pack(row, x, left, right, {})
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for row in rows if down else reversed(rows):
            wish = {i: sum(x[j] for j in neighbours[i]) / len(neighbours[i]) for i in row if neighbours[i]}
            row.sort(key=lambda i: wish.get(i, x[i]))
            _pack(row, x, left, right, wish)
    for row in rows:  # a last look both ways, with the order settled
        near = {i: above[i] + below[i] for i in row}
        _pack(row, x, left, right, {i: sum(x[j] for j in near[i]) / len(near[i]) for i in row if near[i]})

    shift = MARGIN - min((x[i] - left[i] for i in range(len(x))), default=0.0)
    x = [value + shift for value in x]
    width = max((x[i] + right[i] for i in range(len(x))), default=0.0) + MARGIN
    return Layout(
        x, [MARGIN + 12 + ROW * rank for rank in ranks], routes, width, 2 * MARGIN + 24 + ROW * (len(rows) - 1)
    )


def _ranks(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Below all it depends on; a node that depends on nothing stands just above the first that needs it."""
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    ranks = [0] * count
    for i in range(count):
        ranks[i] = 1 + max((ranks[j] for j in before[i]), default=-1)
    for i in range(count):
        if not before[i] and after[i]:
            ranks[i] = min(ranks[j] for j in after[i]) - 1
    return ranks


def _pack(row: list[int], x: list[float], left: list[float], right: list[float], wish: dict[int, float]) -> None:
    """Give the nodes of one rank, kept in order, places as near to their wishes as their widths allow.

    Nodes that would overlap are moved together, as a block, by the mean of what they miss.
    """
    blocks: list[tuple[float, list[int], list[float]]] = []  # start, members, offsets
    for i in row:
        start, members, offsets = wish.get(i, x[i]), [i], [0.0]
        while blocks and blocks[-1][0] + blocks[-1][2][-1] + right[blocks[-1][1][-1]] + GAP + left[members[0]] > start:
            earlier_start, earlier, earlier_offsets = blocks.pop()
            step = earlier_offsets[-1] + right[earlier[-1]] + GAP + left[members[0]]
            both = len(earlier) + len(members)
            start = (earlier_start * len(earlier) + (start - step) * len(members)) / both
            offsets = earlier_offsets + [step + offset for offset in offsets]
            members = earlier + members
        blocks.append((start, members, offsets))
    for start, members, offsets in blocks:
        for i, offset in zip(members, offsets, strict=True):
            x[i] = start + offset
