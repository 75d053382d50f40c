"""The page of a comparison in a browser without a network, narrow and wide, light and dark."""

from pathlib import Path

import pytest
from tests.compare.page_sample import ablation, comparison, scaling
from tests.explain.browser import CHROMIUM, evaluate

from weft.compare.page import ComparisonPage
from weft.compare.scale import ScalingPage

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

SCRIPT = """
for (const details of document.querySelectorAll("details")) details.open = true;
const button = document.querySelector(".command button");
const shown = !button.hidden;
await clicked(button);
await new Promise(done => setTimeout(done, 50));
return { requests, errors, shown, label: button.textContent, selected: String(getSelection()),
         wide: document.documentElement.scrollWidth - innerWidth,
         cut: [...document.querySelectorAll(".chart text")].filter(each => {
           const box = each.closest("svg").getBoundingClientRect(), own = each.getBoundingClientRect();
           return own.right > box.right + 2 || own.left < box.left - 2; }).map(each => each.textContent),
         over: [...document.querySelectorAll(".chart")].flatMap(chart => {
           const texts = [...chart.querySelectorAll("text")].map(each => [each.textContent,
             each.getBoundingClientRect()]);
           const cross = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4
             && b.top < a.bottom - 4;
           return texts.flatMap(([one, a], n) => texts.slice(0, n).filter(([, b]) => cross(a, b))
             .map(([other]) => [one, other])); }) };
"""


def check(page: ComparisonPage | ScalingPage, command: str, path: Path, width: int, dark: bool) -> None:
    page.save(path)
    found = evaluate(path, SCRIPT, width, dark)
    assert found["requests"] == [] and found["errors"] == []
    assert found["wide"] <= 0, f"{found['wide']} px wider than the window"
    assert found["shown"] and found["label"] in ("Copied", "Selected")
    assert found["selected"].strip() == command
    assert found["cut"] == [], "clipped texts"
    assert found["over"] == [], "overlapping texts"


@pytest.mark.parametrize(("width", "dark"), [(390, False), pytest.param(1280, True, marks=pytest.mark.slow)])
def test_a_comparison_makes_no_request_and_fits(tmp_path: Path, width: int, dark: bool) -> None:
    check(ComparisonPage(comparison()), comparison().command, tmp_path / "page.html", width, dark)


@pytest.mark.slow
def test_an_ablation_with_long_names_fits(tmp_path: Path) -> None:
    check(ComparisonPage(ablation()), ablation().command, tmp_path / "page.html", 390, dark=True)


@pytest.mark.slow
def test_a_scaling_law_fits(tmp_path: Path) -> None:
    check(scaling(), scaling().command, tmp_path / "page.html", 390, dark=False)
