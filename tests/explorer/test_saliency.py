"""Saliency in the Explorer: the token that is chosen is the one that is explained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.explorer.reading import show

import weft

SHADES = "tokens => tokens.map(token => Number(token.style.getPropertyValue('--s')))"


def test_a_chosen_token_is_explained(page: Any, at: Callable[..., str], runs: Path) -> None:
    explain = weft.load(runs / "gpt").explain
    show(page, at("saliency", model="gpt", text="A tale of two"), "gpt")
    assert "The model's next token" in page.locator(".saliency-target").inner_text()
    before = explain.reading("A tale of two").before
    page.locator(".saliency-text .shaded-token").nth(before + 3).click()
    page.wait_for_function("() => location.hash.includes('place=')")
    page.keyboard.press("ArrowRight")
    known = explain.saliency("A tale of two", place=before + 3)
    includes = "text => document.querySelector('.saliency-target').textContent.includes(text)"
    page.wait_for_function(includes, arg=f"log p {known.log_prob:.2f}".replace("-", "−"))
    shades = page.locator(".saliency-text .shaded-token").evaluate_all(SHADES)
    norm = known.sides[0].norm
    assert shades[: len(norm)] == pytest.approx((norm / norm.max()) ** 0.5, abs=1e-3) and not any(shades[len(norm) :])
    assert page.locator(".shaded-token[aria-selected=true]").evaluate("token => token === document.activeElement")
    assert f"--place {before + 3}" in page.locator(".tools code").inner_text()
    page.get_by_label("Shaded by").select_option("times_input")
    told = page.locator(".saliency-most").inner_text()
    page.reload()
    page.wait_for_selector(".saliency-target")
    assert page.locator(".saliency-most").inner_text() == told
    assert page.locator(".saliency-less").count() == told.count("−") - told.count("e−")


def test_every_kind_with_gradients_is_explained(page: Any, at: Callable[..., str]) -> None:
    for model, strips in {"lstm": 1, "masked-next": 1, "pairs": 2, "bahdanau": 2}.items():
        show(page, at("saliency", model=model, text="a b"), model)
        assert page.locator(".shaded-text").count() == strips
        assert page.locator(".saliency-text [aria-selected=true]").count() == 1
