"""Decoding as the lectures draw it: a tree of beginnings, whose edges are tokens with their probabilities.

Greedy search follows the likeliest edge at each node, beam search several beginnings at a time, and ancestral sampling
draws an edge with its probability. Each tree is recorded while `generate` or `beam_search` writes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from weft.data.batch import Source as Rows
from weft.decode.beam import Candidate, beam_search
from weft.decode.config import Beam, Branching, Sampling
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.text import Chunk, spelled
from weft.models.base import EncoderInput, LanguageModel

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
    model: LanguageModel, prompt: Prompt, settings: Branching | None = None, source: EncoderInput | None = None
) -> Trees:
    """Continue a prompt for a few tokens: greedily, with a beam, and with samples, of which number i has seed + i. An
    encoder–decoder writes from `source`, (1, source time)."""
    settings = settings or Branching()
    greedy = Sampling(temperature=0.0, max_tokens=settings.depth, logprobs=settings.alternatives)
    chosen = settings.model_dump(include={"temperature", "top_k", "seed"})
    drawn = Sampling(**chosen, max_tokens=settings.depth, logprobs=0)
    many, samples = source, settings.samples
    if source is not None:
        real = torch.ones_like(source.tokens, dtype=torch.bool) if source.mask is None else source.mask
        many = Rows(source.tokens.expand(samples, -1), real.expand(samples, -1))
    return Trees(
        _written("greedy", generate(model, [prompt], greedy, source=source), prompt, 1),
        _beam(model, prompt, settings, source),
        _written("sampling", generate(model, [prompt] * samples, drawn, source=many), prompt, samples),
    )


@dataclass
class _Growing:
    """A tree on its way; a token after the same beginning is one node, however often it comes."""

    prompt: Prompt
    nodes: list[Node] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)

    def total(self, number: int) -> float:
        return 0.0 if number < 0 else self.nodes[number].total

    def add(self, parent: int, id: int, logprob: float, state: State) -> int:
        """A node's number; one that is there already is counted once more."""
        number = self.children.setdefault((parent, id), len(self.nodes))
        if number < len(self.nodes):
            self.nodes[number] = replace(self.nodes[number], count=self.nodes[number].count + 1)
            return number
        text = str(id) if self.prompt.tokenizer is None else spelled(self.prompt.tokenizer, id)
        self.nodes.append(Node(parent, id, text, logprob, self.total(parent) + logprob, state))
        return number

    def tree(self, name: str, leaves: Sequence[int]) -> Tree:
        """It, grown, with what was written."""
        found, prompt, texts = Tree(name, tuple(self.nodes), ()), self.prompt, []
        for leaf in leaves:
            ids = found.path(leaf)
            text = " ".join(map(str, ids))
            if prompt.tokenizer is not None:
                stream = prompt.tokenizer.stream(begun=prompt.begun)
                text = stream.extend(ids) + stream.flush()
            texts.append(Written(text, leaf, self.nodes[leaf].total))
        return replace(found, written=tuple(texts))


def _written(name: str, chunks: Iterable[Chunk], prompt: Prompt, rows: int) -> Tree:
    """The tree of texts that continue a prompt in so many rows, and of the tokens that they report beside their own."""
    tree, leaves = _Growing(prompt), [-1] * rows
    for chunk in chunks:
        assert chunk.logprob is not None
        for id, logprob in chunk.top:
            if id != chunk.id:
                tree.add(leaves[chunk.row], id, logprob, "pruned")
        leaves[chunk.row] = tree.add(leaves[chunk.row], chunk.id, chunk.logprob, "chosen")
    return tree.tree(name, leaves)


def _beam(model: LanguageModel, prompt: Prompt, settings: Branching, source: EncoderInput | None) -> Tree:
    tree, alive = _Growing(prompt), [-1]

    def watch(candidates: Sequence[Candidate], kept: Sequence[int]) -> None:
        nonlocal alive
        numbers = []
        for place, (total, beam, token) in enumerate(candidates):
            parent = alive[beam] if total > -torch.inf else -1
            # what stood among the best and did not stay has ended
            state: State = "kept" if place in kept or place < settings.beams else "pruned"
            numbers.append(tree.add(parent, token, total - tree.total(parent), state) if total > -torch.inf else -1)
        alive = [numbers[place] for place in kept]

    chosen = Beam(beams=settings.beams, max_tokens=settings.depth)
    leaf = -1
    for id in beam_search(model, [prompt], chosen, source, watch)[0][0].ids:
        leaf = tree.children[leaf, id]
        tree.nodes[leaf] = replace(tree.nodes[leaf], state="chosen")
    return tree.tree("beam", [leaf])
