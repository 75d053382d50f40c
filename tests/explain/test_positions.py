"""Pictures of positions hold what the formulas say."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.explain.small import preset_model, small
from tests.spread import spread

from weft.config import kinds
from weft.errors import ConfigError, ModelError
from weft.explain.positions import Positions, positions
from weft.models.config import Decoder
from weft.nn.config import Attention
from weft.nn.position import alibi_slopes
from weft.nn.position_config import ALiBi, Concatenated, NoPosition, PositionConfig, Rotary, Sinusoidal


def of(kind: Any, length: int = 24, d: int = 16, heads: int = 1) -> Positions:
    return positions(Decoder(**small(40, position=kind, d_model=d * heads, attention=Attention(heads=heads))), length)


def test_sinusoids_are_the_formula() -> None:
    (found,) = of(Sinusoidal(), length=20, d=16).encodings
    assert found.stripes is not None
    for position in (0, 3, 19):
        for i in range(8):
            angle = position / 10000 ** (2 * i / 16)
            assert found.stripes[position, 2 * i] == pytest.approx(math.sin(angle))
            assert found.stripes[position, 2 * i + 1] == pytest.approx(math.cos(angle))
    # sin a sin b + cos a cos b = cos(a − b)
    expected = [float(np.mean([math.cos(k / 10000 ** (2 * i / 16)) for i in range(8)])) for k in range(20)]
    assert found.curves["mean"] == pytest.approx(expected)


def test_concatenated_positions_show_their_own_coordinates() -> None:
    (found,), (added,) = of(Concatenated(width=6), d=16).encodings, of(Sinusoidal(), d=6).encodings
    assert found.stripes is not None and found.stripes == pytest.approx(added.stripes)


def test_the_lectures_values_are_printed() -> None:
    text = of(Sinusoidal()).text() or ""
    assert "interleaved           1  0.8415   0.5403   0.0100  1.0000" in text
    for line in ("1  0.8415   0.0001   0.5403  1.0000", "2  0.9093   0.0002  -0.4161  1.0000"):
        assert f"tensor2tensor         {line}" in text


def test_rotated_products_depend_on_the_distance_only() -> None:
    (found,) = of(Rotary(), length=64, d=32).encodings
    assert found.exact is not None and set(found.exact) == {"halves", "adjacent"}
    assert max(found.exact.values()) < 1e-5
    expected = [float(np.mean([math.cos(k * 10000 ** (-2 * i / 32)) for i in range(16)])) for k in range(64)]
    assert found.curves["q = k"] == pytest.approx(expected, abs=1e-5)
    assert "Rotated products" in (of(Rotary()).text() or "")


def test_alibi_falls_with_the_distance() -> None:
    (found,) = of(ALiBi(), length=10, heads=8).encodings
    assert found.curves["head 2"] == pytest.approx(-float(alibi_slopes(8)[2]) * np.arange(10))
    assert found.stripes is None


KINDS: dict[str, Any] = {kind.model_fields["kind"].default: kind for kind in kinds(PositionConfig)}


@pytest.mark.parametrize("kind", spread(KINDS.values(), 5))
def test_every_kind_is_drawn(kind: Any) -> None:
    if kind is NoPosition:
        with pytest.raises(ModelError, match="'none' change neither embeddings nor scores"):
            of(kind())
        return
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = of(kind())
    assert len(found.charts()) == sum((each.stripes is not None) + 1 for each in found.encodings) > 0
    assert found.html().count('role="img"') == len(found.charts())
    assert torch.equal(before, torch.get_rng_state()), "drawing uses no random numbers"


def test_combined_encodings_are_two_pictures() -> None:
    learned, t5 = of(KINDS["learned+t5"]()).encodings
    assert (learned.name, t5.name) == ("learned", "t5")
    assert learned.stripes is not None and t5.curve_label == "added to the score"


def test_a_models_own_table_is_shown() -> None:
    model = preset_model("gpt-tiny")
    (found,) = positions(model, length=100).encodings
    assert found.stripes == pytest.approx(model.decoder.position.weight[:100].detach().numpy())
    with pytest.raises(ModelError, match=r"model\.context = 128"):
        positions(model, length=129)


def test_relative_vectors_are_clipped() -> None:
    model = preset_model("gpt-tiny", position={"kind": "relative", "max_distance": 4})
    (found,) = positions(model, length=20).encodings
    table = model.decoder.blocks[0].attention.relative_keys.detach().double()
    rows = [table[4 - min(distance, 4)] for distance in range(20)]
    assert found.curves["key vectors"] == pytest.approx([float(row @ table[4]) for row in rows])


def test_one_position_shows_nothing() -> None:
    with pytest.raises(ConfigError, match="two positions or more"):
        of(Rotary(), length=1)
