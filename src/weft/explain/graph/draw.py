"""Draw a folded graph as a figure, as plain SVG and as Graphviz source."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path

from weft.explain.graph.fold import Subgraph
from weft.explain.graph.labels import BoxLabels, LabelledGraph
from weft.explain.graph.layered import GroupLayout, Size, group_layouts
from weft.explain.graph.placing import TITLE_HEIGHT, Box, Connector, place
from weft.figures.page import template
from weft.figures.shaded import width_of

# fill, border, border width, dashed; the label inside a box distinguishes the kinds as well
STYLES = {
    "variable": ("#ffffff", "#262626", 1.0, False),
    "parameter": ("#e3edf5", "#2f6f9f", 1.0, False),
    "input": ("#f8e6dd", "#c4562a", 1.0, False),
    "constant": ("#f4f4f2", "#6d6a64", 1.0, True),
    "group": ("#efedf5", "#262626", 2.2, False),
    "frame": ("none", "#8f8b84", 0.8, False),
}
INK, SOFT = "#262626", "#5d5a55"
FONT_SIZE, SMALL_FONT_SIZE = 12.0, 12.0
BOX_HEIGHT = 26.0
LINE_HEIGHT, SMALL_LINE_HEIGHT = 15.0, 13.5
LABEL_GAP = 7.0  # between a box and its labels
MARGIN = 10.0
ARROW = 6.0  # length of an arrowhead
SIZE_STEP = 8.0  # pixels to which box sizes are rounded for the layout, so that nearly identical layers share one
MAX_INCHES = 200.0  # longest side of a figure; a larger graph is scaled down
PIXELS_PER_INCH = 96


class DrawnBox(NamedTuple):
    """Visible box or frame. The rectangle of a box is `rectangle_width` wide, with the labels to its right."""

    box: Box
    labels: BoxLabels
    rectangle_width: float

    @property
    def is_frame(self) -> bool:
        return self.box.inside is not None


@dataclass(frozen=True)
class Drawing:
    """Graph with everything placed. In the backward pass, gradients flow up along some of the connectors."""

    width: float
    height: float
    boxes: list[DrawnBox]
    connectors: list[Connector]
    backward: bool
    differentiable: Sequence[bool]

    def arrows(self) -> Iterator[tuple[float, float, float]]:
        """Yield the tip (x, y) of each arrow, with 1 if it points down and −1 if up."""
        if self.backward:
            used = (line for line in self.connectors if line.leaves and not self.is_faint(line))
            yield from dict.fromkeys((line.x, line.y, -1.0) for line in used)
        else:
            yield from dict.fromkeys((line.to_x, line.to_y, 1.0) for line in self.connectors if line.arrives)

    def is_faint(self, connector: Connector) -> bool:
        """Return whether no gradient passes a connector in the backward pass."""
        return self.backward and not any(self.differentiable[source] for source in connector.sources)


def group_keys(labelled: LabelledGraph, root: Subgraph) -> dict[str, int]:
    """Return the key of every group, by path: groups are numbered after the nodes."""
    return {group.path: len(labelled.graph.nodes) + n for n, group in enumerate(root.subgraphs())}


def closed_layouts(labelled: LabelledGraph, root: Subgraph) -> dict[int, GroupLayout]:
    """Return the layout of every group with its children closed, by key."""
    key_of = group_keys(labelled, root)
    children: dict[int, list[int]] = {}
    sizes: dict[int, Size] = {}
    for group in root.subgraphs():
        keys = children[key_of[group.path]] = []
        for child in group.children:
            keys.append(child if isinstance(child, int) else key_of[child.path])
            box = _closed_box(keys[-1], labelled.labels(child)).box
            sizes[box.key] = Size(*(SIZE_STEP * round(size / SIZE_STEP) for size in (box.width, box.port)))
    return group_layouts(children, labelled.graph.edges, sizes, differentiable=labelled.differentiable)


def _closed_box(key: int, labels: BoxLabels) -> DrawnBox:
    width = max(BOX_HEIGHT * 1.6, width_of(labels.inside, FONT_SIZE) + 20.0)
    widths = [width_of(labels.name, FONT_SIZE), *(width_of(line, SMALL_FONT_SIZE) for line in labels.lines)]
    height = max(BOX_HEIGHT, LINE_HEIGHT + SMALL_LINE_HEIGHT * len(labels.lines))
    return DrawnBox(Box(key, width + LABEL_GAP + max(widths), height, width / 2), labels, width)


def drawing(labelled: LabelledGraph, root: Subgraph, opened: Set[str], *, shapes: bool, backward: bool) -> Drawing:
    """Draw a graph with the groups at the paths `opened` open."""
    key_of, layouts = group_keys(labelled, root), closed_layouts(labelled, root)
    drawn: list[DrawnBox] = []

    def add(child: Subgraph | int) -> Box:
        key = child if isinstance(child, int) else key_of[child.path]
        if isinstance(child, int) or child.path not in opened | {root.path}:
            drawn.append(_closed_box(key, labelled.labels(child, shapes=shapes, backward=backward)))
        else:
            title = width_of(f"{child.label} · {child.kind}", FONT_SIZE)
            box = Box(key, inside=list(map(add, child.children)), group=layouts[key], title=title)
            drawn.append(DrawnBox(box, BoxLabels(child.kind, child.label, (), "frame"), 0.0))
        return drawn[-1].box

    frame = add(root)
    connectors, differentiable = place(frame), labelled.differentiable
    width, height = frame.width + 2 * MARGIN, frame.height + 2 * MARGIN
    return Drawing(width, height, drawn[-2::-1], connectors, backward=backward, differentiable=differentiable)


def figure(drawing: Drawing) -> Figure:
    width, height = drawing.width / PIXELS_PER_INCH, drawing.height / PIXELS_PER_INCH
    scale = min(1.0, MAX_INCHES / max(width, height))
    fig = Figure(figsize=(width * scale, height * scale))
    FigureCanvasAgg(fig)
    axes: Any = fig.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-MARGIN, drawing.width - MARGIN), ylim=(drawing.height - MARGIN, -MARGIN))
    axes.axis("off")
    unit = 0.75 * scale
    for drawn in drawing.boxes:
        fill, edge, line_width, dashed = STYLES[drawn.labels.style]
        x, y, w, h = _rectangle(drawn)
        dash: Any = (0, (3, 2)) if dashed else "solid"
        look: dict[str, Any] = {"facecolor": fill, "edgecolor": edge, "linewidth": line_width * unit, "linestyle": dash}
        look["boxstyle"] = f"round,pad=0,rounding_size={5 if drawn.is_frame else 3}"
        axes.add_patch(FancyBboxPatch((x, y), w, h, zorder=1 if drawn.is_frame else 3, **look))
        for text in _texts(drawn):
            font = {"fontsize": text.size * unit, "family": "DejaVu Sans", "color": SOFT if text.soft else INK}
            align = {"ha": "center" if text.centred else "left", "va": "baseline", "zorder": 4}
            axes.text(text.x, text.y, text.text, parse_math=False, **font, **align)
    for line in drawing.connectors:
        mid = (line.bend + line.straight) / 2
        points = [(line.x, line.y), (line.x, line.bend), (line.x, mid), (line.to_x, mid), (line.to_x, line.straight)]
        path = Path([*points, (line.to_x, line.to_y)], [1, 2, 4, 4, 4, 2])
        dash = (0, (1, 3)) if drawing.is_faint(line) else "solid"
        look = {"edgecolor": SOFT, "linewidth": 0.9 * unit, "linestyle": dash, "zorder": 2, "capstyle": "butt"}
        axes.add_patch(PathPatch(path, fill=False, **look))
    for x, y, down in drawing.arrows():
        axes.add_patch(Polygon(_arrow(x, y, down), closed=True, facecolor=INK, edgecolor="none", zorder=4))
    return fig


def svg(drawing: Drawing, label: str) -> str:
    """Return plain SVG: rectangles, paths and text, with no style sheet, script or marker."""
    looks = {"styles": STYLES, "ink": INK, "soft": SOFT, "margin": MARGIN}
    shapes = {"rectangle": _rectangle, "texts": _texts, "arrow": _arrow, "n": lambda x: f"{x:.1f}".removesuffix(".0")}
    return template("graph_svg.html").render(drawing=drawing, label=label, **looks, **shapes) + "\n"


class _PlacedText(NamedTuple):
    x: float
    y: float
    text: str
    size: float
    centred: bool = False
    soft: bool = False


def _rectangle(drawn: DrawnBox) -> tuple[float, float, float, float]:
    box = drawn.box
    return box.x, box.y, box.width if drawn.is_frame else drawn.rectangle_width, box.height


def _texts(drawn: DrawnBox) -> Iterator[_PlacedText]:
    box, labels = drawn.box, drawn.labels
    if drawn.is_frame:
        title = f"{labels.name} · {labels.inside}"
        yield _PlacedText(box.x + box.title_x, box.y + TITLE_HEIGHT - 8.0, title, FONT_SIZE, soft=True)
        return
    middle = box.y + box.height / 2
    baseline = middle + FONT_SIZE * 0.36
    yield _PlacedText(box.x + drawn.rectangle_width / 2, baseline, labels.inside, FONT_SIZE, centred=True)
    height = LINE_HEIGHT + SMALL_LINE_HEIGHT * len(labels.lines)
    x, y = box.x + drawn.rectangle_width + LABEL_GAP, middle - height / 2 + FONT_SIZE
    yield _PlacedText(x, y, labels.name, FONT_SIZE)
    for n, line in enumerate(labels.lines, 1):
        yield _PlacedText(x, y + SMALL_LINE_HEIGHT * n, line, SMALL_FONT_SIZE, soft=True)


def _arrow(x: float, y: float, down: float) -> list[tuple[float, float]]:
    return [(x, y), (x - ARROW * 0.5, y - ARROW * down), (x + ARROW * 0.5, y - ARROW * down)]


def dot(labelled: LabelledGraph, root: Subgraph, opened: frozenset[str], *, shapes: bool, backward: bool) -> str:
    """Return Graphviz source: a cluster for each open group, a box for each node and each closed group."""
    key_of = group_keys(labelled, root)
    shown_as: dict[int, int] = {}  # node → key of its box
    lines = ["digraph {", '  node [shape=box, fontname="Helvetica", fontsize=11];']
    lines.append(f"  edge [{'dir=back, ' if backward else ''}arrowsize=0.6];")

    def write(group: Subgraph, indent: str) -> None:
        for child in group.children:
            if isinstance(child, int):
                function, name = labelled.function(labelled.graph.nodes[child]), labelled.names[child]
                name = f"{name}  {labelled.shape(child)}" if shapes else name
                lines.append(f"{indent}n{child} [label={quoted(function)}, xlabel={quoted(name)}];")
                shown_as[child] = child
            elif child.path in opened:
                lines.append(f"{indent}subgraph cluster_{key_of[child.path]} {{")
                lines.append(f"{indent}  label={quoted(f'{child.label} · {child.kind}')};")
                write(child, indent + "  ")
                lines.append(f"{indent}}}")
            else:
                key = key_of[child.path]
                lines.append(f"{indent}n{key} [label={quoted(child.kind)}, xlabel={quoted(child.label)}, penwidth=2];")
                shown_as.update(dict.fromkeys(child.nodes(), key))

    write(root, "  ")
    edges = dict.fromkeys((shown_as[a], shown_as[b]) for a, b in labelled.graph.edges if shown_as[a] != shown_as[b])
    lines += [f"  n{a} -> n{b};" for a, b in edges]
    return "\n".join([*lines, "}", ""])


def quoted(text: str) -> str:
    """Return a Graphviz string literal, with backslashes escaped because they would start an escape sequence."""
    return '"{}"'.format(text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", ""))
