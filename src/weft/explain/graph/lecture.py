"""The lecture's own network, with the lecture's four modules: one hidden layer, a softmax, and the loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.explain.graph.formulas import Rule
from weft.explain.graph.graph import Call, Graph, Kind, Node

# The four modules of the lecture, of vectors that are columns: a the input, b the result, ω the parameters.
LECTURE: dict[str, Rule] = {
    "Linear": Rule(
        "ωa",
        "{ω} {a}",
        lambda ω, a: ω @ a,
        {
            "ω": ("{g} {a}ᵀ", lambda g, a, **_: torch.outer(g, a)),
            "a": ("{ω}ᵀ {g}", lambda g, ω, **_: ω.T @ g),
        },
    ),
    "Sigmoid": Rule("a", "σ({a})", torch.sigmoid, {"a": ("{g} ⊙ {y} ⊙ (1 − {y})", lambda g, y, **_: g * y * (1 - y))}),
    "Softmax": Rule(
        "a",
        "softmax({a})",
        lambda a: a.softmax(0),
        {
            "a": (
                "{g}ᵀ (diag({y}) − {y} {y}ᵀ)",
                lambda g, y, **_: g @ (torch.diag(y) - torch.outer(y, y)),
            )
        },
    ),
    "CrossEntropy": Rule(
        "aâ",
        "−{a}ᵀ log {â}",
        lambda a, â: -(a @ â.log()),
        {"â": ("−{g} ({a} ÷ {â})", lambda g, a, â, **_: -g * (a / â))},
    ),
}


class Tape:
    """Variables and the modules that computed them, in their order: what a run of the algorithm leaves behind."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.names: list[str] = []
        self.values: list[Tensor] = []

    def given(self, kind: Kind, what: str, name: str, value: Tensor) -> int:
        """A parameter, an input or a constant."""
        return self._add(Node(kind, what, name, shape=tuple(value.shape)), name, value)

    def compute(self, module: str, name: str, *operands: int) -> int:
        """What a module computes from other variables."""
        value = LECTURE[module].function(*(self.values[i] for i in operands))
        arguments = tuple(zip(LECTURE[module].operands, operands, strict=True))
        return self._add(Node("variable", module, name, shape=tuple(value.shape), arguments=arguments), name, value)

    def _add(self, node: Node, name: str, value: Tensor) -> int:
        self.nodes.append(node)
        self.names.append(name)
        self.values.append(value)
        return len(self.nodes) - 1

    def graph(self) -> Graph:
        """The computation graph."""
        edges = [(source, place) for place, node in enumerate(self.nodes) for _, source in node.arguments]
        return Graph(self.nodes, edges, [Call("", "network", 0)])

    def backward(self) -> list[Tensor | None]:
        """The gradient of the last variable by each other: the graph in reverse topological order, by the formulas."""
        gradients: list[Tensor | None] = [None] * len(self.nodes)
        gradients[-1] = torch.ones_like(self.values[-1])
        for place in range(len(self.nodes) - 1, -1, -1):
            node, g = self.nodes[place], gradients[place]
            if g is None or not node.arguments:
                continue
            operands = {letter: self.values[source] for letter, source in node.arguments}
            for letter, source in node.arguments:
                if letter in LECTURE[node.function].gradients:
                    passed = LECTURE[node.function].gradients[letter][1](g=g, y=self.values[place], **operands)
                    old = gradients[source]
                    gradients[source] = passed if old is None else old + passed
        return gradients


def mlp(sizes: Sequence[int] = (3, 4, 2)) -> Tape:
    """x → Linear(α) → a → Sigmoid → z → Linear(β) → b → Softmax → ŷ → CrossEntropy with y → J (lecture 3)."""
    rng = torch.Generator().manual_seed(0)
    inputs, hidden, outputs = sizes
    tape = Tape()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    x = tape.given("input", "feature vector", "x", draw(inputs))
    alpha = tape.given("parameter", "parameter", "α", draw(hidden, inputs))
    a = tape.compute("Linear", "a", alpha, x)
    z = tape.compute("Sigmoid", "z", a)
    beta = tape.given("parameter", "parameter", "β", draw(outputs, hidden))
    b = tape.compute("Linear", "b", beta, z)
    guess = tape.compute("Softmax", "ŷ", b)
    y = tape.given("constant", "true label", "y", torch.eye(outputs, dtype=torch.float64)[0])
    tape.compute("CrossEntropy", "J", y, guess)
    return tape
