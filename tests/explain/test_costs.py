"""Costs by component and layer are those of the built model; growth and times follow from them."""

import math

import pytest
import torch

from weft.costs.count import count
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

COUNTED = [name for name in PRESETS if not name.startswith("ngram")]


def layer_sizes(name: str) -> dict[str, int]:
    """Parameters of each layer of the built model, by looking at its modules."""
    with empty_weights():
        model = build(preset(name))
    found: dict[str, int] = {}
    for path, weight in model.named_parameters():
        parts = path.split(".")
        layer = ".".join(parts[:3]) if "blocks" in parts else ""
        if "_l" in path and parts[0] in ("recurrence", "encoder", "decoder"):
            layer = f"layer {path.split('_l')[-1].split('_')[0]}"
        found[layer] = found.get(layer, 0) + weight.numel()
    return found


@pytest.mark.parametrize("name", COUNTED)
def test_layers_and_what_stands_around_them_make_the_whole(name: str) -> None:
    found = costs(preset(name))
    whole = count(preset(name))
    for of in (lambda cost: cost.parameters, lambda cost: cost.forward, lambda cost: cost.training()):
        assert sum(layer.repeats * of(layer.cost) for layer in found.layers) + of(found.around) == pytest.approx(
            of(whole)
        )
    for bar in found.bars():
        assert sum(piece.share for piece in bar.pieces) == pytest.approx(1.0)
        assert all(piece.share >= 0 for piece in bar.pieces)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "vaswani-base", "bert-mini", "transformer"])
def test_a_layer_has_the_parameters_of_its_modules(name: str) -> None:
    sizes = layer_sizes(name)
    around = sizes.pop("")
    found = costs(preset(name))
    assert found.around.parameters == around
    expected = list(sizes.values())
    assert [layer.cost.parameters for layer in found.layers for _ in range(layer.repeats)] == expected


@pytest.mark.parametrize("name", ["lstm", "gru", "elman"])
def test_recurrent_layers_are_counted_one_by_one(name: str) -> None:
    sizes = layer_sizes(name)
    found = costs(preset(name).replace(d_embedding=preset(name).d_embedding))
    assert [layer.cost.parameters for layer in found.layers] == [size for name, size in sizes.items() if name]


def test_kept_activations_of_layers_sum_to_the_memory_planned() -> None:
    model = preset("gpt2")
    found = costs(model, 512)
    planned = training_memory(model, Workload(1, 512, "bf16"))
    inside = 512 * sum(layer.repeats * layer.activations for layer in found.layers)
    assert 0 < planned.activations - inside < 0.05 * planned.activations
    assert found.cache == 2 * 12 * 768 * 2
    assert [layer.cache for layer in found.layers] == [2 * 768 * 2]


@pytest.mark.parametrize("position", [Relative(), T5Bias(), Rotary()])
def test_tables_of_positions_are_where_they_stand(position) -> None:
    model = preset("gpt-tiny").replace(position=position)
    found = costs(model)
    in_layers = [part.parameters for part in found.layers[0].cost.components if part.name == "positions"]
    assert in_layers == ([2 * 33 * 32] if isinstance(position, Relative) else [])


def test_text_and_page_say_the_same() -> None:
    found = costs(preset("gpt2"))
    text, page = found.text(), found.html()
    assert max(map(len, text.splitlines())) <= 80
    for what in ("124,439,808", "7,087,872", "12 × layer", "36 KiB"):
        assert what in text and what in page
    assert page.count('"pieces":') == len(found.bars()) and 'data-module="costs.js"' in page
    assert "&lt;div" not in page


def test_each_piece_of_a_bar_tells_how_much_it_is() -> None:
    parameters, flops, layers, _, memory = costs(preset("gpt2"), 512).bars()
    told = [piece.tells for piece in parameters.pieces]
    assert "embeddings: 38,597,376 parameters, 31.0%" in told
    counts = [int(line.split(": ")[1].split(" ")[0].replace(",", "")) for line in told]
    assert sum(counts) == 124_439_808
    assert layers.pieces[3].tells == "layer 3: 7,087,872 parameters, 5.7%" and not layers.pieces[3].name
    whole = count(preset("gpt2"), 512)
    attention = next(part for part in whole.components if part.name == "attention")
    forward = attention.flops / 512
    assert any(f"{short(forward)} FLOPs forward, {short(2 * forward)} backward" in p.tells for p in flops.pieces)
    assert any(piece.tells.startswith("optimizer: 949 MiB") for piece in memory.pieces)


def test_an_n_gram_has_nothing_to_count() -> None:
    with pytest.raises(ModelError, match="no weights"):
        costs(preset("ngram-3"))
    with pytest.raises(ModelError, match="n-gram"):
        growth(preset("ngram-3"))
    with pytest.raises(ModelError, match="n-gram"):
        step_time(build(preset("ngram-3")), 8)


def test_lengths_that_do_not_fit_are_refused() -> None:
    for length, why in ((0, "at least one token"), (1025, "model.context = 1024")):
        with pytest.raises(ModelError, match=why):
            costs(preset("gpt2"), length)
    with pytest.raises(ModelError, match="at least 1"):
        step_time(build(preset("gpt-tiny")), 0)


def test_growth_follows_the_known_laws() -> None:
    found = {axis.letter: {curve.name: curve for curve in axis.curves} for axis in growth(preset("llama-7b")).axes}
    powers = {letter: [curve.power for curve in curves.values()] for letter, curves in found.items()}
    assert powers == {"T": [0, 1, 1], "d": [2, 2, 1], "L": [1, 1, 1], "V": [1, 1, 0]}
    assert found["d"]["parameters"].law("d") == "∝ d²"
    assert all(chart.x.label and chart.y.label for chart in growth(preset("gpt-tiny")).charts())
    assert found["V"]["bytes of a text's cache"].law("V") == "constant"


def test_growth_is_the_count_of_the_grown_model() -> None:
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


def test_a_window_bounds_what_the_length_costs() -> None:
    model = preset("llama-tiny").replace(attention=Attention(heads=4, window=16))
    axes = {axis.letter: axis for axis in growth(model).axes}
    assert [curve.power for curve in axes["T"].curves] == [0, 0, 1]


def test_odd_sizes_grow_only_to_whole_ones() -> None:
    model = Decoder(
        vocab_size=101, layers=1, d_model=36, attention=Attention(heads=9, kv_heads=3), feedforward=Gated(d_ff=96),
        norm=RMSNorm(), position=Rotary(),
    )  # fmt: skip
    assert [axis.sizes[0] for axis in growth(model).axes if axis.letter == "d"] == [36]


@pytest.mark.parametrize("name", ["gpt-tiny", "bahdanau-tiny", "vaswani-tiny"])
def test_a_step_is_timed_and_leaves_the_model_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert f"{found.seconds / found.predicted:.2f}" in found.text()
