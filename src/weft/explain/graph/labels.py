"""Texts of a computation graph's boxes: functions, names, order of computation, shapes and formulas."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from weft.explain.graph.fold import Subgraph
from weft.explain.graph.formulas import MODULES, RULES, GradientRule
from weft.explain.graph.graph import Graph, Node
from weft.explain.graph.names import scalar_label


@dataclass(frozen=True)
class BoxLabels:
    """Function inside the box, and beside it a name and smaller lines; `style` is a key of `draw.STYLES`."""

    inside: str
    name: str
    lines: tuple[str, ...]
    style: str


@dataclass(frozen=True)
class LabelledGraph:
    """Graph with the names of its variables and the gradient rules of its functions."""

    graph: Graph
    names: list[str]
    rules: Mapping[str, GradientRule] = field(default_factory=lambda: RULES)
    substitute: bool = False  # write formulas with the variables' names instead of the rules' letters

    @cached_property
    def differentiable(self) -> list[bool]:
        """Whether a gradient reaches each node: a floating-point parameter or input, or a value computed from one."""
        reached: list[bool] = []
        for node in self.graph.nodes:
            computed = node.kind == "variable" and any(reached[source] for _, source in node.arguments)
            reached.append(node.floating and (computed or node.kind in ("parameter", "input")))
        return reached

    @cached_property
    def backward_order(self) -> list[int]:
        """Number of each node in the order of the backward pass, from 1; 0 for nodes without a gradient."""
        total, passed = sum(self.differentiable), accumulate(self.differentiable)
        return [reached * (total + 1 - n) for reached, n in zip(self.differentiable, passed, strict=True)]

    @cached_property
    def formulas(self) -> list[tuple[str, ...]]:
        """Gradients that each node passes back to its operands."""
        return [self._formulas(i, node) for i, node in enumerate(self.graph.nodes)]

    def _formulas(self, i: int, node: Node) -> tuple[str, ...]:
        if not self.differentiable[i] or node.kind != "variable":
            return ()
        rule = self.rules.get(node.function)
        if rule is None:
            return ("no formula in the table",)
        last = len(rule.operands) - 1
        operands = [(rule.operands[min(n, last)], source) for n, (_, source) in enumerate(node.arguments)]
        names = {}
        if self.substitute:
            names = {letter: self.names[source] for letter, source in operands} | {"y": self.names[i]}
        elif node.scalar is not None and len(operands) == 1:
            names = {"b": scalar_label(self.graph, node)}
        reached = dict.fromkeys(letter for letter, source in operands if self.differentiable[source])
        return tuple(rule.gradient(letter, names) for letter in reached if letter in rule.gradients)

    def group_formulas(self, group: Subgraph) -> tuple[str, ...]:
        """Gradients of a closed module that has a rule as a whole."""
        rule = RULES.get(MODULES.get(group.kind, ""))
        if rule is None:
            return ()
        parameters = sum(self.graph.nodes[i].kind == "parameter" for i in group.nodes())
        return tuple(rule.gradient(operand, {}) for operand in rule.gradients if operand != "b" or parameters > 1)

    def function(self, node: Node) -> str:
        """Return the text inside a node's box: its function, with the operand if that is a number."""
        return node.function if node.scalar is None else f"{node.function} {scalar_label(self.graph, node)}"

    def order(self, child: Subgraph | int, *, backward: bool) -> str:
        """Return a node's number in the order of computation, or a group's first and last."""
        nodes = [child] if isinstance(child, int) else child.nodes()
        numbers = [n for n in (self.backward_order[i] if backward else i + 1 for i in nodes) if n]
        return " – ".join(map(str, dict.fromkeys((min(numbers), max(numbers))))) if numbers else ""

    def shape(self, child: Subgraph | int) -> str:
        """Return the shape of a node, or of a group's last node: 1×4×128."""
        last = child if isinstance(child, int) else max(child.nodes())
        return "×".join(map(str, self.graph.nodes[last].shape)) or "scalar"

    def labels(self, child: Subgraph | int, *, shapes: bool = False, backward: bool = False) -> BoxLabels:
        """Return the texts of a node, or of a closed group."""
        order, shape = self.order(child, backward=backward), self.shape(child) if shapes else ""
        lines = [" · ".join(filter(None, (order, shape)))]
        if isinstance(child, int):
            node = self.graph.nodes[child]
            inside, name, style = self.function(node), self.names[child], str(node.kind)
            lines += self.formulas[child] if backward else ()
        else:
            inside, name, style = child.kind, child.label, "group"
            lines += self.group_formulas(child) if backward else ()
        return BoxLabels(inside, name, tuple(filter(None, lines)), style)
