"""Gradients through time: against plain autograd, their bound, and what gates and spectral radii do to them."""

from functools import cache
from typing import Any

import pytest
import torch
from tests.explain.small import preset_model, read_ids
from tests.spread import spread
from torch.nn import functional as F

import weft
from weft.errors import ModelError
from weft.explain.gradients import GradientHistory, gradient_norms
from weft.explain.time_gradients import TimeGradients, state_gradients, time_gradients
from weft.models.build import build
from weft.models.config import ELMo, Recurrent
from weft.nn.config import FanInInit

SMALL: dict[str, Any] = {"vocab_size": 20, "d_model": 12}


@cache
def untrained(seed: int) -> TimeGradients:
    return time_gradients(Recurrent(vocab_size=64, d_model=64, init=FanInInit()), seed=seed)


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
def test_elman_equals_the_loop_and_stays_below_its_bound(activation: Any) -> None:
    torch.manual_seed(0)
    model = build(Recurrent(**SMALL, cell="elman", activation=activation)).eval()
    tokens = torch.randint(20, (2, 7))
    found, loss = state_gradients(model, tokens)
    w = dict(model.named_parameters())
    sigma = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid}[activation]
    h, states = torch.zeros(2, 12), []
    for x in model.embedding(tokens[:, :-1]).unbind(1):
        b_a = w["recurrence.bias_ih_l0"] + w["recurrence.bias_hh_l0"]
        h = sigma(h @ w["recurrence.weight_hh_l0"].T + x @ w["recurrence.weight_ih_l0"].T + b_a)
        states.append(h)
    expected = F.cross_entropy(h @ w["output"].T + w["output_bias"], tokens[:, -1])
    norms = [float(gradient.norm()) for gradient in torch.autograd.grad(expected, states)]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found.norms == pytest.approx(norms, rel=1e-4)
    assert all(norm <= bound * 1.0001 for norm, bound in zip(found.norms, found.bound, strict=True))


@pytest.mark.parametrize(("cell", "layers"), [("lstm", 2), ("gru", 1), ("elman", 2)])
def test_the_gradient_of_the_whole_state(cell: Any, layers: int) -> None:
    """A small change of the state after a step changes the loss by its product with the gradient."""
    torch.manual_seed(1)
    model = build(Recurrent(**SMALL, cell=cell, layers=layers)).eval()
    tokens = torch.randint(20, (1, 6))
    found, _ = state_gradients(model, tokens)
    assert len(found.norms) == 5 and not found.bound
    state = model.start(1, 6)
    model.advance(tokens[:, :3], state)
    carried = state.current().detach().requires_grad_()
    hidden: Any = carried if cell == "lstm" else carried[0]
    last = model.recurrence(model.embedding(tokens[:, 3:-1]), tuple(hidden) if cell == "lstm" else hidden)[0][:, -1]
    (gradient,) = torch.autograd.grad(F.cross_entropy(model.readout(last).logits(), tokens[:, -1]), carried)
    assert found.norms[2] == pytest.approx(float(gradient.norm()), rel=1e-4)


@pytest.mark.parametrize("seed", spread(range(5), 1))
def test_a_forget_bias_slows_vanishing_down_in_every_seed(seed: int) -> None:
    cells = untrained(seed).cells
    first = {name: found.norms[0] for name, found in cells.items()}
    assert all(first[name] < 1e-5 for name in ("Elman", "LSTM", "GRU"))  # all vanish at the usual initialisation
    assert first["LSTM, forget bias 1"] > 100 * max(first["LSTM"], first["Elman"])


@pytest.mark.parametrize("seed", spread(range(5), 1))
def test_the_spectral_radius_decides_between_vanishing_and_exploding(seed: int) -> None:
    found = untrained(seed)
    first = {radius: each.norms[0] for radius, each in found.radii.items()}
    assert first[0.7] < 1e-5 and first[1.0] == pytest.approx(1, abs=0.01) and first[1.3] > 100
    for each in found.radii.values():
        assert all(norm <= 1.001 * bound for norm, bound in zip(each.norms, each.bound, strict=True))
    assert found.weights[0.5] < 1 < 10 < found.weights[1.6]
    rows = {row[0]: row[1:] for row in found.tables()[1].rows}
    assert rows["1.6"][1] == "1.00" and rows["0.5"][0] == rows["0.5"][1]


@pytest.mark.parametrize("backward", [False, True])
def test_each_direction_of_elmo_has_a_gradient(backward: bool) -> None:
    """A small change of a layer's state after a step changes the loss by its product with the gradient."""
    torch.manual_seed(2)
    model: Any = build(ELMo(vocab_size=20, d_model=6, layers=2, d_cell=9)).double().eval()
    tokens = torch.randint(20, (3, 7))
    found, loss = state_gradients(model, tokens, backward=backward)
    read = tokens.flip(1) if backward else tokens
    half = model.directions(model.features(tokens))[backward]
    (h, target) = (half[:, 1], tokens[:, 0]) if backward else (half[:, -2], tokens[:, -1])
    assert loss.item() == pytest.approx(F.cross_entropy(model.readout(h).logits().float(), target).item())
    layers, x, carried = (model.back if backward else model.ahead), model.embedding(read[:, :-1]), []
    for number, layer in enumerate(layers):
        before, state = layer(x[:, :3])
        carried += [part.detach().requires_grad_() for part in state]
        h = torch.cat([before, layer(x[:, 3:], tuple(carried[-2:]))[0]], dim=1)
        x = x + h if number else h
    again = F.cross_entropy(model.readout(x[:, -1]).logits().float(), read[:, -1])
    norms = [gradient.norm() for gradient in torch.autograd.grad(again, carried)]
    assert found.norms[2] == pytest.approx(float(torch.stack(norms).norm()))
    assert len(found.norms) == 6 and not found.bound


def test_a_text_has_gradients_in_both_directions_of_elmo() -> None:
    found = gradient_norms(read_ids(preset_model("elmo-tiny"), tuple(range(5, 21))))
    assert list(found.states) == ["forward", "backward"]
    assert "both directions" in (found.text() or "") and "norm, backward" in (found.text() or "")
    history = GradientHistory({"at first": found, "best": found})
    titles = [chart.title for chart in history.charts()]
    assert titles[:2] == ["of the hidden states, forward", "of the hidden states, backward"]
    assert "best, backward" in (history.text() or "") and {"forward.0", "backward.1"} <= {
        g.layer for g in found.parameters
    }


@pytest.mark.parametrize("name", spread(["elman", "lstm", "gru", "bahdanau-tiny", "elmo-tiny"], 1))
def test_presets_show_time_steps_and_no_transformers(name: str) -> None:
    found = weft.architecture(name, ["model.d_model=16"]).gradients()
    assert isinstance(found, TimeGradients) and found.d_model == 16 and len(found.charts()) == 3
    assert "norm" not in str(found.tables()[0].header) and "skips" not in (found.text() or "")


def test_an_ngram_preset_has_no_gradient() -> None:
    with pytest.raises(ModelError, match="learns by counting"):
        weft.architecture("ngram-3").gradients()


@pytest.mark.parametrize("name", spread(["lstm", "elman", "bahdanau-tiny"], 2))
def test_a_text_has_a_gradient_at_every_step(name: str) -> None:
    found = gradient_norms(read_ids(preset_model(name), tuple(range(5, 21))), clip=1e-6)
    (states,) = found.states.values()
    assert len(states.norms) == 15 and all(states.norms)
    assert found.charts()[0].title == "of the hidden states"
    assert "steps back" in (found.text() or "") and "Clipping to 1e-06 divides it by" in (found.text() or "")
