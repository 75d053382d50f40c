"""What a graph shows in one state of folding: boxes with their labels, frames, lines, placed on a plane of pixels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font

from weft.explain.graph.fold import Group, short, shown
from weft.explain.graph.formulas import MODULES, RULES, Rule, gradient
from weft.explain.graph.graph import Graph, Node
from weft.explain.graph.layers import Box
from weft.explain.graph.layout import Line, arrange

TEXT, SMALL = 12.0, 10.5  # sizes of letters
BOX = 26.0  # a box is so high
ROW, SMALL_ROW = 15.0, 13.5
MARGIN = 10.0
MEASURED = 32.0  # letters are measured at this size
DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True)
class Labels:
    """What is written: inside of a box, and beside it a name and smaller lines. `style` is what kind of box it is."""

    inside: str
    name: str
    lines: tuple[str, ...]
    style: str


@dataclass
class Mark:
    """A box or a frame that is shown. The rectangle is `wide` and its labels are to its right."""

    box: Box
    labels: Labels
    wide: float
    group: Group | None = None

    @property
    def frame(self) -> bool:
        return self.box.inside is not None


@dataclass
class Scene:
    """All of it."""

    width: float
    height: float
    marks: list[Mark]
    lines: list[Line]


@dataclass(frozen=True)
class Written:
    """A graph and what is written at its nodes: names, and formulas by the rules of its functions."""

    graph: Graph
    names: list[str]
    rules: Mapping[str, Rule] = field(default_factory=lambda: RULES)
    substitute: bool = False  # formulas have the variables' own names, not the rules' letters

    @property
    def differentiable(self) -> list[bool]:
        """Where a gradient goes: parameters and inputs that are real numbers, and what is computed from them."""
        found: list[bool] = []
        for node in self.graph.nodes:
            computed = node.kind == "variable" and any(found[source] for _, source in node.arguments)
            found.append(node.floating and (computed or node.kind in ("parameter", "input")))
        return found

    @property
    def backward_order(self) -> list[int]:
        """The number of each node in the reverse order, from 1; 0 where no gradient goes."""
        numbers, next_number = [0] * len(self.graph.nodes), 0
        for place, goes in reversed(list(enumerate(self.differentiable))):
            if goes:
                next_number += 1
                numbers[place] = next_number
        return numbers

    def formulas(self) -> list[tuple[str, ...]]:
        """For each node what it passes back to each of its operands."""
        goes = self.differentiable
        return [tuple(self._formulas(place, node, goes)) for place, node in enumerate(self.graph.nodes)]

    def _formulas(self, place: int, node: Node, goes: list[bool]) -> Iterator[str]:
        if not goes[place] or node.kind != "variable":
            return
        rule = self.rules.get(node.function)
        if rule is None:
            yield "no formula in the table"
            return
        letters = [rule.operands[min(n, len(rule.operands) - 1)] for n in range(len(node.arguments))]
        names = {}
        if self.substitute:
            names = {letter: self.names[i] for letter, (_, i) in zip(letters, node.arguments, strict=True)}
            names["y"] = self.names[place]
        elif node.number is not None and len(node.arguments) == 1:
            names = {"b": number(node.number)}
        wanted = dict.fromkeys(
            letter
            for letter, (_, i) in zip(letters, node.arguments, strict=True)
            if goes[i] and letter in rule.gradients
        )
        yield from (gradient(rule, letter, names) for letter in wanted)


def group_formulas(graph: Graph, group: Group) -> tuple[str, ...]:
    """Those of a module that the table knows as a whole."""
    rule = RULES.get(MODULES.get(group.kind, ""))
    if rule is None:
        return ()
    parameters = sum(graph.nodes[place].kind == "parameter" for place in group.nodes())
    return tuple(gradient(rule, of, {}) for of in rule.gradients if of != "b" or parameters > 1)


def names(graph: Graph) -> list[str]:
    """Short names, as they are clear inside of a frame: those of parameters and of what modules give; v₇ for others."""
    found = []
    for place, node in enumerate(graph.nodes):
        call = graph.calls[node.call] if graph.calls else None
        path = call.path if call else ""
        if ":" in node.name:
            found.append(f"v{place + 1}".translate(DIGITS))
        elif node.kind == "variable" and node.name == "model":
            found.append("result")
        elif call and node.kind == "variable" and node.name == path:
            found.append(short(path, graph.calls[call.parent].path))
        else:
            inside = node.name.removeprefix(f"{path}.") if path else node.name
            found.append(shown(inside))
    return found


def number(value: float) -> str:
    """As short as it can be read."""
    return f"{value:.4g}".replace("-", "−")


def function(node: Node) -> str:
    """What stands in a node's box."""
    return node.function if node.number is None else f"{node.function} {number(node.number)}"


def shape(node: Node) -> str:
    """A tensor's shape: 1×4×128."""
    return "×".join(map(str, node.shape)) or "scalar"


def scene(written: Written, root: Group, opened: set[str], shapes: bool, backward: bool) -> Scene:
    """Lay out a graph whose groups `opened` are open."""
    groups = list(root.groups())
    first = len(written.graph.nodes)
    keys = {group.path: first + n for n, group in enumerate(groups)}
    formulas = written.formulas() if backward else []
    order = written.backward_order if backward else list(range(1, first + 1))
    marks: list[Mark] = []
    showing: dict[int, int] = {}

    def leaf(place: int) -> Box:
        node = written.graph.nodes[place]
        details = [str(order[place]) if order[place] else "", shape(node) if shapes else ""]
        lines = tuple(filter(None, [" · ".join(filter(None, details)), *(formulas[place] if backward else ())]))
        style = "constant" if node.kind == "constant" else node.kind
        return mark(place, Labels(function(node), written.names[place], lines, style), None)

    def closed(group: Group) -> Box:
        numbers = [order[place] for place in group.nodes() if order[place]]
        ends = dict.fromkeys((min(numbers), max(numbers)) if numbers else ())
        last = shape(written.graph.nodes[max(group.nodes())]) if shapes else ""
        span = " · ".join(filter(None, [" – ".join(map(str, ends)), last]))
        lines = tuple(filter(None, [span, *(group_formulas(written.graph, group) if backward else ())]))
        return mark(keys[group.path], Labels(group.kind, group.label, lines, "group"), group)

    def mark(key: int, labels: Labels, group: Group | None) -> Box:
        wide = max(BOX * 1.6, length(labels.inside, TEXT) + 20.0)
        beside = max([length(labels.name, TEXT), *(length(line, SMALL) for line in labels.lines)])
        rows = ROW + SMALL_ROW * len(labels.lines)
        box = Box(key, wide + 7.0 + beside, max(BOX, rows), wide / 2)
        marks.append(Mark(box, labels, wide, group))
        return box

    def build(group: Group) -> Box:
        inside = []
        for child in group.children:
            if isinstance(child, int):
                inside.append(leaf(child))
                showing[child] = child
            elif child.path in opened:
                inside.append(build(child))
            else:
                inside.append(closed(child))
                showing.update(dict.fromkeys(child.nodes(), keys[child.path]))
        title = f"{group.label} · {group.kind}"
        box = Box(keys[group.path], 0.0, 0.0, length(title, TEXT) + 6.0, inside)
        if group is not root:
            marks.append(Mark(box, Labels(group.kind, group.label, (), "frame"), 0.0, group))
        return box

    frame = build(root)
    lines = arrange(frame, visible_edges(written.graph.edges, showing))
    return Scene(frame.width + 2 * MARGIN, frame.height + 2 * MARGIN, marks[::-1], lines)


def visible_edges(edges: Sequence[tuple[int, int]], showing: Mapping[int, int]) -> list[tuple[int, int]]:
    """Edges between what is shown, each once."""
    return list(dict.fromkeys((showing[a], showing[b]) for a, b in edges if showing[a] != showing[b]))


def length(text: str, size: float) -> float:
    """How wide a text is, in the figures' own font."""
    return sum(_advance(sign) for sign in text) * size


@cache
def _advance(sign: str) -> float:
    font = _font()
    return font.load_char(ord(sign)).linearHoriAdvance / 65536 / MEASURED


@cache
def _font() -> FT2Font:
    font = FT2Font(findfont(FontProperties(family="DejaVu Sans")))
    font.set_size(MEASURED, 72)
    return font
