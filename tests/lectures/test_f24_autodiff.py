"""F24 (lecture 3): module-based automatic differentiation, and computation graphs."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.explain.graph.graph import Graph, graph
from weft.models.build import build
from weft.models.config import Bahdanau, Recurrent
from weft.models.presets import llama


def vector(size: int, seed: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(b: Tensor, g_b: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """PyTorch's gradients of the inputs, for g_b of b."""
    return torch.autograd.grad(b, inputs, g_b)


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_f24_sigmoid() -> None:
    """g_a = g_b ⊙ b ⊙ (1 − b)."""
    a, g_b = vector(6, 0).requires_grad_(), vector(6, 1)
    b = torch.sigmoid(a)
    check_close(gradients(b, g_b, a)[0], g_b * b * (1 - b))


def test_f24_linear() -> None:
    """b = ωa: g_ω = g_b aᵀ and g_a = ωᵀ g_b."""
    a, omega, g_b = vector(4, 0).requires_grad_(), vector(12, 1).view(3, 4).requires_grad_(), vector(3, 2)
    g_omega, g_a = gradients(nn.functional.linear(a, omega), g_b, omega, a)
    check_close(g_omega, torch.outer(g_b, a))
    check_close(g_a, omega.T @ g_b)


def test_f24_softmax() -> None:
    """g_a = g_bᵀ (diag(b) − b bᵀ)."""
    a, g_b = vector(5, 0).requires_grad_(), vector(5, 1)
    b = torch.softmax(a, 0)
    check_close(gradients(b, g_b, a)[0], g_b @ (torch.diag(b) - torch.outer(b, b)))


def test_f24_cross_entropy() -> None:
    """b = −aᵀ log â: g_â = −g_b (a ÷ â); after a softmax, PyTorch's cross-entropy."""
    logits, a = vector(5, 0).requires_grad_(), torch.softmax(vector(5, 1), 0)
    guess = torch.softmax(logits, 0)
    b, g_b = -(a @ guess.log()), torch.tensor(1.7, dtype=torch.float64)
    check_close(gradients(b, g_b, guess)[0], -g_b * (a / guess))
    jacobian = torch.diag(guess) - torch.outer(guess, guess)
    whole = gradients(nn.functional.cross_entropy(logits, a), g_b, logits)[0]
    check_close(whole, (-g_b * (a / guess)) @ jacobian)


# ---- computation graphs


class SlideNetwork(nn.Module):
    """One hidden layer and a loss: J = −aᵀ log softmax(β σ(α x))."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(3, 2))
        self.beta = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        z = torch.sigmoid(self.alpha @ x)
        return -(label * torch.softmax(self.beta @ z, 0).log()).sum()


def functions(recorded: Graph, kind: str = "variable") -> list[str]:
    return [node.function for node in recorded.nodes if node.kind == kind]


def test_f24_one_node_per_intermediate_variable() -> None:
    """Nodes and edges of a network small enough to list."""
    recorded = graph(SlideNetwork(), torch.ones(2), torch.ones(4))
    assert functions(recorded) == ["mv", "sigmoid", "mv", "softmax", "log", "mul", "sum", "neg"]
    edges = {(recorded.nodes[a].name, recorded.nodes[b].name) for a, b in recorded.edges}
    v = [node.name for node in recorded.nodes if node.kind == "variable"]
    assert edges == {("alpha", v[0]), ("x", v[0]), ("beta", v[2]), ("label", v[5]), *pairwise(v)}


def test_f24_elman_cell() -> None:
    """Two words through Elman's network: embedding, twice W_ah h + W_ax x + b and tanh, then the output."""
    model = build(Recurrent(vocab_size=9, d_model=4, cell="elman")).eval()
    recorded = graph(model, torch.tensor([[1, 2]]))
    assert functions(recorded).count("tanh") == 2
    assert {n.name for n in recorded.nodes if n.kind == "parameter"} == {n for n, _ in model.named_parameters()}
    steps = [i for i, node in enumerate(recorded.nodes) if node.function == "tanh"]
    assert _reaches(recorded, steps[0], steps[1])
    assert not _reaches(recorded, steps[1], steps[0])


def _reaches(recorded: Graph, start: int, end: int) -> bool:
    seen = {start}
    for a, b in recorded.edges:
        if a in seen:
            seen.add(b)
    return end in seen


def models() -> dict[str, tuple[nn.Module, dict[str, object]]]:
    sizes: dict[str, Any] = {"vocab_size": 9, "d_model": 8}
    source = SimpleNamespace(tokens=torch.tensor([[1, 2, 0]]), mask=torch.tensor([[True, True, False]]))
    return {
        "lstm": (build(Recurrent(**sizes, cell="lstm", layers=2)), {}),
        "gru": (build(Recurrent(**sizes, cell="gru", tied=True)), {}),
        "sigmoid": (build(Recurrent(**sizes, cell="elman", activation="sigmoid")), {}),
        "bahdanau": (build(Bahdanau(**sizes)), {"source": source}),
        "decoder": (build(llama(1, 8, 2, d_ff=16, vocab_size=9, tied=True)), {}),
    }


@pytest.mark.parametrize("name", ["lstm", "gru", "sigmoid", "bahdanau", "decoder"])
def test_f24_any_model_has_a_graph(name: str) -> None:
    """Every parameter and input is a node, edges point forwards, and one node is the result."""
    model, inputs = models()[name]
    model.eval()
    tokens = torch.tensor([[3, 4]])
    before = model(tokens, **inputs)
    recorded = graph(model, tokens, **inputs)
    assert torch.equal(model(tokens, **inputs), before), "recording changed the model"
    assert {n.name for n in recorded.nodes if n.kind == "parameter"} == {n for n, _ in model.named_parameters()}
    assert "tokens" in {n.name for n in recorded.nodes if n.kind == "input"}
    assert all(a < b for a, b in recorded.edges)
    assert {a for a, _ in recorded.edges} == set(range(len(recorded.nodes) - 1)), "only the last has no edge"
    assert len(functions(recorded)) > 5


def test_f24_a_tied_table_is_one_node_and_views_have_no_node() -> None:
    recorded = graph(models()["gru"][0].eval(), torch.tensor([[3, 4]]))
    (table,) = [i for i, node in enumerate(recorded.nodes) if node.name == "embedding.weight"]
    used = [recorded.nodes[b].function for a, b in recorded.edges if a == table]
    assert used == ["embedding", "linear"]
    assert not {"view", "transpose", "t", "clone"} & set(functions(recorded))
