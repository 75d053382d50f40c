"""Axes of a page (web/chart_axes.js, web/numbers.js) have the limits, ticks and labels of print."""

import json
import math
import random
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest

from weft.figures.formats import FORMATS, Format, fixed, general, table_number
from weft.figures.plot import Axis, Plot, Series
from weft.figures.shapes import plot_data

WEB = Path(__file__).parents[2] / "src" / "weft" / "web"
RANGES = 1000
COMPARE = """
import { readFileSync } from "node:fs";
const { limits, roundTicks } = await import(`${process.argv[2]}/chart_axes.js`);
const { formatOf } = await import(`${process.argv[2]}/numbers.js`);
console.log(JSON.stringify(JSON.parse(readFileSync(0)).map(({ axis, values, maxTicks }) => {
  const ends = limits(axis, values);
  return { ends, ticks: roundTicks(axis, ends, maxTicks), labels: values.map(formatOf(axis)) };
})));
"""


def run_node(script: str, data: Any = None) -> subprocess.CompletedProcess[str]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    command = [node, "--input-type=module", "--eval", script, "--", "eval", str(WEB)]
    return subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, timeout=60, check=False)


def random_case(rng: random.Random) -> tuple[Axis, list[float], int]:
    log, width = rng.random() < 0.5, rng.choice((1e-3, 0.1, 2, 30, 1e6))
    low = 10 ** rng.uniform(-8, 14) * (1 if log or rng.random() < 0.7 else -1)
    if rng.random() < 0.3:
        low = float(f"{low:.2g}")
    high = low * (1 + width) if low > 0 else abs(low) * width
    values = [low, high, *(rng.uniform(low, high) for _ in range(3))]
    includes = rng.choice(((), (low,), (high,), (high * 2,), (low, high), () if log else (0.0,)))
    format: Format = rng.choice(get_args(Format))
    return Axis(log=log, format=format, includes=includes, pad=rng.choice((0.0, 0.04, 0.1))), values, rng.randint(1, 9)


def test_a_page_and_print_agree_on_limits_ticks_and_labels() -> None:
    rng = random.Random(7)
    cases = [random_case(rng) for _ in range(RANGES)]
    data = [{"axis": plot_data(Plot("", [], x=axis))["x"], "values": v, "maxTicks": n} for axis, v, n in cases]
    answer = run_node(COMPARE, data)
    assert answer.returncode == 0, answer.stderr
    for (axis, values, max_ticks), page in zip(cases, json.loads(answer.stdout), strict=True):
        ends = axis.limits(values)
        assert page["ends"] == pytest.approx(ends, rel=1e-12), axis
        ticks = axis.round_ticks(ends, max_ticks)
        assert page["ticks"] == [{"value": value, "label": label} for value, label in ticks.items()], (axis, ends)
        assert page["labels"] == [axis.label_of(value) for value in values], axis
    answer = run_node(COMPARE, [{"axis": {"format": "roman"}, "values": [1, 2], "maxTicks": 3}])
    assert answer.returncode and 'axis format "roman": expected one of number, count, scientific' in answer.stderr


def test_data_of_a_page_have_names() -> None:
    series = Series("a", [(1.0, 2.0)], band=[(1.0, 3.0)])
    axis = Axis("rate", ticks={1.0: "one"}, format="count", includes=(0.0,))
    data = plot_data(Plot("T", [series], x=axis, marks=[(1.0, "here")]))
    assert data["size"] == {"width": 480, "height": 290} and data["marks"] == [{"x": 1.0, "text": "here"}]
    assert data["x"] == {
        "format": "count", "pad": 0.04, "ticks": [{"value": 1.0, "label": "one"}], "label": "rate", "includes": [0.0],
    }  # fmt: skip
    (sent,) = data["series"]
    assert sent == {
        "name": "a", "look": asdict(series)["look"]._asdict(), "x": [1.0], "y": [2.0],
        "band": {"low": [1.0], "high": [3.0]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("format", "texts"),
    [
        ("number", {0.0: "0", 5e-5: "5e-5", 0.0005: "0.0005", 2500.0: "2500", 25e3: "25k", 1.5e6: "1.5M", 2e9: "2B"}),
        ("count", {32_000.0: "32,000", 1e6: "1,000,000", -0.2: "0"}),
        ("scientific", {0.0: "0", 1e15: "10¹⁵", 2e-4: "2·10⁻⁴", 1.5e8: "1.5·10⁸"}),
        ("multiple", {2.0: "2×", 0.5: "0.5×"}),
        ("signed", {0.5: "+0.5", -0.25: "-0.25", 0.0: "0"}),
    ],
)
def test_named_formats(format: Format, texts: dict[float, str]) -> None:
    assert {value: FORMATS[format](value) for value in texts} == texts


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (1.2966, "1.30"), (0.009951, "0.00995"), (128.0, "128"), (12_400.0, "12,400"),
     (1.2e-5, "1.2·10⁻⁵"), (-0.25, "-0.250"), (float("nan"), "nan"), (float("inf"), "inf")],
)  # fmt: skip
def test_numbers_of_a_table_have_three_digits(value: float, text: str) -> None:
    assert table_number(value) == text


def test_huge_numbers_have_short_exponents() -> None:
    assert [general(value, 3) for value in (1e-7, 123456.0, 0.00012345, 1.0)] == ["1e-7", "1.23e5", "0.000123", "1"]
    texts = {120.944: "120.94", 999999.0: "999999.00", 1e178: "1e178", -2.376e10: "-2.38e10", math.inf: "∞"}
    assert {value: fixed(value, ".2f") for value in texts} == texts
    assert fixed(math.nan) == "nan"
