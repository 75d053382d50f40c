"""Histograms count every number once, and say how many are zero, saturated or dead."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from weft.errors import ModelError
from weft.explain.capture import capture
from weft.explain.reading import Reading
from weft.explain.weights import histograms
from weft.models.build import build
from weft.models.presets import preset
from weft.nn.config import Plain
from weft.nn.recurrent import InterLayerDropout

TEXT = tuple(range(5, 25))


class Letters:
    """As much of a tokenizer as a picture needs."""

    special_tokens: ClassVar[dict[str, int]] = {}
    mask_id = None


def made(name: str, **changes):
    torch.manual_seed(0)
    return build(preset(name).replace(**changes))


def read(model, **more) -> Reading:
    return Reading(model, Letters(), TEXT, **more)  # type: ignore[arg-type]


def test_weights_are_counted_by_part_and_layer() -> None:
    model = made("gpt-tiny")
    found = histograms(model)
    assert set(found.weights) == {"embedding", "positions", "attention", "norms", "feedforward"}
    assert list(found.weights["attention"]) == [f"decoder.{layer}" for layer in range(4)]
    own = torch.cat([w.flatten() for w in model.decoder.blocks[1].attention.parameters()]).detach()
    shown = found.weights["attention"]["decoder.1"]
    assert shown.numbers == own.numel()
    assert shown.deviation == pytest.approx(float(own.std(unbiased=False)), rel=1e-4)
    assert shown.largest == pytest.approx(float(own.abs().max()))
    assert shown.zeros == pytest.approx(float((own == 0).float().mean()))
    counts, _ = np.histogram(own.numpy(), shown.edges)
    assert np.abs(counts - shown.counts).sum() <= 4  # numbers on an edge
    total = sum(each.numbers for layers in found.weights.values() for each in layers.values())
    assert total == sum(weight.numel() for weight in model.parameters())
    assert not found.activations and not found.entropy


def test_activations_are_those_of_the_text() -> None:
    model = made("gpt-tiny", feedforward=Plain(d_ff=256, activation="relu")).eval()
    with torch.no_grad():
        model.decoder.blocks[2].feedforward.up.bias[:64] = -1e9  # a quarter of the units can never fire
    plain = model(torch.tensor([TEXT]))
    states = []
    hook = model.decoder.blocks[2].feedforward.down.register_forward_pre_hook(lambda _, given: states.append(given[0]))
    model(torch.tensor([TEXT]))
    hook.remove()
    found = histograms(model, read(model))
    hidden = found.activations["decoder feed-forward hidden"]["2"]
    assert hidden.zeros == pytest.approx(float((states[0] == 0).float().mean()))
    assert hidden.dead == pytest.approx(float((states[0] == 0).flatten(0, 1).all(0).float().mean()))
    assert hidden.dead >= 0.25
    assert hidden.saturated is None
    assert list(found.activations["decoder residual"]) == ["0", "1", "2", "3"]
    assert torch.equal(plain, model(torch.tensor([TEXT])))


def test_entropy_is_a_share_of_the_largest() -> None:
    model = made("gpt-tiny")
    with torch.no_grad():
        for block in model.decoder.blocks:
            block.attention.qkv.weight.zero_()  # all scores alike
    found = histograms(model, read(model))
    assert list(found.entropy["decoder attention"].values()) == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("name", ["lstm", "bahdanau-tiny", "vaswani-tiny", "bert-tiny"])
def test_every_family_shows_its_states(name: str) -> None:
    model = made(name)
    source = {"source": TEXT} if name in ("bahdanau-tiny", "vaswani-tiny") else {}
    found = histograms(model, read(model, **source))
    places = {
        "lstm": {"recurrence states"},
        "bahdanau-tiny": {"encoder states", "decoder states"},
        "vaswani-tiny": {
            f"{stack} {what}" for stack in ("encoder", "decoder") for what in ("residual", "feed-forward hidden")
        },
        "bert-tiny": {"encoder residual", "encoder feed-forward hidden"},
    }[name]
    assert set(found.activations) == places
    if name == "vaswani-tiny":
        assert set(found.entropy) == {"encoder attention", "decoder attention", "decoder cross"}
    if name == "lstm":
        assert found.activations["recurrence states"]["all"].saturated is not None
    assert max(map(len, (found.text() or "").splitlines())) <= 80


@pytest.mark.parametrize("name", ["elman", "lstm", "gru", "bahdanau-tiny"])
def test_states_are_seen_where_layers_are_read_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a stack with dropout between its layers is never called as a whole."""
    model = made(name, layers=2, d_model=16, dropout=0.5, vocab_size=40)
    reading = read(model, **({"source": TEXT} if name == "bahdanau-tiny" else {}))
    whole = histograms(model, reading).activations
    with torch.no_grad(), capture(model.eval(), *(place.removesuffix(" states") for place in whole)) as before:
        model(reading.tokens, **reading.given)
    drop = InterLayerDropout.drop
    monkeypatch.setattr(InterLayerDropout, "drop", lambda self, rng, on_gpu, begin=0: drop(self, rng, True, begin))
    one_by_one = histograms(model, reading).activations
    assert set(one_by_one) == set(whole) != set()
    with torch.no_grad(), capture(model, *before) as after:
        model(reading.tokens, **reading.given)
    for place in before:
        torch.testing.assert_close(after.calls(place), before.calls(place))
    assert not any(part._forward_hooks for part in model.modules())


def test_an_n_gram_has_no_weights() -> None:
    with pytest.raises(ModelError, match="counts, not weights"):
        histograms(build(preset("ngram-3")))
