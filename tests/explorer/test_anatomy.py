"""Anatomy in the Explorer: parts, costs, growth and the graph of models of every kind, and of a preset."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.explorer.reading import saved_svg
from tests.serve.serving import Served

from weft.models.presets import PRESETS


def ready(page: Any) -> None:
    page.wait_for_selector(".anatomy-place:not([aria-busy]) > *")


@pytest.mark.parametrize("model", ["gpt", "lstm", "ngram", "bahdanau", "masked-next", "pairs"])
def test_parts_of_every_kind_are_drawn_and_told(page: Any, at: Callable[..., str], server: Served, model: str) -> None:
    before = server.library.models[model].thread
    page.goto(at("anatomy", model=model))
    page.wait_for_selector(".anat-part")
    sent = server.get(f"/v1/architecture/anatomy?model={model}").json()
    names = page.locator(".anat-list > .anat-part > .anat-head .anat-name").all_inner_texts()
    assert [name.split(" × ")[-1] for name in names] == [
        part["name"] for column in sent["columns"] for part in column["parts"]
    ]
    assert page.locator(".anat-drawing:visible .anat-box").count() > 2
    assert server.library.models[model].thread is before  # nothing was loaded for it


def test_a_box_that_is_chosen_opens_its_part_and_stands_in_the_address(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("anatomy", model="gpt"))
    box = page.locator(".anat-box.attention").first
    box.focus()
    page.keyboard.press("Enter")
    chosen = page.locator(".anat-part.anat-chosen > .anat-head .anat-name")
    assert "attention" in chosen.inner_text()
    address = page.url
    assert "part=0." in address
    page.reload()
    page.wait_for_selector(".anat-part.anat-chosen")
    assert "attention" in chosen.inner_text() and page.url == address
    page.keyboard.press("Tab")
    page.locator(".anat-part.anat-chosen summary").first.click()
    assert "def " in page.locator(".anat-part.anat-chosen pre").first.inner_text()


def test_costs_tell_what_is_pointed_at_and_growth_has_its_charts(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("anatomy", preset="gpt2", show="costs"))
    page.wait_for_selector(".cost-piece")
    told = page.locator(".cost-part [role=status]").first
    assert told.inner_text() == "124,439,808"
    page.locator(".cost-piece").first.hover()
    assert told.inner_text() == "embeddings: 38,597,376 parameters, 31.0%"
    page.locator(".cost-piece").first.focus()
    page.keyboard.press("ArrowRight")
    assert told.inner_text().startswith("MHA projections: 28,348,416 parameters")
    page.get_by_role("button", name="Growth").click()
    page.wait_for_selector(".anatomy-place .chart")
    assert page.locator(".anatomy-place .chart").count() == 4 and "show=growth" in page.url
    page.go_back()
    page.wait_for_selector(".cost-piece")


def test_a_graph_is_opened_searched_and_reloaded(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("anatomy", model="gpt", show="graph"))
    page.wait_for_selector(".graph-box")
    closed = page.locator(".graph-box").count()
    page.get_by_label("Find").fill("softmax")
    assert page.locator(".graph-box.chosen").inner_text() == "softmax"
    assert page.locator(".graph-box").count() > closed
    assert re.search(r"1 of \d+", page.locator(".graph-found").inner_text())
    page.get_by_label("shapes").check()
    shown, address = page.locator(".graph-plane").inner_text(), page.url
    assert "open=" in address and "at=" in address and "shapes=1" in address
    page.reload()
    page.wait_for_selector(".graph-box.chosen")
    assert page.locator(".graph-plane").inner_text() == shown
    assert "--only graph --shapes" in page.locator(".tools code").inner_text()
    text = saved_svg(page)
    assert text.startswith("<svg") and "softmax" in text and "class=" not in text


@pytest.mark.parametrize("shown", [{"model": "gpt"}, {"model": "bahdanau"}, {"preset": "vaswani-tiny"}])
def test_a_wide_graph_begins_at_its_uppermost_box_on_a_phone(page: Any, at: Callable[..., str], shown: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(at("anatomy", **shown, show="graph"))
    page.wait_for_selector(".graph-box", timeout=60_000)
    in_view = """() => {
      const { left, right } = document.querySelector(".graph-view").getBoundingClientRect();
      const boxes = [...document.querySelectorAll(".graph-box")].map(each => each.getBoundingClientRect());
      const first = boxes.sort((a, b) => a.top - b.top)[0];
      return first.left >= left && first.right <= right; }"""
    assert page.evaluate(in_view)
    page.get_by_role("button", name="Open one more level").click()
    assert page.evaluate("() => document.querySelector('.graph-view').scrollWidth") > 390
    assert page.evaluate(in_view)


def test_a_graph_of_twelve_layers_opens_at_once(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("anatomy", preset="gpt2", show="graph"))
    page.wait_for_selector(".graph-box", timeout=60_000)
    times = page.evaluate(
        """() => {
        const timed = element => {
          const begun = performance.now();
          element.click();
          void document.body.offsetHeight;
          return performance.now() - begun; };
        for (let n = 0; n < 2; n++) document.querySelector(".graph-deeper").click();
        const block = () => [...document.querySelectorAll("[data-key]")].find(each => each.ariaLabel.includes("Block"));
        return Array.from({ length: 6 }, () => timed(block())); }"""
    )
    assert page.locator(".graph-box").count() > 30
    assert min(times) < 150, times  # other processes may take the rest


def test_a_model_without_such_a_view_says_why_and_other_architectures_are_a_choice_away(
    page: Any, at: Callable[..., str], server: Served
) -> None:
    page.goto(at("anatomy", model="ngram", show="graph"))
    ready(page)
    assert "An n-gram model looks up counts" in page.locator(".anatomy-place").inner_text()
    begun = time.monotonic()
    page.get_by_label("Architecture").select_option("lstm")
    page.wait_for_selector(".graph-box")
    assert "preset=lstm" in page.url and time.monotonic() - begun < 20
    assert page.get_by_label("Architecture").locator("option").count() == len(PRESETS) + 1
