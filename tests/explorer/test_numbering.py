"""Layers, heads, neurons and positions count from 0, as in Python, wherever a view names one, in print and on pages."""

import re
from typing import Any

import pytest
from tests.explorer.reading import At
from tests.explorer.test_every_view import offered, settle
from tests.explorer.test_step import TEXT
from tests.serve.serving import RUNS, Served

import weft
from weft.models.config import Recurrent

NAMED = re.compile(r"\b(layer|block|head|neuron|unit|position|row)s? (\d+)\b(?! (?:heads|rows))", re.IGNORECASE)
# What a reader of a page meets: its text, titles and labels, and the choices of a list that is closed.
SHOWN = """() => {
  const main = document.querySelector("main"), inside = [...main.querySelectorAll("*")];
  return [main.innerText, ...inside.flatMap(each => [each.ariaLabel, each.getAttribute("title"),
    each.localName === "text" || each.localName === "option" ? each.textContent : null])].filter(Boolean);
}"""


def counts(name: str) -> dict[str, int]:
    """How many layers, heads and so on the model of a run has."""
    model: Any = weft.load(RUNS / name).config.model
    if isinstance(model, Recurrent):
        return {"layer": model.layers, "unit": model.d_model}
    heads, neurons = model.attention.heads, model.feedforward.d_ff
    return {"layer": model.layers, "block": model.layers, "head": heads, "neuron": neurons}


def numbers(texts: list[str]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for text in texts:
        for kind, number in NAMED.findall(text):
            found.setdefault(kind.lower(), set()).add(int(number))
    return found


@pytest.mark.parametrize("view", ["attention", "heads", "surprise", "lens", "saliency", "step", "costs"])
def test_in_print(view: str) -> None:
    explain = weft.load(RUNS / "gpt").explain
    text = (explain.costs() if view == "costs" else getattr(explain, view)(TEXT)).text()
    found, most = numbers([text]), counts("gpt")
    assert all(max(found.get(kind, {0})) < count for kind, count in most.items()), found
    if view in ("surprise", "saliency"):
        places = {int(place) for place in re.findall(r"^(?:text)? *(\d+)  ", text, re.MULTILINE)}
        assert max(places) < len(TEXT) + 1 and (view == "saliency" or min(places) == 0)


@pytest.mark.parametrize("model", ["gpt", "lstm"])
def test_on_pages(page: Any, at: At, server: Served, model: str) -> None:
    most = counts(model)
    seen: dict[str, set[int]] = {}
    places = server.json("/v1/explain/step", model=model, input=TEXT)["step"]["pieces"]
    page.goto(at("tokens", model=model, text=TEXT))
    for view in offered(page):
        zooms = ("", "block", "head", "ff", "ff/0", "layer/0") if view == "step" else ("",)
        for zoom in zooms:
            page.goto(at(view, model=model, text=TEXT, stage="probabilities", zoom=zoom))
            settle(page)
            found = numbers(page.evaluate(SHOWN))
            assert all(max(found.get(kind, {0})) < count for kind, count in most.items()), (view, zoom, found)
            assert max(found.get("position", {0})) < len(places), (view, zoom)
            for kind in found:
                seen.setdefault(kind, set()).update(found[kind])
    assert seen and all(min(seen[kind]) == 0 for kind in seen if kind != "position"), seen


def test_positions_of_every_list_begin_at_0(page: Any, at: At) -> None:
    page.goto(at("step", model="gpt", text=TEXT))
    settle(page)
    follow = page.get_by_label("Follow").locator("option").all_text_contents()
    assert [int(each.split(":")[0]) for each in follow] == list(range(len(follow)))
    for view in ("surprise", "saliency"):
        page.goto(at(view, model="gpt", text=TEXT))
        settle(page)
        cells = page.locator("table:has(th:text-is('position')) tbody tr").evaluate_all(
            "rows => rows.map(row => row.cells[0].textContent)"
        )
        assert cells == [str(n) for n in range(len(cells))] and len(cells) > 4, view
