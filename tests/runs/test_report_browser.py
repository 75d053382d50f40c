"""A run's report in a browser without a network: it fits a phone, and its curves tell their values."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_explain import RUNS
from tests.explain.browser import CHROMIUM, evaluate

from weft.runs.folder import RunFolder
from weft.runs.report import report

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

LOOKED = """
const chart = document.querySelector(".chart[data-values]"), told = chart.querySelector(".told");
const lines = JSON.parse(chart.dataset.values), box = chart.getBoundingClientRect();
const [x, y, at, value] = lines[0][1].at(-1);
const clientX = box.left + x * box.width / chart.viewBox.baseVal.width;
chart.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY: box.top + 60 }));
const pointed = told.textContent;
chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
const before = told.textContent;
chart.dispatchEvent(new PointerEvent("pointerleave"));
const texts = [...document.querySelectorAll(".prose tbody :is(td, th)")].filter(each => each.textContent.length > 40);
return { requests, errors, at, value, pointed, before, left: told.textContent,
         wide: document.documentElement.scrollWidth - innerWidth,
         narrow: texts.filter(each => each.getBoundingClientRect().width < 90).map(each => each.textContent) };
"""


def test_a_report_fits_a_phone_and_tells_the_values_of_its_curves(tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(RUNS / "classify", tmp_path / "run")))
    lines = ({"step": step, "loss": 9 / step, "lr": 0.1, "tokens": 8 * step, "epoch": 1.0} for step in range(1, 60))
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    row = ["a review that goes on for as long as reviews often do", "positive", "negative", "98.1%"]
    run.event("result", table=[["text", "actual", "predicted", "probability"], row], accuracy=0.5)
    page = tmp_path / "report.html"
    page.write_text(report(run), encoding="utf-8")
    found: dict[str, Any] = evaluate(page, LOOKED, 390)
    assert found["requests"] == [] and found["errors"] == []
    assert found["wide"] <= 0 and found["narrow"] == []
    assert found["at"].startswith("step ") and found["pointed"].startswith(f"{found['at']}: ")
    assert found["value"] in found["pointed"]
    assert found["before"].startswith("step ") and found["before"] != found["pointed"] and found["left"] == ""
