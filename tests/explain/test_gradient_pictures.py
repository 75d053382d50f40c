"""Gradients by layer: of untrained stacks, and of a model on a text."""

import pytest
import torch
from tests.explain.small import preset_model, read_ids
from tests.spread import spread
from torch.nn import functional as F

from weft.errors import ConfigError, DataError, ModelError
from weft.explain.capture import capture
from weft.explain.gradients import gradient_flow, gradient_flows, gradient_norms
from weft.explain.groups import ParameterGroup
from weft.figures.formats import table_number
from weft.models.head_config import EmbeddingHead

TEXT = tuple(range(5, 21))


def test_all_six_stacks_are_shown() -> None:
    found = gradient_flows(layers=4, d_model=8, seed=3)
    stacks = [(placement, residual) for residual in (True, False) for placement in ("pre", "post", "none")]
    assert [(flow.placement, flow.residual) for flow in found.flows] == stacks
    assert found.flows[1] == gradient_flow("post", True, 4, d_model=8, seed=3)
    text = found.text() or ""
    assert table_number(found.flows[0].full[0]) in text and "e+0" not in text and "e-0" not in text
    assert "4 layers of width 8" in text
    assert [row[:2] for row in found.tables()[0].rows][3] == ("pre-norm", "no")
    assert found.html().count('role="img"') == 4
    with pytest.raises(ConfigError, match="multiple of 4"):
        gradient_flows(d_model=30)


def test_norms_are_those_of_backward() -> None:
    model = preset_model("gpt-tiny")
    found = gradient_norms(read_ids(model, TEXT))
    assert all(weight.grad is None for weight in model.parameters())
    model.eval()
    with capture(model, "decoder.*.residual", grads=True) as captured:
        tokens = torch.tensor([TEXT])
        loss = F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert list(found.stream) == ["decoder.in", *(f"decoder.{layer}" for layer in range(4))]
    for layer in range(4):
        gradient = captured[f"decoder.{layer}.residual"].grad
        assert gradient is not None
        assert found.stream[f"decoder.{layer}"] == pytest.approx(float(gradient.norm()), rel=1e-4)
    weights = torch.cat([weight.grad.flatten() for weight in model.decoder.blocks[2].feedforward.parameters()])
    norm, _ = found.parameters[ParameterGroup("decoder.2", "feedforward")]
    assert norm == pytest.approx(float(weights.norm()), rel=1e-4)


def test_frozen_weights_have_gradients_too_and_stay_frozen() -> None:
    model = preset_model("gpt-tiny").requires_grad_(False)
    found = gradient_norms(read_ids(model, TEXT))
    assert all(norm > 0 for norm, _ in found.parameters.values())
    assert not any(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("name", spread(["lstm", "bahdanau-tiny", "vaswani-tiny", "bert-tiny"], 2))
def test_every_family(name: str) -> None:
    found = gradient_norms(read_ids(preset_model(name), TEXT))
    stacks = {layer.split(".")[0] for layer in found.stream}
    assert stacks == {"vaswani-tiny": {"encoder", "decoder"}, "bert-tiny": {"encoder"}}.get(name, set())
    assert found.text() and found.charts()


def test_a_head_without_tokens_has_a_random_direction_as_its_loss() -> None:
    found = gradient_norms(read_ids(preset_model("bert-tiny", head=EmbeddingHead()), TEXT))
    assert "random direction" in found.what
    assert found.stream["encoder.1"] == pytest.approx(1.0, rel=1e-4)


def test_models_and_texts_without_a_gradient_are_refused() -> None:
    with pytest.raises(ModelError, match="n-gram"):
        gradient_norms(read_ids(preset_model("ngram-3"), TEXT))
    with pytest.raises(DataError, match="one token"):
        gradient_norms(read_ids(preset_model("gpt-tiny"), (5,)))
