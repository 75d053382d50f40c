"""Lecture 3: module-based automatic differentiation, on a computation graph of scalars. Standard library only.

    python lectures/backprop.py            the lecture's network with one hidden layer, node by node; then XOR
    python lectures/backprop.py data.csv   your own table: rows of numbers, with the class (0, 1, …) in the last column

Figure: after 1,000 epochs the network gets 4 of 4 cases of XOR right, with a mean cross-entropy of 0.004.
"""

import math
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

# ---- The computation graph: "one node per intermediate variable in the algorithm"


class Node:
    """A scalar b, computed by `module` from the nodes a in `edges`; `backward` sets g to g_b = ∂J/∂b."""

    def __init__(self, value: float, module: "Module | None" = None, edges: "tuple[Node, ...]" = ()) -> None:
        self.value, self.module, self.edges = value, module, edges
        self.g = 0.0

    def __add__(self, other: "Node") -> "Node":
        return add(self, other)

    def __mul__(self, other: "Node") -> "Node":
        return multiply(self, other)

    def __truediv__(self, other: "Node") -> "Node":
        return divide(self, other)


class Module(NamedTuple):
    """forward(a …) gives b; backward(g_b, b, a …) gives g_a = g_b · ∂b/∂a of each input: one step of the chain rule."""

    formula: str
    forward: Callable[..., float]
    backward: Callable[..., tuple[float, ...]]

    def __call__(self, *edges: Node) -> Node:
        """Add a node to the graph: "allow the control flow to dictate the creation of the computation graph"."""
        return Node(self.forward(*(node.value for node in edges)), self, edges)


add = Module("{} + {}", lambda a, c: a + c, lambda g_b, b, a, c: (g_b, g_b))
multiply = Module("{} · {}", lambda a, c: a * c, lambda g_b, b, a, c: (g_b * c, g_b * a))
divide = Module("{} / {}", lambda a, c: a / c, lambda g_b, b, a, c: (g_b / c, -g_b * b / c))
exp = Module("exp {}", math.exp, lambda g_b, b, a: (g_b * b,))
log = Module("log {}", math.log, lambda g_b, b, a: (g_b / a,))
sigmoid = Module("σ({})", lambda a: (1 + math.tanh(a / 2)) / 2, lambda g_b, b, a: (g_b * b * (1 - b),))


def topological_order(J: Node) -> list[Node]:
    """All nodes that J depends on, each after its inputs."""
    order: dict[Node, None] = {}
    stack = [(J, iter(J.edges))]
    while stack:
        node, edges = stack[-1]
        before = next(edges, None)
        if before is None:
            order[node] = None
            stack.pop()
        elif before not in order:
            stack.append((before, iter(before.edges)))
    return list(order)


def backward(J: Node) -> None:
    """Set g = ∂J/∂b of every node b: "just follow the computation graph in reverse topological order"."""
    order = topological_order(J)
    for node in order:
        node.g = 0.0
    J.g = 1.0
    for node in reversed(order):
        if node.module is not None:
            gradients = node.module.backward(node.g, node.value, *(edge.value for edge in node.edges))
            for edge, g_a in zip(node.edges, gradients, strict=True):
                edge.g += g_a  # a node that is used several times sums the gradients of its uses


# ---- The slide's vector modules, composed of scalar ones: their backward passes need no code

Vector = list[Node]


def total(nodes: Iterable[Node]) -> Node:
    first, *rest = nodes
    for node in rest:
        first = first + node
    return first


def linear(a: Vector, omega: list[Vector]) -> Vector:
    """b = ω a."""
    return [total(w * a_j for w, a_j in zip(row, a, strict=True)) for row in omega]


def softmax(a: Vector) -> Vector:
    """b_k = exp a_k / Σ_j exp a_j."""
    e = [exp(a_k) for a_k in a]
    Z = total(e)
    return [e_k / Z for e_k in e]


def cross_entropy(a: Vector, a_hat: Vector) -> Node:
    """b = −aᵀ log â."""
    return Node(-1.0) * total(a_k * log(a_hat_k) for a_k, a_hat_k in zip(a, a_hat, strict=True))


# ---- The lecture's example: a network with one hidden layer, trained by stochastic gradient descent


class Layers(NamedTuple):
    """o = object(x, a, z, b, ŷ, J): everything that the forward pass computes."""

    x: Vector
    a: Vector
    z: Vector
    b: Vector
    y_hat: Vector
    J: Node


def nn_forward(features: list[float], label: int, alpha: list[Vector], beta: list[Vector]) -> Layers:
    """NNForward(x, y, α, β). The intercepts are folded in: x_0 = 1 and z_0 = 1."""
    x = [Node(1.0), *map(Node, features)]
    y = [Node(float(k == label)) for k in range(len(beta))]
    a = linear(x, alpha)
    z = [Node(1.0), *(sigmoid(a_j) for a_j in a)]
    b = linear(z, beta)
    y_hat = softmax(b)
    return Layers(x, a, z, b, y_hat, cross_entropy(y, y_hat))


Data = list[tuple[list[float], int]]


def sgd(data: Data, hidden: int, epochs: int, gamma: float) -> None:
    """Update α ← α − γ g_α and β ← β − γ g_β after every example; print the mean J and the number of correct ones."""
    rng = random.Random(1)
    alpha = [[Node(rng.uniform(-1, 1)) for _ in range(1 + len(data[0][0]))] for _ in range(hidden)]
    beta = [[Node(rng.uniform(-1, 1)) for _ in range(1 + hidden)] for _ in range(1 + max(y for _, y in data))]
    for epoch in range(1, epochs + 1):
        J, right = 0.0, 0
        for x, y in rng.sample(data, len(data)):
            o = nn_forward(x, y, alpha, beta)
            backward(o.J)
            for parameter in (node for row in alpha + beta for node in row):
                parameter.value -= gamma * parameter.g
            J += o.J.value / len(data)
            right += max(range(len(beta)), key=lambda k: o.y_hat[k].value) == y
        if epoch * 10 % epochs == 0:
            print(f"epoch {epoch:4}: mean cross-entropy {J:.3f}, {right} of {len(data)} right")


def show_graph(J: Node, names: dict[Node, str]) -> None:
    """Print every node of the graph in the order of computation, with its value and gradient."""
    backward(J)
    for number, node in enumerate(topological_order(J)):
        name = names.setdefault(node, f"v{number}")
        formula = node.module.formula.format(*map(names.get, node.edges)) + " =" if node.module else ""
        print(f"{name:>3} = {formula:11} {node.value:7.4f}     ∂J/∂{name:3} = {node.g:7.4f}")


def read_table(path: str) -> Data:
    """Read rows of numbers; standardise each column to mean 0 and deviation 1."""
    rows = [[float(cell) for cell in line.split(",")] for line in Path(path).read_text().split("\n") if line.strip()]
    columns = list(zip(*(row[:-1] for row in rows), strict=True))
    labels = [int(row[-1]) for row in rows]
    if not columns or min(labels) < 0:
        raise ValueError("expected rows of numbers, with the class 0, 1, … in the last column")
    means = [sum(column) / len(column) for column in columns]
    deviations = [max(math.dist(c, [m] * len(c)) / len(c) ** 0.5, 1e-9) for c, m in zip(columns, means, strict=True)]
    scaled = [[(v - m) / d for v, m, d in zip(row, means, deviations, strict=False)] for row in rows]
    return list(zip(scaled, labels, strict=True))


def main() -> None:
    if len(sys.argv) > 1:
        try:
            data = read_table(sys.argv[1])
        except (OSError, ValueError) as error:
            print(f"backprop.py: {sys.argv[1]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
            sys.exit(2)
        sgd(data, hidden=8, epochs=50, gamma=0.1)
        return
    alpha = [[Node(0.1), Node(0.3), Node(-0.2)]]
    beta = [[Node(0.0), Node(0.5)], [Node(0.2), Node(-0.4)]]
    o = nn_forward([1.0, 2.0], 1, alpha, beta)
    named = {"α": alpha[0], "β0": beta[0], "β1": beta[1], "x": o.x, "a": o.a, "z": o.z, "b": o.b, "ŷ": o.y_hat}
    show_graph(o.J, {o.J: "J"} | {node: f"{name}{i}" for name, nodes in named.items() for i, node in enumerate(nodes)})
    sgd([([0.0, 0.0], 0), ([0.0, 1.0], 1), ([1.0, 0.0], 1), ([1.0, 1.0], 0)], hidden=4, epochs=1000, gamma=0.5)


if __name__ == "__main__":
    main()
