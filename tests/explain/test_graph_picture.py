"""The drawn computation graph: folding, layout, both directions, and the files it is saved to."""

import re
from collections.abc import Sequence
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
from scipy.sparse.csgraph import connected_components
from tests.explain.small import page_data
from torch import Tensor, nn

from weft.errors import ConfigError, ModelError
from weft.explain.graph.draw import quoted
from weft.explain.graph.fold import Subgraph, fold
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
    return graph_picture(empty(name) if name == "gpt2" else build(preset(name)), TOKENS, **source_of(name))


def drawn(name: str, depth: int | None = None, open: str | Sequence[str] = (), **options: Any) -> GraphPicture:
    return replace(recorded(name).unfolded(depth, open), **options)


def labels(picture: GraphPicture) -> list[tuple[str, str]]:
    return [(each.inside, each.name) for each in map(picture.labelled.labels, picture.boxes())]


# ---- recording


@pytest.mark.parametrize("name", ["bert-tiny", "elman", "bahdanau-tiny"])
def test_a_model_on_the_meta_device_has_the_same_graph(name: str) -> None:
    source = source_of(name)
    expected = graph(build(preset(name)).eval(), TOKENS, **source)
    model = empty(name)
    before = dict(model.named_parameters())
    assert graph(model, TOKENS, **source) == expected
    assert all(p is before[n] and p.is_meta for n, p in model.named_parameters())


def test_shapes_are_those_of_the_modules_outputs() -> None:
    model = build(preset("llama-tiny")).eval()
    outputs: dict[str, tuple[int, ...]] = {}

    def record(path: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        outputs[path] = tuple(output.shape)

    for path, module in model.named_modules():
        module.register_forward_hook(partial(record, path or "model"))
    shapes = {node.name: node.shape for node in graph(model, TOKENS).nodes if node.kind == "variable"}
    named = set(shapes) & set(outputs)
    assert len(named) > 20
    assert {name: shapes[name] for name in named} == {name: outputs[name] for name in named}


# ---- folding


def test_gpt2_is_folded_to_its_modules() -> None:
    boxes = labels(drawn("gpt2"))
    expected = {("Embedding", "embedding"), ("Block × 12", "decoder.0 … 11"), ("LayerNorm", "norm")}
    assert {*expected, ("LMHead", "output")} <= set(boxes) and len(boxes) < 15


def test_opening_one_block_or_several_levels() -> None:
    boxes = labels(drawn("gpt2", open="decoder.3"))
    stacks = {("Block × 3", "decoder.0 … 2"), ("Block × 8", "decoder.4 … 11")}
    assert {*stacks, ("Sublayer", "attention_skip")} <= set(boxes)
    deeper = labels(drawn("gpt2", open=["decoder.3.attention", "decoder.3.feedforward.*"]))
    assert any(inside == "softmax" for inside, _ in deeper)
    assert ("Linear", "qkv") in deeper
    assert sum(inside == "parameter" and name in ("W₁", "W₂") for inside, name in deeper) == 2
    counts = [len(labels(drawn("llama-tiny", depth=depth))) for depth in (1, 2, 3, 4, 9)]
    assert all(a < b for a, b in pairwise(counts))
    with pytest.raises(ModelError, match="depth 0"):
        drawn("llama-tiny", depth=0)
    with pytest.raises(ModelError, match=r"decoder\.99.*nothing in this model"):
        drawn("llama-tiny", open="decoder.99")


@pytest.mark.parametrize("name", ["llama-tiny", "vaswani-tiny", "bahdanau-tiny", "lstm"])
def test_folding_keeps_every_node_and_creates_no_cycle(name: str) -> None:
    picture = drawn(name)
    edges = picture.labelled.graph.edges
    assert sorted(picture.root.nodes()) == list(range(len(picture.labelled.graph.nodes)))
    for group in picture.root.subgraphs():
        assert _is_acyclic(group, edges), group.path


def _is_acyclic(group: Subgraph, edges: list[tuple[int, int]]) -> bool:
    """Whether no two children are strongly connected; `fold` sorts them topologically instead."""
    nodes = [list(child.nodes()) if isinstance(child, Subgraph) else [child] for child in group.children]
    child_of = {node: n for n, members in enumerate(nodes) for node in members}
    joined = np.zeros((len(nodes), len(nodes)), bool)
    for a, b in edges:
        if a in child_of and b in child_of:
            joined[child_of[a], child_of[b]] = True
    return bool(connected_components(joined, connection="strong")[0] == len(nodes))


def test_a_decoders_keys_of_the_source_are_drawn_inside_it() -> None:
    picture = drawn("vaswani-tiny")
    assert {child.path for child in picture.root.children if isinstance(child, Subgraph)} >= {"encoder", "decoder"}
    cross = next(group for group in picture.root.subgraphs() if group.path == "decoder.1.cross")
    assert [child.label for child in cross.children if isinstance(child, Subgraph)] == ["kv", "q", "out"]


def test_models_without_a_graph_are_refused() -> None:
    with pytest.raises(ModelError, match="Identity computes no tensor"):
        graph_picture(nn.Identity(), TOKENS)
    with pytest.raises(ModelError, match="needs a source"):
        graph_picture(build(preset("bahdanau-tiny")), TOKENS)


def test_steps_of_a_recurrent_decoder_are_separate_and_constants_fold() -> None:
    names = [name for inside, name in labels(drawn("bahdanau-tiny")) if inside == "GRU"]
    assert names == ["encoder", "decoder (1)", "decoder (2)", "decoder (3)", "decoder (4)"]
    root = fold(graph(build(preset("gpt-tiny")).eval(), TOKENS))
    masks = [group for group in root.subgraphs() if group.kind == "constants"]
    assert len(masks) == 4 and all(group.label == "mask" for group in masks)


def names(name: str, **changes: Any) -> list[str]:
    return drawn(name, **changes).labelled.names


def test_variables_have_the_names_of_the_formulas() -> None:
    for name in ("gpt-tiny", "llama-tiny"):
        picture = drawn(name)
        assert {"Q", "K", "V", "Q Kᵀ", "scores", "A", "A V", "W_QKV", "W₂", "x + FFN", "h", "logits"} <= {*names(name)}
        functions = {picture.labelled.function(node) for node in picture.labelled.graph.nodes}
        assert "mul 1/√d_k" in functions and not any(re.search(r"mul 0\.\d", function) for function in functions)
    assert {"h₀", "h₄", "a₁", "W_ah", "W_ax", "b_ah", "W_yh", "b_y"} <= {*names("elman")}
    lstm = names("lstm")  # two layers
    assert {"c₀", "i₄", "f₁ ⊙ c₀", "tanh c₂", "h₄⁽¹⁾", "W_ah⁽¹⁾"} <= {*lstm} and "W_ax x₁⁽²⁾" not in lstm
    for name in ("gpt-tiny", "llama-tiny", "elman", "lstm", "gru", "vaswani-tiny"):
        assert not any(re.fullmatch("v[₀-₉]+", each) or "_l0" in each for each in names(name))


def test_gates_of_an_lstm_depend_on_their_part_of_the_sum_only() -> None:
    labelled = drawn("lstm").labelled
    of = {name: node for node, name in zip(labelled.graph.nodes, labelled.names, strict=True)}
    for gate in "ifgo":
        ((_, part),) = of[f"{gate}₂"].arguments
        assert labelled.names[part] == f"a_{gate}₂"


def test_the_loss_follows_the_logits() -> None:
    picture = graph_picture(build(preset("gpt-tiny")).eval(), TOKENS, loss=True)
    assert picture.labelled.names[-5:] == ["logits", "y", "y*", "ℓ_t", "ℓ"]
    assert "g_p = −g_y ÷ p at t, 0 elsewhere" in picture.labelled.formulas[-2]


# ---- layout


@pytest.mark.parametrize("name", ["llama-tiny", "vaswani-tiny", "bahdanau-tiny"])
@pytest.mark.parametrize("options", [{}, {"depth": 99}, {"depth": 3, "shapes": True, "backward": True}])
def test_nothing_overlaps_and_connectors_avoid_boxes(name: str, options: dict[str, Any]) -> None:
    drawing = drawn(name, **options).drawing()
    frames, closed = ([d.box for d in drawing.boxes if d.is_frame is frame] for frame in (True, False))
    rectangles = [(box.x, box.y, box.x + box.width, box.y + box.height) for box in closed]
    rectangles += [(b.x + b.title_x, b.y + 4, b.x + b.title_x + b.title, b.y + 18) for b in frames]
    lefts, tops, rights, bottoms = np.array(rectangles).T
    for n, (left, top, right, bottom) in enumerate(rectangles):
        assert left >= -0.01 and top >= -0.01 and right < drawing.width and bottom < drawing.height
        apart = (right <= lefts + 0.01) | (rights <= left + 0.01) | (bottom <= tops + 0.01) | (bottoms <= top + 0.01)
        assert apart[:n].all()
    t = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    bernstein = np.stack([(1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3], axis=1)
    for line in drawing.connectors:
        mid = (line.bend + line.straight) / 2
        curve = bernstein @ [(line.x, line.bend), (line.x, mid), (line.to_x, mid), (line.to_x, line.straight)]
        for x, y in (*[(line.x, (line.y + line.bend) / 2), (line.to_x, (line.straight + line.to_y) / 2)], *curve):
            assert not ((lefts + 0.1 < x) & (x < rights - 0.1) & (tops + 0.1 < y) & (y < bottoms - 0.1)).any()


def test_frames_contain_their_boxes() -> None:
    for frame in (each.box for each in drawn("llama-tiny", depth=99).drawing().boxes):
        for child in frame.inside or ():
            assert frame.x < child.x and child.x + child.width < frame.x + frame.width
            assert frame.y < child.y and child.y + child.height <= frame.y + frame.height


def test_connectors_join_what_edges_join() -> None:
    """From each box down, its connectors lead to the nodes computed from it, and to no others."""
    picture = drawn("llama-tiny", depth=99)
    drawing = picture.drawing()
    closed = {each.box.key: each.box for each in drawing.boxes if not each.is_frame}
    for a, b in picture.labelled.graph.edges:
        if a in closed and b in closed:
            lines = [line for line in drawing.connectors if a in line.sources and b in line.targets]
            ends = {(round(line.to_x, 3), round(line.to_y, 3)): line for line in lines}
            at = (round(closed[b].x + closed[b].port, 3), round(closed[b].y, 3))
            start = (round(closed[a].x + closed[a].port, 3), round(closed[a].y + closed[a].height, 3))
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
    boxes = "feature vector x, parameter α, Linear a, Sigmoid z, parameter β, Linear b, Softmax ŷ, true label y"
    assert [" ".join(pair) for pair in labels(picture)] == [*boxes.split(", "), "CrossEntropy J"]
    names = picture.labelled.names
    edges = {f"{names[a]}{names[b]}" for a, b in picture.labelled.graph.edges}
    assert edges == {"xa", "αa", "az", "βb", "zb", "bŷ", "ŷJ", "yJ"}


def test_f24_the_lectures_network_backwards() -> None:
    lines = lecture_mlp(backward=True).text().splitlines()
    assert [re.split(r"\s{2,}", line)[1] for line in lines] == ["J", "y", "ŷ", "b", "β", "z", "a", "α", "x"]
    formulas = ["g_ŷ = −g_J (y ÷ ŷ)", "g_b = g_ŷᵀ (diag(ŷ) − ŷ ŷᵀ)", "g_β = g_b zᵀ", "g_z = βᵀ g_b"]
    for formula in (*formulas, "g_a = g_z ⊙ z ⊙ (1 − z)", "g_α = g_a xᵀ"):
        assert formula in "\n".join(lines)


def test_the_backward_pass_is_the_reverse_order() -> None:
    picture = drawn("llama-tiny", backward=True)
    order, differentiable = picture.labelled.backward_order, picture.labelled.differentiable
    assert [n for n in order if n] == list(range(sum(differentiable), 0, -1))
    for a, b in picture.labelled.graph.edges:
        assert not order[a] or not order[b] or order[a] > order[b]
    nodes = picture.labelled.graph.nodes
    assert all(differentiable[i] for i, node in enumerate(nodes) if node.kind == "parameter")
    assert not any(differentiable[i] for i, node in enumerate(nodes) if node.kind in ("constant", "input"))
    assert {down for _, _, down in picture.drawing().arrows()} == {-1.0}
    assert {down for _, _, down in drawn("llama-tiny").drawing().arrows()} == {1.0}


# ---- files and pages


class Odd(nn.Module):
    """Names that every file format has to escape."""

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
    pattern = r'^ *(n\d+) \[label="((?:[^"\\]|\\.)*)", xlabel="((?:[^"\\]|\\.)*)"(?:, penwidth=2)?\];$'
    boxes = re.findall(pattern, source, re.M)
    assert sorted((label, name) for _, label, name in boxes) == sorted(labels(picture))
    assert re.findall(r'label="(.*)";', source) == ["decoder · Stack", "decoder.0 · Block"]
    ends = re.findall(r"^  (n\d+) -> (n\d+);$", source, re.M)
    assert {end for pair in ends for end in pair} == {key for key, _, _ in boxes}
    assert "edge [dir=back, arrowsize" in replace(picture, backward=True).dot()
    assert quoted('a"\\\n') == '"a\\"\\\\\\n"'


def test_the_page_holds_the_whole_graph() -> None:
    picture = drawn("llama-tiny", shapes=True)
    page = picture.html()
    fallback = re.search(r'data-module="graph.js"><script[^>]*>.*?</script>(.*)</div>', page, re.S)
    assert fallback and ElementTree.fromstring(fallback[1]).tag.endswith("svg"), "shown without scripts"
    data = page_data(page)
    nodes, groups = data["nodes"], data["groups"]
    assert len(nodes) == len(picture.labelled.graph.nodes)
    edges = data["edges"]
    assert list(zip(edges["sources"], edges["targets"], strict=True)) == picture.labelled.graph.edges
    children = [child for group in groups for child in group["children"]]
    assert sorted(children) == sorted({*range(len(nodes)), *range(len(nodes) + 1, len(nodes) + len(groups))})
    assert all(0 <= each["formulas"] < len(data["formulas"]) for each in (*nodes, *groups))
    assert all(len(data["layouts"][group["layout"]]["vertices"]) >= len(group["children"]) for group in groups)
    assert data["shapes"] and not data["backward"] and data["title"] == picture.title
    assert "g_W = g_yᵀ x" in {line for rule in data["rules"] for line in rule["gradients"]}
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_figure_has_all_labels() -> None:
    picture = drawn("bert-tiny", shapes=True)
    texts = {text.get_text() for text in picture.figure().axes[0].texts}
    assert {text for pair in labels(picture) for text in pair} <= texts
    assert any("1×4×128" in text for text in texts)
