"""Tokens: every tokenizer at hand cuts what is typed."""

from collections.abc import Callable
from typing import Any

HOSTILE = "<img src=x onerror=alert(1)> \u202eשלום 😀"


def cut(page: Any, name: str) -> Any:
    return page.locator(f".tok-pieces[aria-label='{name}'] .tok-piece")


def test_a_text_is_cut_while_it_is_typed(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("tokens"))
    page.wait_for_selector(".tok-piece")
    page.locator("#tokens-text").fill(HOSTILE)
    page.wait_for_selector(f"table:has-text('{len(HOSTILE.encode())}')")
    assert cut(page, "bytes").count() == len(HOSTILE.encode())
    assert cut(page, "characters, trained on this text").count() == len(HOSTILE)
    assert page.locator("main img").count() == 0
    page.reload()
    page.wait_for_selector(".tok-piece")
    assert page.locator("#tokens-text").input_value() == HOSTILE


def test_a_piece_tells_its_id_and_marks_the_same_characters_elsewhere(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("tokens", text="a 😀 b"))
    page.wait_for_selector(".tok-piece")
    cut(page, "characters, trained on this text").nth(2).hover()
    page.wait_for_selector(".tokens-here")
    assert page.locator(".tok-pieces[aria-label='bytes'] .tokens-same").count() == 4  # the bytes of one sign
    assert "bytes f0 9f 98 80" in page.locator(".tokens-facts").inner_text()
    cut(page, "bytes").first.focus()
    page.keyboard.press("ArrowRight")
    assert "characters 1 to 1" in page.locator(".tokens-facts").inner_text()


def test_no_text_has_no_tokens(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("tokens"))
    page.wait_for_selector(".tok-piece")
    page.locator("#tokens-text").fill("")
    page.wait_for_selector(".tok-piece", state="detached")
    page.locator("#tokens-text").fill("a" * 10_000)
    page.wait_for_selector("main:has-text('and 9,500 more')")
