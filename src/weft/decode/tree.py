"""Decoding as the lectures draw it: a tree of beginnings, whose edges are tokens with their probabilities.

Greedy search follows the likeliest edge at each node, beam search several beginnings at a time, and ancestral sampling
draws an edge with its probability. Each tree is recorded while `generate` or `beam_search` writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from weft.data.batch import Source as Rows
from weft.decode.beam import Candidate, beam_search
from weft.decode.config import Beam, Branching, Sampling
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.text import spelled
from weft.models.base import LanguageModel, Source

State = Literal["chosen", "kept", "pruned"]


@dataclass(frozen=True)
class Node:
    """A beginning, by its last token. `parent` is the number of the beginning that it goes on from, −1 for the prompt.

    `logprob` is log p of the token there, `total` of the whole beginning. "chosen" leads to what was returned, "kept"
    was followed for some time, "pruned" never. `count` samples begin so.
    """

    parent: int
    id: int
    text: str
    logprob: float
    total: float
    state: State
    count: int = 1


@dataclass(frozen=True)
class Written:
    """A text that came back, the number of its last node, and log p of all its tokens."""

    text: str
    leaf: int
    logprob: float


@dataclass(frozen=True)
class Tree:
    """One search: a parent stands before its children."""

    name: str
    nodes: tuple[Node, ...]
    written: tuple[Written, ...]

    def path(self, leaf: int) -> tuple[int, ...]:
        """The token ids from the prompt to a node."""
        ids: list[int] = []
        while leaf >= 0:
            ids.append(self.nodes[leaf].id)
            leaf = self.nodes[leaf].parent
        return tuple(reversed(ids))


class Trees(NamedTuple):
    """Three ways to continue the same prompt."""

    greedy: Tree
    beam: Tree
    sampling: Tree


def search_trees(
    model: LanguageModel, prompt: Prompt, settings: Branching | None = None, source: Source | None = None
) -> Trees:
    """Continue a prompt for a few tokens: greedily, with a beam, and with samples, of which number i has seed + i.

    An encoder–decoder writes from `source`, (1, source time).
    """
    settings = settings or Branching()
    return Trees(
        _greedy(model, prompt, settings, source),
        _beam(model, prompt, settings, source),
        _sampling(model, prompt, settings, source),
    )


@dataclass
class _Growing:
    """A tree on its way; a token after the same beginning is one node, however often it comes."""

    prompt: Prompt
    nodes: list[Node] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, parent: int, id: int, logprob: float, state: State) -> int:
        """A node's number; one that is there already is counted once more."""
        key = parent, id
        if key in self.children:
            number = self.children[key]
            self.nodes[number] = replace(self.nodes[number], count=self.nodes[number].count + 1)
            return number
        before = 0.0 if parent < 0 else self.nodes[parent].total
        tokenizer = self.prompt.tokenizer
        text = str(id) if tokenizer is None else spelled(tokenizer, id)
        self.nodes.append(Node(parent, id, text, logprob, before + logprob, state))
        self.children[key] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def choose(self, leaf: int) -> None:
        """Mark the way to a node."""
        while leaf >= 0:
            self.nodes[leaf] = replace(self.nodes[leaf], state="chosen")
            leaf = self.nodes[leaf].parent

    def tree(self, name: str, leaves: Sequence[int]) -> Tree:
        """It, grown, with what was written."""
        found = Tree(name, tuple(self.nodes), ())
        written = tuple(Written(_text(self.prompt, found.path(leaf)), leaf, self.nodes[leaf].total) for leaf in leaves)
        return replace(found, written=written)


def _greedy(model: LanguageModel, prompt: Prompt, settings: Branching, source: Source | None) -> Tree:
    tree, leaf = _Growing(prompt), -1
    chosen = Sampling(temperature=0.0, max_tokens=settings.depth, logprobs=settings.alternatives)
    for chunk in generate(model, [prompt], chosen, source=source):
        assert chunk.logprob is not None
        for id, logprob in chunk.top:
            if id != chunk.id:
                tree.add(leaf, id, logprob, "pruned")
        leaf = tree.add(leaf, chunk.id, chunk.logprob, "chosen")
    return tree.tree("greedy", [leaf])


def _beam(model: LanguageModel, prompt: Prompt, settings: Branching, source: Source | None) -> Tree:
    tree, alive = _Growing(prompt), [-1]

    def watch(candidates: Sequence[Candidate], kept: Sequence[int]) -> None:
        nonlocal alive
        numbers = []
        for place, (total, beam, token) in enumerate(candidates):
            parent = alive[beam] if total > -torch.inf else -1
            before = 0.0 if parent < 0 else tree.nodes[parent].total
            # what stood among the best and did not stay has ended
            state: State = "kept" if place in kept or place < settings.beams else "pruned"
            numbers.append(tree.add(parent, token, total - before, state) if total > -torch.inf else -1)
        alive = [numbers[place] for place in kept]

    chosen = Beam(beams=settings.beams, max_tokens=settings.depth)
    best = beam_search(model, [prompt], chosen, source, watch)[0][0]
    leaf = -1
    for id in best.ids:
        leaf = tree.children[leaf, id]
    tree.choose(leaf)
    return tree.tree("beam", [leaf])


def _sampling(model: LanguageModel, prompt: Prompt, settings: Branching, source: Source | None) -> Tree:
    tree, leaves = _Growing(prompt), [-1] * settings.samples
    chosen = Sampling(temperature=settings.temperature, max_tokens=settings.depth, seed=settings.seed, logprobs=0)
    if source is not None:
        real = torch.ones_like(source.tokens, dtype=torch.bool) if source.mask is None else source.mask
        source = Rows(source.tokens.expand(settings.samples, -1), real.expand(settings.samples, -1))
    for chunk in generate(model, [prompt] * settings.samples, chosen, source=source):
        assert chunk.logprob is not None
        leaves[chunk.row] = tree.add(leaves[chunk.row], chunk.id, chunk.logprob, "chosen")
    return tree.tree("sampling", leaves)


def _text(prompt: Prompt, ids: Sequence[int]) -> str:
    if prompt.tokenizer is None:
        return " ".join(map(str, ids))
    stream = prompt.tokenizer.stream(begun=prompt.begun)
    return stream.extend(ids) + stream.flush()
