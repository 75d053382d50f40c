"""The gradient of each operation by its operands, as a formula to read.

g is the gradient of the loss by the operation's result y; the formula of an operand says what is passed back to it.
Where an operand was broadcast, its gradient is summed over the copies. Products of rows: x (…, n), W (m, n).
The tests compute every formula and hold it to autograd.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Rule(NamedTuple):
    """y = `forward`, and by operand the gradient.

    `operands` are the letters of the function's tensors in their order, of which a call may leave out the last; what
    comes after them is like the last. In the texts {x} stands for an operand, {y} for the result, {g} for its gradient.
    """

    operands: str
    forward: str
    gradients: Mapping[str, str]

    def gradient(self, operand: str, names: Mapping[str, str]) -> str:
        """The formula of an operand's gradient, by the names of the operands and of the result y."""
        letters = {letter: letter for letter in (*self.operands, "y")} | dict(names)
        passed = self.gradients[operand].format_map(letters | {"g": f"g_{letters['y']}"})
        return f"g_{letters[operand]} = {passed}"


def _each(forward: str, gradient: str) -> Rule:
    return Rule("x", forward, {"x": gradient})


_PRODUCT = {"A": "{g} {B}ᵀ", "B": "{A}ᵀ {g}"}
_SCORES = "S {K}/√d, S = P ⊙ ({g} {V}ᵀ − Σ {g} {V}ᵀ ⊙ P)"
_TANH = "{x}/2 (1 + t), t = tanh(u), u = √(2/π)({x} + 0.044715 {x}³)"
_SUM, _GAIN = "Σ {g} over all rows", "Σ {g} ⊙ u over all rows"
_NORMED = "(h − mean h − u mean(h ⊙ u))/σ, h = {g} ⊙ {w}"
_SCALED = "(h − u mean(h ⊙ u))/RMS({x}), h = {g} ⊙ {w}"

RULES: dict[str, Rule] = {
    # products
    "linear": Rule("xWb", "{x} {W}ᵀ + {b}", {"x": "{g} {W}", "W": "{g}ᵀ {x}", "b": _SUM}),
    "matmul": Rule("AB", "{A} {B}", _PRODUCT),
    "addmm": Rule("CAB", "{C} + {A} {B}", {**_PRODUCT, "C": "{g}"}),
    "baddbmm": Rule("CAB", "{C} + {A} {B}", {**_PRODUCT, "C": "{g}"}),
    "mv": Rule("Wx", "{W} {x}", {"W": "{g} {x}ᵀ", "x": "{W}ᵀ {g}"}),
    "dot": Rule("ab", "{a}ᵀ {b}", {"a": "{g} {b}", "b": "{g} {a}"}),
    "embedding": Rule("Wi", "row {i} of {W}", {"W": "{g} added to row {i}, 0 in the others"}),
    "attention": Rule("QKV", "P {V}, P = softmax({Q} {K}ᵀ/√d)", {"Q": _SCORES, "K": "Sᵀ {Q}/√d", "V": "Pᵀ {g}"}),
    # sums, and parts of tensors
    "add": Rule("ab", "{a} + {b}", {"a": "{g}", "b": "{g}"}),
    "sub": Rule("ab", "{a} − {b}", {"a": "{g}", "b": "−{g}"}),
    "mul": Rule("ab", "{a} ⊙ {b}", {"a": "{g} ⊙ {b}", "b": "{g} ⊙ {a}"}),
    "div": Rule("ab", "{a} ÷ {b}", {"a": "{g} ÷ {b}", "b": "−{g} ⊙ {y} ÷ {b}"}),
    "pow": Rule("ab", "{a} to the power {b}", {"a": "{g} ⊙ {b} {a}^({b} − 1)"}),
    "sum": _each("Σ {x}", "{g} for each element"),
    "mean": _each("mean of {x}", "{g}/n for each of n elements"),
    "amax": _each("greatest of {x}", "{g} where {x} is the greatest, else 0"),
    "where": Rule("cab", "{a} where {c}, else {b}", {"a": "{g} where {c}, else 0", "b": "0 where {c}, else {g}"}),
    "masked_fill": Rule("xm", "{x}, a constant where {m}", {"x": "0 where {m}, else {g}"}),
    "index": Rule("xi", "elements {i} of {x}", {"x": "{g} added at {i}, 0 elsewhere"}),
    "cat": Rule("ab", "{a} and {b}, one after the other", {"a": "its part of {g}", "b": "its part of {g}"}),
    "stack": Rule("ab", "{a} and {b}, one beside the other", {"a": "its part of {g}", "b": "its part of {g}"}),
    # element by element
    "sigmoid": _each("σ({x})", "{g} ⊙ {y} ⊙ (1 − {y})"),
    "tanh": _each("tanh({x})", "{g} ⊙ (1 − {y}²)"),
    "relu": _each("max(0, {x})", "{g} where {x} > 0, else 0"),
    "gelu": _each("{x} Φ({x})", "{g} ⊙ (Φ({x}) + {x} φ({x}))"),
    "gelu-tanh": _each(_TANH, "{g} ⊙ ((1 + t)/2 + {x}/2 (1 − t²) u′)"),
    "silu": _each("{x} σ({x})", "{g} ⊙ σ({x}) ⊙ (1 + {x} (1 − σ({x})))"),
    "neg": _each("−{x}", "−{g}"),
    "exp": _each("exp({x})", "{g} ⊙ {y}"),
    "log": _each("log({x})", "{g} ÷ {x}"),
    "sqrt": _each("√{x}", "{g} ÷ 2{y}"),
    "rsqrt": _each("1/√{x}", "−½ {g} ⊙ {y}³"),
    "reciprocal": _each("1/{x}", "−{g} ⊙ {y}²"),
    "sin": _each("sin({x})", "{g} ⊙ cos({x})"),
    "cos": _each("cos({x})", "−{g} ⊙ sin({x})"),
    "softmax": _each("softmax({x})", "{y} ⊙ ({g} − Σ {g} ⊙ {y})"),
    "log_softmax": _each("log softmax({x})", "{g} − exp({y}) Σ {g}"),
    # norms and losses
    "layer_norm": Rule("xwb", "{w} ⊙ u + {b}, u = ({x} − μ)/σ", {"x": _NORMED, "w": _GAIN, "b": _SUM}),
    "rms_norm": Rule("xw", "{w} ⊙ u, u = {x}/RMS({x})", {"x": _SCALED, "w": _GAIN}),
    "cross_entropy": Rule("xt", "mean of −log softmax({x}) at {t}", {"x": "{g} (softmax({x}) − onehot({t}))/n"}),
    "nll_loss": Rule("xt", "mean of −{x} at {t}", {"x": "−{g}/n at {t}, 0 elsewhere"}),
    "mse_loss": Rule("xt", "mean of ({x} − {t})²", {"x": "2 {g} ({x} − {t})/n"}),
}
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
# The four modules of the lecture, of vectors that are columns: a the input, b the result, ω the parameters.
LECTURE: dict[str, Rule] = {
    "Linear": Rule("ωa", "{ω} {a}", {"ω": "{g} {a}ᵀ", "a": "{ω}ᵀ {g}"}),
    "Sigmoid": Rule("a", "σ({a})", {"a": "{g} ⊙ {y} ⊙ (1 − {y})"}),
    "Softmax": Rule("a", "softmax({a})", {"a": "{g}ᵀ (diag({y}) − {y} {y}ᵀ)"}),
    "CrossEntropy": Rule("aâ", "−{a}ᵀ log {â}", {"â": "−{g} ({a} ÷ {â})"}),
}
