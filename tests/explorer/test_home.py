"""The Explorer's home page: a first prediction, a card per model, the latest runs, and what to type without any."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.explorer.conftest import problems_of
from tests.explorer.test_every_view import AXE
from tests.serve.serving import RUNS, Served, served

from weft.course.lectures import lectures


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
    assert "undefined" not in page.locator("main").inner_text()
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
            assert page.locator("#chooser select").first.input_value() == chosen, view
        page.close()


def test_a_folder_without_runs_says_what_to_type(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path, may_be_empty=True) as server:
        page = browser.new_page()
        page.goto(f"{server.url}/#/attention")
        page.get_by_text("weft quickstart", exact=True).wait_for()
        shutil.copytree(RUNS / "gpt", tmp_path / "gpt")
        page.locator(".home-card h3", has_text="gpt").wait_for()
        page.close()


def test_a_term_is_explained_by_pointer_and_keyboard(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("surprise", model="gpt"))
    card = page.locator(".term-card")
    page.get_by_role("button", name="perplexity").focus()
    card.get_by_text("Lecture 5").wait_for()
    assert page.get_by_role("button", name="perplexity").get_attribute("aria-describedby") == "term-card"
    page.keyboard.press("Escape")
    assert card.is_hidden()
    page.get_by_role("button", name="surprisal").hover()
    card.get_by_text("Shannon 1948").wait_for()


def test_every_view_has_terms_of_the_glossary(page: Any, at: Callable[..., str]) -> None:
    page.goto(at(""))
    page.wait_for_selector("nav#views a")
    page.locator(".glossary dt").last.wait_for(state="attached")
    known = set(page.locator(".glossary dt").all_text_contents())
    for link in page.eval_on_selector_all("nav#views a", "all => all.map(each => each.getAttribute('href'))"):
        page.goto(f"{at('').split('#')[0]}{link}")
        page.wait_for_selector(".term")
        used = set(page.locator(".term").all_text_contents())
        assert used and used <= known, link


@pytest.mark.parametrize(
    ("model", "own", "others"),
    [
        ("gpt", {"attention head", "causal mask"}, {"hidden state", "back-off"}),
        ("masked-next", {"attention head", "masked language model"}, {"causal mask", "temperature", "gate"}),
        ("pairs", {"cross-attention", "causal mask"}, {"hidden state"}),
        ("lstm", {"hidden state", "gate", "cell state", "softmax"}, {"attention head", "residual stream"}),
        ("bahdanau", {"attention", "hidden state", "gate"}, {"attention head", "cell state"}),
        ("ngram", {"back-off", "smoothing"}, {"logits", "embedding", "hidden state"}),
    ],
)
def test_the_terms_of_a_step_are_the_models(
    page: Any, at: Callable[..., str], model: str, own: set[str], others: set[str]
) -> None:
    page.goto(at("step", model=model))
    page.wait_for_selector(".term")
    used = set(page.locator(".term").all_text_contents())
    assert own <= used and not others & used


def test_the_lectures_of_the_glossary_are_those_of_the_course(server: Served) -> None:
    glossary = server.get("/web/glossary.json").json()
    assert glossary["lectures"] == [lecture.title for lecture in lectures().values()]
    assert {name for terms in glossary["views"].values() for name in terms} <= set(glossary["terms"])


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: make test-explorer")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_the_home_page_fits_and_is_accessible(browser: Any, server: Served, scheme: str, width: int) -> None:
    context = browser.new_context(bypass_csp=True, reduced_motion="reduce", color_scheme=scheme)
    page = context.new_page()
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(server.url)
    page.locator(".home-candidate").first.wait_for()
    page.locator(".home-run .chart").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.add_script_tag(path=str(AXE))
    found = page.evaluate("axe.run(document).then(result => result.violations)")
    bad = [each for each in found if each["impact"] in ("serious", "critical")]
    assert not bad, [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in bad]
    context.close()
