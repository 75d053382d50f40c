"""The gradient of each operation by its operands, as a formula for reading and as a function that computes it.

g is the gradient of the loss by the operation's result y; the formula of an operand says what is passed back to it.
Where an operand was broadcast, its gradient is summed over the copies. Products of rows: x (…, n), W (m, n).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Compute = Callable[..., Tensor]


class Rule(NamedTuple):
    """y = `forward`, the same as a function of the operands, and by operand the gradient: what is read and computed.

    `operands` are the letters of the function's tensors in their order, of which a call may leave out the last; what
    comes after them is like the last. In the texts {x} stands for an operand, {y} for the result, {g} for its gradient.
    """

    operands: str
    forward: str
    function: Compute
    gradients: Mapping[str, tuple[str, Compute]]


def _like(g: Tensor, x: Tensor) -> Tensor:
    """g summed over what was broadcast from x."""
    g = g.sum(dim=tuple(range(g.dim() - x.dim()))) if g.dim() > x.dim() else g
    stretched = tuple(d for d in range(x.dim()) if x.shape[d] == 1 and g.shape[d] != 1)
    return g.sum(dim=stretched, keepdim=True) if stretched else g


def _each(text: str, forward: Compute, gradient: str, compute: Compute) -> Rule:
    """A function of one tensor, element by element."""
    return Rule("x", text, forward, {"x": (gradient, compute)})


def _bell(x: Tensor) -> Tensor:
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _below(x: Tensor) -> Tensor:
    return (1 + torch.erf(x / math.sqrt(2))) / 2


def _inner(x: Tensor) -> Tensor:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    t = torch.tanh(_inner(x))
    return (1 + t) / 2 + x / 2 * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


def _normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x − μ)/σ and σ."""
    sigma = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return (x - x.mean(-1, keepdim=True)) / sigma, sigma


def _layer_norm_x(g: Tensor, x: Tensor, w: Tensor, **_: Tensor) -> Tensor:
    u, sigma = _normed(x)
    h = g * w
    return (h - h.mean(-1, keepdim=True) - u * (h * u).mean(-1, keepdim=True)) / sigma


def _rms(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _rms_norm_x(g: Tensor, x: Tensor, w: Tensor, **_: Tensor) -> Tensor:
    u, h = x / _rms(x), g * w
    return (h - u * (h * u).mean(-1, keepdim=True)) / _rms(x)


def _columns(g: Tensor) -> Tensor:
    return g.sum(dim=tuple(range(g.dim() - 1)))


def _scatter(g: Tensor, W: Tensor, i: Tensor, **_: Tensor) -> Tensor:
    return torch.zeros_like(W).index_put((i,), g, accumulate=True)


def _one_hot(x: Tensor, t: Tensor) -> Tensor:
    return F.one_hot(t, x.shape[-1]).to(x)


def _scores(Q: Tensor, K: Tensor) -> Tensor:
    return torch.softmax(Q @ K.mT / math.sqrt(Q.shape[-1]), -1)


def _scores_back(g: Tensor, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    P, passed = _scores(Q, K), g @ V.mT
    return P * (passed - (passed * P).sum(-1, keepdim=True)) / math.sqrt(Q.shape[-1])


def _relu_gate(g: Tensor, x: Tensor, **_: Tensor) -> Tensor:
    return g * (x > 0)


def _ties(x: Tensor, y: Tensor) -> Tensor:
    """1 at the greatest of each row; equals share it."""
    hit = (x == y.unsqueeze(-1)).to(x)
    return hit / hit.sum(-1, keepdim=True)


def _matrix_rules() -> dict[str, Rule]:
    flat = {"x": ("{g} {W}", lambda g, W, **_: g @ W)}
    product = {
        "A": ("{g} {B}ᵀ", lambda g, B, **_: g @ B.mT),
        "B": ("{A}ᵀ {g}", lambda g, A, **_: A.mT @ g),
    }
    added = {"C": ("{g}", lambda g, C, **_: _like(g, C))}
    vector = {
        "W": ("{g} {x}ᵀ", lambda g, x, **_: torch.outer(g, x)),
        "x": ("{W}ᵀ {g}", lambda g, W, **_: W.T @ g),
    }
    return {
        "linear": Rule(
            "xWb",
            "{x} {W}ᵀ + {b}",
            lambda x, W, b: x @ W.T + b,
            flat
            | {
                "W": ("{g}ᵀ {x}", lambda g, x, **_: g.flatten(0, -2).T @ x.flatten(0, -2)),
                "b": ("Σ {g} over all rows", lambda g, **_: _columns(g)),
            },
        ),
        "matmul": Rule("AB", "{A} {B}", lambda A, B: A @ B, product),
        "addmm": Rule("CAB", "{C} + {A} {B}", lambda C, A, B: C + A @ B, product | added),
        "baddbmm": Rule("CAB", "{C} + {A} {B}", lambda C, A, B: C + A @ B, product | added),
        "mv": Rule("Wx", "{W} {x}", lambda W, x: W @ x, vector),
        "dot": Rule(
            "ab",
            "{a}ᵀ {b}",
            lambda a, b: a @ b,
            {"a": ("{g} {b}", lambda g, b, **_: g * b), "b": ("{g} {a}", lambda g, a, **_: g * a)},
        ),
        "embedding": Rule(
            "Wi",
            "row {i} of {W}",
            lambda W, i: W[i],
            {"W": ("{g} added to row {i}, 0 in the others", _scatter)},
        ),
        "attention": Rule(
            "QKV",
            "P {V}, P = softmax({Q} {K}ᵀ/√d)",
            lambda Q, K, V: _scores(Q, K) @ V,
            {
                "Q": (
                    "S {K}/√d, S = P ⊙ ({g} {V}ᵀ − Σ {g} {V}ᵀ ⊙ P)",
                    lambda g, Q, K, V, **_: _scores_back(g, Q, K, V) @ K,
                ),
                "K": ("Sᵀ {Q}/√d", lambda g, Q, K, V, **_: _scores_back(g, Q, K, V).mT @ Q),
                "V": ("Pᵀ {g}", lambda g, Q, K, **_: _scores(Q, K).mT @ g),
            },
        ),
    }


def _sum_rules() -> dict[str, Rule]:
    return {
        "add": Rule(
            "ab",
            "{a} + {b}",
            lambda a, b: a + b,
            {"a": ("{g}", lambda g, a, **_: _like(g, a)), "b": ("{g}", lambda g, b, **_: _like(g, b))},
        ),
        "sub": Rule(
            "ab",
            "{a} − {b}",
            lambda a, b: a - b,
            {"a": ("{g}", lambda g, a, **_: _like(g, a)), "b": ("−{g}", lambda g, b, **_: _like(-g, b))},
        ),
        "mul": Rule(
            "ab",
            "{a} ⊙ {b}",
            lambda a, b: a * b,
            {
                "a": ("{g} ⊙ {b}", lambda g, a, b, **_: _like(g * b, a)),
                "b": ("{g} ⊙ {a}", lambda g, a, b, **_: _like(g * a, b)),
            },
        ),
        "div": Rule(
            "ab",
            "{a} ÷ {b}",
            lambda a, b: a / b,
            {
                "a": ("{g} ÷ {b}", lambda g, a, b, **_: _like(g / b, a)),
                "b": ("−{g} ⊙ {y} ÷ {b}", lambda g, y, b, **_: _like(-g * y / b, b)),
            },
        ),
        "pow": Rule(
            "ab",
            "{a} to the power {b}",
            lambda a, b: a**b,
            {"a": ("{g} ⊙ {b} {a}^({b} − 1)", lambda g, a, b, **_: g * b * a ** (b - 1))},
        ),
        "sum": _each("Σ {x}", lambda x: x.sum(), "{g} for each element", lambda g, x, **_: g.expand_as(x)),
        "mean": _each(
            "mean of {x}",
            lambda x: x.mean(-1, keepdim=True),
            "{g}/n for each of n elements",
            lambda g, x, **_: (g / x.shape[-1]).expand_as(x),
        ),
        "amax": _each(
            "greatest of {x}",
            lambda x: x.amax(-1),
            "{g} where {x} is the greatest, else 0",
            lambda g, x, y: g.unsqueeze(-1) * _ties(x, y),
        ),
        "where": Rule(
            "cab",
            "{a} where {c}, else {b}",
            lambda c, a, b: torch.where(c, a, b),
            {
                "a": ("{g} where {c}, else 0", lambda g, c, a, **_: _like(g * c, a)),
                "b": ("0 where {c}, else {g}", lambda g, c, b, **_: _like(g * ~c, b)),
            },
        ),
        "masked_fill": Rule(
            "xm",
            "{x}, a constant where {m}",
            lambda x, m: x.masked_fill(m, -9.0),
            {"x": ("0 where {m}, else {g}", lambda g, m, **_: g * ~m)},
        ),
        "index": Rule(
            "xi",
            "elements {i} of {x}",
            lambda x, i: x[i],
            {"x": ("{g} added at {i}, 0 elsewhere", lambda g, x, i, **_: _scatter(g, x, i))},
        ),
        "cat": Rule(
            "ab",
            "{a} and {b}, one after the other",
            lambda a, b: torch.cat([a, b], -1),
            {
                "a": ("its part of {g}", lambda g, a, **_: g[..., : a.shape[-1]]),
                "b": ("its part of {g}", lambda g, a, **_: g[..., a.shape[-1] :]),
            },
        ),
        "stack": Rule(
            "ab",
            "{a} and {b}, one beside the other",
            lambda a, b: torch.stack([a, b]),
            {"a": ("its part of {g}", lambda g, **_: g[0]), "b": ("its part of {g}", lambda g, **_: g[1])},
        ),
    }


def _element_rules() -> dict[str, Rule]:
    gate = torch.sigmoid
    return {
        "sigmoid": _each("σ({x})", torch.sigmoid, "{g} ⊙ {y} ⊙ (1 − {y})", lambda g, y, **_: g * y * (1 - y)),
        "tanh": _each("tanh({x})", torch.tanh, "{g} ⊙ (1 − {y}²)", lambda g, y, **_: g * (1 - y * y)),
        "relu": _each("max(0, {x})", torch.relu, "{g} where {x} > 0, else 0", _relu_gate),
        "gelu": _each(
            "{x} Φ({x})",
            lambda x: F.gelu(x),
            "{g} ⊙ (Φ({x}) + {x} φ({x}))",
            lambda g, x, **_: g * (_below(x) + x * _bell(x)),
        ),
        "gelu-tanh": _each(
            "{x}/2 (1 + t), t = tanh(u), u = √(2/π)({x} + 0.044715 {x}³)",
            lambda x: F.gelu(x, approximate="tanh"),
            "{g} ⊙ ((1 + t)/2 + {x}/2 (1 − t²) u′)",
            lambda g, x, **_: g * _gelu_tanh_slope(x),
        ),
        "silu": _each(
            "{x} σ({x})",
            lambda x: F.silu(x),
            "{g} ⊙ σ({x}) ⊙ (1 + {x} (1 − σ({x})))",
            lambda g, x, **_: g * gate(x) * (1 + x * (1 - gate(x))),
        ),
        "neg": _each("−{x}", torch.neg, "−{g}", lambda g, **_: -g),
        "exp": _each("exp({x})", torch.exp, "{g} ⊙ {y}", lambda g, y, **_: g * y),
        "log": _each("log({x})", torch.log, "{g} ÷ {x}", lambda g, x, **_: g / x),
        "sqrt": _each("√{x}", torch.sqrt, "{g} ÷ 2{y}", lambda g, y, **_: g / (2 * y)),
        "rsqrt": _each("1/√{x}", torch.rsqrt, "−½ {g} ⊙ {y}³", lambda g, y, **_: -g * y**3 / 2),
        "reciprocal": _each("1/{x}", torch.reciprocal, "−{g} ⊙ {y}²", lambda g, y, **_: -g * y * y),
        "sin": _each("sin({x})", torch.sin, "{g} ⊙ cos({x})", lambda g, x, **_: g * torch.cos(x)),
        "cos": _each("cos({x})", torch.cos, "−{g} ⊙ sin({x})", lambda g, x, **_: -g * torch.sin(x)),
        "softmax": _each(
            "softmax({x})",
            lambda x: x.softmax(-1),
            "{y} ⊙ ({g} − Σ {g} ⊙ {y})",
            lambda g, y, **_: y * (g - (g * y).sum(-1, keepdim=True)),
        ),
        "log_softmax": _each(
            "log softmax({x})",
            lambda x: x.log_softmax(-1),
            "{g} − exp({y}) Σ {g}",
            lambda g, y, **_: g - y.exp() * g.sum(-1, keepdim=True),
        ),
    }


def _norm_and_loss_rules() -> dict[str, Rule]:
    return {
        "layer_norm": Rule(
            "xwb",
            "{w} ⊙ u + {b}, u = ({x} − μ)/σ",
            lambda x, w, b: w * _normed(x)[0] + b,
            {
                "x": ("(h − mean h − u mean(h ⊙ u))/σ, h = {g} ⊙ {w}", _layer_norm_x),
                "w": ("Σ {g} ⊙ u over all rows", lambda g, x, **_: _columns(g * _normed(x)[0])),
                "b": ("Σ {g} over all rows", lambda g, **_: _columns(g)),
            },
        ),
        "rms_norm": Rule(
            "xw",
            "{w} ⊙ u, u = {x}/RMS({x})",
            lambda x, w: w * x / _rms(x),
            {
                "x": ("(h − u mean(h ⊙ u))/RMS({x}), h = {g} ⊙ {w}", _rms_norm_x),
                "w": ("Σ {g} ⊙ u over all rows", lambda g, x, **_: _columns(g * x / _rms(x))),
            },
        ),
        "cross_entropy": Rule(
            "xt",
            "mean of −log softmax({x}) at {t}",
            lambda x, t: F.cross_entropy(x, t),
            {
                "x": (
                    "{g} (softmax({x}) − onehot({t}))/n",
                    lambda g, x, t, **_: g * (x.softmax(-1) - _one_hot(x, t)) / len(x),
                )
            },
        ),
        "nll_loss": Rule(
            "xt",
            "mean of −{x} at {t}",
            lambda x, t: F.nll_loss(x, t),
            {"x": ("−{g}/n at {t}, 0 elsewhere", lambda g, x, t, **_: -g * _one_hot(x, t) / len(x))},
        ),
        "mse_loss": Rule(
            "xt",
            "mean of ({x} − {t})²",
            lambda x, t: F.mse_loss(x, t),
            {"x": ("2 {g} ({x} − {t})/n", lambda g, x, t, **_: 2 * g * (x - t) / x.numel())},
        ),
    }


RULES: dict[str, Rule] = _matrix_rules() | _sum_rules() | _element_rules() | _norm_and_loss_rules()
# What whole modules compute: a folded one has these formulas.
MODULES = {
    "Linear": "linear",
    "Embedding": "embedding",
    "LayerNorm": "layer_norm",
    "RMSNorm": "rms_norm",
    "SelfAttention": "attention",
    "CrossAttention": "attention",
    "CrossEntropyLoss": "cross_entropy",
    "MSELoss": "mse_loss",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Softmax": "softmax",
}


def gradient(rule: Rule, operand: str, names: Mapping[str, str]) -> str:
    """The formula of an operand's gradient, by the names of the operands and of the result y."""
    letters = {letter: letter for letter in rule.operands} | {"y": "y"} | dict(names)
    text = rule.gradients[operand][0]
    return f"g_{letters[operand]} = " + text.format_map(letters | {"g": f"g_{letters['y']}"})
