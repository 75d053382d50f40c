"""Two models side by side: the same text, linked pointers, differences, and a slider over checkpoints."""

from pathlib import Path
from typing import Any

import pytest
from tests.explorer.conftest import problems_of
from tests.explorer.reading import At
from tests.explorer.test_every_view import AXE, settle
from tests.serve.serving import Served

import weft

TEXT = "A tale is told"
VIEWS = ("step", "attention", "surprise", "write")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("beside", ["gpt@0", "gpt~decoder.0.1", "base"])
def test_each_view_has_two_sides(page: Any, at: At, view: str, beside: str) -> None:
    for width in (390, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("about:blank")
        page.goto(at(view, model="gpt", text=TEXT, **{"with": beside}))
        page.locator(".side").nth(1).wait_for()
        settle(page)
        assert not problems_of(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        tops = [page.locator(".side-title").nth(n).bounding_box()["y"] for n in (0, 1)]
        assert (tops[0] == tops[1]) == (width > 800)


def test_a_model_is_put_beside_another_and_its_checkpoint_moves(page: Any, at: At) -> None:
    page.goto(at("surprise", model="gpt", text=TEXT))
    page.wait_for_selector(".surprise-facts")
    page.get_by_label("Compare with").select_option("@")
    page.get_by_role("heading", name="gpt, before training").wait_for()
    page.get_by_label("at", exact=True).focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("heading", name="gpt, step 6").wait_for()
    assert "with=gpt%406" in page.url
    page.locator("#views").get_by_text("Inside a step").click()
    page.locator(".stage").nth(1).wait_for()
    assert "with=gpt%406" in page.url


def test_differences_are_the_models(page: Any, at: At, runs: Path) -> None:
    page.goto(at("surprise", model="gpt", text=TEXT, **{"with": "gpt@0"}))
    after, before = (weft.load(runs / "gpt", step=step).explain.surprise(TEXT) for step in (6, 0))
    change = sum(each or 0.0 for each in before.nats) - sum(each or 0.0 for each in after.nats)
    told = page.locator(".side-difference p").first
    told.wait_for()
    assert told.inner_text() == (
        f"gpt, before training: {abs(change):.1f} nats {'less' if change < 0 else 'more'} for this text than gpt."
    )


def test_a_token_is_lit_on_both_sides(page: Any, at: At) -> None:
    page.goto(at("surprise", model="gpt", text=TEXT, **{"with": "base"}))
    page.locator(".side .shaded-token").nth(2).hover()
    assert page.locator(".side").nth(1).locator(".linked").count() >= 1
    page.goto(at("step", model="gpt", text=TEXT, **{"with": "gpt@0"}, stage="tokens"))
    settle(page)
    page.locator(".side").first.locator("[data-thread] .chip").nth(1).hover()
    assert page.locator(".linked").count() == 2
    page.keyboard.press("End")
    assert page.locator(".side").nth(1).locator(".stage-caption b").inner_text() == "Probabilities"


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: make test-explorer")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sides_are_accessible(browser: Any, server: Served, scheme: str) -> None:
    page = browser.new_context(bypass_csp=True, reduced_motion="reduce", color_scheme=scheme).new_page()
    for view in VIEWS:
        page.goto(f"{server.url}/#/{view}?model=gpt&with=gpt@0&text=A%20tale")
        page.locator(".side").nth(1).wait_for()
        settle(page)
        page.add_script_tag(path=str(AXE))
        found = page.evaluate("axe.run(document).then(result => result.violations)")
        bad = [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")]
        assert not bad, (view, bad)
