"""Histograms count every value once, and the shares that are zero, saturated or dead."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.explain.small import preset_model, read_ids
from tests.spread import spread

from weft.errors import ModelError
from weft.explain.capture import capture
from weft.explain.weights import histograms
from weft.models.build import build
from weft.models.presets import preset
from weft.nn.config import Plain
from weft.nn.recurrent import InterLayerDropout

TEXT = tuple(range(5, 25))


def test_weights_are_counted_by_part_and_layer() -> None:
    model = preset_model("gpt-tiny")
    found = histograms(model)
    assert set(found.weights) == {"embedding", "positions", "attention", "norms", "feedforward"}
    assert list(found.weights["attention"]) == [f"decoder.{layer}" for layer in range(4)]
    own = torch.cat([w.flatten() for w in model.decoder.blocks[1].attention.parameters()]).detach()
    histogram = found.weights["attention"]["decoder.1"]
    assert histogram.size == own.numel()
    assert histogram.deviation == pytest.approx(float(own.std(unbiased=False)), rel=1e-4)
    assert histogram.largest == pytest.approx(float(own.abs().max()))
    assert histogram.zeros == pytest.approx(float((own == 0).float().mean()))
    counts, _ = np.histogram(own.numpy(), histogram.edges)
    assert np.abs(counts - histogram.counts).sum() <= 4  # values on an edge
    total = sum(each.size for layers in found.weights.values() for each in layers.values())
    assert total == sum(weight.numel() for weight in model.parameters())
    assert not found.activations and not found.entropy


def test_activations_are_those_of_the_text() -> None:
    model = preset_model("gpt-tiny", feedforward=Plain(d_ff=256, activation="relu")).eval()
    with torch.no_grad():
        model.decoder.blocks[2].feedforward.up.bias[:64] = -1e9  # a quarter of the units can never fire
    plain = model(torch.tensor([TEXT]))
    with capture(model, "decoder.2.feedforward.hidden") as captured:
        model(torch.tensor([TEXT]))
    zero = captured["decoder.2.feedforward.hidden"] == 0
    found = histograms(model, read_ids(model, TEXT))
    hidden = found.activations["decoder feed-forward hidden"]["2"]
    assert hidden.zeros == pytest.approx(float(zero.float().mean()))
    assert hidden.dead == pytest.approx(float(zero.flatten(0, 1).all(0).float().mean()))
    assert (hidden.dead or 0) >= 0.25 and hidden.saturated is None
    assert list(found.activations["decoder residual"]) == ["0", "1", "2", "3"]
    assert torch.equal(plain, model(torch.tensor([TEXT])))


def test_entropy_is_a_share_of_the_maximum() -> None:
    model = preset_model("gpt-tiny")
    with torch.no_grad():
        for block in model.decoder.blocks:
            block.attention.qkv.weight.zero_()  # all scores are equal
    found = histograms(model, read_ids(model, TEXT))
    assert list(found.entropy["decoder attention"].values()) == pytest.approx([1.0] * 4)


ENCODER, DECODER = ({f"{stack} residual", f"{stack} feed-forward hidden"} for stack in ("encoder", "decoder"))
FAMILIES = {"lstm": {"recurrence states"}, "bahdanau-tiny": {"encoder states", "decoder states"}}
FAMILIES |= {"vaswani-tiny": ENCODER | DECODER, "bert-tiny": ENCODER}


@pytest.mark.parametrize("name", spread(FAMILIES, 2))
def test_every_family_shows_its_states(name: str) -> None:
    model = preset_model(name)
    found = histograms(model, read_ids(model, TEXT))
    assert set(found.activations) == FAMILIES[name]
    if name == "vaswani-tiny":
        assert set(found.entropy) == {"encoder attention", "decoder attention", "decoder cross"}
    if name == "lstm":
        assert found.activations["recurrence states"]["all"].saturated is not None
    assert max(map(len, (found.text() or "").splitlines())) <= 80


@pytest.mark.parametrize("name", ["elman", "lstm", "gru", "bahdanau-tiny"])
def test_states_are_captured_when_layers_run_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a stack with dropout between its layers is never called as a whole."""
    model = preset_model(name, layers=2, d_model=16, dropout=0.5, vocab_size=40)
    reading = read_ids(model, TEXT)
    whole = histograms(model, reading).activations
    with torch.no_grad(), capture(model.eval(), *(label.removesuffix(" states") for label in whole)) as before:
        model(reading.tokens, **reading.model_kwargs)
    drop: Any = InterLayerDropout.drop
    monkeypatch.setattr(InterLayerDropout, "drop", lambda self, rng, on_gpu, begin=0: drop(self, rng, True, begin))
    assert set(histograms(model, reading).activations) == set(whole) != set()
    with torch.no_grad(), capture(model, *before) as after:
        model(reading.tokens, **reading.model_kwargs)
    for name in before:
        torch.testing.assert_close(after.calls(name), before.calls(name))
    assert not any(part._forward_hooks for part in model.modules())


def test_an_n_gram_has_no_weights() -> None:
    with pytest.raises(ModelError, match="counts, not weights"):
        histograms(build(preset("ngram-3")))
