"""The lecture's own network, with the lecture's four modules: one hidden layer, a softmax, and the loss."""

from weft.explain.graph.formulas import Rule
from weft.explain.graph.graph import Call, Graph, Node

# The four modules of the lecture, of vectors that are columns: a the input, b the result, ω the parameters.
LECTURE: dict[str, Rule] = {
    "Linear": Rule("ωa", "{ω} {a}", {"ω": "{g} {a}ᵀ", "a": "{ω}ᵀ {g}"}),
    "Sigmoid": Rule("a", "σ({a})", {"a": "{g} ⊙ {y} ⊙ (1 − {y})"}),
    "Softmax": Rule("a", "softmax({a})", {"a": "{g}ᵀ (diag({y}) − {y} {y}ᵀ)"}),
    "CrossEntropy": Rule("aâ", "−{a}ᵀ log {â}", {"â": "−{g} ({a} ÷ {â})"}),
}
INPUTS, HIDDEN, OUTPUTS = 3, 4, 2


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
