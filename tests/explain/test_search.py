"""Search trees are laid out so that nothing overlaps, and page and figure show what a search did."""

import itertools
import math
from pathlib import Path

import pytest
from markupsafe import escape
from tests.decode.small import decoder
from tests.explain.small import page_data
from tests.lectures.test_f19_search import MODEL

from weft.decode.config import Branching, TreeSearch
from weft.decode.prompt import Prompt
from weft.decode.tree import SearchedText, SearchNode, SearchTree, search_trees
from weft.errors import ConfigError
from weft.explain.search import BOX, CURVE, SMALL, SearchTrees, handmade, tree_layout, visible
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
    layout = picture().layouts[which]
    spots = layout.positions
    boxes = [(spot.x, spot.y - BOX / 2, spot.x + spot.width, spot.y + BOX / 2) for spot in spots]
    boxes += [(s.label_x, s.y - 4 - SMALL, s.label_x + width_of(s.label, SMALL), s.y - 4) for s in spots]
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for spot in spots:
        assert width_of(spot.text, 12.5) < spot.width  # a text stays in its box
        assert spot.start_x <= spot.label_x - CURVE < spot.label_x < spot.x
        assert spot.x >= 0 and spot.x + spot.width <= layout.width and spot.y + BOX / 2 <= layout.height


def test_children_are_sorted_by_probability_with_their_parent_in_the_middle() -> None:
    shown = picture()
    for tree, layout in zip(shown.trees, shown.layouts, strict=True):
        pairs = list(zip(tree.nodes, layout.positions, strict=True))
        for number in range(-1, len(tree.nodes)):
            children = sorted((pair for pair in pairs if pair[0].parent == number), key=lambda pair: pair[1].y)
            logprobs = [node.logprob for node, _ in children if node.id >= 0]
            assert logprobs == sorted(logprobs, reverse=True)
            if children:
                y = layout.root if number < 0 else layout.positions[number].y
                assert y == pytest.approx((children[0][1].y + children[-1][1].y) / 2)


def test_the_page_holds_all_nodes_and_their_layout() -> None:
    shown = picture(3)
    html = shown.html()
    data = page_data(html)
    for tree, layout, sent, laid in zip(shown.trees, shown.layouts, data["trees"], data["layouts"], strict=True):
        assert [node["state"] for node in sent["nodes"]] == [node.state for node in tree.nodes]
        assert [node["total"] for node in sent["nodes"]] == [node.total for node in tree.nodes]
        assert [spot["x"] for spot in laid["positions"]] == [spot.x for spot in layout.positions]
        assert [each["logprob"] for each in sent["written"]] == [each.logprob for each in tree.written]
    assert data["prompt"] == "a<b" and "a<b" not in html and escape(shown.text()) in html
    assert all(name in shown.text() for name in ("Greedy search", "Beam search", "Sampling"))


def test_texts_and_probabilities_that_a_search_misses_are_reported() -> None:
    shown = SearchTrees("0", tuple(search_trees(MODEL, Prompt([0]), Branching(depth=2, beams=2))))
    values = [f"{-math.log(p):.2f}" for p in (0.15, 0.36)]
    assert f"its path has −log p {values[0]} instead of {values[1]} (beam search, 2.4 times as likely)" in shown.about
    greedy, beam, _ = shown.trees
    assert "loses" not in SearchTrees("0", (greedy, SearchTree("beam", beam.nodes, greedy.written))).about
    shown = picture(2)
    for tree in shown.trees:
        for parent in {node.parent for node in tree.nodes}:
            children = [node for node in tree.nodes if node.parent == parent]
            assert sum(math.exp(node.logprob) for node in children) == pytest.approx(1.0, abs=1e-4)
        ends = {n for n, node in enumerate(tree.nodes) if node.state != "unseen" and len(tree.nodes_to(n)) == 2}
        left = 1 - sum(math.exp(tree.nodes[n].total) for n in ends)
        assert tree.left == pytest.approx(left, abs=1e-3)
        assert f"not considered to the end: {100 * left:.0f}%" in "\n".join(shown.results(tree))


def test_a_tree_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text('{"tree": {"a": {"p": 0.6, "next": {"c": 0.5, "d": 0.5}}, "b": {"p": 0.4, "next": {"e": 1}}}}')
    shown = handmade(file, TreeSearch(beams=2, samples=3))
    texts = {tree.name: tree.written[0].text for tree in shown.trees}
    assert texts | {"sampling": ""} == {"greedy": "a c", "beam": "b e", "sampling": "", "best": "b e"}
    assert "loses 0.29" in shown.text() and "0.51 + 0.69 = 1.20" in shown.text()
    states = {node.text: node.state for node in shown.trees[0].nodes}
    assert states == {" a": "chosen", " b": "pruned", " c": "chosen", " d": "pruned", " e": "unseen"}
    file.write_text(
        '{"edges": "weight", "tree": {"a": {"weight": 3, "next": {"b": 1}}, "c": {"weight": 2, "next": {"d": 9}}}}'
    )
    shown = handmade(file, TreeSearch(beams=1))
    assert [tree.written[0].text for tree in shown.trees] == ["c d", "c d", "a b"]
    assert "%" not in "".join(spot.label for layout in shown.layouts for spot in layout.positions)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "expected a tree"),
        ('{"tree": {"a": 0.7, "b": 0.5}}', "sum to 1.2"),
        ('{"tree": {"a": {"p": 1, "next": {"b": -1}}}}', r"tree\.a\.next\.b: expected a probability"),
        ('{"tree": {"a": true}}', "expected a probability"),
        ('{"tree": {"a": 1}, "beams": 3}', "unknown key 'beams'"),
        ('{"tree": {"a": 1}, "edges": "cost"}', "expected edges"),
    ],
)
def test_a_bad_tree_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        handmade(file, TreeSearch())


def test_the_figure_draws_every_token() -> None:
    shown = picture(3)
    texts = [text.get_text() for text in shown.figure().axes[0].texts]
    assert {spot.label for layout in shown.layouts for spot in layout.positions} <= set(texts)
    assert texts.count("Beam search") == 1


def test_long_and_strange_tokens() -> None:
    words = ["\n", "  ", "x" * 60, "$a_b$", "漢字", "<b>"]
    nodes = tuple(SearchNode(-1, n, word, -1.0 - n, -1.0 - n, "kept") for n, word in enumerate(words))
    tree = SearchTree("greedy", nodes, (SearchedText("\n a", 0, -1.0),))
    assert [spot.text for spot in tree_layout(tree).positions][:3] == ["⏎", "␣␣", "x" * 11 + "…"]
    shown = SearchTrees("p", (tree,))
    shown.figure().draw_without_rendering()
    assert "<b>" not in shown.html()
    assert visible(" to be\n") == "␣to be⏎" and visible(" ") == "␣" and visible("") == ""
