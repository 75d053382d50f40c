"""Layout of every group of a folded graph, each with its children closed: which lines run between the children."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from weft.explain.graph.layered import OUTSIDE, Hyperedge, LayeredLayout, Size, layered_layout

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
    bundles = [
        Bundle(
            tuple(source for source, _ in values),
            tuple(tuple(dict.fromkeys(node for _, users in values for node in users[end])) for end in edge.targets),
        )
        for (_, edge), values in members.items()
    ]
    inputs = [source for start, _, source in uses if start == OUTSIDE]
    outputs = [source for (_, _, source), targets in uses.items() if OUTSIDE in targets]
    main = max(inputs or outputs, key=lambda source: (differentiable[source], source), default=OUTSIDE)
    return GroupLayout(layered_layout(sizes, tuple(edge for _, edge in members)), tuple(bundles), main)
