"""Each gradient's formula computes what autograd computes, at float64; and every operation of weft's models has one."""

import string
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.explain.graph.formulas import MODULES, RULES, Rule, gradient
from weft.explain.graph.graph import graph
from weft.explain.graph.lecture import LECTURE, mlp
from weft.explain.graph.scene import Written, names
from weft.models.build import build
from weft.models.presets import preset


def real(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


X = real(3, 5)
MASK = X > 0
OPERANDS: dict[str, dict[str, Any]] = {
    "linear": {"x": real(2, 3, 4), "W": real(5, 4), "b": real(5)},
    "matmul": {"A": real(2, 3, 4), "B": real(2, 4, 5)},
    "addmm": {"C": real(5), "A": real(3, 4), "B": real(4, 5)},
    "baddbmm": {"C": real(2, 1, 5), "A": real(2, 3, 4), "B": real(2, 4, 5)},
    "mv": {"W": real(3, 4), "x": real(4)},
    "dot": {"a": real(4), "b": real(4, seed=1)},
    "embedding": {"W": real(6, 3), "i": torch.tensor([[1, 4], [1, 0]])},
    "attention": {"Q": real(2, 3, 4), "K": real(2, 5, 4), "V": real(2, 5, 6)},
    "add": {"a": X, "b": real(1, 5)},
    "sub": {"a": X, "b": real(5)},
    "mul": {"a": X, "b": real(3, 1)},
    "div": {"a": X, "b": real(5)},
    "pow": {"a": X, "b": 3},
    "where": {"c": MASK, "a": X, "b": real(1, 1)},
    "masked_fill": {"x": X, "m": MASK},
    "index": {"x": X, "i": torch.tensor([2, 0, 2])},
    "cat": {"a": X, "b": real(3, 2)},
    "stack": {"a": X, "b": real(3, 5, seed=1)},
    "layer_norm": {"x": real(2, 3, 5), "w": real(5), "b": real(5, seed=1)},
    "rms_norm": {"x": real(2, 3, 5), "w": real(5)},
    "cross_entropy": {"x": X, "t": torch.tensor([4, 0, 2])},
    "nll_loss": {"x": X, "t": torch.tensor([4, 0, 2])},
    "mse_loss": {"x": X, "t": real(3, 5, seed=1)},
    "log": {"x": X.abs() + 0.1},
    "sqrt": {"x": X.abs() + 0.1},
    "rsqrt": {"x": X.abs() + 0.1},
    "amax": {"x": torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]], dtype=torch.float64)},
}
# What PyTorch has as one function, under the name that the recorder gives it.
FRAMEWORK = {
    "linear": lambda x, W, b: F.linear(x, W, b),
    "attention": lambda Q, K, V: F.scaled_dot_product_attention(Q, K, V),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (5,), w, b),
    "rms_norm": lambda x, w: F.rms_norm(x, (5,), w, 1e-6),
    "embedding": lambda W, i: F.embedding(i, W),
    "addmm": torch.addmm,
    "baddbmm": torch.baddbmm,
}


def check(rule: Rule, operands: dict[str, Any], function: Any) -> None:
    wanted = {
        k: v.clone().requires_grad_(k in rule.gradients) if isinstance(v, Tensor) else v for k, v in operands.items()
    }
    y = function(**wanted) if function is rule.function else function(*wanted.values())
    torch.testing.assert_close(rule.function(**operands), y.detach(), atol=1e-12, rtol=1e-12)
    g = real(*y.shape, seed=7)
    expected = torch.autograd.grad(y, [wanted[k] for k in rule.gradients], g)
    for (operand, (_, compute)), by_autograd in zip(rule.gradients.items(), expected, strict=True):
        got = compute(g=g, y=y.detach(), **operands)
        torch.testing.assert_close(got, by_autograd, atol=1e-12, rtol=1e-12, msg=f"gradient by {operand}")


@pytest.mark.parametrize("name", RULES)
def test_a_formula_is_the_gradient(name: str) -> None:
    rule = RULES[name]
    operands = OPERANDS.get(name, {"x": X})
    assert list(operands) == list(rule.operands)
    check(rule, operands, FRAMEWORK.get(name, rule.function))


@pytest.mark.parametrize("name", LECTURE)
def test_f24_the_lectures_formulas(name: str) -> None:
    operands: dict[str, dict[str, Tensor]] = {
        "Linear": {"ω": real(3, 4), "a": real(4)},
        "Sigmoid": {"a": real(4)},
        "Softmax": {"a": real(4)},
        "CrossEntropy": {"a": torch.softmax(real(4), 0), "â": torch.softmax(real(4, seed=1), 0)},
    }
    check(LECTURE[name], operands[name], LECTURE[name].function)
    texts = {of: gradient(LECTURE[name], of, {"y": "b"}) for of in LECTURE[name].gradients}
    assert (
        texts
        == {
            "Linear": {"ω": "g_ω = g_b aᵀ", "a": "g_a = ωᵀ g_b"},
            "Sigmoid": {"a": "g_a = g_b ⊙ b ⊙ (1 − b)"},
            "Softmax": {"a": "g_a = g_bᵀ (diag(b) − b bᵀ)"},
            "CrossEntropy": {"â": "g_â = −g_b (a ÷ â)"},
        }[name]
    )


def test_every_text_names_only_operands() -> None:
    for rule in [*RULES.values(), *LECTURE.values()]:
        for text in (rule.forward, *(text for text, _ in rule.gradients.values())):
            fields = {field for _, field, _, _ in string.Formatter().parse(text) if field}
            assert fields <= {*rule.operands, "y", "g"}
        assert set(rule.gradients) <= set(rule.operands)
    assert set(MODULES.values()) <= set(RULES)


def test_f24_the_graph_in_reverse_order_gives_the_gradients() -> None:
    """Following the lecture's formulas back through the lecture's network is what autograd does."""
    tape = mlp()
    values = dict(zip(tape.names, tape.values, strict=True))
    given = {name: values[name].clone().requires_grad_() for name in ("x", "α", "β")}
    z = torch.sigmoid(given["α"] @ given["x"])
    J = -(values["y"] @ torch.softmax(given["β"] @ z, 0).log())
    torch.testing.assert_close(values["J"], J.detach())
    found = dict(zip(tape.names, tape.backward(), strict=True))
    assert found["y"] is None
    for (name, tensor), expected in zip(given.items(), torch.autograd.grad(J, list(given.values())), strict=True):
        assert tensor.shape == expected.shape
        torch.testing.assert_close(found[name], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "name", ["gpt-tiny", "llama-tiny", "bert-tiny", "vaswani-tiny", "bahdanau-tiny", "elman", "lstm", "gru"]
)
def test_all_operations_of_wefts_models_have_a_formula(name: str) -> None:
    model = build(preset(name)).eval()
    two = name in ("vaswani-tiny", "bahdanau-tiny")
    source = {"source": SimpleNamespace(tokens=torch.ones(1, 2).long(), mask=None)} if two else {}
    recorded = graph(model, torch.ones(1, 3).long(), **source)
    lacking = {
        node.function
        for node, lines in zip(recorded.nodes, Written(recorded, names(recorded)).formulas(), strict=True)
        if "no formula in the table" in lines
    }
    assert not lacking


def test_an_operation_that_the_table_lacks_says_so() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.det(self.w * x)

    recorded = graph(Odd(), torch.ones(3, 3))
    formulas = Written(recorded, names(recorded)).formulas()
    by_function = {node.function: lines for node, lines in zip(recorded.nodes, formulas, strict=True)}
    assert by_function["mul"] == ("g_a = g_y ⊙ b", "g_b = g_y ⊙ a")
    assert by_function["linalg_det"] == ("no formula in the table",)
