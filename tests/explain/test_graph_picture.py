"""The drawn computation graph: folding, layout, both directions, and what is written to files."""

import json
import re
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weft.errors import ConfigError, ModelError
from weft.explain.graph.draw import quoted
from weft.explain.graph.fold import Group, fold
from weft.explain.graph.graph import graph
from weft.explain.graph.picture import GraphPicture, graph_picture, lecture_mlp
from weft.models.build import build
from weft.models.presets import preset

TOKENS = torch.ones(1, 4).long()
SOURCE = SimpleNamespace(tokens=torch.ones(1, 3).long(), mask=None)


def empty(name: str) -> nn.Module:
    with torch.device("meta"):
        return build(preset(name)).eval()


def source_of(name: str) -> dict[str, Any]:
    return {"source": SOURCE} if name.startswith(("vaswani", "bahdanau")) else {}


@cache
def recorded(name: str) -> GraphPicture:
    model = empty(name) if name == "gpt2" else build(preset(name))
    return graph_picture(model, TOKENS, **source_of(name))


def drawn(name: str, depth: int | None = None, open: str | list[str] = (), **options: bool) -> GraphPicture:
    return replace(recorded(name).unfolded(depth, open), **options)


def labels(picture: GraphPicture) -> list[tuple[str, str]]:
    return [(each.inside, each.name) for each in map(picture.written.of, picture.boxes())]


# ---- recording


@pytest.mark.parametrize("name", ["bert-tiny", "elman", "bahdanau-tiny"])
def test_a_model_without_numbers_has_the_same_graph(name: str) -> None:
    """On the meta device: the same nodes, shapes and edges; the model is left as it was."""
    source = source_of(name)
    whole = graph(build(preset(name)).eval(), TOKENS, **source)
    model = empty(name)
    before = dict(model.named_parameters())
    found = graph(model, TOKENS, **source)
    assert [(n.kind, n.function, n.name, n.shape) for n in found.nodes] == [
        (n.kind, n.function, n.name, n.shape) for n in whole.nodes
    ]
    assert found.edges == whole.edges
    assert all(p is before[n] and p.is_meta for n, p in model.named_parameters())


def test_shapes_are_those_that_modules_give() -> None:
    model = build(preset("llama-tiny")).eval()
    seen: dict[str, tuple[int, ...]] = {}

    def see(path: str, module: nn.Module, given: Any, result: Tensor) -> None:
        seen[path] = tuple(result.shape)

    for path, module in model.named_modules():
        module.register_forward_hook(partial(see, path or "model"))
    shapes = {node.name: node.shape for node in graph(model, TOKENS).nodes if node.kind == "variable"}
    named = set(shapes) & set(seen)
    assert len(named) > 20
    assert {name: shapes[name] for name in named} == {name: seen[name] for name in named}


# ---- folding


def test_gpt2_is_first_its_modules() -> None:
    found = labels(drawn("gpt2"))
    assert ("Embedding", "embedding") in found
    assert ("Block × 12", "decoder.0 … 11") in found
    assert ("LayerNorm", "norm") in found
    assert ("LMHead", "output") in found
    assert len(found) < 15


def test_opening_one_block() -> None:
    found = labels(drawn("gpt2", open="decoder.3"))
    assert ("Block × 3", "decoder.0 … 2") in found and ("Block × 8", "decoder.4 … 11") in found
    assert ("Sublayer", "attention_skip") in found
    deeper = labels(drawn("gpt2", open=["decoder.3.attention", "decoder.3.feedforward.*"]))
    assert any(inside == "softmax" for inside, _ in deeper)
    assert ("Linear", "qkv") in deeper
    assert sum(inside == "parameter" and name == "weight" for inside, name in deeper) == 2


def test_depth() -> None:
    counts = [len(labels(drawn("llama-tiny", depth=depth))) for depth in (1, 2, 3, 4, 9)]
    assert all(a < b for a, b in pairwise(counts))
    with pytest.raises(ModelError, match="depth 0"):
        drawn("llama-tiny", depth=0)
    with pytest.raises(ModelError, match=r"decoder\.99.*nothing in this model"):
        drawn("llama-tiny", open="decoder.99")


def test_folding_keeps_every_node_and_makes_no_circle() -> None:
    for name in ("llama-tiny", "vaswani-tiny", "bahdanau-tiny", "lstm"):
        picture = drawn(name)
        edges = picture.written.graph.edges
        assert sorted(picture.root.nodes()) == list(range(len(picture.written.graph.nodes)))
        for group in picture.root.groups():
            assert _ordered(group, edges), (name, group.path)


def _ordered(group: Group, edges: list[tuple[int, int]]) -> bool:
    """By depth-first search, unlike the fold's own check."""
    child_of = {
        place: n
        for n, child in enumerate(group.children)
        for place in (child.nodes() if isinstance(child, Group) else [child])
    }
    after: dict[int, set[int]] = {n: set() for n in range(len(group.children))}
    for a, b in edges:
        if a in child_of and b in child_of and child_of[a] != child_of[b]:
            after[child_of[a]].add(child_of[b])
    state: dict[int, int] = {}

    def visit(n: int) -> bool:
        if state.get(n):
            return state[n] == 2
        state[n] = 1
        good = all(visit(m) for m in after[n])
        state[n] = 2
        return good

    return all(visit(n) for n in after)


def test_what_a_decoder_reads_of_its_source_is_inside_of_it() -> None:
    picture = drawn("vaswani-tiny")
    assert {child.path for child in picture.root.children if isinstance(child, Group)} >= {"encoder", "decoder"}
    cross = next(group for group in picture.root.groups() if group.path == "decoder.1.cross")
    assert [child.label for child in cross.children if isinstance(child, Group)] == ["kv", "q", "out"]


def test_what_computes_nothing_has_no_graph() -> None:
    with pytest.raises(ModelError, match="Identity computes no tensor"):
        graph_picture(nn.Identity(), TOKENS)
    with pytest.raises(ModelError, match="needs a source"):
        graph_picture(build(preset("bahdanau-tiny")), TOKENS)


def test_steps_of_a_recurrent_decoder_stay_apart() -> None:
    found = [name for inside, name in labels(drawn("bahdanau-tiny")) if inside == "GRU"]
    assert found == ["encoder", "decoder (1)", "decoder (2)", "decoder (3)", "decoder (4)"]


def test_constants_fold() -> None:
    root = fold(graph(build(preset("gpt-tiny")).eval(), TOKENS))
    masks = [group for group in root.groups() if group.kind == "constants"]
    assert len(masks) == 4 and all(group.label == "where" for group in masks)


# ---- layout


@pytest.mark.parametrize("name", ["llama-tiny", "vaswani-tiny", "bahdanau-tiny"])
@pytest.mark.parametrize("options", [{}, {"depth": 99}, {"depth": 3, "shapes": True, "backward": True}])
def test_nothing_overlaps_and_lines_keep_off_the_boxes(name: str, options: dict[str, Any]) -> None:
    scene = drawn(name, **options).drawing()
    boxes = [(m.box.x, m.box.y, m.box.x + m.box.width, m.box.y + m.box.height) for m in scene.marks if not m.frame]
    titles = [
        (m.box.x + m.box.title_x, m.box.y + 4, m.box.x + m.box.title_x + m.box.title, m.box.y + 18)
        for m in scene.marks
        if m.frame
    ]
    every = boxes + titles
    lefts, tops, rights, feet = np.array(every).T
    for n, (left, top, right, foot) in enumerate(every):
        assert left >= -0.01 and top >= -0.01 and right < scene.width and foot < scene.height
        apart = (right <= lefts + 0.01) | (rights <= left + 0.01) | (foot <= tops + 0.01) | (feet <= top + 0.01)
        assert apart[:n].all()
    for line in scene.lines:
        mid = (line.bend + line.straight) / 2
        corners = [(line.x, line.y), (line.x, line.bend), (line.x, mid), (line.to_x, mid), (line.to_x, line.straight)]
        points = [(line.x, (line.y + line.bend) / 2), (line.to_x, (line.straight + line.to_y) / 2)]
        for share in (0.1, 0.3, 0.5, 0.7, 0.9):
            p, q = 1 - share, share
            (x0, y0), (x1, y1), (x2, y2), (x3, y3) = corners[1:]
            points.append(
                (
                    p**3 * x0 + 3 * p * p * q * x1 + 3 * p * q * q * x2 + q**3 * x3,
                    p**3 * y0 + 3 * p * p * q * y1 + 3 * p * q * q * y2 + q**3 * y3,
                )
            )
        for x, y in points:
            assert not ((lefts + 0.1 < x) & (x < rights - 0.1) & (tops + 0.1 < y) & (y < feet - 0.1)).any()


def test_frames_hold_what_is_inside() -> None:
    for mark in drawn("llama-tiny", depth=99).drawing().marks:
        for child in mark.box.inside or ():
            assert mark.box.x < child.x and child.x + child.width < mark.box.x + mark.box.width
            assert mark.box.y < child.y and child.y + child.height <= mark.box.y + mark.box.height


def test_lines_join_what_edges_join() -> None:
    """From each box down the pieces of its lines lead to what is computed from it, and to nothing else."""
    picture = drawn("llama-tiny", depth=99)
    scene = picture.drawing()
    leaves = {m.box.key: m.box for m in scene.marks if not m.frame}
    for a, b in picture.written.graph.edges:
        if a in leaves and b in leaves:
            pieces = [line for line in scene.lines if a in line.sources and b in line.targets]
            ends = {(round(line.to_x, 3), round(line.to_y, 3)): line for line in pieces}
            at = (round(leaves[b].x + leaves[b].port, 3), round(leaves[b].y, 3))
            start = (round(leaves[a].x + leaves[a].port, 3), round(leaves[a].y + leaves[a].height, 3))
            for _ in range(200):
                line = ends[at]
                at = (round(line.x, 3), round(line.y, 3))
                if at == start:
                    break
                at = next(end for end in ends if abs(end[0] - at[0]) < 0.01 and abs(end[1] - at[1]) < 0.01)
            assert at == start


# ---- the lecture's network, and both directions


def test_f24_the_lectures_network() -> None:
    picture = lecture_mlp()
    assert labels(picture) == [
        ("feature vector", "x"),
        ("parameter", "α"),
        ("Linear", "a"),
        ("Sigmoid", "z"),
        ("parameter", "β"),
        ("Linear", "b"),
        ("Softmax", "ŷ"),
        ("true label", "y"),
        ("CrossEntropy", "J"),
    ]
    names = picture.written.names
    assert {(names[a], names[b]) for a, b in picture.written.graph.edges} == {
        ("x", "a"),
        ("α", "a"),
        ("a", "z"),
        ("β", "b"),
        ("z", "b"),
        ("b", "ŷ"),
        ("ŷ", "J"),
        ("y", "J"),
    }


def test_f24_the_lectures_network_backwards() -> None:
    lines = lecture_mlp(backward=True).text().splitlines()
    order = [re.split(r"\s{2,}", line)[1] for line in lines]
    assert order == ["J", "y", "ŷ", "b", "β", "z", "a", "α", "x"]
    text = "\n".join(lines)
    for formula in (
        "g_ŷ = −g_J (y ÷ ŷ)",
        "g_b = g_ŷᵀ (diag(ŷ) − ŷ ŷᵀ)",
        "g_β = g_b zᵀ",
        "g_z = βᵀ g_b",
        "g_a = g_z ⊙ z ⊙ (1 − z)",
        "g_α = g_a xᵀ",
    ):
        assert formula in text


def test_the_backward_pass_is_the_reverse_order() -> None:
    picture = drawn("llama-tiny", backward=True)
    order, goes = picture.written.backward_order, picture.written.differentiable
    assert [n for n in order if n] == list(range(sum(goes), 0, -1))
    for a, b in picture.written.graph.edges:
        assert not order[a] or not order[b] or order[a] > order[b]
    nodes = picture.written.graph.nodes
    assert all(goes[i] for i, node in enumerate(nodes) if node.kind == "parameter")
    assert not any(goes[i] for i, node in enumerate(nodes) if node.kind in ("constant", "input"))
    drawing = picture.drawing()
    assert {down for _, _, down in drawing.arrows()} == {-1.0}
    assert {down for _, _, down in drawn("llama-tiny").drawing().arrows()} == {1.0}


# ---- files and pages


class Odd(nn.Module):
    """Names that no file format likes."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module('a"b</script>\\$x$', nn.Linear(2, 2))
        self.add_module("& ünï", nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def test_names_are_escaped(tmp_path: Path) -> None:
    picture = graph_picture(Odd(), torch.ones(1, 2), depth=1)
    for suffix in picture.suffixes:
        assert picture.save(tmp_path / f"odd{suffix}").stat().st_size > 200
    page = (tmp_path / "odd.html").read_text()
    assert "b</script>" not in page and "b\\u003c/script>" in page
    tree = ElementTree.fromstring((tmp_path / "odd.svg").read_text())
    assert {element.tag.split("}")[1] for element in tree.iter()} <= {"svg", "title", "rect", "path", "text", "polygon"}
    assert 'a"b</script>\\$x$' in {element.text for element in tree.iter()}
    with pytest.raises(ConfigError, match=r"\.pdf or \.dot"):
        picture.save(tmp_path / "odd.gif")


def test_graphviz_source() -> None:
    picture = drawn("gpt2", open="decoder.0")
    source = picture.dot()
    assert source.startswith("digraph {") and source.count("{") == source.count("}")
    boxes = re.findall(
        r'^ *(n\d+) \[label="((?:[^"\\]|\\.)*)", xlabel="((?:[^"\\]|\\.)*)"(?:, penwidth=2)?\];$', source, re.M
    )
    assert sorted((label, name) for _, label, name in boxes) == sorted(labels(picture))
    assert re.findall(r'label="(.*)";', source) == ["decoder · Stack", "decoder.0 · Block"]
    ends = re.findall(r"^  (n\d+) -> (n\d+);$", source, re.M)
    assert {end for pair in ends for end in pair} == {key for key, _, _ in boxes}
    assert "edge [dir=back, arrowsize" in replace(picture, backward=True).dot()
    assert quoted('a"\\\n') == '"a\\"\\\\\\n"'


def test_the_page_holds_the_whole_graph() -> None:
    picture = drawn("llama-tiny", shapes=True)
    page = picture.html()
    found = re.search(r'data-module="graph.js"><script[^>]*>(.*?)</script>(.*)</div>', page, re.S)
    assert found and ElementTree.fromstring(found[2]).tag.endswith("svg"), "what stands there without scripts"
    data = json.loads(found[1])
    assert len(data["nodes"]) == len(picture.written.graph.nodes)
    assert list(zip(data["edges"][::2], data["edges"][1::2], strict=True)) == picture.written.graph.edges
    first = len(data["nodes"])
    children = [child for group in data["groups"] for child in group[5]]
    assert sorted(children) == sorted({*range(first), *range(first + 1, first + len(data["groups"]))})
    assert all(0 <= node[4] < len(data["texts"]) for node in data["nodes"])
    assert data["shapes"] and not data["backward"] and data["title"] == picture.title
    assert "g_W = g_yᵀ x" in {line for _, _, gradients in data["rules"] for line in gradients}
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_figure_has_all_labels() -> None:
    picture = drawn("bert-tiny", shapes=True)
    texts = {text.get_text() for text in picture.figure().axes[0].texts}
    assert {text for pair in labels(picture) for text in pair} <= texts
    assert any("1×4×128" in text for text in texts)
