"""Surprise, lens, saliency and search on one self-contained page: the drawings show what the views hold."""

from pathlib import Path
from typing import Any

import pytest
from tests.explain.browser import CHROMIUM, evaluate
from tests.explain.small import sharp
from tests.explain.test_surprise import GPT, TEXT, TOKENIZER, read

from weft.decode.config import Branching
from weft.decode.prompt import Prompt
from weft.decode.tree import search_trees
from weft.explain.lens import lens as lens_of
from weft.explain.saliency import saliency as saliency_of
from weft.explain.search import SearchTrees
from weft.explain.surprise import surprise as surprise_of
from weft.figures.picture import Album

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

LOOKED = """
const all = (root, what) => [...root.querySelectorAll(what)];
const [surprise, lens, saliency, search] = all(document, "[data-module]");
const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const copied = element => { getSelection().selectAllChildren(element); return String(getSelection()); };
const found = { errors, requests, copied: copied(surprise.querySelector(".shaded-text")),
  tokens: all(surprise, ".shaded-token").length, facts: surprise.querySelector(".surprise-facts").textContent };
const first = surprise.querySelector(".shaded-token");
first.focus();
found.told = surprise.querySelector(".shaded-details").textContent;
press(first, "ArrowRight");
found.second = all(surprise, ".shaded-token").indexOf(document.activeElement);
const unit = surprise.querySelector("select");
unit.value = "bits";
unit.dispatchEvent(new Event("change"));
found.bits = surprise.querySelector(".shaded-details").textContent;
found.layers = all(lens, "tbody th").map(each => each.textContent);
found.cells = all(lens, "td").map(each => each.textContent);
const cell = lens.querySelector(".lens-chosen");
cell.focus();
press(cell, "ArrowDown");
found.lens = lens.querySelector(".shaded-details").textContent;
found.shades = all(saliency, ".shaded-token").map(each => Number(each.style.getPropertyValue("--s")));
found.boxes = all(search, "rect").length;
found.states = ["chosen", "kept", "pruned"].map(state => all(search, `.search-${state}`).length);
const button = name => all(search, ".search-steps button").find(each => each.textContent === name);
for (let n = 0; n < 3; n++) button("Back").click();
found.hidden = all(search, "g.search-later").length;
button("Next").click();
found.grown = all(search, "g.search-later").length;
found.status = search.querySelector(".search-status").textContent;
return found;
"""


def test_drawings_show_what_the_views_hold(tmp_path: Path) -> None:
    reading = read(model := sharp(GPT, 4.0))
    surprise, lens, saliency = surprise_of(reading), lens_of(reading), saliency_of(reading)
    trees = search_trees(model, Prompt.of(TOKENIZER, TEXT), Branching(depth=3))
    search = SearchTrees(TEXT, tuple(trees))
    Album("All", "", (surprise, lens, saliency, search)).save(tmp_path / "page.html")
    found: dict[str, Any] = evaluate(tmp_path / "page.html", LOOKED, width=390)
    assert found["errors"] == [] and found["requests"] == []
    assert found["copied"].strip() == TEXT and found["tokens"] == len(surprise.tokens)
    for number in (f"{surprise.nats_per_token:.3f}", f"{surprise.bits_per_byte:.3f}"):
        assert number in found["facts"]
    assert f"{surprise.nats[0]:.2f} nats, rank {surprise.ranks[0]:,} of {surprise.vocab_size:,}" in found["told"]
    assert all(guess.piece in found["told"] for guess in surprise.guesses[0])
    assert found["second"] == 1 and f"{surprise.scored[1] / 0.6931472:.2f} bits" in found["bits"]
    assert found["layers"] == lens.names[::-1]
    assert found["cells"] == [guess.piece for row in lens.guesses[::-1] for guess in row]
    assert f"rank {lens.final_rank[-2, -1]:,}." in found["lens"]
    (side,) = saliency.sides
    assert found["shades"] == pytest.approx((side.norm / side.norm.max()).tolist(), abs=1e-3)
    nodes = [node for tree in search.trees for node in tree.nodes]
    assert found["boxes"] == len(nodes)
    assert found["states"] == [sum(node.state == state for node in nodes) for state in ("chosen", "kept", "pruned")]
    deep = [len(tree.path(number)) for tree in trees for number in range(len(tree.nodes))]
    assert found["hidden"] == sum(depth > 1 for depth in deep) and found["grown"] == sum(depth > 2 for depth in deep)
    assert found["status"] == "Token 2 of 3"
