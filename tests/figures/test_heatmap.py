"""Figures are complete files of the right type, with the expected texts."""

from pathlib import Path

import numpy as np
import pytest

from weft.errors import ConfigError, DataError
from weft.figures.heatmap import ConfusionMatrix
from weft.figures.picture import render


def test_a_confusion_matrix_names_labels_and_counts(tmp_path: Path) -> None:
    picture = ConfusionMatrix(((90, 10), (0, 0)), ("$no$", "yes"), title="held out")
    (axes,) = picture.figure().axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["$no$", "yes"]
    assert [text.get_text() for text in axes.texts] == ["90", "10", "0", "0"]
    assert np.asarray(axes.images[0].get_array()).tolist() == [[0.9, 0.1], [0.0, 0.0]]
    assert (axes.get_ylabel(), axes.get_xlabel(), axes.get_title()) == ("actual", "predicted", "held out")
    assert picture.save(tmp_path / "deep" / "matrix.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in picture.save(tmp_path / "matrix.SVG").read_text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_same_figure_is_the_same_file(kind: str) -> None:
    first, second = (render(ConfusionMatrix(((1,),), ("a",)).figure(), kind) for _ in range(2))
    assert first == second


def test_a_large_matrix_has_a_scale_instead_of_numbers() -> None:
    labels = tuple(f"label {n}" for n in range(30))
    counts = np.random.default_rng(0).integers(0, 9, (30, 30)).tolist()
    figure = ConfusionMatrix(tuple(map(tuple, counts)), labels).figure()
    assert len(figure.axes) == 2 and not figure.axes[0].texts
    assert figure.get_size_inches().max() <= 24


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    picture = ConfusionMatrix(((1,),), ("a",))
    with pytest.raises(ConfigError, match=r"a\.jpg: expected a file name ending in \.svg, \.png or \.pdf"):
        picture.save(tmp_path / "a.jpg")
    with pytest.raises(ConfigError, match=r"^5: expected a file's path, such as figure\.pdf"):
        picture.save(5)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        picture.save(tmp_path / "file" / "a.png")
