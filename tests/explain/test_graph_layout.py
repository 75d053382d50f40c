"""The page and Python place a graph identically: web/graph_layout.js and explain/graph/placing.py on the same boxes."""

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.explain.test_graph_picture import recorded

import weft
from weft.explain.graph.draw import closed_layouts, group_keys
from weft.explain.graph.fold import Subgraph
from weft.explain.graph.layered import MAX_PASSED_LAYERS, OUTSIDE, Hyperedge, Size, layered_layout
from weft.explain.graph.picture import GraphPicture, graph_picture, lecture_mlp
from weft.explain.graph.placing import Box, place
from weft.figures.page import as_json

SCRIPT = Path(weft.__file__).parent / "web" / "graph_layout.js"
RUNNER = """
import { readFileSync } from "node:fs";
import { place } from "SCRIPT";
const flat = box => [box, ...(box.inside ?? []).flatMap(flat)];
const placed = JSON.parse(readFileSync(0)).map(root => {
  const connectors = place(root);
  const boxes = flat(root).map(({ key, x, y, width, height, port, titleX }) =>
    ({ key, x, y, width, height, port, title_x: titleX }));
  return { boxes, connectors: connectors.map(({ toX, toY, ...rest }) => ({ ...rest, to_x: toX, to_y: toY })) };
});
console.log(JSON.stringify(placed));
"""


def random_boxes(picture: GraphPicture, rng: random.Random, count: int) -> list[Box]:
    """The picture's graph, `count` times, with random groups open and boxes of random sizes."""
    keys, layouts = group_keys(picture.labelled, picture.root), closed_layouts(picture.labelled, picture.root)

    def box(child: Subgraph | int) -> Box:
        if isinstance(child, Subgraph) and (child is picture.root or rng.random() < 0.6):
            key = keys[child.path]
            return Box(key, inside=list(map(box, child.children)), group=layouts[key], title=rng.uniform(20, 200))
        width = rng.uniform(40, 260)
        key = child if isinstance(child, int) else keys[child.path]
        return Box(key, width, rng.uniform(26, 90), width * rng.uniform(0.2, 0.8))

    return [box(picture.root) for _ in range(count)]


def sent(box: Box) -> dict[str, Any]:
    """The fields that graph.js sets."""
    size = {"key": box.key, "width": box.width, "height": box.height, "port": box.port, "title": box.title}
    return size if box.inside is None else {**size, "inside": list(map(sent, box.inside)), "group": as_json(box.group)}


def flat(box: Box) -> list[Box]:
    return [box, *(nested for child in box.inside or () for nested in flat(child))]


class Wide(torch.nn.Module):
    """Skips over many layers, two values out of one module, and inputs that are used far below."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for n in range(2 * MAX_PASSED_LAYERS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x
        for n, layer in enumerate(self.layers):
            x = layer(x).tanh() if n % 3 else layer(x) + x
        return x + first * y, x - y


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_places_boxes_as_python_does(tmp_path: Path) -> None:
    rng = random.Random(0)
    pictures = [recorded(name) for name in ("llama-tiny", "vaswani-tiny", "bahdanau-tiny", "lstm")]
    pictures += [lecture_mlp(), graph_picture(Wide(), torch.ones(1, 3), torch.ones(1, 3))]
    roots = [root for picture in pictures for root in random_boxes(picture, rng, 4)]
    sizes = json.dumps(list(map(sent, roots)))  # before Python has placed them
    expected = []
    for root in roots:
        connectors, names = place(root), ("key", "x", "y", "width", "height", "port", "title_x")
        boxes = [{name: getattr(box, name) for name in names[: 7 if box.inside else 6]} for box in flat(root)]
        del boxes[0]["title_x"]  # the whole graph has no frame
        expected.append({"boxes": boxes, "connectors": as_json(connectors)})
    module = Path(shutil.copy(SCRIPT, tmp_path / "graph_layout.mjs"))
    command = ["node", "--input-type=module", "--eval", RUNNER.replace("SCRIPT", module.as_uri())]
    done = subprocess.run(command, input=sizes, capture_output=True, text=True, check=True, timeout=60)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert sum(len(graph["connectors"]) for graph in expected) > 4_000
    assert found == expected


def test_a_long_line_runs_in_a_track_at_the_left() -> None:
    length = MAX_PASSED_LAYERS + 3
    chain = [Hyperedge(n, (n + 1, length) if n == 0 else (n + 1,), True) for n in range(length)]
    layout = layered_layout((Size(48.0, 24.0),) * (length + 1), tuple(chain))
    passing = [vertex for vertex in layout.vertices if vertex.child == OUTSIDE]
    assert len(passing) == 2 and {vertex.column for vertex in passing} == {0}
    assert [vertex.layer for vertex in layout.vertices if vertex.child != OUTSIDE] == list(range(length + 1))
