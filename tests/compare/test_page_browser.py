"""The page of a comparison in a browser without a network, narrow and wide, light and dark."""

from pathlib import Path

import pytest
from tests.compare.page_sample import ablation, comparison
from tests.explain.browser import CHROMIUM, evaluate

from weft.compare.page import ComparisonPage

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

LOOKED = """
for (const details of document.querySelectorAll("details")) details.open = true;
const button = document.querySelector(".cmp-command button");
const shown = !button.hidden;
await clicked(button);
await new Promise(done => setTimeout(done, 50));
return { requests, errors, shown, told: button.textContent, selected: String(getSelection()),
         wide: document.documentElement.scrollWidth - innerWidth,
         low: [...document.querySelectorAll(".figure text")].filter(each => {
           const box = each.closest("svg").getBoundingClientRect(), own = each.getBoundingClientRect();
           return own.right > box.right + 2 || own.left < box.left - 2; }).map(each => each.textContent) };
"""


@pytest.mark.parametrize(
    ("kind", "width", "dark"), [("four", 390, False), ("ablation", 390, True), ("four", 1280, True)]
)
def test_the_page_asks_for_nothing_and_fits(tmp_path: Path, kind: str, width: int, dark: bool) -> None:
    given = comparison() if kind == "four" else ablation()
    ComparisonPage(given).save(tmp_path / "page.html")
    found = evaluate(tmp_path / "page.html", LOOKED, width, dark)
    assert found["requests"] == [] and found["errors"] == []
    assert found["wide"] <= 0, f"{found['wide']} px wider than the window"
    assert found["shown"] and found["told"] in ("Copied", "Selected")
    assert found["selected"].strip() == given.command
    assert found["low"] == [], "texts that a figure cuts off"
