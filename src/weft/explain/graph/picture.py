"""The computation graph of a model as a picture: folded by module, forwards or backwards (lecture 3)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure
from torch import nn

from weft.errors import ModelError
from weft.explain.graph import draw
from weft.explain.graph.fold import Group, fold, opened
from weft.explain.graph.formulas import LECTURE, MODULES
from weft.explain.graph.graph import Call, Graph, Node, graph
from weft.explain.graph.labels import Written, function, names, shape
from weft.explain.graph.level import Level
from weft.explain.texts import TEXTS
from weft.figures.page import mounted
from weft.figures.picture import FIGURES, PAGE, Picture, check_picture
from weft.models.base import evaluating
from weft.storage.files import write_text

INPUTS, HIDDEN, OUTPUTS = 3, 4, 2  # sizes of the lecture's network


@dataclass(frozen=True)
class GraphPicture(Picture):
    """A computation graph, folded: `open` are the paths of the groups that are shown open."""

    title: str
    written: Written
    root: Group
    open: frozenset[str]
    shapes: bool = False
    backward: bool = False

    scripts: ClassVar[tuple[str, ...]] = ("graph.js",)
    suffixes: ClassVar[tuple[str, ...]] = (PAGE, *FIGURES, ".dot")

    @property
    def about(self) -> str:  # type: ignore[override]
        result = "" if self.written.substitute else ", and y the result of the box"
        told = [TEXTS["graph"], *[TEXTS["folded"]] * self._folds, TEXTS["backward"].format(result=result)]
        return " ".join(told)

    @property
    def _folds(self) -> bool:
        return any(isinstance(child, Group) for child in self.root.children)

    def unfolded(self, depth: int | None = None, open: str | Sequence[str] = ()) -> "GraphPicture":
        """The same graph with other modules open: `depth` levels of them, and those that `open` names."""
        if depth is not None and depth < 1:
            raise ModelError(f"depth {depth}: a graph shows at least one level of modules")
        paths = [open] if isinstance(open, str) else list(open)
        root = fold(self.written.graph, paths)
        return replace(self, root=root, open=frozenset(opened(root, depth, paths)))

    @property
    def _state(self) -> tuple[Written, Group, frozenset[str], bool, bool]:
        return self.written, self.root, self.open, self.shapes, self.backward

    def drawing(self) -> draw.Drawing:
        return draw.drawing(*self._state)

    def figure(self) -> Figure:
        return draw.figure(self.drawing())

    def svg(self) -> str:
        """As plain SVG: rectangles, text and paths."""
        return draw.svg(self.drawing(), self.title)

    def dot(self) -> str:
        """As Graphviz source, with a cluster for each open module."""
        return draw.dot(*self._state)

    def save(self, path: Path | str) -> Path:
        path = check_picture(path, self.suffixes)
        if path.suffix.lower() not in (".svg", ".dot"):
            return super().save(path)
        write_text(path, self.svg() if path.suffix.lower() == ".svg" else self.dot())
        return path

    def text(self) -> str:
        labels = [self.written.of(what, self.shapes, self.backward) for what in self.boxes()]
        wide = [max(len(each.inside) for each in labels), max(len(each.name) for each in labels)]
        rows = (f"{each.inside:<{wide[0]}}  {each.name:<{wide[1]}}  {'  '.join(each.lines)}" for each in labels)
        return "\n".join(row.rstrip() for row in rows)

    def boxes(self) -> list[Group | int]:
        """The nodes and closed groups that are shown, in the order of the pass."""
        found = sorted(self._boxes(self.root), key=lambda what: what if isinstance(what, int) else min(what.nodes()))
        return found[::-1] if self.backward else found

    def _boxes(self, group: Group) -> Iterator[Group | int]:
        for child in group.children:
            if isinstance(child, Group) and child.path in self.open:
                yield from self._boxes(child)
            else:
                yield child

    def html(self) -> str:
        return mounted("graph.js", self.data(), self.svg())

    def _rules(self) -> list[tuple[str, str, list[str]]]:
        used = dict.fromkeys(node.function for node in self.written.graph.nodes if node.kind == "variable")
        used |= dict.fromkeys(MODULES[group.kind] for group in self.root.groups() if group.kind in MODULES)
        result = "b" if self.written.substitute else "y"
        rules = []
        for name, rule in ((name, self.written.rules[name]) for name in used if name in self.written.rules):
            letters = {letter: letter for letter in rule.operands} | {"y": result}
            forward = f"{result} = " + rule.forward.format_map(letters)
            rules.append((name, forward, [rule.gradient(of, letters) for of in rule.gradients]))
        return rules

    def data(self) -> dict[str, Any]:
        """What web/graph.js draws: nodes, groups with what is inside of them, edges, and what several have in common,
        formulas and levels, once."""
        written = self.written
        key_of, laid = draw.keys(written, self.root), draw.laid_out(written, self.root)
        formulas: dict[tuple[str, ...], int] = {}
        levels: dict[Level, int] = {}
        each = zip(written.graph.nodes, written.names, written.formulas, written.backward_order, strict=True)
        nodes = [
            [function(node), name, node.kind, shape(node), formulas.setdefault(lines, len(formulas)), back]
            for node, name, lines, back in each
        ]
        groups = []
        for group in self.root.groups():
            level, bundles, main = laid[key_of[group.path]]
            children = [child if isinstance(child, int) else key_of[child.path] for child in group.children]
            lines = formulas.setdefault(written.group_formulas(group), len(formulas))
            inside = [children, levels.setdefault(level, len(levels)), bundles, main]
            groups.append([group.kind, group.label, group.path, lines, group.path in self.open, *inside])
        edges = [place for edge in written.graph.edges for place in edge]
        shown = {"title": self.title, "shapes": self.shapes, "backward": self.backward, "rules": self._rules()}
        shared = {"texts": list(formulas), "levels": list(levels)}
        return {**shown, "nodes": nodes, "groups": groups, "edges": edges, **shared}


def graph_picture(
    model: nn.Module,
    *inputs: Any,
    shapes: bool = False,
    backward: bool = False,
    depth: int | None = None,
    open: str | Sequence[str] = (),
    **given: Any,
) -> GraphPicture:
    """The computation graph of model(*inputs, **given), in the lecture's conventions.

    The model runs once, as it is used, without dropout; on the meta device (`with torch.device("meta"): build(…)`) no
    number is computed, so that the largest presets draw in seconds. `depth` levels of modules are shown open, or those
    that `open` names ("decoder.0", "decoder.*.attention"); `shapes` adds each tensor's shape; `backward` turns the
    edges and adds each gradient's formula.
    """
    with evaluating(model):
        recorded = graph(model, *inputs, **given)
    if not any(node.kind == "variable" for node in recorded.nodes):
        raise ModelError(f"{type(model).__name__} computes no tensor from others; it has no computation graph")
    title = f"Computation graph of {type(model).__name__}"
    whole = GraphPicture(title, Written(recorded, names(recorded)), fold(recorded), frozenset(), shapes, backward)
    return whole.unfolded(depth, open)


def lecture_mlp(*, shapes: bool = False, backward: bool = False) -> GraphPicture:
    """A network with one hidden layer exactly as lecture 3 draws it, with its variables' names and its formulas."""
    network = mlp()
    written = Written(network, [node.name for node in network.nodes], LECTURE, substitute=True)
    title = "A network with one hidden layer, as in the lecture"
    return GraphPicture(title, written, fold(network), frozenset({""}), shapes, backward)


def mlp() -> Graph:
    """x → Linear(α) → a → Sigmoid → z → Linear(β) → b → Softmax → ŷ → CrossEntropy with y → J (lecture 3)."""
    nodes: list[Node] = []

    def computed(module: str, name: str, shape: tuple[int, ...], *operands: int) -> None:
        arguments = tuple(zip(LECTURE[module].operands, operands, strict=True))
        nodes.append(Node("variable", module, name, shape=shape, arguments=arguments))

    nodes.append(Node("input", "feature vector", "x", shape=(INPUTS,)))
    nodes.append(Node("parameter", "parameter", "α", shape=(HIDDEN, INPUTS)))
    computed("Linear", "a", (HIDDEN,), 1, 0)
    computed("Sigmoid", "z", (HIDDEN,), 2)
    nodes.append(Node("parameter", "parameter", "β", shape=(OUTPUTS, HIDDEN)))
    computed("Linear", "b", (OUTPUTS,), 4, 3)
    computed("Softmax", "ŷ", (OUTPUTS,), 5)
    nodes.append(Node("constant", "true label", "y", shape=(OUTPUTS,)))
    computed("CrossEntropy", "J", (), 7, 6)
    edges = [(source, place) for place, node in enumerate(nodes) for _, source in node.arguments]
    return Graph(nodes, edges, [Call("", "network", 0)])
