"""lectures/rnn.py computes weft's recurrent language models: logits, loss, gradients, carried states."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.later import Later
from tests.lectures.textbook.lecture import TOLERANCE, assert_gradients, gradients, load
from torch import Tensor

from weft.models.build import build
from weft.models.presets import preset
from weft.nn.loss import linear_cross_entropy
from weft.nn.recurrent import CarriedState

stats = Later("scipy.stats")
rnn = load("rnn")

SHAPES: list[dict[str, Any]] = [
    {"layers": 1, "d_model": 6, "d_embedding": 4, "tied": False},
    {"layers": 3, "d_model": 5, "d_embedding": None, "tied": True},
    {"layers": 2, "d_model": 8, "d_embedding": 8, "tied": False},
]


def renamed(weights: Mapping[str, Tensor], cell: str, are_gradients: bool) -> dict[str, Tensor]:
    """weft's tensors under the file's names. PyTorch's two biases are one there, except for the GRU's new state."""
    tied = "output" not in weights
    found = {"embedding": weights["embedding.weight"], "b_y": weights["output_bias"]}
    if not are_gradients or not tied:
        found["W_yh"] = weights["embedding.weight" if tied else "output"]
    for layer in range(sum("weight_ih" in name for name in weights)):
        parts = (f"recurrence.{part}_l{layer}" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        W_ax, W_ah, b_ax, b_ah = (weights[part] for part in parts)
        b_a, b_nh = b_ax if are_gradients else b_ax + b_ah, b_ah[-W_ah.shape[1] :]
        if cell == "gru":
            found[f"cells.{layer}.b_nh"] = b_nh
            b_a = torch.cat([b_a[: -len(b_nh)], b_ax[-len(b_nh) :]])
        found |= {f"cells.{layer}.W_ax": W_ax, f"cells.{layer}.W_ah": W_ah, f"cells.{layer}.b_a": b_a}
    return found


def pair(cell: str, shape: dict[str, Any], V: int = 11) -> tuple[Any, Any]:
    """weft's preset at a small size with random weights, and the file's model with its weights."""
    torch.manual_seed(0)
    ours = build(preset(cell).replace(vocab_size=V, dropout=0.0, **shape)).double()
    with torch.no_grad():
        for weight in ours.parameters():
            weight.normal_(std=0.5)
    d_h, d_x = shape["d_model"], shape["d_embedding"] or shape["d_model"]
    theirs = rnn.RNNLM(rnn.CELLS[cell], V, d_x, d_h, shape["layers"], shape["tied"]).double()
    theirs.load_state_dict(renamed(dict(ours.state_dict()), cell, are_gradients=False))
    return ours, theirs


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
@pytest.mark.parametrize("shape", SHAPES, ids=["one", "tied", "two"])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 9)])
def test_logits_loss_and_gradients_are_wefts(cell: str, shape: dict[str, Any], B: int, T: int) -> None:
    ours, theirs = pair(cell, shape)
    tokens = torch.randint(11, (B, T + 1), generator=torch.Generator().manual_seed(1))
    features = ours.forward_features(tokens[:, :-1])
    logits, _ = theirs(tokens[:, :-1])
    torch.testing.assert_close(logits, ours.head(features), rtol=0, atol=TOLERANCE)
    total, _ = linear_cross_entropy(ours.readout(features), tokens[:, 1:].flatten())
    (total / (B * T)).backward()
    loss = rnn.loss(logits, tokens[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(total.item() / (B * T), rel=TOLERANCE)
    assert_gradients(gradients(theirs), renamed(gradients(ours), cell, are_gradients=True))


@pytest.mark.parametrize("sigma", ["sigmoid", "relu"])
def test_elmans_other_nonlinearities(sigma: str) -> None:
    ours, theirs = pair("elman", SHAPES[0] | {"activation": sigma})
    theirs.cells[0].sigma = getattr(torch, sigma)
    tokens = torch.randint(11, (2, 7))
    torch.testing.assert_close(theirs(tokens)[0], ours(tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
def test_carried_states_are_wefts(cell: str) -> None:
    """Three windows of a text, one after the other, give the logits of the whole text."""
    ours, theirs = pair(cell, SHAPES[1])
    windows = torch.randint(11, (2, 12)).split(4, dim=1)
    carried, states, rows = CarriedState(), None, []
    for window in windows:
        expected = ours.head(ours.forward_features(window, carried=carried))
        logits, states = theirs(window, states)
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
        rows.append(logits)
    torch.testing.assert_close(torch.cat(rows, dim=1), theirs(torch.cat(windows, dim=1))[0])


def test_gradients_end_where_a_window_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, each window starts from the detached states of the one before."""
    model, seen = rnn.RNNLM(rnn.LSTM, 5, 4, 4), []
    forward = model.forward

    def recorded(tokens: Tensor, carried: Any = None) -> Any:
        logits, states = forward(tokens, carried)
        seen.append((carried, states))
        return logits, states

    monkeypatch.setattr(model, "forward", recorded)
    rnn.train(model, torch.randint(5, (2 * 13,)), steps=10, B=2, T=4)
    for (_, before), (carried, _) in pairwise(seen[:3]):
        for last, first in zip(before[0], carried[0], strict=True):
            assert torch.equal(last, first) and not first.requires_grad
    assert seen[3][0] is None, "at the end of the text, training restarts from its beginning"


def test_sampling_follows_the_softmax() -> None:
    torch.manual_seed(0)
    model, generator = rnn.RNNLM(rnn.GRU, 4, 3, 3), torch.Generator().manual_seed(0)
    p = model(torch.tensor([[1, 2]]))[0][0, -1].softmax(-1).double()
    counts = torch.zeros(4)
    for _ in range(600):
        counts[rnn.sample(model, [1, 2], 1, generator)[0]] += 1
    assert stats.chisquare(counts.double(), 600 * p.detach() / p.sum().item()).pvalue > 1e-3
    written = rnn.sample(model, [1, 2], 5, torch.Generator().manual_seed(1))
    assert written == rnn.sample(model, [1, 2], 5, torch.Generator().manual_seed(1))
