"""Searches of a hand-written tree, in TOML or JSON: greedy, beam, sampling, and the best of all paths.

    prompt = "cows"
    [tree]
    eat = { p = 0.6, next = { corn = 0.5, hay = 0.5 } }   # an edge with a probability, and the edges after it
    like = { p = 0.4, next = { grass = 0.9, hay = 0.1 } }

With `edges = "weight"` the numbers are weights instead, to be summed: `left = { weight = 3, next = { down = 1 } }`.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from weft.config import read_toml
from weft.decode.config import TreeSearch
from weft.decode.tree import NodeState, SearchedText, SearchNode, SearchTree
from weft.errors import ConfigError
from weft.storage.untrusted import read_json

EXAMPLE = Path(__file__).with_name("handmade.toml")
MAX_NODES = 300  # of a tree that is drawn


class Edge(NamedTuple):
    """Edge to a node: the node before it (−1 for the root), its word, and its weight, −log p of a probability."""

    parent: int
    word: str
    weight: float


@dataclass(frozen=True)
class HandmadeTree:
    """Tree by its edges, parents first. If they are probabilities, those after a node sum to 1 at most."""

    prompt: str
    edges: tuple[Edge, ...]
    probabilities: bool

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Nodes after each node."""
        children: dict[int, list[int]] = {node: [] for node in range(-1, len(self.edges))}
        for node, edge in enumerate(self.edges):
            children[edge.parent].append(node)
        return children

    @cached_property
    def totals(self) -> list[float]:
        """Sum of the weights from the root to each node."""
        totals: list[float] = []
        for parent, _, weight in self.edges:
            totals.append(weight + (totals[parent] if parent >= 0 else 0.0))
        return totals

    @property
    def complete(self) -> bool:
        """Whether the edges after every node are probabilities that sum to 1, so that a path can be sampled."""
        sums = (sum(math.exp(-self.edges[n].weight) for n in after) for after in self.children.values() if after)
        return self.probabilities and all(abs(total - 1.0) < 1e-6 for total in sums)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to a node."""
        return [] if node < 0 else [*self.path(self.edges[node].parent), node]


def read_tree(path: Path) -> HandmadeTree:
    """Read a tree from a .toml or .json file."""
    content = read_json(path) if path.suffix.lower() == ".json" else read_toml(path)
    known = {"prompt": "", "edges": "p", "tree": None}
    if not isinstance(content, dict) or not isinstance(content.get("tree"), dict) or not content["tree"]:
        raise ConfigError(f'{path}: expected a tree, such as tree = {{"eat": {{"p": 0.6, "next": {{"corn": 1.0}}}}}}')
    if extra := next((key for key in content if key not in known), None):
        raise ConfigError(f"{path}: unknown key {extra!r}; a tree has {', '.join(known)}")
    key, prompt = content.get("edges", "p"), content.get("prompt", "")
    if key not in ("p", "weight") or not isinstance(prompt, str):
        raise ConfigError(f'{path}: expected edges = "p" or "weight", and a text as prompt')
    edges: list[Edge] = []
    waiting: list[tuple[int, str, Mapping[str, Any]]] = [(-1, "tree", content["tree"])]
    while waiting:
        parent, place, branches = waiting.pop(0)
        start = len(edges)
        for word, value in branches.items():
            branch = value if isinstance(value, dict) else {key: value}
            edge: Any = branch.get(key)
            after: Any = branch.get("next", {})
            number = isinstance(edge, int | float) and not isinstance(edge, bool) and math.isfinite(edge)
            if not number or edge < 0 or (key == "p" and not 0 < edge <= 1) or not isinstance(after, dict):
                wanted = "a probability above 0, up to 1" if key == "p" else "a weight of at least 0"
                raise ConfigError(f"{path}: {place}.{word}: expected {wanted}, or {{ {key} = …, next = {{ … }} }}")
            waiting += [(len(edges), f"{place}.{word}.next", after)] if after else []
            edges.append(Edge(parent, word, -math.log(edge) if key == "p" else float(edge)))
        total = sum(math.exp(-edge.weight) for edge in edges[start:])
        if key == "p" and total > 1 + 1e-6:
            raise ConfigError(f"{path}: {place}: the probabilities sum to {total:.4g}, more than 1")
        if len(edges) > MAX_NODES:
            raise ConfigError(f"{path}: more than {MAX_NODES} nodes are too many to draw")
    return HandmadeTree(prompt, tuple(edges), key == "p")


def handmade_searches(tree: HandmadeTree, settings: TreeSearch) -> list[SearchTree]:
    """Return greedy search, beam search, samples if the tree is complete, and the best path, each on the whole tree."""
    weights, leaves = [edge.weight for edge in tree.edges], [n for n in range(len(tree.edges)) if not tree.children[n]]
    greedy = -1
    while after := tree.children[greedy]:
        greedy = min(after, key=lambda n: weights[n])
    alive, kept, ended = [-1], set[int](), list[int]()
    while alive:
        after = sorted((n for node in alive for n in tree.children[node]), key=lambda n: tree.totals[n])
        kept |= set(after[: settings.beams])
        ended += [n for n in after[: settings.beams] if not tree.children[n]]
        alive = [n for n in after[: settings.beams] if tree.children[n]]
    rng, sampled = random.Random(settings.seed), list[int]()
    for _ in range(settings.samples if tree.complete else 0):
        node = -1
        while after := tree.children[node]:
            node = rng.choices(after, [math.exp(-weights[n]) for n in after])[0]
        sampled.append(node)
    total = tree.totals.__getitem__
    paths = [n for leaf in sampled for n in tree.path(leaf)]
    return [
        _searched(tree, "greedy", [greedy], kept=tree.path(greedy)),
        _searched(tree, "beam", [min(ended, key=total)], kept=kept),
        *([_searched(tree, "sampling", sampled, kept=paths)] if sampled else []),
        _searched(tree, "best", [min(leaves, key=total)], kept=range(len(tree.edges))),
    ]


def _searched(tree: HandmadeTree, name: str, leaves: Sequence[int], *, kept: Iterable[int]) -> SearchTree:
    """Return the whole tree as one search saw it: it extended `kept`, and returned the paths to `leaves`."""
    kept, counts = {*kept}, Counter(n for leaf in leaves for n in tree.path(leaf))
    considered = {n for node in (-1, *kept) for n in tree.children[node]}

    def state(node: int) -> NodeState:
        return "chosen" if node in counts else "kept" if node in kept else "pruned" if node in considered else "unseen"

    nodes = tuple(
        SearchNode(parent, n, f" {word}", logprob=-weight, total=-tree.totals[n], state=state(n), count=counts[n] or 1)
        for n, (parent, word, weight) in enumerate(tree.edges)
    )
    words = {leaf: " ".join(tree.edges[n].word for n in tree.path(leaf)) for leaf in leaves}
    unseen = (node for node in nodes if node.state == "unseen" and node.parent in considered)
    texts = tuple(SearchedText(words[leaf], leaf, -tree.totals[leaf]) for leaf in leaves)
    return SearchTree(name, nodes, texts, left=sum(math.exp(min(0.0, node.total)) for node in unseen))
