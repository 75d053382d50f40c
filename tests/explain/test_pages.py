"""The pages of `weft explain` in a browser without a network: they request nothing, and everything works."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.explain.browser import CHROMIUM, evaluate
from tests.explain.small import sharp
from tests.explain.test_surprise import GPT, TEXT, TOKENIZER, read

import weft
from weft.decode.config import Branching
from weft.decode.prompt import Prompt
from weft.decode.tree import search_trees
from weft.explain.attention.maps import AttentionMaps, KindMaps
from weft.explain.graph.picture import lecture_mlp
from weft.explain.lens import lens as lens_of
from weft.explain.saliency import saliency as saliency_of
from weft.explain.search import SearchTrees
from weft.explain.surprise import surprise as surprise_of
from weft.figures.picture import Album

RUNS = Path(__file__).parent.parent / "api" / "runs-0.1"
MAX_PAGE_BYTES = 3_000_000

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

LOOKED = """
const named = element => (element.getAttribute("aria-label") || element.textContent.trim() || element.title
  || (element.labels && element.labels.length) || element.getAttribute("aria-labelledby"));
const controls = [...document.querySelectorAll("button, select, input, [role=button], [tabindex='0']")];
const clicks = [];
const buttons = controls.filter(each => each.tagName === "BUTTON").slice(0, 12);
for (const element of buttons) clicks.push(await clicked(element));
for (const details of document.querySelectorAll("details")) details.open = true;
return { requests, errors, controls: controls.length, clicks: clicks.length,
         nameless: controls.filter(each => !named(each)).map(each => each.outerHTML.slice(0, 120)),
         wide: document.documentElement.scrollWidth - innerWidth,
         cut: [...document.querySelectorAll("p, h1, h2, h3, .graph-view")].filter(each =>
           (each.matches(".graph-view") || !each.closest(".scroll")) && each.getBoundingClientRect().right > innerWidth)
           .map(each => each.textContent.slice(0, 60)),
         cells: [...document.querySelectorAll(".heads-map svg")].flatMap(each => [
           each.clientWidth / each.viewBox.baseVal.width, each.clientHeight / each.viewBox.baseVal.height]),
         pictures: [...document.querySelectorAll("svg, canvas")].filter(each => !each.closest("button")
           && each.getAttribute("role") && !named(each)).map(each => each.outerHTML.slice(0, 120)) };
"""


def check(page: Path, width: int, dark: bool) -> None:
    found: dict[str, Any] = evaluate(page, LOOKED, width, dark)
    assert found["requests"] == [] and found["errors"] == [] and found["nameless"] == []
    assert found["wide"] <= 0, f"{found['wide']} px wider than the window"
    assert found["pictures"] == [] and found["cut"] == []
    assert min(found["cells"], default=20) >= 20, "heads too small to tell apart"
    assert page.stat().st_size <= MAX_PAGE_BYTES


@pytest.mark.slow
def test_a_run_on_one_page(tmp_path: Path) -> None:
    weft.load(RUNS / "gpt").explain.all().save(tmp_path / "page.html")
    check(tmp_path / "page.html", 390, dark=False)


def test_attention_of_three_kinds(tmp_path: Path) -> None:
    weft.load(RUNS / "pairs").explain.attention().save(tmp_path / "page.html")
    check(tmp_path / "page.html", 1280, dark=True)


@pytest.mark.slow
def test_many_heads_and_tokens_fit(tmp_path: Path) -> None:
    """12 layers × 12 heads × 128 tokens of random attention, the hardest to compress."""
    p = np.tril(np.random.default_rng(0).random((12, 12, 128, 128), dtype=np.float32))
    p /= p.sum(-1, keepdims=True)
    tokens = [f"word{n}" for n in range(128)]
    AttentionMaps("Attention", "", (KindMaps("decoder", p, tokens, tokens),)).save(tmp_path / "maps.html")
    check(tmp_path / "maps.html", 390, True)


OPENED = """
const root = document.querySelector(".graph"), plane = root.querySelector(".graph-plane"), states = [];
const look = () => {
  const parts = [...root.querySelectorAll(".graph-box, .graph-head, .graph-label")];
  const boxes = parts.map(each => each.getBoundingClientRect()), whole = plane.getBoundingClientRect();
  const crossed = boxes.filter((a, n) => boxes.slice(0, n).some(b => a.left < b.right - 0.5 && b.left < a.right - 0.5
    && a.top < b.bottom - 0.5 && b.top < a.bottom - 0.5));
  const outside = boxes.filter(b => b.left < whole.left || b.right > whole.right || b.bottom > whole.bottom);
  states.push([parts.length, crossed.length, outside.length, root.querySelectorAll(".graph-frame").length]);
};
look();
for (let n = 0; n < 4; n++) { root.querySelector(".graph-deeper").click(); look(); }
for (const name of ["shapes", "backward"]) { root.querySelector(`.graph-${name}`).click(); look(); }
const head = root.querySelector(".graph-head");
head.click(); look();
const pressed = new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true });
root.querySelector(`[data-key="${head.dataset.key}"]`).dispatchEvent(pressed);
const told = root.querySelector(".graph-detail").textContent, near = root.querySelector(".near").getAttribute("d");
root.querySelector(".graph-reset").click(); look();
return { states, told, near, errors };
"""


def test_a_graph_opens_and_closes(tmp_path: Path) -> None:
    lecture_mlp().save(tmp_path / "mlp.html")
    check(tmp_path / "mlp.html", 390, False)


@pytest.mark.slow
def test_boxes_of_an_opened_graph_do_not_overlap(tmp_path: Path) -> None:
    """The page places Python's layouts with the sizes that it measures."""
    weft.architecture("llama-tiny").graph().save(tmp_path / "graph.html")
    found: dict[str, Any] = evaluate(tmp_path / "graph.html", OPENED)
    assert not found["errors"] and found["told"].strip() and found["near"]
    counts = [parts for parts, _, _, _ in found["states"]]
    assert all(state[1:3] == [0, 0] for state in found["states"])
    assert counts[4] == counts[5] == counts[6] > counts[3] > counts[2] > counts[1] > counts[0] == counts[-1]
    assert found["states"][0][3] == 1 and found["states"][7][3] < found["states"][6][3]


DRAWN = """
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


@pytest.mark.slow
def test_drawings_show_what_the_views_hold(tmp_path: Path) -> None:
    reading = read(model := sharp(GPT, 4.0))
    surprise, lens, saliency = surprise_of(reading), lens_of(reading), saliency_of(reading)
    trees = search_trees(model, Prompt.of(TOKENIZER, TEXT), Branching(depth=3))
    search = SearchTrees(TEXT, tuple(trees))
    Album("All", "", (surprise, lens, saliency, search)).save(tmp_path / "page.html")
    found: dict[str, Any] = evaluate(tmp_path / "page.html", DRAWN, width=390)
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
    assert found["shades"] == pytest.approx(((side.norm / side.norm.max()) ** 0.5).tolist(), abs=1e-3)
    nodes = [node for tree in search.trees for node in tree.nodes]
    assert found["boxes"] == len(nodes)
    assert found["states"] == [sum(node.state == state for node in nodes) for state in ("chosen", "kept", "pruned")]
    deep = [len(tree.path(number)) for tree in trees for number in range(len(tree.nodes))]
    assert found["hidden"] == sum(depth > 1 for depth in deep) and found["grown"] == sum(depth > 2 for depth in deep)
    assert found["status"] == "Token 2 of 3"
