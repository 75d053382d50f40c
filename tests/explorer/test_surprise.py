"""Surprise on the text that somebody types: the model's own numbers, in the address too."""

import math
from pathlib import Path
from typing import Any

from tests.explorer.reading import At, saved_svg, show

import weft

HOSTILE = "A tale <img src=x>"


def test_every_kind_that_predicts_words_is_surprised(page: Any, at: At) -> None:
    for model in ("gpt", "ngram", "masked-next", "pairs"):
        show(page, at("surprise", model=model), model)
        assert page.locator(".shaded-token[aria-selected=true]").count() == 1
        assert page.locator("#views a:not(.lacking)").all_inner_texts().count("Lens") == (0 if model == "ngram" else 1)
        assert page.locator(".reading-field").count() == (2 if model == "pairs" else 1)


def test_what_is_typed_is_scored_and_is_in_the_address(page: Any, at: At, runs: Path) -> None:
    known = weft.load(runs / "gpt").explain.surprise(HOSTILE)
    show(page, at("surprise", model="gpt"), "gpt")
    page.get_by_label("Text", exact=True).fill(HOSTILE)
    page.wait_for_function("n => document.querySelectorAll('.shaded-token').length === n", arg=len(known.tokens))
    facts = page.locator(".surprise-facts").inner_text()
    assert f"{known.nats_per_token:.3f}" in facts and f"{known.bits_per_byte:.3f}" in facts
    assert page.locator("main img").count() == 0
    page.get_by_label("Surprisal in").select_option("bits")
    page.locator(".shaded-token").nth(1).click()
    page.keyboard.press("ArrowRight")
    told = page.locator(".shaded-details").inner_text()
    assert f"{(known.nats[2] or 0.0) / math.log(2):.2f} bits, rank {known.ranks[2]:,}" in told
    command = page.locator(".tools code").inner_text()
    assert command == f"weft explain runs/gpt --only surprise --text '{HOSTILE}'"
    picture = saved_svg(page)
    assert picture.startswith("<svg") and all(f">{sign}<" in picture for sign in "Atale")
    assert "var(" not in picture and "class=" not in picture and "color(" not in picture
    page.reload()
    page.wait_for_selector(".surprise-facts")
    assert page.locator(".shaded-details").inner_text() == told
    box = page.get_by_label("Text", exact=True)
    assert box.input_value() == HOSTILE
    # what can't be read is said, and the last picture stays
    box.fill("A tale " * 400)
    page.wait_for_function("() => document.querySelector('.reading-problem').textContent.includes('takes at most')")
    assert page.locator(".surprise-facts").inner_text()
