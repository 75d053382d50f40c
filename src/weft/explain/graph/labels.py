"""What is written at the nodes and groups of a computation graph: functions, names, order, shapes and formulas."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from weft.explain.graph.fold import Group, short, shown
from weft.explain.graph.formulas import MODULES, RULES, Rule
from weft.explain.graph.graph import Graph, Node

DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True)
class Labels:
    """What is written: inside of a box, and beside it a name and smaller lines. `style` is what kind of box it is."""

    inside: str
    name: str
    lines: tuple[str, ...]
    style: str


@dataclass(frozen=True)
class Written:
    """A graph and what is written at its nodes: names, and formulas by the rules of its functions."""

    graph: Graph
    names: list[str]
    rules: Mapping[str, Rule] = field(default_factory=lambda: RULES)
    substitute: bool = False  # formulas have the variables' own names, not the rules' letters

    @cached_property
    def differentiable(self) -> list[bool]:
        """Where a gradient goes: parameters and inputs that are real numbers, and what is computed from them."""
        found: list[bool] = []
        for node in self.graph.nodes:
            computed = node.kind == "variable" and any(found[source] for _, source in node.arguments)
            found.append(node.floating and (computed or node.kind in ("parameter", "input")))
        return found

    @cached_property
    def backward_order(self) -> list[int]:
        """The number of each node in the reverse order, from 1; 0 where no gradient goes."""
        found, left = [], sum(self.differentiable)
        for goes in self.differentiable:
            found.append(left if goes else 0)
            left -= goes
        return found

    @cached_property
    def formulas(self) -> list[tuple[str, ...]]:
        """For each node what it passes back to each of its operands."""
        return [self._formulas(place, node) for place, node in enumerate(self.graph.nodes)]

    def _formulas(self, place: int, node: Node) -> tuple[str, ...]:
        if not self.differentiable[place] or node.kind != "variable":
            return ()
        rule = self.rules.get(node.function)
        if rule is None:
            return ("no formula in the table",)
        letters = [rule.operands[min(n, len(rule.operands) - 1)] for n in range(len(node.arguments))]
        sources = [source for _, source in node.arguments]
        names = {}
        if self.substitute:
            names = {letter: self.names[source] for letter, source in zip(letters, sources, strict=True)}
            names["y"] = self.names[place]
        elif node.number is not None and len(sources) == 1:
            names = {"b": number(node.number)}
        wanted = [letter for letter, source in zip(letters, sources, strict=True) if self.differentiable[source]]
        return tuple(rule.gradient(letter, names) for letter in dict.fromkeys(wanted) if letter in rule.gradients)

    def group_formulas(self, group: Group) -> tuple[str, ...]:
        """Those of a module that the table knows as a whole."""
        rule = RULES.get(MODULES.get(group.kind, ""))
        if rule is None:
            return ()
        parameters = sum(self.graph.nodes[place].kind == "parameter" for place in group.nodes())
        return tuple(rule.gradient(of, {}) for of in rule.gradients if of != "b" or parameters > 1)

    def of(self, what: Group | int, shapes: bool = False, backward: bool = False) -> Labels:
        """The labels of a node, or of a group that is closed."""
        places = [what] if isinstance(what, int) else list(what.nodes())
        numbers = [self.backward_order[place] if backward else place + 1 for place in places]
        ends = dict.fromkeys((min(filter(None, numbers)), max(numbers)) if any(numbers) else ())
        size = shape(self.graph.nodes[max(places)]) if shapes else ""
        first = " · ".join(filter(None, (" – ".join(map(str, ends)), size)))
        if isinstance(what, int):
            node, formulas = self.graph.nodes[what], self.formulas[what] if backward else ()
            inside, name, style = function(node), self.names[what], str(node.kind)
        else:
            formulas = self.group_formulas(what) if backward else ()
            inside, name, style = what.kind, what.label, "group"
        return Labels(inside, name, tuple(filter(None, (first, *formulas))), style)


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
            found.append(shown(node.name.removeprefix(f"{path}.") if path else node.name))
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
