"""The view of attention: heads are chosen, followed and switched off, and the address gives the same view again."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.explorer.reading import At, saved_svg

TEXT = "A tale is told, and then"


def opened(page: Any, address: str) -> None:
    page.goto(address)
    page.locator(".att-grid button").first.wait_for()


def state(page: Any) -> dict[str, str]:
    return page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))")


def test_a_head_is_chosen_read_and_followed(page: Any, at: At) -> None:
    opened(page, at("attention", model="gpt", text=TEXT))
    page.locator(".att-grid button").last.click()
    title = page.locator(".att-map h3").text_content()
    page.keyboard.press("ArrowLeft")
    assert page.locator(".att-map h3").text_content() != title
    page.locator(".att-queries button").nth(3).click()
    assert "(3)" in page.locator(".att-side h3").text_content()
    page.locator(".att-heat").focus()
    page.keyboard.press("ArrowRight")
    assert "→" in page.locator(".att-readout").text_content()
    assert page.locator(".att-svg path").count() > 0
    page.locator(".att-lines select").select_option("one")
    chosen = state(page)
    assert chosen["token"] == "3" and chosen["lines"] == "one"
    before = page.locator(".att-side").inner_text(), page.locator(".att-map h3").text_content()
    page.reload()
    page.locator(".att-grid button").first.wait_for()
    assert (page.locator(".att-side").inner_text(), page.locator(".att-map h3").text_content()) == before
    assert page.locator(".att-lines select").input_value() == "one"


def test_the_numbers_are_the_models(page: Any, at: At, runs: Path) -> None:
    import weft

    maps = weft.load(runs / "gpt").explain.attention(TEXT).part()
    opened(page, at("attention", model="gpt", text=TEXT, layer=0, head=1, token=4))
    rows = page.locator(".att-table tbody tr")
    for number in range(rows.count()):
        _, place, weight = rows.nth(number).locator("td").all_text_contents()
        assert float(weight.replace("<", "")) == pytest.approx(maps.probabilities[0, 1, 4, int(place)], abs=0.003)


def test_heads_are_switched_off_and_on(page: Any, at: At) -> None:
    opened(page, at("attention", model="gpt", text=TEXT, layer=0, head=0))
    page.get_by_role("button", name="Switch this head off").click()
    page.locator(".side").nth(1).wait_for()
    assert state(page)["with"] == "gpt~decoder.0.0"
    page.get_by_text("gpt, without 0.0:").wait_for()
    page.locator(".side").nth(1).locator(".att-grid [aria-pressed=true]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("o")
    page.get_by_role("heading", name="gpt, without 0.0, 0.1").wait_for()
    assert page.locator(".att-off").count() == 2
    page.reload()
    page.get_by_role("heading", name="gpt, without 0.0, 0.1").wait_for()
    page.get_by_role("button", name="Switch this head on").click()
    page.wait_for_function("() => document.querySelectorAll('.att-off').length === 1")
    page.locator(".att-off").click()
    page.get_by_role("button", name="Switch this head on").click()
    page.locator(".side").first.wait_for(state="detached")
    assert "with" not in state(page)


def test_three_kinds_and_a_target(page: Any, at: At) -> None:
    opened(page, at("attention", model="pairs", text="one tale", target="then another"))
    kinds = page.locator(".att-controls select").first
    for kind in ("encoder", "decoder", "cross"):
        kinds.select_option(kind)
    page.get_by_role("button", name="Switch this head off").click()
    page.locator(".side").nth(1).wait_for()
    assert state(page)["kind"] == "cross" and page.locator(".att-keys span").count() > 0
    assert page.locator(".att-off").count() == 1


def test_text_is_typed(page: Any, at: At) -> None:
    opened(page, at("attention", model="gpt"))
    assert page.locator("textarea").first.input_value()
    text = "<img src=x onerror=a>"
    with page.expect_response("**/v1/explain/maps"):
        page.locator("textarea").first.fill(text)
    page.locator("main [aria-busy]").wait_for(state="detached")
    assert state(page)["text"] == text and page.locator("main img").count() == 0
    page.reload()
    page.locator(".att-grid button").first.wait_for()
    assert page.locator("textarea").first.input_value() == text


def test_heads_of_an_encoder_are_switched_off(page: Any, at: At) -> None:
    opened(page, at("attention", model="masked-next"))
    assert page.get_by_role("button", name="Switch this head off").count() == 1


def test_the_only_attention_of_a_model_has_no_layer_and_head(page: Any, at: At) -> None:
    page.goto(at("attention", model="bahdanau"))
    page.get_by_role("heading", name="Attention to the source").wait_for()
    assert page.get_by_role("button", name="Switch this head off").count() == 0
    labels = page.eval_on_selector_all(
        ".att [aria-label]",
        "all => all.filter(each => each.checkVisibility()).map(each => each.getAttribute('aria-label'))",
    )
    for text in (page.locator(".att").inner_text(), *labels, saved_svg(page)):
        assert "layer" not in text.lower() and not re.search(r"\bheads?\b", text.lower()), text


def test_a_model_without_attention(page: Any, at: At) -> None:
    page.goto(at("attention", model="lstm"))
    page.get_by_text("lstm is a language model, which has no attention: it is recurrent.").wait_for()


def test_it_is_kept_as_svg_and_fits_a_phone(page: Any, at: At) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    opened(page, at("attention", model="gpt", text=TEXT, layer=0, head=1))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    saved = saved_svg(page)
    assert saved.startswith("<svg") and "data:image/png;base64" in saved and "<path" in saved and "var(" not in saved
    assert "rgb(" not in saved and "color(" not in saved  # colours that every program reads
    assert page.locator(".att-queries button").last.text_content() in saved
    command = page.locator(".tools code").text_content()
    assert command == f"weft explain runs/gpt --only attention --text '{TEXT}' --layer 0 --head 1"
