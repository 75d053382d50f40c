"""A folded graph laid out, as a figure and as plain SVG; and as Graphviz source."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path as Curve

from weft.explain.graph.fold import Group
from weft.explain.graph.labels import Labels, Written, function, shape
from weft.explain.graph.layout import HEAD, Box, Inside, Line, arrange, insides
from weft.explain.graph.level import Size
from weft.figures.page import template
from weft.figures.shaded import width_of

# fill, border, width of the border, dashes; told apart by what is written in them as well
STYLES = {
    "variable": ("#ffffff", "#262626", 1.0, False),
    "parameter": ("#e3edf5", "#2f6f9f", 1.0, False),
    "input": ("#f8e6dd", "#c4562a", 1.0, False),
    "constant": ("#f4f4f2", "#6d6a64", 1.0, True),
    "group": ("#efedf5", "#262626", 2.2, False),
    "frame": ("none", "#8f8b84", 0.8, False),
}
INK, SOFT = "#262626", "#5d5a55"
TEXT, SMALL = 12.0, 10.5  # sizes of letters
BOX = 26.0  # a box is so high
ROW, SMALL_ROW = 15.0, 13.5
BESIDE = 7.0  # between a box and its labels
MARGIN = 10.0
ARROW = 6.0
ROUNDED = 8.0  # pixels to which the sizes of boxes are rounded where boxes that are about alike shall be laid out alike
MAX_INCHES = 200.0  # of a figure; a larger one is drawn smaller


class Mark(NamedTuple):
    """A box or a frame that is shown. The rectangle is `wide` and its labels are to its right."""

    box: Box
    labels: Labels
    wide: float

    @property
    def frame(self) -> bool:
        return self.box.inside is not None


@dataclass(frozen=True)
class Drawing:
    """Everything in its place; gradients go along edges backwards, and not along all of them."""

    width: float
    height: float
    marks: list[Mark]
    lines: list[Line]
    backward: bool
    differentiable: Sequence[bool]

    def arrows(self) -> Iterator[tuple[float, float, float]]:
        """The tip of each arrow, and 1 where it points down, −1 up."""
        if self.backward:
            shown = (line for line in self.lines if line.leaves and not self.faint(line))
            yield from dict.fromkeys((line.x, line.y, -1.0) for line in shown)
        else:
            yield from dict.fromkeys((line.to_x, line.to_y, 1.0) for line in self.lines if line.arrives)

    def faint(self, line: Line) -> bool:
        """Whether nothing passes a line in this direction."""
        return self.backward and not any(self.differentiable[source] for source in line.sources)


def keys(written: Written, root: Group) -> dict[str, int]:
    """Numbers for groups, after those of the nodes."""
    return {group.path: len(written.graph.nodes) + n for n, group in enumerate(root.groups())}


def laid_out(written: Written, root: Group) -> dict[int, Inside]:
    """How the inside of every group is laid out, by key, with its children closed."""
    key_of = keys(written, root)
    children: dict[int, list[int]] = {}
    sizes: dict[int, Size] = {}
    for group in root.groups():
        inside = children[key_of[group.path]] = []
        for child in group.children:
            inside.append(child if isinstance(child, int) else key_of[child.path])
            box = _closed(inside[-1], written.of(child))[0]
            sizes[box.key] = Size(*(ROUNDED * round(size / ROUNDED) for size in (box.width, box.port)))
    return insides(children, written.graph.edges, sizes, written.differentiable)


def _closed(key: int, labels: Labels) -> tuple[Box, float]:
    wide = max(BOX * 1.6, width_of(labels.inside, TEXT) + 20.0)
    beside = max([width_of(labels.name, TEXT), *(width_of(line, SMALL) for line in labels.lines)])
    rows = ROW + SMALL_ROW * len(labels.lines)
    return Box(key, wide + BESIDE + beside, max(BOX, rows), wide / 2), wide


def drawing(written: Written, root: Group, opened: frozenset[str], shapes: bool, backward: bool) -> Drawing:
    """A graph whose groups `opened` are open."""
    key_of, laid = keys(written, root), laid_out(written, root)
    marks: list[Mark] = []

    def build(what: Group | int) -> Box:
        key = what if isinstance(what, int) else key_of[what.path]
        if isinstance(what, int) or what.path not in opened | {root.path}:
            labels = written.of(what, shapes, backward)
            box, wide = _closed(key, labels)
        else:
            labels, wide = Labels(what.kind, what.label, (), "frame"), 0.0
            title = width_of(f"{what.label} · {what.kind}", TEXT)
            box = Box(key, inside=list(map(build, what.children)), laid=laid[key], title=title)
        marks.append(Mark(box, labels, wide))
        return box

    frame = build(root)
    lines = arrange(frame)
    size = frame.width + 2 * MARGIN, frame.height + 2 * MARGIN
    return Drawing(*size, marks[-2::-1], lines, backward, written.differentiable)


def figure(drawing: Drawing) -> Figure:
    scale = min(1.0, MAX_INCHES / max(drawing.width / 96, drawing.height / 96))
    fig = Figure(figsize=(drawing.width / 96 * scale, drawing.height / 96 * scale))
    FigureCanvasAgg(fig)
    axes: Any = fig.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-MARGIN, drawing.width - MARGIN)
    axes.set_ylim(drawing.height - MARGIN, -MARGIN)
    axes.axis("off")
    unit = 0.75 * scale
    for mark in drawing.marks:
        fill, edge, width, dashed = STYLES[mark.labels.style]
        x, y, w, h = _rectangle(mark)
        dash: Any = (0, (3, 2)) if dashed else "solid"
        rounded = f"round,pad=0,rounding_size={5 if mark.frame else 3}"
        look: dict[str, Any] = {"facecolor": fill, "edgecolor": edge, "linewidth": width * unit, "linestyle": dash}
        look |= {"boxstyle": rounded, "zorder": 1 if mark.frame else 3}
        axes.add_patch(FancyBboxPatch((x, y), w, h, **look))
        for text in _texts(mark):
            font = {"fontsize": text.size * unit, "family": "DejaVu Sans", "color": SOFT if text.soft else INK}
            where = {"ha": "center" if text.middle else "left", "va": "baseline", "zorder": 4}
            axes.text(text.x, text.y, text.text, parse_math=False, **font, **where)
    for line in drawing.lines:
        mid = (line.bend + line.straight) / 2
        points = [(line.x, line.y), (line.x, line.bend), (line.x, mid), (line.to_x, mid), (line.to_x, line.straight)]
        curve = Curve([*points, (line.to_x, line.to_y)], [1, 2, 4, 4, 4, 2])
        dash = (0, (1, 3)) if drawing.faint(line) else "solid"
        look = {"edgecolor": SOFT, "linewidth": 0.9 * unit, "linestyle": dash, "zorder": 2, "capstyle": "butt"}
        axes.add_patch(PathPatch(curve, fill=False, **look))
    for x, y, down in drawing.arrows():
        axes.add_patch(Polygon(_arrow(x, y, down), closed=True, facecolor=INK, edgecolor="none", zorder=4))
    return fig


def svg(drawing: Drawing, label: str) -> str:
    """Plain SVG: rectangles, paths and text, with no style sheet, script or marker."""
    looks = {"styles": STYLES, "ink": INK, "soft": SOFT, "margin": MARGIN}
    shapes = {"rectangle": _rectangle, "texts": _texts, "arrow": _arrow, "n": _n}
    return template("graph_svg.html").render(drawing=drawing, label=label, **looks, **shapes) + "\n"


class _Text(NamedTuple):
    x: float
    y: float
    text: str
    size: float
    middle: bool = False
    soft: bool = False


def _rectangle(mark: Mark) -> tuple[float, float, float, float]:
    return mark.box.x, mark.box.y, mark.box.width if mark.frame else mark.wide, mark.box.height


def _texts(mark: Mark) -> Iterator[_Text]:
    box, labels = mark.box, mark.labels
    if mark.frame:
        yield _Text(box.x + box.title_x, box.y + HEAD - 8.0, f"{labels.name} · {labels.inside}", TEXT, soft=True)
        return
    middle = box.y + box.height / 2
    yield _Text(box.x + mark.wide / 2, middle + TEXT * 0.36, labels.inside, TEXT, middle=True)
    rows = ROW + SMALL_ROW * len(labels.lines)
    x, y = box.x + mark.wide + BESIDE, middle - rows / 2 + TEXT
    yield _Text(x, y, labels.name, TEXT)
    for n, line in enumerate(labels.lines, 1):
        yield _Text(x, y + SMALL_ROW * n, line, SMALL, soft=True)


def _arrow(x: float, y: float, down: float) -> list[tuple[float, float]]:
    return [(x, y), (x - ARROW * 0.5, y - ARROW * down), (x + ARROW * 0.5, y - ARROW * down)]


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def dot(written: Written, root: Group, opened: frozenset[str], shapes: bool, backward: bool) -> str:
    """Graphviz source: a cluster for each open group, a box for each node and for each closed group."""
    key_of = keys(written, root)
    showing: dict[int, int] = {}
    out = ["digraph {", '  node [shape=box, fontname="Helvetica", fontsize=11];']
    out.append(f"  edge [{'dir=back, ' if backward else ''}arrowsize=0.6];")

    def write(group: Group, indent: str) -> None:
        for child in group.children:
            if isinstance(child, int):
                node, name = written.graph.nodes[child], written.names[child]
                named = f"{name}  {shape(node)}" if shapes else name
                out.append(f"{indent}n{child} [label={quoted(function(node))}, xlabel={quoted(named)}];")
                showing[child] = child
            elif child.path in opened:
                out.append(f"{indent}subgraph cluster_{key_of[child.path]} {{")
                out.append(f"{indent}  label={quoted(f'{child.label} · {child.kind}')};")
                write(child, indent + "  ")
                out.append(f"{indent}}}")
            else:
                key = key_of[child.path]
                out.append(f"{indent}n{key} [label={quoted(child.kind)}, xlabel={quoted(child.label)}, penwidth=2];")
                showing.update(dict.fromkeys(child.nodes(), key))

    write(root, "  ")
    joined = dict.fromkeys((showing[a], showing[b]) for a, b in written.graph.edges if showing[a] != showing[b])
    out += [f"  n{a} -> n{b};" for a, b in joined]
    return "\n".join([*out, "}", ""])


def quoted(text: str) -> str:
    """A text as a Graphviz string; a backslash would begin one of its escapes."""
    inner = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "")
    return f'"{inner}"'
