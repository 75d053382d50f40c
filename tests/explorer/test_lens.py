"""The logit lens in the Explorer: each cell is the layer's own guess; arrow keys, the address, a phone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.explorer.reading import show

import weft

TEXT = "A tale of two"
CELLS = "cells => cells.map(cell => cell.textContent)"


def test_cells_are_the_layers_guesses(page: Any, at: Callable[..., str], runs: Path) -> None:
    for model in ("masked-next", "pairs", "gpt"):
        known = weft.load(runs / model).explain.lens(TEXT)
        show(page, at("lens", model=model, text=TEXT), model)
        cells = page.locator(".lens tbody td")
        assert cells.evaluate_all(CELLS) == [guess.piece for row in known.guesses[::-1] for guess in row]
        page.get_by_label("Each cell shows").select_option("rank")
        assert cells.evaluate_all(CELLS) == [f"{rank:,}" for row in known.final_rank[::-1] for rank in row]
    page.locator(".lens-chosen").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    told = page.locator(".shaded-details").inner_text()
    assert f"rank {known.final_rank[-2, 2]:,}." in told
    page.reload()
    page.wait_for_selector(".lens td")
    assert page.locator(".shaded-details").inner_text() == told
    assert page.get_by_label("Each cell shows").input_value() == "rank"


def test_on_a_phone_it_scrolls_and_layers_keep_their_names(page: Any, at: Callable[..., str]) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    show(page, at("lens", model="gpt", text="A tale of two cities and more"), "gpt")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    left = "document.querySelector('.lens tbody th').getBoundingClientRect().left"
    scroll = page.locator(".lens .scroll")
    assert scroll.evaluate("box => box.scrollLeft") == 0  # it begins with the first token
    scroll.evaluate("box => { box.scrollLeft = 60; }")
    assert scroll.evaluate("box => box.scrollLeft") == 60 and page.evaluate(left) >= 0
