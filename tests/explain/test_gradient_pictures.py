"""Gradients by layer: of untrained stacks, and of a model on a text."""

from typing import ClassVar

import pytest
import torch
from torch.nn import functional as F

from weft.errors import ConfigError, DataError, ModelError
from weft.explain.gradients import gradient_flow, gradient_flows, gradient_norms
from weft.explain.groups import Group
from weft.explain.reading import Reading
from weft.figures.plot import plain
from weft.models.build import build
from weft.models.config import EmbeddingHead
from weft.models.presets import preset

TEXT = tuple(range(5, 21))


class Letters:
    """As much of a tokenizer as a picture needs."""

    special_tokens: ClassVar[dict[str, int]] = {}
    mask_id = 4


def read(model, text=TEXT, **more) -> Reading:
    return Reading(model, Letters(), text, **more)  # type: ignore[arg-type]


def made(name: str, **changes):
    torch.manual_seed(0)
    return build(preset(name).replace(**changes))


def test_all_six_stacks_are_shown() -> None:
    found = gradient_flows(layers=4, d_model=8, seed=3)
    assert [(flow.placement, flow.residual) for flow in found.flows] == [
        (placement, residual) for residual in (True, False) for placement in ("pre", "post", "none")
    ]
    assert found.flows[1] == gradient_flow("post", True, 4, 8, 3)
    text = found.text() or ""
    assert plain(found.flows[0].full[0]) in text and "e+0" not in text and "e-0" not in text
    assert "4 layers of width 8" in text
    assert [row[:2] for row in found.tables()[0].rows][3] == ("pre-norm", "no")
    assert found.html().count('role="img"') == 4


def test_the_width_fits_the_heads() -> None:
    with pytest.raises(ConfigError, match="multiple of 4"):
        gradient_flows(d_model=30)


def test_norms_are_those_of_backward() -> None:
    model = made("gpt-tiny")
    found = gradient_norms(read(model))
    assert all(weight.grad is None for weight in model.parameters())

    model.eval()
    states: list[torch.Tensor] = []
    for block in model.decoder.blocks:
        block.register_forward_hook(lambda _, given, out: (out.retain_grad(), states.append(out))[0])
    tokens = torch.tensor([TEXT])
    loss = F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert list(found.stream) == ["decoder.in", *(f"decoder.{layer}" for layer in range(4))]
    for layer, state in enumerate(states):
        assert found.stream[f"decoder.{layer}"] == pytest.approx(float(state.grad.norm()), rel=1e-4)
    weights = torch.cat([weight.grad.flatten() for weight in model.decoder.blocks[2].feedforward.parameters()])
    assert found.parameters[Group("decoder.2", "feedforward")][0] == pytest.approx(float(weights.norm()), rel=1e-4)


def test_frozen_weights_have_gradients_too_and_stay_frozen() -> None:
    model = made("gpt-tiny").requires_grad_(False)
    found = gradient_norms(read(model))
    assert all(norm > 0 for norm, _ in found.parameters.values())
    assert not any(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("name", ["lstm", "bahdanau-tiny", "vaswani-tiny", "bert-tiny"])
def test_every_family(name: str) -> None:
    source = {"source": TEXT} if name in ("bahdanau-tiny", "vaswani-tiny") else {}
    found = gradient_norms(read(made(name), **source))
    stacks = {place.split(".")[0] for place in found.stream}
    assert stacks == {"vaswani-tiny": {"encoder", "decoder"}, "bert-tiny": {"encoder"}}.get(name, set())
    assert found.text() and found.charts()


def test_a_head_without_words_is_pulled_in_a_random_direction() -> None:
    found = gradient_norms(read(made("bert-tiny", head=EmbeddingHead())))
    assert "random direction" in found.what
    assert found.stream["encoder.1"] == pytest.approx(1.0, rel=1e-4)


def test_what_has_no_gradient_is_refused() -> None:
    with pytest.raises(ModelError, match="n-gram"):
        gradient_norms(read(build(preset("ngram-3"))))
    with pytest.raises(DataError, match="one token"):
        gradient_norms(read(made("gpt-tiny"), (5,)))
