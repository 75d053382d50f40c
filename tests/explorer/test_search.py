"""Search trees in the Explorer: they grow a token at a time, with the settings that somebody chose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.explorer.reading import saved_svg, show

import weft
from weft.decode.config import Branching

LATER = "document.querySelectorAll('.search-tree g.search-later').length"


def test_trees_grow_step_by_step(page: Any, at: Callable[..., str], runs: Path) -> None:
    settings = Branching(beams=2, depth=4)
    trees = weft.load(runs / "gpt").explain.search("A tale", settings=settings).trees
    deep = [len(tree.path(number)) for tree in trees for number in range(len(tree.nodes))]
    show(page, at("search", model="gpt", text="A tale", depth=4), "gpt")
    page.get_by_label("Beams").fill("2")
    page.wait_for_function("n => document.querySelectorAll('.search-tree rect').length === n", arg=len(deep))
    assert page.evaluate(LATER) == 0  # who asked for less motion sees all of it
    assert "depth=4 beams=2" in page.locator(".tools code").inner_text()
    bold = page.locator(".search-tree .search-chosen").count()
    for step in (4, 3, 2):
        page.get_by_role("button", name="Back").click()
        assert page.evaluate(LATER) == sum(depth > step for depth in deep)
    # which beam is the best is known at the end
    assert page.locator(".search-tree .search-chosen").count() == bold - len(trees[1].path(trees[1].written[0].leaf))
    page.reload()
    page.wait_for_selector(".search-tree")
    assert page.locator(".search-status").inner_text() == "Token 2 of 4"
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("() => document.querySelector('.search-status').textContent === 'Token 3 of 4'")
    page.get_by_role("button", name="Pause").click()
    page.wait_for_function("() => location.hash.includes('step=3')")


def test_every_kind_that_writes_has_trees(page: Any, at: Callable[..., str]) -> None:
    for model, begins in {"lstm": "After", "ngram": "After", "pairs": "From", "bahdanau": "From"}.items():
        show(page, at("search", model=model, text="a b", samples=2, seed=7, temperature=0.5, top_k=2), model)
        assert page.locator(".search-tree svg").count() == 3
        assert page.locator(".search p").first.inner_text().startswith(begins)
    picture = saved_svg(page)
    assert "Beam search" in picture and picture.count("<svg") == 7 and "color(" not in picture
