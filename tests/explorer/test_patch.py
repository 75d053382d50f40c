"""Patch and Abilities in the Explorer: the numbers are those of the command."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.explorer.reading import show

import weft
from weft.figures.shaded import percent

CELLS = "cells => cells.map(cell => cell.textContent)"


@pytest.mark.parametrize(
    ("model", "state"),
    [
        ("gpt", {"text": "Fi", "other": "Yi", "a": "i", "b": "v"}),
        ("pairs", {"text": "the cat", "other": "the dog", "target": "the", "a": "cat", "b": "dog"}),
    ],
)
def test_the_map_is_that_of_the_command(
    page: Any, at: Callable[..., str], runs: Path, model: str, state: dict[str, str]
) -> None:
    known: Any = weft.load(runs / model).explain.patch(
        state["text"], state["other"], (state["a"], state["b"]), target=state.get("target")
    )
    show(page, at("patch", model=model, **state), model)
    cells = page.locator(".lens tbody td").evaluate_all(CELLS)
    expected = [f"{round(100 * share) + 0:d}" for row in known.maps[0].recovered[::-1].tolist() for share in row]
    assert [cell.replace("−", "-") for cell in cells] == expected
    corrupt, clean = (f"{round(value, 2) + 0.0:.2f}".replace("-", "−") for value in known.difference)
    assert f"clean {clean}, corrupt {corrupt}" in page.locator(".lens").inner_text()


@pytest.mark.parametrize("model", ["gpt", "pairs"])
def test_it_opens_with_a_pair_of_the_models_own(page: Any, at: Callable[..., str], runs: Path, model: str) -> None:
    pair = weft.load(runs / model).explain.example_pair()
    page.goto(at("patch", model=model))
    page.locator(".lens tbody td").first.wait_for()
    assert page.locator("textarea").first.input_value() == pair["clean"]
    assert page.get_by_label("Other text").input_value() == pair["corrupt"]
    assert page.get_by_label("Answer to the text").input_value() == pair["answer"]


def test_it_asks_for_both_answers(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("patch", model="gpt", text="the cat", other="the bat"))
    page.get_by_text("Type a second text").wait_for()


def test_abilities_say_which_distances_are_left_out(page: Any, at: Callable[..., str], runs: Path) -> None:
    known = weft.load(runs / "gpt").abilities(["copying"], questions=25)
    page.goto(at("abilities", model="gpt"))
    page.get_by_text(known.remarks[0].removeprefix("copying: ").capitalize()).wait_for()
    assert page.get_by_text(f"copying: {percent(known.curves[0].overall.accuracy)} right").count()  # type: ignore[union-attr]
