"""A network drawn as neurons: units, weights, what is left out, and which models have none."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.command import Cli

import weft
from weft.errors import ModelError
from weft.explain.neurons import MAX_UNITS, lecture_neurons, neurons
from weft.models.build import build
from weft.models.config import Recurrent
from weft.text.config import Word
from weft.text.tokenizer import build_tokenizer


def elman(**sizes: int) -> Recurrent:
    return Recurrent.model_validate({"vocab_size": 5, "d_model": 4, "d_embedding": 3, "cell": "elman"} | sizes)


def lines(picture: object) -> list[tuple[str, float]]:
    """Return colour and width of each line of the figure."""
    (axes,) = picture.figure().axes  # type: ignore[attr-defined]
    return [(line.get_color(), line.get_linewidth()) for line in axes.lines]


def test_one_line_per_weight_with_its_sign_and_size() -> None:
    torch.manual_seed(0)
    model = build(elman(vocab_size=7))
    picture = neurons(model, build_tokenizer(Word(), ["a b c"]))
    drawn = lines(picture)
    assert len(drawn) == 4 * 3 + 4 * 4 + 7 * 4
    values = np.concatenate([each.values.T.ravel() for each in picture.weights])
    colours = {colour for colour, _ in drawn}
    assert len(colours) == 2
    positive = drawn[int(values.argmax())][0]
    assert [colour == positive for colour, _ in drawn] == (values > 0).tolist()
    first = picture.weights[0].values.T.ravel()
    widths = np.array([width for _, width in drawn[: len(first)]])
    assert np.argmax(widths) == np.abs(first).argmax() and np.allclose(picture.weights[0].values, model_weight(model))
    words = [text.get_text() for text in picture.figure().axes[0].texts]
    assert {"x₀", "x₂", "h₃", "y₄", "a", "c", "W_ax", "W_ah", "W_yh"} <= set(words) and "⋮" not in words


def model_weight(model: torch.nn.Module) -> NDArray[np.float64]:
    return dict(model.named_parameters())["recurrence.weight_ih_l0"].detach().double().numpy()


def test_wide_layers_are_elided() -> None:
    picture = neurons(build(elman(vocab_size=40, d_model=30, d_embedding=20)))
    words = [text.get_text() for text in picture.figure().axes[0].texts]
    assert words.count("⋮") == 4 and {"h₀", "h₂₈", "h₂₉", "y₃₉"} <= set(words) and "h₂₀" not in words
    assert picture.data()["layers"][3]["drawn"] == [*range(MAX_UNITS - 3), 38, 39]
    assert np.shape(picture.data()["weights"][2]["values"]) == (MAX_UNITS - 1, MAX_UNITS - 1)
    assert "40 × 30" in picture.text()


def test_the_lectures_network() -> None:
    picture = lecture_neurons()
    assert [layer.size for layer in picture.layers] == [3, 4, 2] and len(lines(picture)) == 3 * 4 + 4 * 2


@pytest.mark.parametrize("changes", [["model.cell=lstm"], ["model.layers=2"]])
def test_other_networks_are_refused(changes: list[str]) -> None:
    with pytest.raises(ModelError, match="Elman networks of one layer"):
        weft.architecture("elman", [*changes, "model.d_model=4"]).neurons()


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    assert "z = σ(αx)" in cli("explain", "mlp", "--only", "neurons")
    cli("explain", "mlp", "--only", "neurons", "--out", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().count("<svg") == 1
    assert "needs --only graph" in cli.refused("explain", "mlp", "--only", "neurons", "--shapes")
    assert "drawn for mlp" in cli.refused("explain", "gpt-tiny", "--only", "neurons")
