"""Activation functions, their derivatives, and schedules, as pictures."""

import math

import numpy as np
import pytest

from weft.explain.activations import activations
from weft.explain.schedule import schedule


def test_values_and_slopes_are_those_of_calculus() -> None:
    found = activations()
    x = found.x
    sigmoid = 1 / (1 + np.exp(-x))
    normal = np.array([0.5 * (1 + math.erf(each / math.sqrt(2))) for each in x])
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    expected = {
        "relu": (np.maximum(x, 0), (x > 0).astype(float)),
        "gelu": (x * normal, normal + x * density),
        "silu": (x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))),
        "sigmoid": (sigmoid, sigmoid * (1 - sigmoid)),
        "tanh": (np.tanh(x), 1 - np.tanh(x) ** 2),
    }
    for name, (values, slopes) in expected.items():
        assert found.values[name] == pytest.approx(values, abs=1e-6)
        assert found.slopes[name] == pytest.approx(slopes, abs=1e-6)
    assert found.values["gelu-tanh"] == pytest.approx(found.values["gelu"], abs=1e-3)
    assert found.swish[1.0] == pytest.approx(found.values["silu"], abs=1e-12)
    assert found.swish[0.0] == pytest.approx(x / 2)
    assert found.swish[5.0] == pytest.approx(x / (1 + np.exp(-5 * x)))
    assert found.slopes["gelu-tanh"] == pytest.approx(found.slopes["gelu"], abs=3e-3)


def test_all_functions_are_drawn_and_printed() -> None:
    found = activations()
    text = found.text() or ""
    for name in ("relu", "gelu", "gelu-tanh", "silu", "sigmoid", "tanh"):
        assert name in text
    assert found.html().count('role="img"') == 8
    assert "0.8413" in text
    assert "-0.0000" not in text


def test_a_schedule_shows_its_peak() -> None:
    found = schedule([512**-0.5 * min(step**-0.5, step * 4000**-1.5) for step in range(1, 10_001)], "2017 <schedule>")
    assert "4,000   0.000699  peak" in (found.text() or "")
    assert "&lt;schedule&gt;" in found.html() and "<schedule>" not in found.html()
