"""Computation graph of a model as a picture: folded by module, forward or backward (lecture 3)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure
from torch import nn

from weft.errors import ModelError
from weft.explain.graph import draw
from weft.explain.graph.fold import Subgraph, fold, opened
from weft.explain.graph.formulas import LECTURE, MODULES
from weft.explain.graph.graph import Call, Graph, Node, graph
from weft.explain.graph.labels import LabelledGraph
from weft.explain.graph.layered import LayeredLayout
from weft.explain.graph.names import variable_names
from weft.explain.texts import TEXTS
from weft.figures.page import as_json, mount_point
from weft.figures.picture import FIGURES, PAGE, Picture, check_picture
from weft.models.base import evaluating
from weft.storage.files import write_text

INPUTS, HIDDEN, OUTPUTS = 3, 4, 2  # sizes of the lecture's network


@dataclass(frozen=True)
class GraphPicture(Picture):
    """Folded computation graph; `open` are the paths of the groups that are shown open."""

    title: str
    labelled: LabelledGraph
    root: Subgraph
    open: frozenset[str]
    shapes: bool = False
    backward: bool = False

    scripts: ClassVar[tuple[str, ...]] = ("graph.js",)
    suffixes: ClassVar[tuple[str, ...]] = (PAGE, *FIGURES, ".dot")

    @property
    def about(self) -> str:  # type: ignore[override]
        folds = any(isinstance(child, Subgraph) for child in self.root.children)
        result = "" if self.labelled.substitute else ", and y is the result of the box"
        return " ".join((TEXTS["graph"], *[TEXTS["folded"]] * folds, TEXTS["backward"].format(result=result)))

    def unfolded(self, depth: int | None = None, open: str | Sequence[str] = ()) -> "GraphPicture":
        """Return this graph with other modules open: `depth` levels of them, and those that match `open`."""
        if depth is not None and depth < 1:
            raise ModelError(f"depth {depth}: a graph shows at least one level of modules")
        patterns = [open] if isinstance(open, str) else list(open)
        root = fold(self.labelled.graph, patterns)
        return replace(self, root=root, open=frozenset(opened(root, depth, patterns)))

    def drawing(self) -> draw.Drawing:
        return draw.drawing(self.labelled, self.root, self.open, shapes=self.shapes, backward=self.backward)

    def figure(self) -> Figure:
        return draw.figure(self.drawing())

    def svg(self) -> str:
        """Return plain SVG: rectangles, text and paths."""
        return draw.svg(self.drawing(), self.title)

    def dot(self) -> str:
        """Return Graphviz source, with a cluster for each open module."""
        return draw.dot(self.labelled, self.root, self.open, shapes=self.shapes, backward=self.backward)

    def save(self, path: Path | str) -> Path:
        path = check_picture(path, self.suffixes)
        if path.suffix.lower() not in (".svg", ".dot"):
            return super().save(path)
        write_text(path, self.svg() if path.suffix.lower() == ".svg" else self.dot())
        return path

    def text(self) -> str:
        rows = [self.labelled.labels(child, shapes=self.shapes, backward=self.backward) for child in self.boxes()]
        inside, name = max(len(row.inside) for row in rows), max(len(row.name) for row in rows)
        lines = (f"{row.inside:<{inside}}  {row.name:<{name}}  {'  '.join(row.lines)}" for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def boxes(self) -> list[Subgraph | int]:
        """Return the visible nodes and closed groups, in the order of the pass."""
        boxes = sorted(self._boxes(self.root), key=lambda box: box if isinstance(box, int) else min(box.nodes()))
        return boxes[::-1] if self.backward else boxes

    def _boxes(self, group: Subgraph) -> Iterator[Subgraph | int]:
        for child in group.children:
            if isinstance(child, Subgraph) and child.path in self.open:
                yield from self._boxes(child)
            else:
                yield child

    def html(self) -> str:
        return mount_point("graph.js", self.data(), self.svg())

    def _rules(self) -> list[dict[str, Any]]:
        functions = dict.fromkeys(node.function for node in self.labelled.graph.nodes if node.kind == "variable")
        functions |= dict.fromkeys(MODULES[group.kind] for group in self.root.subgraphs() if group.kind in MODULES)
        result = "b" if self.labelled.substitute else "y"
        rules = []
        for name, rule in ((name, self.labelled.rules[name]) for name in functions if name in self.labelled.rules):
            letters = {letter: letter for letter in rule.operands} | {"y": result}
            forward = f"{result} = {rule.forward.format_map(letters)}"
            gradients = [rule.gradient(operand, letters) for operand in rule.gradients]
            rules.append({"operation": name, "forward": forward, "gradients": gradients})
        return rules

    def data(self) -> dict[str, Any]:
        """Return the data of web/graph.js. Nodes and groups refer to formulas and layouts, which many of them share."""
        labelled = self.labelled
        key_of, layouts = draw.group_keys(labelled, self.root), draw.closed_layouts(labelled, self.root)
        formulas: dict[tuple[str, ...], int] = {}
        shared_layouts: dict[LayeredLayout, int] = {}

        def described(child: Subgraph | int, texts: tuple[str, ...]) -> dict[str, Any]:
            order = {"forward": labelled.order(child, backward=False), "backward": labelled.order(child, backward=True)}
            return {"shape": labelled.shape(child), "formulas": formulas.setdefault(texts, len(formulas)), **order}

        nodes = [
            {"function": labelled.function(node), "name": labelled.names[i], "kind": node.kind}
            | described(i, labelled.formulas[i])
            for i, node in enumerate(labelled.graph.nodes)
        ]
        groups = []
        for group in self.root.subgraphs():
            layout, bundles, main = layouts[key_of[group.path]]
            children = [child if isinstance(child, int) else key_of[child.path] for child in group.children]
            number = shared_layouts.setdefault(layout, len(shared_layouts))
            placed = {"children": children, "layout": number, "bundles": bundles, "main": main}
            named = {"kind": group.kind, "name": group.label, "path": group.path, "open": group.path in self.open}
            groups.append(named | placed | described(group, labelled.group_formulas(group)))
        shown = {"title": self.title, "shapes": self.shapes, "backward": self.backward, "rules": self._rules()}
        sources, targets = zip(*labelled.graph.edges, strict=True) if labelled.graph.edges else ((), ())
        graph = {"nodes": nodes, "groups": groups, "edges": {"sources": sources, "targets": targets}}
        return as_json({**shown, **graph, "formulas": list(formulas), "layouts": list(shared_layouts)})


def graph_picture(
    model: nn.Module,
    *args: Any,
    shapes: bool = False,
    backward: bool = False,
    depth: int | None = None,
    open: str | Sequence[str] = (),
    loss: bool = False,
    **kwargs: Any,
) -> GraphPicture:
    """Return the computation graph of `model(*args, **kwargs)`, in the lecture's conventions.

    The model runs once, in evaluation mode. On the meta device (`with torch.device("meta"): build(…)`) no values are
    computed, so the largest presets draw in seconds. `depth` levels of modules are shown open, or those that match
    `open` ("decoder.0", "decoder.*.attention"); `shapes` adds each tensor's shape; `backward` reverses the edges and
    adds each gradient's formula. With `loss`, the results are logits: softmax, target and cross-entropy follow.
    """
    with evaluating(model):
        recorded = graph(model, *args, **kwargs)
    if not any(node.kind == "variable" for node in recorded.nodes):
        raise ModelError(f"{type(model).__name__} computes no tensor from others; it has no computation graph")
    recorded = with_loss(recorded) if loss else recorded
    title, labelled = f"Computation graph of {type(model).__name__}", LabelledGraph(recorded, variable_names(recorded))
    folded = GraphPicture(title, labelled, fold(recorded), frozenset(), shapes=shapes, backward=backward)
    return folded.unfolded(depth, open)


def with_loss(graph: Graph) -> Graph:
    """Append the loss to the graph of a language model's logits: y = softmax(…), ℓ = −Σ log y at the targets y*."""
    logits = graph.nodes[-1]
    nodes = [
        Node("variable", "softmax", "y", shape=logits.shape, arguments=(("self", len(graph.nodes) - 1),)),
        Node("constant", "next tokens", "y*", shape=logits.shape[:-1], floating=False),
        Node("variable", "cross-entropy", "ℓ_t", shape=logits.shape[:-1], arguments=(("y", 0), ("t", 1))),
        Node("variable", "sum", "ℓ", arguments=(("self", 2),)),
    ]
    first = len(graph.nodes)
    nodes[2:] = [replace(n, arguments=tuple((role, first + i) for role, i in n.arguments)) for n in nodes[2:]]
    edges = [(source, first + i) for i, node in enumerate(nodes) for _, source in node.arguments]
    return Graph([*graph.nodes, *nodes], [*graph.edges, *edges], graph.calls)


def lecture_mlp(*, shapes: bool = False, backward: bool = False) -> GraphPicture:
    """Return a network with one hidden layer exactly as lecture 3 draws it, with its names and formulas."""
    network = mlp()
    labelled = LabelledGraph(network, [node.name for node in network.nodes], LECTURE, substitute=True)
    title = "A network with one hidden layer, as in the lecture"
    return GraphPicture(title, labelled, fold(network), frozenset({""}), shapes=shapes, backward=backward)


def mlp() -> Graph:
    """Return x → Linear(α) → a → Sigmoid → z → Linear(β) → b → Softmax → ŷ → CrossEntropy with y → J (lecture 3)."""
    nodes: list[Node] = []

    def compute(module: str, name: str, shape: tuple[int, ...], *operands: int) -> None:
        arguments = tuple(zip(LECTURE[module].operands, operands, strict=True))
        nodes.append(Node("variable", module, name, shape=shape, arguments=arguments))

    nodes.append(Node("input", "feature vector", "x", shape=(INPUTS,)))
    nodes.append(Node("parameter", "parameter", "α", shape=(HIDDEN, INPUTS)))
    compute("Linear", "a", (HIDDEN,), 1, 0)
    compute("Sigmoid", "z", (HIDDEN,), 2)
    nodes.append(Node("parameter", "parameter", "β", shape=(OUTPUTS, HIDDEN)))
    compute("Linear", "b", (OUTPUTS,), 4, 3)
    compute("Softmax", "ŷ", (OUTPUTS,), 5)
    nodes.append(Node("constant", "true label", "y", shape=(OUTPUTS,)))
    compute("CrossEntropy", "J", (), 7, 6)
    edges = [(source, i) for i, node in enumerate(nodes) for _, source in node.arguments]
    return Graph(nodes, edges, [Call("", "network", 0)])
