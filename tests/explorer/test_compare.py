"""Comparisons and scaling laws in the Explorer: charts one can point at, an address that brings them back."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.compare.page_sample import comparison, scaling
from tests.explorer.reading import saved_svg
from tests.serve.serving import RUNS, Served, served

from weft.compare.page import ComparisonPage

NAMES = ("four", "law", "hostile")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of one run, two comparisons and a law; one of them has names that no page likes."""
    place = tmp_path_factory.mktemp("compare")
    data = ComparisonPage(comparison()).data()
    bad = "<img src=x onerror=alert(1)>\u202e" + "x" * 300
    hostile = json.loads(json.dumps(data).replace("transformer++", bad))
    for name, value in zip(NAMES, (data, scaling().data(), hostile), strict=True):
        (place / name).mkdir()
        (place / name / f"{value['kind']}.json").write_text(json.dumps(value), encoding="utf-8")
    (place / "runs").mkdir()
    (place / "runs" / "results.jsonl").write_text("{}\n")
    (place / "runs" / "plan.json").write_text('{"command": "weft compare a b"}')
    with served(RUNS / "gpt", place) as it:
        yield it


@pytest.fixture
def at(server: Served) -> Callable[..., str]:
    return lambda path, **state: f"{server.url}/#/{path}?{urlencode(state)}"


def test_curves_change_their_axis_and_come_back(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("compare", study="four"))
    page.wait_for_selector(".compare-losses .chart")
    assert page.locator(".lead").inner_text() == ComparisonPage(comparison()).result
    axes = page.get_by_role("group", name="Bits per byte against").get_by_role("button")
    assert axes.all_inner_texts() == ["FLOPs", "tokens", "steps", "seconds"]
    axes.nth(1).click()
    assert "x=tokens" in page.url
    page.locator(".compare-losses .plot-name", has_text="lstm").click()
    page.reload()
    page.wait_for_selector(".compare-losses .chart")
    assert "against tokens" in page.locator(".compare-losses .title").text_content()
    pressed = page.locator(".compare-losses .plot-name[aria-pressed=false]")
    assert pressed.count() == 1 and "lstm" in pressed.inner_text()


def test_pointing_tells_values_and_the_ranking_has_every_contender(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("compare", study="four"))
    chart = page.locator(".compare-losses .chart")
    chart.focus()
    page.keyboard.press("ArrowRight")
    found = ComparisonPage(comparison()).ranking
    first = found[0].result
    bits = sum(job.bits_per_byte for job in first.at(first.shares[0])) / len(first.at(first.shares[0]))
    told = page.locator(".compare-losses .plot-name", has_text=found[0].name).first.inner_text()
    assert f"{bits:.4g}" in told
    ranking = page.locator(".compare-figure").first.text_content()
    assert all(f"{ranked.bits_text()}" in ranking for ranked in found if ranked.finished)


def test_a_law_has_its_fit_and_its_runs_and_is_saved(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("compare", study="law"))
    page.wait_for_selector(".compare-losses .chart")
    axes = page.get_by_role("group", name="Bits per byte against").get_by_role("button")
    assert axes.all_inner_texts() == ["FLOPs", "tokens", "parameters"]
    axes.nth(2).click()
    assert "by FLOPs" in page.locator(".compare-losses .title").text_content()
    assert page.locator(".tools code").inner_text() == scaling().command
    text = saved_svg(page)
    assert text.count("<svg") >= 4 and "Residuals" in text


def test_names_are_text_and_what_has_not_ended_says_so(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("compare", study="hostile"))
    page.wait_for_selector(".compare-losses .chart")
    assert page.locator("main img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_label("Comparison").select_option("runs")
    page.get_by_text("Unfinished: 1 run done").wait_for()
    assert "study=runs" in page.url


def test_nothing_is_wider_than_a_phone(browser: Any, at: Callable[..., str]) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    opened = context.new_page()
    for study in NAMES:
        opened.goto(at("compare", study=study))
        opened.reload()
        opened.wait_for_selector(".compare-losses .chart")
        assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


def test_no_comparison_names_the_command_that_makes_one(browser: Any, tmp_path: Path) -> None:
    with served(RUNS / "gpt") as empty:
        context = browser.new_context()
        opened = context.new_page()
        opened.goto(f"{empty.url}/#/compare")
        opened.get_by_text("weft compare lstm").wait_for()
        context.close()
