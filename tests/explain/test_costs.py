"""Costs by component and layer are those of the built model; growth and times follow from them."""

import math
from typing import Any

import pytest
import torch

from weft.costs.count import Count, count
from weft.costs.memory import Workload, training_memory
from weft.costs.units import short
from weft.errors import ModelError
from weft.explain.costs import costs
from weft.explain.growth import growth
from weft.explain.timing import step_time
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.presets import PRESETS, preset
from weft.nn.config import Attention, Gated, RMSNorm
from weft.nn.init import empty_weights
from weft.nn.position_config import Relative, Rotary, T5Bias

LOOKED_UP = ("ngram", "word2vec", "cbow", "glove")  # models without layers
COUNTED = [name for name in PRESETS if not name.startswith(LOOKED_UP)]


def layer_sizes(name: str) -> dict[str, int]:
    """Parameters of each layer of the built model, from its modules; "" outside the layers."""
    with empty_weights():
        model = build(preset(name))
    sizes: dict[str, int] = {"": 0}
    for path, weight in model.named_parameters():
        parts = path.split(".")
        layer = ".".join(parts[:3]) if "blocks" in parts else ""
        if "_l" in path and parts[0] in ("recurrence", "encoder", "decoder"):
            layer = f"layer {path.split('_l')[-1].split('_')[0]}"
        sizes[layer] = sizes.get(layer, 0) + weight.numel()
    return sizes


@pytest.mark.parametrize("name", COUNTED)
def test_layers_and_the_rest_sum_to_the_model(name: str) -> None:
    found, whole = costs(preset(name)), count(preset(name))

    def numbers(cost: Count) -> tuple[float, ...]:
        return cost.parameters, cost.forward, cost.training()

    layers = [tuple(layer.repeats * n for n in numbers(layer.cost)) for layer in found.layers]
    assert tuple(map(sum, zip(*layers, numbers(found.around), strict=True))) == pytest.approx(numbers(whole))
    for bar in found.bars():
        assert sum(piece.share for piece in bar.pieces) == pytest.approx(1.0)
        assert all(piece.share >= 0 for piece in bar.pieces)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama3-8b", "vaswani-base", "bert-mini", "transformer", "lstm", "gru", "elman"]
)
def test_a_layer_has_the_parameters_of_its_modules(name: str) -> None:
    sizes = layer_sizes(name)
    outside = sizes.pop("")
    found = costs(preset(name))
    assert found.around.parameters == outside
    assert [layer.cost.parameters for layer in found.layers for _ in range(layer.repeats)] == list(sizes.values())


def test_activations_of_layers_sum_to_the_planned_memory() -> None:
    model = preset("gpt2")
    found = costs(model, 512)
    planned = training_memory(model, Workload(1, 512, "bf16"))
    inside = 512 * sum(layer.repeats * layer.activations for layer in found.layers)
    assert 0 < planned.activations - inside < 0.05 * planned.activations
    assert found.cache == 2 * 12 * 768 * 2


@pytest.mark.parametrize("position", [Relative(), T5Bias(), Rotary()])
def test_tables_of_positions_are_counted_in_their_layers(position: Any) -> None:
    found = costs(preset("gpt-tiny").replace(position=position))
    in_layers = [part.parameters for part in found.layers[0].cost.components if part.name == "positions"]
    assert in_layers == ([2 * 33 * 32] if isinstance(position, Relative) else [])


def test_text_and_page_agree() -> None:
    found = costs(preset("gpt2"))
    text, page = found.text(), found.html()
    assert max(map(len, text.splitlines())) <= 80
    for number in ("124,439,808", "7,087,872", "12 × layer", "36 KiB"):
        assert number in text and number in page
    assert page.count('"pieces":') == len(found.bars()) and 'data-module="costs.js"' in page
    assert "&lt;div" not in page


def test_each_segment_of_a_bar_has_its_size() -> None:
    parameters, flops, layers, _, memory = costs(preset("gpt2"), 512).bars()
    lines = [piece.tells for piece in parameters.pieces]
    assert "embeddings: 38,597,376 parameters, 31.0%" in lines
    assert sum(int(line.split(": ")[1].split(" ")[0].replace(",", "")) for line in lines) == 124_439_808
    assert layers.pieces[3].tells == "layer 3: 7,087,872 parameters, 5.7%" and not layers.pieces[3].name
    forward = next(part for part in count(preset("gpt2"), 512).components if part.name == "attention").flops / 512
    assert any(f"{short(forward)} FLOPs forward, {short(2 * forward)} backward" in p.tells for p in flops.pieces)
    assert any(piece.tells.startswith("optimizer: 949 MiB") for piece in memory.pieces)


def test_n_grams_and_wrong_lengths_are_refused() -> None:
    with pytest.raises(ModelError, match="no weights"):
        costs(preset("ngram-3"))
    with pytest.raises(ModelError, match="'ngram' only looks values up"):
        growth(preset("ngram-3"))
    with pytest.raises(ModelError, match="n-gram"):
        step_time(build(preset("ngram-3")), 8)
    for length, why in ((0, "at least one token"), (1025, "model.context = 1024")):
        with pytest.raises(ModelError, match=why):
            costs(preset("gpt2"), length)
    with pytest.raises(ModelError, match="at least 1"):
        step_time(build(preset("gpt-tiny")), 0)


def test_growth_follows_the_known_laws() -> None:
    curves = {axis.letter: {curve.name: curve for curve in axis.curves} for axis in growth(preset("llama-7b")).axes}
    powers = {letter: [curve.power for curve in named.values()] for letter, named in curves.items()}
    assert powers == {"T": [0, 1, 1], "d": [2, 2, 1], "L": [1, 1, 1], "V": [1, 1, 0]}
    assert curves["d"]["parameters"].law("d") == "∝ d²"
    assert all(chart.x.label and chart.y.label for chart in growth(preset("gpt-tiny")).charts())
    assert curves["V"]["bytes of a text's cache"].law("V") == "constant"
    windowed = preset("llama-tiny").replace(attention=Attention(heads=4, window=16))
    (length,) = (axis for axis in growth(windowed).axes if axis.letter == "T")
    assert [curve.power for curve in length.curves] == [0, 0, 1]


def test_growth_is_the_count_of_the_grown_model_at_integer_sizes() -> None:
    model = preset("gpt2")
    axes = {axis.letter: axis for axis in growth(model).axes}
    wide = dict(zip(axes["d"].sizes, axes["d"].curves[0].values, strict=True))
    heads = Attention(heads=24, d_head=64, bias="all")
    grown = model.replace(d_model=1536, attention=heads, feedforward=model.feedforward.replace(d_ff=6144))
    assert wide[1536] == count(grown).parameters
    long = dict(zip(axes["T"].sizes, axes["T"].curves[1].values, strict=True))
    assert long[2048] == count(model.replace(context=2048)).training()
    near = (count(model.replace(layers=6)).parameters, count(model.replace(layers=24)).parameters)
    assert axes["L"].curves[0].slope == pytest.approx(math.log(near[1] / near[0]) / math.log(4))
    attention, feedforward = Attention(heads=9, kv_heads=3), Gated(d_ff=96)
    sizes: dict[str, Any] = {"vocab_size": 101, "layers": 1, "d_model": 36, "norm": RMSNorm(), "position": Rotary()}
    model = Decoder(**sizes, attention=attention, feedforward=feedforward)
    assert [axis.sizes[0] for axis in growth(model).axes if axis.letter == "d"] == [36]


@pytest.mark.parametrize("name", ["gpt-tiny", "bahdanau-tiny", "vaswani-tiny"])
def test_timing_a_step_leaves_the_model_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.explain.timing.COPIED_BYTES", 1 << 20)
    monkeypatch.setattr("weft.explain.timing.MAX_MATRIX", {"cpu": 512})
    torch.manual_seed(0)
    model = build(preset(name)).train()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    found = step_time(model, 4, 2, repeats=3)
    assert model.training
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    assert all(weight.grad is None for weight in model.parameters())
    assert found.flops == pytest.approx(count(model.config, 4).training() * 8)
    assert found.predicted == max(found.flops / found.speed, found.traffic / found.bandwidth)
    assert found.seconds == sorted(found.measured)[1] > 0
    assert f"{found.seconds / found.predicted:.2f}" in (found.text() or "")
