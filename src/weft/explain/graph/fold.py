"""A computation graph folded by the modules that compute it.

Calls of modules nest, and each is an unbroken stretch of the order in which things were computed, so that folding any
of them into one node makes no circle. Beside modules two more things fold: constants that are computed from constants
alone, such as a mask, and layers that are alike and follow each other.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from weft.explain.capture import matching
from weft.explain.graph.graph import Graph

MAX_SHOWN_OPEN = 40  # nodes of a graph that is shown open as a whole
MIN_ALIKE = 3  # so many equal layers in a row fold into one node


@dataclass(eq=False)
class Group:
    """A module's call, or what else folds: `path` names it, `kind` is what it computes and `label` its name beside
    its neighbours. Its children are groups and places in `Graph.nodes`, in the order of the forward pass."""

    path: str
    label: str
    kind: str
    children: list["Group | int"] = field(default_factory=list)

    def nodes(self) -> Iterator[int]:
        for child in self.children:
            if isinstance(child, Group):
                yield from child.nodes()
            else:
                yield child

    def groups(self) -> Iterator["Group"]:
        """It and all groups inside."""
        return (group for group, _ in self.walk())

    def walk(self, around: tuple[str, ...] = ()) -> Iterator[tuple["Group", tuple[str, ...]]]:
        """The same, each with the paths of those around it."""
        yield self, around
        for child in self.children:
            if isinstance(child, Group):
                yield from child.walk((*around, self.path))


def fold(graph: Graph, apart: Sequence[str] = ()) -> Group:
    """The graph as a tree of groups. Equal layers in a row fold, but for those of the paths `apart` and what holds
    them."""
    root = _by_call(graph)
    fixed: list[bool] = []  # constants, and what is computed from constants alone
    for node in graph.nodes:
        sources = [fixed[source] for _, source in node.arguments]
        fixed.append(node.kind == "constant" or (node.kind == "variable" and bool(sources) and all(sources)))
    for group in list(root.groups()):
        _fold_constants(graph, group, fixed)
    named = {p for each in apart if each for p in matching(each, {g.path: g for g in root.groups() if g.path})}
    for group in list(root.groups()):
        _fold_alike(graph, group, named)
    return root


def opened(root: Group, depth: int | None, paths: Sequence[str] = ()) -> set[str]:
    """The paths of the groups that are shown open: all down to `depth`; else the stacks of layers, and a graph that is
    small as a whole; and those that `paths` match, with what is around them."""
    around = {group.path: above for group, above in root.walk()}
    if depth is not None:
        found = {path for path, above in around.items() if len(above) < depth}
    elif sum(1 for _ in root.nodes()) <= MAX_SHOWN_OPEN:
        found = {group.path for group in root.groups() if group.kind != "constants"}
    else:
        found = {g.path for g in root.groups() if any(isinstance(c, Group) and "×" in c.kind for c in g.children)}
    for pattern in paths:
        for path in matching(pattern, {path: path for path in around if path}):
            found |= {path, *around[path]}
    return found | {root.path}


def _by_call(graph: Graph) -> Group:
    root = Group("", "model", graph.calls[0].kind)
    groups = {0: root}
    calls = Counter(call.path for call in graph.calls)
    seen: Counter[str] = Counter()
    for place, node in enumerate(graph.nodes):
        chain, call = [], node.call
        while call not in groups:
            chain.append(call)
            call = graph.calls[call].parent
        for new in reversed(chain):
            above, path = graph.calls[graph.calls[new].parent], graph.calls[new].path
            seen[path] += 1
            again = f" ({seen[path]})" if calls[path] > 1 else ""
            groups[new] = Group(shown(path) + again, short(path, above.path) + again, graph.calls[new].kind)
            groups[graph.calls[new].parent].children.append(groups[new])
        groups[node.call].children.append(place)
    _bring_home(graph, root, groups)
    return root


def shown(path: str) -> str:
    """A module's path as a reader writes it: the list that holds a stack's blocks is left out, as in `capture`."""
    return path.replace(".blocks.", ".")


def short(path: str, above: str) -> str:
    """What of a path is new below another."""
    mine, others = shown(path).split("."), shown(above).split(".")
    same = 0
    while same < min(len(mine) - 1, len(others)) and mine[same] == others[same]:
        same += 1
    if same and mine[same:] == mine[-1:] and mine[-1].isdigit():
        same -= 1  # a number alone says little
    return ".".join(mine[same:])


def _bring_home(graph: Graph, root: Group, groups: dict[int, Group]) -> None:
    """A part that was called from outside of the module it belongs to, as a decoder's keys and values of a source are
    before the decoder runs, is drawn inside that module, unless that would make a circle."""
    owners = Counter(graph.calls[call].path for call in groups)
    by_path = {graph.calls[call].path: group for call, group in groups.items()}
    for call, group in list(groups.items()):
        path, above = graph.calls[call].path, graph.calls[graph.calls[call].parent].path
        parts = path.split(".")
        homes = [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
        homes = [home for home in homes if home != above and home.startswith(above)]
        home = next((home for home in homes if home in by_path), None)
        if call == 0 or home is None or owners[home] != 1:
            continue
        was, there = groups[graph.calls[call].parent], by_path[home]
        place, label = was.children.index(group), group.label
        del was.children[place]
        there.children.insert(0, group)
        group.label = short(path, home)
        if not all(_acyclic(graph, each) for each in root.groups()):
            there.children.remove(group)
            was.children.insert(place, group)
            group.label = label


def _fold_constants(graph: Graph, group: Group, fixed: Sequence[bool]) -> None:
    """Constants that are computed from nothing but constants, each connected set of them."""
    mine = {child for child in group.children if isinstance(child, int) and fixed[child]}
    joined = [(a, b) for a, b in graph.edges if a in mine and b in mine]
    set_of = {place: {place} for place in mine}
    for a, b in joined:
        if set_of[a] is not set_of[b]:
            set_of[a] |= set_of[b]
            for place in set_of[b]:
                set_of[place] = set_of[a]
    sets = [members for members in {id(each): each for each in set_of.values()}.values() if len(members) > 1]
    for number, members in enumerate(sets, 1):
        results = [place for place in sorted(members) if not any(a == place for a, _ in joined)]
        label = ", ".join(dict.fromkeys(graph.nodes[place].function for place in results))
        path = ".".join(filter(None, (group.path, f"constants{number}")))
        made, last = Group(path, label, "constants", [*sorted(members)]), max(members)
        _regroup(graph, group, [made if c == last else c for c in group.children if c == last or c not in members])


def _fold_alike(graph: Graph, group: Group, apart: set[str]) -> None:
    runs: list[list[Group | int]] = []
    for child in group.children:
        if runs and _alike(graph, runs[-1][-1], child, apart):
            runs[-1].append(child)
        else:
            runs.append([child])
    children: list[Group | int] = []
    for run in runs:
        first, last = run[0], run[-1]
        if len(run) < MIN_ALIKE or isinstance(first, int) or isinstance(last, int):
            children += run
        else:
            end = f" … {last.label.split('.')[-1]}"
            children.append(Group(first.path + end, first.label + end, f"{first.kind} × {len(run)}", run))
    _regroup(graph, group, children)


def _regroup(graph: Graph, group: Group, children: list[Group | int]) -> None:
    before, group.children = group.children, children
    if not _acyclic(graph, group):
        group.children = before


def _alike(graph: Graph, a: Group | int, b: Group | int, apart: set[str]) -> bool:
    if not isinstance(a, Group) or not isinstance(b, Group) or a.kind != b.kind or a.kind == "constants":
        return False
    if any(g.path in apart for both in (a, b) for g in both.groups()):
        return False
    shapes = [[graph.nodes[i].shape for i in g.nodes() if graph.nodes[i].kind == "parameter"] for g in (a, b)]
    return bool(shapes[0]) and shapes[0] == shapes[1]


def _acyclic(graph: Graph, group: Group) -> bool:
    """Whether a group's children, each as one node, can be put in an order."""
    child_of: dict[int, int] = {}
    for number, child in enumerate(group.children):
        for place in child.nodes() if isinstance(child, Group) else (child,):
            child_of[place] = number
    before: dict[int, set[int]] = {}
    for a, b in graph.edges:
        x, y = child_of.get(a), child_of.get(b)
        if x is not None and y is not None and x != y:
            before.setdefault(y, set()).add(x)
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True
