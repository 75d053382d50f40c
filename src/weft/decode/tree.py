"""Search trees as the lectures draw them: nodes are prefixes, edges are tokens with their probabilities.

Greedy search follows the likeliest edge at each node, beam search follows several prefixes at a time, and ancestral
sampling draws an edge by its probability. Trees are recorded while `generate` or `beam_search` runs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import Literal, NamedTuple

import torch

from weft.data.batch import Source as SourceRows
from weft.decode.beam import Candidate, beam_search
from weft.decode.config import Beam, Branching, Sampling
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.text import Chunk, spell_token
from weft.models.base import EncoderInput, LanguageModel

NodeState = Literal["chosen", "kept", "pruned", "unseen"]
MIN_REST = 5e-5  # probability of all edges that a search did not see, above which they are shown together


@dataclass(frozen=True)
class SearchNode:
    """A prefix, represented by its last token.

    A "chosen" node leads to a returned text, a "kept" one was extended, a "pruned" one never was, and an "unseen" one
    stands for all edges that the search did not consider.
    """

    parent: int  # index of the node before it, −1 for the prompt
    id: int
    text: str
    logprob: float  # of the token
    total: float  # log p of the whole prefix
    state: NodeState
    count: int = 1  # samples that share the prefix


@dataclass(frozen=True)
class SearchedText:
    """A text that a search returned, the index of its last node, and log p of all its tokens."""

    text: str
    leaf: int
    logprob: float


@dataclass(frozen=True)
class SearchTree:
    """All nodes of one search, parents before their children, and the texts it returned.

    `left` is the probability of all texts that it did not consider to their end.
    """

    name: str
    nodes: tuple[SearchNode, ...]
    written: tuple[SearchedText, ...]
    left: float = 0.0

    def nodes_to(self, leaf: int) -> list[int]:
        """Return the indices of the nodes from the prompt to a node."""
        indices: list[int] = []
        while leaf >= 0:
            indices.append(leaf)
            leaf = self.nodes[leaf].parent
        return indices[::-1]

    def path(self, leaf: int) -> tuple[int, ...]:
        """Return the token ids from the prompt to a node."""
        return tuple(self.nodes[index].id for index in self.nodes_to(leaf))


class Trees(NamedTuple):
    """Trees of three searches that continue the same prompt."""

    greedy: SearchTree
    beam: SearchTree
    sampling: SearchTree


def search_trees(
    model: LanguageModel, prompt: Prompt, settings: Branching | None = None, *, source: EncoderInput | None = None
) -> Trees:
    """Continue a prompt for a few tokens: greedily, by beam search, and by samples, of which number i has seed + i.

    An encoder–decoder takes a `source` of (1, source time).
    """
    settings = settings or Branching()
    depth = settings.depth
    greedy = Sampling(temperature=0.0, max_tokens=depth, logprobs=settings.alternatives)
    random = settings.model_dump(include={"temperature", "top_k", "seed"})
    sampled = Sampling(**random, max_tokens=depth, logprobs=0)
    sources, samples = source, settings.samples
    if source is not None:
        mask = torch.ones_like(source.tokens, dtype=torch.bool) if source.mask is None else source.mask
        sources = SourceRows(source.tokens.expand(samples, -1), mask.expand(samples, -1))
    return Trees(
        _generated_tree("greedy", generate(model, [prompt], greedy, source=source), prompt, rows=1, depth=depth),
        _beam_tree(model, prompt, settings, source=source),
        _generated_tree(
            "sampling", generate(model, [prompt] * samples, sampled, source=sources), prompt, rows=samples, depth=depth
        ),
    )


@dataclass
class _TreeBuilder:
    """A tree under construction; equal tokens after equal prefixes share a node."""

    prompt: Prompt
    nodes: list[SearchNode] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)

    def total(self, node: int) -> float:
        return 0.0 if node < 0 else self.nodes[node].total

    def add(self, parent: int, id: int, logprob: float, *, state: NodeState) -> int:
        """Return the index of a node; a node that exists is counted once more."""
        index = self.children.setdefault((parent, id), len(self.nodes))
        if index < len(self.nodes):
            self.nodes[index] = replace(self.nodes[index], count=self.nodes[index].count + 1)
            return index
        text = str(id) if self.prompt.tokenizer is None else spell_token(self.prompt.tokenizer, id)
        total = self.total(parent) + logprob
        self.nodes.append(SearchNode(parent, id, text, logprob=logprob, total=total, state=state))
        return index

    def finish(self, name: str, leaves: Sequence[int], depth: int) -> SearchTree:
        """Return the tree, with a node for the probability that is left after each node's children."""
        nodes, prompt, texts = list(self.nodes), self.prompt, []
        parents = {node.parent for node in nodes}
        for parent in dict.fromkeys(node.parent for node in self.nodes):
            rest = 1.0 - sum(exp(node.logprob) for node in self.nodes if node.parent == parent)
            if rest > MIN_REST:
                total = self.total(parent) + log(rest)
                nodes.append(SearchNode(parent, -1, "…", logprob=log(rest), total=total, state="unseen"))
        tree = SearchTree(name, tuple(nodes), ())
        dropped = (n for n, node in enumerate(self.nodes) if node.state == "pruned" and n not in parents)
        ended = {prompt.eos_id, *prompt.stop_ids}
        open_ends = [n for n in dropped if nodes[n].id not in ended and len(tree.nodes_to(n)) < depth]
        left = sum(exp(nodes[n].total) for n in (*open_ends, *range(len(self.nodes), len(nodes))))
        for leaf in leaves:
            ids = tree.path(leaf)
            text = " ".join(map(str, ids))
            if prompt.tokenizer is not None:
                stream = prompt.tokenizer.stream(mid_text=prompt.mid_text)
                text = stream.extend(ids) + stream.flush()
            texts.append(SearchedText(text, leaf, self.nodes[leaf].total))
        return replace(tree, written=tuple(texts), left=left)


def _generated_tree(name: str, chunks: Iterable[Chunk], prompt: Prompt, *, rows: int, depth: int) -> SearchTree:
    """Return the tree of generated texts and of the alternatives that their chunks report."""
    tree, leaves = _TreeBuilder(prompt), [-1] * rows
    for chunk in chunks:
        assert chunk.logprob is not None
        for id, logprob in chunk.top:
            if id != chunk.id:
                tree.add(leaves[chunk.row], id, logprob, state="pruned")
        leaves[chunk.row] = tree.add(leaves[chunk.row], chunk.id, chunk.logprob, state="chosen")
    return tree.finish(name, leaves, depth)


def _beam_tree(model: LanguageModel, prompt: Prompt, settings: Branching, *, source: EncoderInput | None) -> SearchTree:
    tree, alive = _TreeBuilder(prompt), [-1]

    def record(candidates: Sequence[Candidate], kept: Sequence[int]) -> None:
        nonlocal alive
        nodes = []
        for index, (total, beam, token) in enumerate(candidates):
            if total == -torch.inf:
                nodes.append(-1)
                continue
            # a candidate among the best that no beam continues has ended
            state: NodeState = "kept" if index in kept or index < settings.beams else "pruned"
            nodes.append(tree.add(alive[beam], token, total - tree.total(alive[beam]), state=state))
        alive = [nodes[index] for index in kept]

    leaf = -1
    beam = Beam(beams=settings.beams, max_tokens=settings.depth)
    for id in beam_search(model, [prompt], beam, source=source, on_step=record)[0][0].ids:
        leaf = tree.children[leaf, id]
        tree.nodes[leaf] = replace(tree.nodes[leaf], state="chosen")
    return tree.finish("beam", [leaf], settings.depth)
