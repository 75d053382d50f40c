"""Search trees are laid out so that nothing overlaps, and page and figure show what a search did."""

import itertools
import json
import math
import re

import pytest
import torch
from markupsafe import escape
from tests.decode.small import decoder
from tests.lectures.test_f19_search import MODEL

from weft.decode.config import Branching
from weft.decode.prompt import Prompt
from weft.decode.tree import SearchedText, SearchNode, SearchTree, search_trees
from weft.explain.search import BOX, SMALL, SearchTrees, laid_out, signs
from weft.figures.shaded import width_of
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(Byte())


def picture(depth: int = 5) -> SearchTrees:
    model = decoder(vocab_size=TOKENIZER.vocab_size)
    trees = search_trees(model, Prompt.of(TOKENIZER, "a<b"), Branching(depth=depth, beams=4, samples=6))
    return SearchTrees("a<b", tuple(trees))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nothing_overlaps(which: int) -> None:
    laid = picture().laid[which]
    boxes = [(spot.x, spot.y - BOX / 2, spot.x + spot.width, spot.y + BOX / 2) for spot in laid.spots]
    boxes += [
        (spot.label_x, spot.y - 4 - SMALL, spot.label_x + width_of(spot.label, SMALL), spot.y - 4)
        for spot in laid.spots
    ]
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for spot in laid.spots:
        assert width_of(spot.text, 12.5) < spot.width  # a text stays in its box
        assert spot.start[0] <= spot.turn < spot.label_x < spot.x
        assert spot.x >= 0 and spot.x + spot.width <= laid.width and spot.y + BOX / 2 <= laid.height


def test_children_stand_by_their_probability_and_their_parent_among_them() -> None:
    shown = picture()
    for tree, laid in zip(shown.trees, shown.laid, strict=True):
        places = list(zip(tree.nodes, laid.spots, strict=True))
        for number in range(-1, len(tree.nodes)):
            children = sorted((pair for pair in places if pair[0].parent == number), key=lambda pair: pair[1].y)
            logprobs = [node.logprob for node, _ in children]
            assert logprobs == sorted(logprobs, reverse=True)
            if children:
                y = laid.root if number < 0 else laid.spots[number].y
                assert y == pytest.approx((children[0][1].y + children[-1][1].y) / 2)


def test_the_page_holds_all_nodes_and_their_places() -> None:
    shown = picture(3)
    html = shown.html()
    held = json.loads(re.search(r'<script type="application/json" class="data">(.*?)</script>', html)[1])
    for tree, laid, given, places in zip(shown.trees, shown.laid, held["trees"], held["laid"], strict=True):
        assert [node["state"] for node in given["nodes"]] == [node.state for node in tree.nodes]
        assert [node["total"] for node in given["nodes"]] == [node.total for node in tree.nodes]
        assert [spot["x"] for spot in places["spots"]] == [spot.x for spot in laid.spots]
        assert [each["logprob"] for each in given["written"]] == [each.logprob for each in tree.written]
    assert held["prompt"] == "a<b" and "a<b" not in html and escape(shown.text()) in html
    assert all(name in shown.text() for name in ("Greedy search", "Beam search", "Sampling"))


def test_what_greedy_search_misses_is_said() -> None:
    shown = SearchTrees("0", tuple(search_trees(MODEL, Prompt([0]), Branching(depth=2, beams=2))))
    values = [f"{math.log(p):.2f}".replace("-", "−") for p in (0.15, 0.36)]
    assert f"misses a likelier text: log p {values[0]}, the beam's {values[1]}" in shown.about
    greedy, beam, _ = shown.trees
    assert "misses" not in SearchTrees("0", (greedy, SearchTree("beam", beam.nodes, greedy.written))).about


def test_the_figure_draws_every_token() -> None:
    shown = picture(3)
    texts = [text.get_text() for text in shown.figure().axes[0].texts]
    for laid in shown.laid:
        for spot in laid.spots:
            assert spot.label in texts
    assert texts.count("Beam search") == 1


def test_long_and_strange_tokens() -> None:
    torch.manual_seed(0)
    words = ["\n", "  ", "x" * 60, "$a_b$", "漢字", "<b>"]
    nodes = tuple(SearchNode(-1, n, word, -1.0 - n, -1.0 - n, "kept") for n, word in enumerate(words))
    tree = SearchTree("greedy", nodes, (SearchedText("\n a", 0, -1.0),))
    laid = laid_out(tree)
    assert [spot.text for spot in laid.spots][:3] == ["⏎", "␣␣", "x" * 11 + "…"]
    shown = SearchTrees("p", (tree,))
    shown.figure().draw_without_rendering()
    assert "<b>" not in shown.html()
    assert signs(" to be\n") == "␣to be⏎" and signs(" ") == "␣" and signs("") == ""
