"""lectures/backprop.py has the gradients of PyTorch, and of weft's Elman network."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lectures.textbook.lecture import assert_gradients, gradients, load, run
from torch import Tensor, nn

from weft.models.presets import preset
from weft.models.recurrent import Recurrent
from weft.nn.loss import linear_cross_entropy

backprop = load("backprop")
Node = backprop.Node


def nodes(matrix: Tensor) -> list[list[Any]]:
    return [[Node(value) for value in row] for row in matrix.tolist()]


def node_gradients(matrix: list[list[Any]]) -> Tensor:
    return torch.tensor([[node.g for node in row] for row in matrix], dtype=torch.float64)


@pytest.mark.parametrize(("inputs", "hidden", "classes"), [(2, 4, 2), (3, 1, 4), (1, 5, 3)])
def test_the_lectures_network(inputs: int, hidden: int, classes: int) -> None:
    """J, every layer and every gradient of J = −yᵀ log softmax(β σ(α x)), with intercepts folded in."""
    generator = torch.Generator().manual_seed(hidden)
    alpha, beta = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((hidden, 1 + inputs), (classes, 1 + hidden))
    )
    x, one = torch.randn(inputs, dtype=torch.float64, generator=generator), torch.ones(1, dtype=torch.float64)
    z = torch.sigmoid(alpha @ torch.cat([one, x]))
    J = nn.functional.cross_entropy(beta @ torch.cat([one, z]), torch.tensor(classes - 1))
    J.backward()
    ours, out = nodes(alpha.detach()), nodes(beta.detach())
    assert alpha.grad is not None and beta.grad is not None
    o = backprop.nn_forward(x.tolist(), classes - 1, ours, out)
    backprop.backward(o.J)
    assert o.J.value == pytest.approx(J.item(), rel=1e-12)
    assert [node.value for node in o.z[1:]] == pytest.approx(z.tolist(), rel=1e-12)
    assert_gradients({"α": node_gradients(ours), "β": node_gradients(out)}, {"α": alpha.grad, "β": beta.grad})


def test_every_module_has_the_derivative_of_its_function() -> None:
    rng = random.Random(0)
    functions = {"add": 2, "multiply": 2, "divide": 2, "exp": 1, "log": 1, "sigmoid": 1}
    for name, inputs in functions.items():
        module, step = getattr(backprop, name), 1e-6
        a = [rng.uniform(0.5, 2.0) for _ in range(inputs)]
        found = module.backward(1.7, module.forward(*a), *a)
        for i in range(inputs):
            above, below = ([*a[:i], a[i] + sign * step, *a[i + 1 :]] for sign in (1, -1))
            slope = (module.forward(*above) - module.forward(*below)) / (2 * step)
            assert found[i] == pytest.approx(1.7 * slope, rel=1e-6)


def test_a_node_used_twice_sums_both_gradients_and_a_second_pass_starts_from_zero() -> None:
    a = Node(3.0)
    J = a * a + a
    for _ in range(2):
        backprop.backward(J)
        assert a.g == 7.0
    order = backprop.topological_order(J)
    assert len(order) == len(set(order)) == 3
    assert all(order.index(edge) < order.index(node) for node in order for edge in node.edges)
    deep = Node(1.0)
    for _ in range(5000):
        deep = deep + a
    backprop.backward(deep)
    assert a.g == 5000.0


def test_the_gradients_of_wefts_elman_network() -> None:
    """Four words, scalar by scalar: h_t = σ(W_ah h_{t−1} + W_ax x_t + b_a), y_t = softmax(W_yh h_t + b_y)."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 5, "d_model": 3, "d_embedding": 2, "activation": "sigmoid"}
    model = Recurrent(preset("elman").replace(**sizes)).double()
    tokens = [1, 4, 2, 2, 0]
    features = model.forward_features(torch.tensor([tokens[:-1]]))
    loss, _ = linear_cross_entropy(model.readout(features), torch.tensor(tokens[1:]))
    loss.backward()
    weights = {name: nodes(weight.detach().reshape(len(weight), -1)) for name, weight in model.named_parameters()}
    biases = ("recurrence.bias_ih_l0", "recurrence.bias_hh_l0", "output_bias")
    b_a, b_ah, b_y = ([row[0] for row in weights[name]] for name in biases)
    h, losses = [Node(0.0) for _ in range(3)], []
    for word, target in pairwise(tokens):
        past = backprop.linear(h, weights["recurrence.weight_hh_l0"])
        new = backprop.linear(weights["embedding.weight"][word], weights["recurrence.weight_ih_l0"])
        h = [backprop.sigmoid(p + n + b + c) for p, n, b, c in zip(past, new, b_a, b_ah, strict=True)]
        y = backprop.softmax([o + b for o, b in zip(backprop.linear(h, weights["output"]), b_y, strict=True)])
        losses.append(backprop.cross_entropy([Node(float(k == target)) for k in range(5)], y))
    J = backprop.total(losses)
    backprop.backward(J)
    assert J.value == pytest.approx(loss.item(), rel=1e-6)  # weft sums losses in float32
    found = {name: node_gradients(rows) for name, rows in weights.items()}
    assert_gradients(found, {name: grad.reshape(len(grad), -1) for name, grad in gradients(model).items()})


@pytest.mark.slow
def test_it_learns_a_table(tmp_path: Path) -> None:
    rng = random.Random(0)
    points = [(rng.gauss(5, 3), rng.gauss(-100, 1)) for _ in range(100)]
    (tmp_path / "table.csv").write_text("\n".join(f"{x},{y},{int(x > 5) + int(y > -100)}" for x, y in points))
    code, out, _ = run("backprop", str(tmp_path / "table.csv"))
    assert code == 0 and int(out.splitlines()[-1].split(", ")[1].split()[0]) > 85
