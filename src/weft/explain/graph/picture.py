"""The computation graph of a model as a picture: folded by module, forwards or backwards (lecture 3)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure
from torch import nn

from weft.errors import ModelError
from weft.explain.graph import draw as graph_draw
from weft.explain.graph.draw import Drawing
from weft.explain.graph.fold import Group, fold, opened
from weft.explain.graph.formulas import MODULES, Rule, gradient
from weft.explain.graph.graph import graph
from weft.explain.graph.lecture import LECTURE, mlp
from weft.explain.graph.scene import Written, function, group_formulas, names, scene, shape
from weft.figures.page import data, template
from weft.figures.picture import FIGURES, PAGE, Picture, check_picture
from weft.files import write_text
from weft.models.base import evaluating

ABOUT = (
    "One box per variable: inside it the function that computes it, beside it the variable's name and its number in "
    "the order of computation. Parameters, inputs and constants are boxes too."
)
FOLDED = " A box with a thick border is a module that is folded: opened, it shows what is inside."
BACKWARD = (
    " In the backward pass gradients go against the edges, in the reverse order; what arrives along several edges is "
    "added. g_x is the gradient of the loss by x{}."
)


@dataclass(frozen=True)
class GraphPicture(Picture):
    """A computation graph, folded: `open` are the paths of the groups that are shown open."""

    title: str
    written: Written
    root: Group
    open: frozenset[str]
    shapes: bool = False
    backward: bool = False

    scripts: ClassVar[tuple[str, ...]] = ("graph_layout.js", "graph.js")
    suffixes: ClassVar[tuple[str, ...]] = (PAGE, *FIGURES, ".dot")

    @property
    def about(self) -> str:  # type: ignore[override]
        """What it shows."""
        modules = any(isinstance(child, Group) for child in self.root.children)
        result = "" if self.written.substitute else ", and y the result of the box"
        return ABOUT + FOLDED * modules + BACKWARD.format(result)

    def unfolded(self, depth: int | None = None, open: str | Sequence[str] = ()) -> "GraphPicture":
        """The same graph with other modules open: `depth` levels of them, and those that `open` names."""
        if depth is not None and depth < 1:
            raise ModelError(f"depth {depth}: a graph shows at least one level of modules")
        paths = [open] if isinstance(open, str) else list(open)
        root = fold(self.written.graph, paths)
        return replace(self, root=root, open=frozenset(opened(root, depth, paths)))

    def drawing(self) -> Drawing:
        """Everything in its place, in pixels."""
        placed = scene(self.written, self.root, set(self.open), self.shapes, self.backward)
        goes = self.written.differentiable
        first = len(goes)
        silent = {place for place, does in enumerate(goes) if not does}
        for n, group in enumerate(self.root.groups()):
            if not any(goes[place] for place in group.nodes()):
                silent.add(first + n)
        return Drawing(placed, self.backward, frozenset(silent))

    def figure(self) -> Figure:
        """For print."""
        return graph_draw.figure(self.drawing())

    def svg(self) -> str:
        """As plain SVG: rectangles, text and paths."""
        return graph_draw.svg(self.drawing(), self.title)

    def dot(self) -> str:
        """As Graphviz source, with a cluster for each open module."""
        nodes = self.written.graph.nodes
        labels = {place: (function(node), self._dot_name(place)) for place, node in enumerate(nodes)}
        source = graph_draw.dot(self.root, set(self.open), labels, self.written.graph.edges)
        return source.replace("edge [", "edge [dir=back, ", 1) if self.backward else source

    def _dot_name(self, place: int) -> str:
        name = self.written.names[place]
        return f"{name}  {shape(self.written.graph.nodes[place])}" if self.shapes else name

    def save(self, path: Path | str) -> Path:
        """Write it as .html, .svg, .png, .pdf or .dot."""
        path = Path(path)
        if path.suffix.lower() not in (".svg", ".dot"):
            return super().save(path)
        check_picture(path, self.suffixes)
        write_text(path, self.svg() if path.suffix.lower() == ".svg" else self.dot())
        return path

    def text(self) -> str:
        """A line for each box that is shown, in the order of the forward pass."""
        rows = [(part.labels.inside, part.labels.name, *part.labels.lines) for part in self._in_order()]
        wide = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        return "\n".join(f"{row[0]:<{wide[0]}}  {row[1]:<{wide[1]}}  {'  '.join(row[2:])}".rstrip() for row in rows)

    def _in_order(self) -> list[Any]:
        first = len(self.written.graph.nodes)
        marks = [mark for mark in self.drawing().scene.marks if not mark.frame]
        starts = {first + n: min(group.nodes(), default=0) for n, group in enumerate(self.root.groups())}
        order = sorted(marks, key=lambda mark: starts.get(mark.box.key, mark.box.key))
        return order[::-1] if self.backward else order

    def html(self) -> str:
        """The graph to open and to close, in both directions, and the table of its formulas."""
        return template("graph.html").render(
            data=data("graph-data", self._data()),
            shapes=self.shapes,
            backward=self.backward,
            rules=self._rules(),
            modules=any(isinstance(child, Group) for child in self.root.children),
            title=self.title,
            still=self.svg(),
        )

    def _rules(self) -> list[tuple[str, str, list[str]]]:
        """By function: what it computes, and its gradients."""
        used = dict.fromkeys(node.function for node in self.written.graph.nodes if node.kind == "variable")
        used |= dict.fromkeys(MODULES[group.kind] for group in self.root.groups() if group.kind in MODULES)
        found = [(name, self.written.rules[name]) for name in used if name in self.written.rules]
        result = "b" if self.written.substitute else "y"
        return [(name, *_rule_text(rule, result)) for name, rule in found]

    def _data(self) -> dict[str, Any]:
        written, nodes = self.written, self.written.graph.nodes
        groups = list(self.root.groups())
        place = {id(group): n for n, group in enumerate(groups)}
        first = len(nodes)
        formulas = written.formulas()
        texts = list(dict.fromkeys(formulas + [group_formulas(written.graph, group) for group in groups]))
        at = {lines: n for n, lines in enumerate(texts)}
        return {
            "nodes": [
                [function(node), name, node.kind, shape(node), at[lines], back]
                for node, name, lines, back in zip(nodes, written.names, formulas, written.backward_order, strict=True)
            ],
            "groups": [
                [
                    group.kind,
                    group.label,
                    group.path,
                    [first + place[id(c)] if isinstance(c, Group) else c for c in group.children],
                    at[group_formulas(written.graph, group)],
                    group.path in self.open,
                ]
                for group in groups
            ],
            "edges": [place for edge in written.graph.edges for place in edge],
            "texts": texts,
        }


def _rule_text(rule: Rule, result: str) -> tuple[str, list[str]]:
    letters = {letter: letter for letter in rule.operands} | {"y": result}
    return f"{result} = " + rule.forward.format_map(letters), [gradient(rule, of, letters) for of in rule.gradients]


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
    tape = mlp()
    written = Written(tape.graph(), tape.names, LECTURE, substitute=True)
    root = fold(written.graph)
    return GraphPicture(
        "A network with one hidden layer, as in the lecture", written, root, frozenset({""}), shapes, backward
    )
