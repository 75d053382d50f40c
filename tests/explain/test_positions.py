"""Pictures of positions hold what the formulas say."""

import math

import numpy as np
import pytest
import torch

from weft.errors import ConfigError, ModelError
from weft.explain.positions import positions
from weft.models.build import build
from weft.models.presets import preset
from weft.nn.position import alibi_slopes
from weft.nn.position_config import Rotary, Sinusoidal


def test_sinusoids_are_the_formula() -> None:
    (found,) = positions(Sinusoidal(), length=20, d=16).encodings
    assert found.stripes is not None
    for place in (0, 3, 19):
        for i in range(8):
            angle = place / 10000 ** (2 * i / 16)
            assert found.stripes[place, 2 * i] == pytest.approx(math.sin(angle))
            assert found.stripes[place, 2 * i + 1] == pytest.approx(math.cos(angle))
    # sin a sin b + cos a cos b = cos(a − b)
    expected = [np.mean([math.cos(k / 10000 ** (2 * i / 16)) for i in range(8)]) for k in range(20)]
    assert found.curves["mean"] == pytest.approx(expected)


def test_the_lectures_values_are_printed() -> None:
    text = positions("sinusoidal").text() or ""
    assert "interleaved           1  0.8415   0.5403   0.0100  1.0000" in text
    assert "tensor2tensor         1  0.8415   0.0001   0.5403  1.0000" in text
    assert "tensor2tensor         2  0.9093   0.0002  -0.4161  1.0000" in text


def test_rotated_products_depend_on_the_distance_only() -> None:
    (found,) = positions(Rotary(), length=64, d=32).encodings
    assert found.exact is not None and set(found.exact) == {"halves", "adjacent"}
    assert max(found.exact.values()) < 1e-5
    expected = [np.mean([math.cos(k * 10000 ** (-2 * i / 32)) for i in range(16)]) for k in range(64)]
    assert found.curves["q = k"] == pytest.approx(expected, abs=1e-5)
    assert "Rotated products" in (positions("rotary").text() or "")


def test_alibi_falls_with_the_distance() -> None:
    (found,) = positions("alibi", length=10).encodings
    slopes = alibi_slopes(8)
    assert found.curves["head 2"] == pytest.approx(-float(slopes[2]) * np.arange(10))
    assert found.stripes is None


def test_all_kinds_are_drawn() -> None:
    found = positions("all", length=24, d=16)
    assert {each.name.split(",")[0] for each in found.encodings} == {
        "sinusoidal", "learned", "relative", "disentangled", "rotary", "t5", "alibi",
    }  # fmt: skip
    assert len(found.charts()) == sum((each.stripes is not None) + 1 for each in found.encodings)
    assert found.html().count("<svg") == len(found.charts())


def test_positions_that_do_two_things_are_two_pictures() -> None:
    both = positions("learned+t5", length=24, d=16).encodings
    assert [each.name for each in both] == ["learned", "t5"]
    assert both[0].stripes is not None
    assert both[1].what == "added to the score"


def test_a_models_own_table_is_shown() -> None:
    model = build(preset("gpt-tiny"))
    (found,) = positions(model, length=100).encodings
    assert model.decoder is not None
    assert found.stripes == pytest.approx(model.decoder.position.weight[:100].detach().numpy())
    with pytest.raises(ModelError, match=r"model\.context = 128"):
        positions(model, length=129)


def test_relative_vectors_are_clipped() -> None:
    model = build(preset("gpt-tiny").replace(position={"kind": "relative", "max_distance": 4}))
    (found,) = positions(model, length=20).encodings
    table = model.decoder.blocks[0].attention.relative_keys.detach().double()
    rows = [table[4 - min(distance, 4)] for distance in range(20)]
    assert found.curves["key vectors"] == pytest.approx([float(row @ table[4]) for row in rows])


def test_pictures_draw_nothing_from_the_random_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    positions("all", length=8, d=8)
    assert torch.equal(before, torch.get_rng_state())


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'rotary'"):
        positions("rotery")
    with pytest.raises(ConfigError, match="even"):
        positions("rotary", d=7)
