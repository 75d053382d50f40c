"""The Explorer's home page: a first prediction, a card per model, the latest runs, and what to type without any."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.explorer.conftest import problems_of
from tests.serve.serving import RUNS, served


def test_a_prediction_is_continued_and_models_have_cards(page: Any, at: Callable[..., str]) -> None:
    page.goto(at(""))
    page.locator(".home-candidate").first.wait_for()
    before = page.locator(".home-sentence").input_value()
    first = page.locator(".home-candidate").first
    first.click()
    page.wait_for_function(f"() => document.querySelector('.home-sentence').value.length > {len(before)}")
    assert page.locator(".home-sentence").input_value().startswith(before)
    names = page.locator(".home-card h3").all_inner_texts()
    assert {"gpt", "lstm", "ngram", "pairs", "classify"} <= set(names)
    card = page.locator(".home-card", has=page.locator("h3", has_text="gpt")).first
    card.scroll_into_view_if_needed()
    card.locator(".home-sample b").wait_for()
    page.locator(".home-run .chart").first.wait_for()
    assert not problems_of(page)


def test_start_here_opens_the_text_on_the_page(page: Any, at: Callable[..., str]) -> None:
    page.goto(at(""))
    page.locator(".home-candidate").first.wait_for()
    page.locator(".home-sentence").fill("A tale is told")
    page.wait_for_function("() => document.querySelector('.home-steps a').href.includes('told')")
    page.get_by_role("link", name="Watch one prediction").click()
    page.wait_for_selector(".view-step > *")
    assert "A+tale+is+told" in page.url


def test_a_model_that_suits_the_view_is_chosen(browser: Any, tmp_path: Path) -> None:
    for n, name in enumerate(("gpt", "lstm", "ngram")):
        shutil.copytree(RUNS / name, tmp_path / name)
        os.utime(tmp_path / name / "config.toml", (1e9 + n, 1e9 + n))
    with served(tmp_path) as server:
        page = browser.new_page(reduced_motion="reduce")
        for view, chosen in (("attention", "gpt"), ("step", "gpt"), ("saliency", "lstm"), ("write", "ngram")):
            page.goto("about:blank")
            page.goto(f"{server.url}/#/{view}")
            page.wait_for_selector(".view > *")
            assert page.locator("#chooser select").input_value() == chosen, view
        page.close()


def test_a_folder_without_runs_says_what_to_type(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path, may_be_empty=True) as server:
        page = browser.new_page()
        page.goto(f"{server.url}/#/attention")
        page.get_by_text("weft quickstart", exact=True).wait_for()
        shutil.copytree(RUNS / "gpt", tmp_path / "gpt")
        page.locator(".home-card h3", has_text="gpt").wait_for()
        page.close()
