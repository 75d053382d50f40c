"""A run's report in a browser without a network: it fits a phone, and its curves show their values."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_explain import RUNS
from tests.explain.browser import CHROMIUM, evaluate

from weft.runs.folder import RunFolder
from weft.runs.report import report

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

SCRIPT = """
await new Promise(done => setTimeout(done, 300));
const chart = document.querySelector(".chart.live"), plot = chart.closest(".plot"), box = chart.getBoundingClientRect();
const shown = () => `${plot.querySelector(".plot-at").textContent} ${plot.querySelector(".plot-legend").textContent}`;
chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 21, clientY: box.top + 60 }));
const pointed = shown();
chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
const before = shown();
chart.dispatchEvent(new PointerEvent("pointerleave"));
const texts = [...document.querySelectorAll(".prose tbody :is(td, th)")].filter(each => each.textContent.length > 40);
return { requests, errors, pointed, before, left: plot.querySelector(".plot-at").textContent,
         controls: [...plot.querySelectorAll(".plot-controls button")].map(each => each.textContent),
         wide: document.documentElement.scrollWidth - innerWidth, shown: document.body.innerText,
         narrow: texts.filter(each => each.getBoundingClientRect().width < 90).map(each => each.textContent) };
"""


def test_a_report_fits_a_phone_and_shows_the_values_of_its_curves(tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(RUNS / "classify", tmp_path / "run")))
    lines = ({"step": step, "loss": 9 / step, "lr": 0.1, "tokens": 8 * step, "epoch": 1.0} for step in range(1, 60))
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    row = ["a review that goes on for as long as reviews often do", "positive", "negative", "98.1%"]
    run.event("result", table=[["text", "actual", "predicted", "probability"], row], accuracy=0.5)
    page = tmp_path / "report.html"
    page.write_text(report(run), encoding="utf-8")
    found: dict[str, Any] = evaluate(page, SCRIPT, 390)
    assert found["requests"] == [] and found["errors"] == []
    assert found["wide"] <= 0 and found["narrow"] == []
    assert found["pointed"].startswith("step 59 ") and f"{9 / 59:.4g}" in found["pointed"]
    assert found["before"].startswith("step 58 ") and f"{9 / 58:.4g}" in found["before"] and found["left"] == ""
    assert found["controls"] == ["log x", "log y"]
    assert not re.search(r"</?(svg|div|span|path|polyline|table|td|script)\b", found["shown"])
