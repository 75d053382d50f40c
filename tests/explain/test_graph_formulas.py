"""Each gradient's formula equals autograd's in float64, and every operation of weft's models has one."""

import math
import string
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.explain.graph.formulas import LECTURE, MODULES, RULES, GradientRule
from weft.explain.graph.graph import graph
from weft.explain.graph.labels import LabelledGraph
from weft.explain.graph.names import variable_names
from weft.explain.graph.picture import mlp
from weft.explain.reading import SourceTokens
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
    "cross-entropy": {"p": X.softmax(-1), "t": torch.tensor([4, 0, 2])},
    "nll_loss": {"x": X, "t": torch.tensor([4, 0, 2])},
    "mse_loss": {"x": X, "t": real(3, 5, seed=1)},
    "log": {"x": X.abs() + 0.1},
    "sqrt": {"x": X.abs() + 0.1},
    "rsqrt": {"x": X.abs() + 0.1},
    "amax": {"x": torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]], dtype=torch.float64)},
}
# PyTorch's function of a rule, where the rule's own is written out.
FRAMEWORK: dict[str, Any] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (5,), w, b),
    "rms_norm": lambda x, w: F.rms_norm(x, (5,), w, 1e-6),
    "embedding": lambda W, i: F.embedding(i, W),
}
FRAMEWORK |= {"linear": F.linear, "attention": F.scaled_dot_product_attention}
FRAMEWORK |= {"addmm": torch.addmm, "baddbmm": torch.baddbmm}


# ---- the formulas as code


def density(x: Tensor) -> Tensor:
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu_tanh_slope(x: Tensor) -> Tensor:
    t = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return (1 + t) / 2 + x / 2 * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


def standardised(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x − μ)/σ and σ."""
    sigma = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return (x - x.mean(-1, keepdim=True)) / sigma, sigma


def layer_norm_x(g: Tensor, x: Tensor, w: Tensor, **_: Tensor) -> Tensor:
    (u, sigma), h = standardised(x), g * w
    return (h - h.mean(-1, keepdim=True) - u * (h * u).mean(-1, keepdim=True)) / sigma


def rms(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rms_norm_x(g: Tensor, x: Tensor, w: Tensor, **_: Tensor) -> Tensor:
    u, h = x / rms(x), g * w
    return (h - u * (h * u).mean(-1, keepdim=True)) / rms(x)


def scatter(g: Tensor, x: Tensor, i: Tensor) -> Tensor:
    return torch.zeros_like(x).index_put((i,), g, accumulate=True)


def one_hot(x: Tensor, t: Tensor) -> Tensor:
    return F.one_hot(t, x.shape[-1]).to(x)


def scores(Q: Tensor, K: Tensor) -> Tensor:
    return torch.softmax(Q @ K.mT / math.sqrt(Q.shape[-1]), -1)


def scores_back(g: Tensor, Q: Tensor, K: Tensor, V: Tensor, **_: Tensor) -> Tensor:
    P, passed = scores(Q, K), g @ V.mT
    return P * (passed - (passed * P).sum(-1, keepdim=True)) / math.sqrt(Q.shape[-1])


def ties(x: Tensor, y: Tensor) -> Tensor:
    """1 at the maximum of each row; ties share it."""
    hit = (x == y.unsqueeze(-1)).to(x)
    return hit / hit.sum(-1, keepdim=True)


PRODUCT = {"A": lambda g, B, **_: g @ B.mT, "B": lambda g, A, **_: A.mT @ g}
ADDED = {**PRODUCT, "C": lambda g, **_: g}
# by rule: the function, and the gradient of each operand, before it is summed over the copies of a broadcast operand
COMPUTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (lambda x, W, b: x @ W.T + b, {
        "x": lambda g, W, **_: g @ W,
        "W": lambda g, x, **_: g.flatten(0, -2).T @ x.flatten(0, -2),
        "b": lambda g, **_: g.flatten(0, -2).sum(0),
    }),
    "matmul": (lambda A, B: A @ B, PRODUCT),
    "addmm": (lambda C, A, B: C + A @ B, ADDED),
    "baddbmm": (lambda C, A, B: C + A @ B, ADDED),
    "mv": (lambda W, x: W @ x, {"W": lambda g, x, **_: torch.outer(g, x), "x": lambda g, W, **_: W.T @ g}),
    "dot": (lambda a, b: a @ b, {"a": lambda g, b, **_: g * b, "b": lambda g, a, **_: g * a}),
    "embedding": (lambda W, i: W[i], {"W": lambda g, W, i, **_: scatter(g, W, i)}),
    "attention": (lambda Q, K, V: scores(Q, K) @ V, {
        "Q": lambda g, K, **of: scores_back(g, K=K, **of) @ K,
        "K": lambda g, Q, **of: scores_back(g, Q=Q, **of).mT @ Q,
        "V": lambda g, Q, K, **_: scores(Q, K).mT @ g,
    }),
    "add": (lambda a, b: a + b, {"a": lambda g, **_: g, "b": lambda g, **_: g}),
    "sub": (lambda a, b: a - b, {"a": lambda g, **_: g, "b": lambda g, **_: -g}),
    "mul": (lambda a, b: a * b, {"a": lambda g, b, **_: g * b, "b": lambda g, a, **_: g * a}),
    "div": (lambda a, b: a / b, {"a": lambda g, b, **_: g / b, "b": lambda g, y, b, **_: -g * y / b}),
    "pow": (lambda a, b: a**b, {"a": lambda g, a, b, **_: g * b * a ** (b - 1)}),
    "sum": (lambda x: x.sum(), {"x": lambda g, x, **_: g.expand_as(x)}),
    "mean": (lambda x: x.mean(-1, keepdim=True), {"x": lambda g, x, **_: (g / x.shape[-1]).expand_as(x)}),
    "amax": (lambda x: x.amax(-1), {"x": lambda g, x, y: g.unsqueeze(-1) * ties(x, y)}),
    "where": (torch.where, {"a": lambda g, c, **_: g * c, "b": lambda g, c, **_: g * ~c}),
    "masked_fill": (lambda x, m: x.masked_fill(m, -9.0), {"x": lambda g, m, **_: g * ~m}),
    "index": (lambda x, i: x[i], {"x": lambda g, x, i, **_: scatter(g, x, i)}),
    "cat": (lambda a, b: torch.cat([a, b], -1), {
        "a": lambda g, a, **_: g[..., : a.shape[-1]],
        "b": lambda g, a, **_: g[..., a.shape[-1] :],
    }),
    "stack": (lambda a, b: torch.stack([a, b]), {"a": lambda g, **_: g[0], "b": lambda g, **_: g[1]}),
    "sigmoid": (torch.sigmoid, {"x": lambda g, y, **_: g * y * (1 - y)}),
    "tanh": (torch.tanh, {"x": lambda g, y, **_: g * (1 - y * y)}),
    "relu": (torch.relu, {"x": lambda g, x, **_: g * (x > 0)}),
    "gelu": (F.gelu, {"x": lambda g, x, **_: g * (torch.special.ndtr(x) + x * density(x))}),
    "gelu-tanh": (lambda x: F.gelu(x, approximate="tanh"), {"x": lambda g, x, **_: g * gelu_tanh_slope(x)}),
    "silu": (F.silu, {"x": lambda g, x, **_: g * x.sigmoid() * (1 + x * (1 - x.sigmoid()))}),
    "neg": (torch.neg, {"x": lambda g, **_: -g}),
    "exp": (torch.exp, {"x": lambda g, y, **_: g * y}),
    "log": (torch.log, {"x": lambda g, x, **_: g / x}),
    "sqrt": (torch.sqrt, {"x": lambda g, y, **_: g / (2 * y)}),
    "rsqrt": (torch.rsqrt, {"x": lambda g, y, **_: -g * y**3 / 2}),
    "reciprocal": (torch.reciprocal, {"x": lambda g, y, **_: -g * y * y}),
    "sin": (torch.sin, {"x": lambda g, x, **_: g * torch.cos(x)}),
    "cos": (torch.cos, {"x": lambda g, x, **_: -g * torch.sin(x)}),
    "softmax": (lambda x: x.softmax(-1), {"x": lambda g, y, **_: y * (g - (g * y).sum(-1, keepdim=True))}),
    "log_softmax": (lambda x: x.log_softmax(-1), {"x": lambda g, y, **_: g - y.exp() * g.sum(-1, keepdim=True)}),
    "layer_norm": (lambda x, w, b: w * standardised(x)[0] + b, {
        "x": layer_norm_x,
        "w": lambda g, x, **_: (g * standardised(x)[0]).flatten(0, -2).sum(0),
        "b": lambda g, **_: g.flatten(0, -2).sum(0),
    }),
    "rms_norm": (lambda x, w: w * x / rms(x), {
        "x": rms_norm_x, "w": lambda g, x, **_: (g * x / rms(x)).flatten(0, -2).sum(0),
    }),
    "cross-entropy": (
        lambda p, t: -p.log().gather(-1, t[:, None])[:, 0],
        {"p": lambda g, p, t, **_: -g[:, None] / p * one_hot(p, t)},
    ),
    "split": (lambda x: x[:, 1:3], {"x": lambda g, **_: F.pad(g, (1, 2))}),
    "unbind": (lambda x: x[1], {"x": lambda g, **_: torch.stack((g * 0, g, g * 0))}),
    "cross_entropy": (F.cross_entropy, {"x": lambda g, x, t, **_: g * (x.softmax(-1) - one_hot(x, t)) / len(x)}),
    "nll_loss": (F.nll_loss, {"x": lambda g, x, t, **_: -g * one_hot(x, t) / len(x)}),
    "mse_loss": (F.mse_loss, {"x": lambda g, x, t, **_: 2 * g * (x - t) / x.numel()}),
}  # fmt: skip
# the lecture's modules
TAUGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "Linear": (lambda ω, a: ω @ a, {"ω": lambda g, a, **_: torch.outer(g, a), "a": lambda g, ω, **_: ω.T @ g}),
    "Sigmoid": (torch.sigmoid, {"a": lambda g, y, **_: g * y * (1 - y)}),
    "Softmax": (lambda a: a.softmax(0), {"a": lambda g, y, **_: g @ (torch.diag(y) - torch.outer(y, y))}),
    "CrossEntropy": (lambda a, â: -(a @ â.log()), {"â": lambda g, a, â, **_: -g * (a / â)}),
}


Computed = tuple[Any, dict[str, Any]]


def check(rule: GradientRule, computed: Computed, operands: dict[str, Any], function: Any = None) -> None:
    formula, gradients = computed
    assert gradients.keys() == rule.gradients.keys()
    inputs = {k: v.clone().requires_grad_(k in gradients) if isinstance(v, Tensor) else v for k, v in operands.items()}
    y = (function or formula)(*inputs.values())
    torch.testing.assert_close(formula(*operands.values()), y.detach(), atol=1e-12, rtol=1e-12)
    g = real(*y.shape, seed=7)
    expected = torch.autograd.grad(y, [inputs[k] for k in gradients], g)
    for (operand, compute), by_autograd in zip(gradients.items(), expected, strict=True):
        got = compute(g=g, y=y.detach(), **operands).sum_to_size(operands[operand].shape)
        torch.testing.assert_close(got, by_autograd, atol=1e-12, rtol=1e-12, msg=f"gradient by {operand}")


@pytest.mark.parametrize("name", RULES)
def test_a_formula_is_the_gradient(name: str) -> None:
    operands = OPERANDS.get(name, {"x": X})
    assert list(operands) == list(RULES[name].operands)
    check(RULES[name], COMPUTED[name], operands, FRAMEWORK.get(name))


@pytest.mark.parametrize("name", LECTURE)
def test_f24_the_lectures_formulas(name: str) -> None:
    examples: dict[str, tuple[dict[str, Tensor], list[str]]] = {
        "Linear": ({"ω": real(3, 4), "a": real(4)}, ["g_ω = g_b aᵀ", "g_a = ωᵀ g_b"]),
        "Sigmoid": ({"a": real(4)}, ["g_a = g_b ⊙ b ⊙ (1 − b)"]),
        "Softmax": ({"a": real(4)}, ["g_a = g_bᵀ (diag(b) − b bᵀ)"]),
        "CrossEntropy": ({"a": real(4).softmax(0), "â": real(4, seed=1).softmax(0)}, ["g_â = −g_b (a ÷ â)"]),
    }
    operands, texts = examples[name]
    check(LECTURE[name], TAUGHT[name], operands)
    assert [LECTURE[name].gradient(of, {"y": "b"}) for of in LECTURE[name].gradients] == texts


def test_every_text_names_only_operands() -> None:
    for rule in [*RULES.values(), *LECTURE.values()]:
        for text in (rule.forward, *rule.gradients.values()):
            assert {field for _, field, _, _ in string.Formatter().parse(text) if field} <= {*rule.operands, "y", "g"}
        assert set(rule.gradients) <= set(rule.operands)
    assert set(MODULES.values()) <= set(RULES)


def test_f24_the_graph_in_reverse_order_gives_the_gradients() -> None:
    """Following the lecture's formulas back through the lecture's network is what autograd does."""
    nodes = mlp().nodes
    values: list[Tensor] = []
    for node in nodes:
        operands = [values[source] for _, source in node.arguments]
        value = TAUGHT[node.function][0](*operands) if operands else real(*node.shape)
        values.append(torch.softmax(value, 0) if node.name == "y" else value)
        assert tuple(value.shape) == node.shape
    gradients: list[Tensor | None] = [None] * len(nodes)
    gradients[-1] = torch.ones_like(values[-1])
    for i, node in reversed(list(enumerate(nodes))):
        named = {letter: values[source] for letter, source in node.arguments}
        for letter, source in node.arguments:
            if letter in LECTURE[node.function].gradients:
                passed = TAUGHT[node.function][1][letter](g=gradients[i], y=values[i], **named)
                assert gradients[source] is None  # nothing in this network is used twice
                gradients[source] = passed
    by_name = dict(zip((node.name for node in nodes), values, strict=True))
    leaves = {name: by_name[name].clone().requires_grad_() for name in ("x", "α", "β")}
    J = -(by_name["y"] @ torch.softmax(leaves["β"] @ torch.sigmoid(leaves["α"] @ leaves["x"]), 0).log())
    torch.testing.assert_close(by_name["J"], J.detach())
    found = dict(zip(by_name, gradients, strict=True))
    assert found["y"] is None
    for name, expected in zip(leaves, torch.autograd.grad(J, list(leaves.values())), strict=True):
        torch.testing.assert_close(found[name], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "name", ["gpt-tiny", "llama-tiny", "bert-tiny", "vaswani-tiny", "bahdanau-tiny", "elman", "lstm", "gru"]
)
def test_all_operations_of_wefts_models_have_a_formula(name: str) -> None:
    source = {"source": SourceTokens(torch.ones(1, 2).long())} if name.startswith(("vaswani", "bahdanau")) else {}
    recorded = graph(build(preset(name)).eval(), torch.ones(1, 3).long(), **source)
    formulas = LabelledGraph(recorded, variable_names(recorded)).formulas
    assert not {node.function for node, f in zip(recorded.nodes, formulas, strict=True) if "no formula" in "".join(f)}


def test_an_operation_without_a_formula_says_so() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.det(self.w * x)

    recorded = graph(Odd(), torch.ones(3, 3))
    formulas = LabelledGraph(recorded, variable_names(recorded)).formulas
    by_function = {node.function: lines for node, lines in zip(recorded.nodes, formulas, strict=True)}
    assert by_function["mul"] == ("g_a = g_y ⊙ b", "g_b = g_y ⊙ a")
    assert by_function["linalg_det"] == ("no formula in the table",)
