"""Fold a computation graph by the modules that compute it.

Module calls nest, and the nodes of each call are consecutive in the order of computation, so collapsing a call into one
node never creates a cycle. Two more things fold: constants computed from constants alone, such as a mask, and runs of
identical layers.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from weft.explain.capture import matching
from weft.explain.graph.graph import Graph
from weft.explain.graph.names import reader_path, short_path, variable_names

MAX_OPEN_NODES = 40  # a graph of at most this many nodes is shown with every group open
DIGITS = "₀₁₂₃₄₅₆₇₈₉"
MIN_REPEATED_LAYERS = 3  # fold at least this many identical consecutive layers into one box


@dataclass(eq=False)
class Subgraph:
    """Part of a graph that is drawn as one box or, when open, as a frame: a module call or another foldable set."""

    path: str
    label: str  # short name inside its parent
    kind: str  # class of the module, or "constants"
    children: list["Subgraph | int"] = field(default_factory=list)  # or indices of nodes, in the order of computation

    def nodes(self) -> Iterator[int]:
        for child in self.children:
            yield from child.nodes() if isinstance(child, Subgraph) else (child,)

    def subgraphs(self) -> Iterator["Subgraph"]:
        """Yield this subgraph and all nested ones, parents first."""
        yield self
        for child in self.children:
            if isinstance(child, Subgraph):
                yield from child.subgraphs()


def fold(graph: Graph, separate: Sequence[str] = ()) -> Subgraph:
    """Return the graph as a tree of subgraphs; identical consecutive layers fold, unless they contain `separate`."""
    root = _by_call(graph)
    constant: list[bool] = []  # whether a node depends on constants only
    for node in graph.nodes:
        sources = [constant[source] for _, source in node.arguments]
        constant.append(node.kind == "constant" or (node.kind == "variable" and bool(sources) and all(sources)))
    names = variable_names(graph)
    for subgraph in list(root.subgraphs()):
        _fold_constants(graph, subgraph, constant, names=names)
    paths = {subgraph.path: subgraph for subgraph in root.subgraphs() if subgraph.path}
    kept_apart = {path for pattern in separate if pattern for path in matching(pattern, paths)}
    for subgraph in list(root.subgraphs()):
        _fold_repeats(graph, subgraph, kept_apart)
    return root


def opened(root: Subgraph, depth: int | None, patterns: Sequence[str] = ()) -> set[str]:
    """Return the paths of the subgraphs to show open: all down to `depth`, and those that match, with their parents."""
    parents: dict[str, tuple[str, ...]] = {root.path: ()}
    for subgraph in root.subgraphs():
        inside = (child.path for child in subgraph.children if isinstance(child, Subgraph))
        parents |= dict.fromkeys(inside, (*parents[subgraph.path], subgraph.path))
    if depth is not None:
        paths = {path for path, above in parents.items() if len(above) < depth}
    elif sum(1 for _ in root.nodes()) <= MAX_OPEN_NODES:  # a small graph as a whole
        paths = {subgraph.path for subgraph in root.subgraphs() if subgraph.kind != "constants"}
    else:  # stacks of layers
        paths = {g.path for g in root.subgraphs() if any(isinstance(c, Subgraph) and "×" in c.kind for c in g.children)}
    for pattern in patterns:
        for path in matching(pattern, {path: path for path in parents if path}):
            paths |= {path, *parents[path]}
    return paths | {root.path}


def _by_call(graph: Graph) -> Subgraph:
    """Return the graph as nested module calls."""
    root = Subgraph("", "model", graph.calls[0].kind)
    subgraphs = {0: root}
    call_counts = Counter(call.path for call in graph.calls)
    seen: Counter[str] = Counter()
    for i, node in enumerate(graph.nodes):
        new_calls, call = [], node.call
        while call not in subgraphs:
            new_calls.append(call)
            call = graph.calls[call].parent
        for new in reversed(new_calls):
            path, kind, parent = graph.calls[new]
            seen[path] += 1
            count = f" ({seen[path]})" if call_counts[path] > 1 else ""
            label = short_path(path, graph.calls[parent].path)
            subgraphs[new] = Subgraph(reader_path(path) + count, label + count, kind)
            subgraphs[parent].children.append(subgraphs[new])
        subgraphs[node.call].children.append(i)
    _move_to_owners(graph, root, subgraphs)
    return root


def _move_to_owners(graph: Graph, root: Subgraph, subgraphs: dict[int, Subgraph]) -> None:
    """Move a call into the module that owns it if it was made before that module ran, unless this creates a cycle."""
    owner_calls = Counter(graph.calls[call].path for call in subgraphs)
    by_path = {graph.calls[call].path: subgraph for call, subgraph in subgraphs.items()}
    for call, subgraph in list(subgraphs.items()):
        path, caller_path = graph.calls[call].path, graph.calls[graph.calls[call].parent].path
        parts = path.split(".")
        owners = [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
        owners = [owner for owner in owners if owner != caller_path and owner.startswith(caller_path)]
        owner = next((owner for owner in owners if owner in by_path), None)
        if call == 0 or owner is None or owner_calls[owner] != 1:
            continue
        caller = subgraphs[graph.calls[call].parent]
        index, label = caller.children.index(subgraph), subgraph.label
        del caller.children[index]
        by_path[owner].children.insert(0, subgraph)
        subgraph.label = short_path(path, owner)
        if not all(_acyclic(graph, each) for each in root.subgraphs()):
            by_path[owner].children.remove(subgraph)
            caller.children.insert(index, subgraph)
            subgraph.label = label


def _fold_constants(graph: Graph, parent: Subgraph, constant: Sequence[bool], *, names: Sequence[str]) -> None:
    """Fold each connected set of constant nodes; it is named after its results."""
    candidates = {child for child in parent.children if isinstance(child, int) and constant[child]}
    edges = [(a, b) for a, b in graph.edges if a in candidates and b in candidates]
    component_of = {node: {node} for node in candidates}
    for a, b in edges:
        if component_of[a] is not component_of[b]:
            component_of[a] |= component_of[b]
            for node in component_of[b]:
                component_of[node] = component_of[a]
    components = {id(component): component for component in component_of.values()}.values()
    for number, members in enumerate((each for each in components if len(each) > 1), 1):
        results = [node for node in sorted(members) if not any(a == node for a, _ in edges)]
        label = ", ".join(dict.fromkeys(names[node].rstrip(DIGITS) for node in results))
        path = ".".join(filter(None, (parent.path, f"constants{number}")))
        folded, last = Subgraph(path, label, "constants", [*sorted(members)]), max(members)
        _regroup(graph, parent, [folded if c == last else c for c in parent.children if c == last or c not in members])


def _fold_repeats(graph: Graph, parent: Subgraph, kept_apart: set[str]) -> None:
    """Fold runs of identical layers."""
    runs: list[list[Subgraph | int]] = []
    for child in parent.children:
        if runs and not kept_apart & _paths(child, runs[-1][-1]) and _identical(graph, runs[-1][-1], child):
            runs[-1].append(child)
        else:
            runs.append([child])
    children: list[Subgraph | int] = []
    for run in runs:
        first, last = run[0], run[-1]
        if len(run) < MIN_REPEATED_LAYERS or isinstance(first, int) or isinstance(last, int):
            children += run
        else:
            end = f" … {last.label.split('.')[-1]}"
            children.append(Subgraph(first.path + end, first.label + end, f"{first.kind} × {len(run)}", run))
    _regroup(graph, parent, children)


def _regroup(graph: Graph, parent: Subgraph, children: list[Subgraph | int]) -> None:
    """Replace a subgraph's children, unless this creates a cycle."""
    before, parent.children = parent.children, children
    if not _acyclic(graph, parent):
        parent.children = before


def _identical(graph: Graph, a: Subgraph | int, b: Subgraph | int) -> bool:
    """Return whether two children are modules of one class with parameters of the same shapes."""
    if not isinstance(a, Subgraph) or not isinstance(b, Subgraph) or a.kind != b.kind or a.kind == "constants":
        return False
    shapes = [[graph.nodes[i].shape for i in g.nodes() if graph.nodes[i].kind == "parameter"] for g in (a, b)]
    return bool(shapes[0]) and shapes[0] == shapes[1]


def _paths(*children: Subgraph | int) -> set[str]:
    return {inner.path for child in children if isinstance(child, Subgraph) for inner in child.subgraphs()}


def _acyclic(graph: Graph, parent: Subgraph) -> bool:
    """Return whether the children, each collapsed to one node, have a topological order."""
    members = [child.nodes() if isinstance(child, Subgraph) else (child,) for child in parent.children]
    child_of = {node: number for number, nodes in enumerate(members) for node in nodes}
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
