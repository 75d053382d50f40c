"""Search trees record decoding: their leaves are the texts of generate and beam_search, for every model."""

import math

import pytest
import torch
from tests.decode.fast.helpers import sharpen
from tests.decode.small import VOCAB, complete, decoder, token_ids
from tests.lectures.test_f19_search import FIRST, MODEL, SECOND
from tests.models.contract import PaddedSource

from weft.decode.beam import beam_search
from weft.decode.config import Beam, Branching, Sampling
from weft.decode.prompt import Prompt
from weft.decode.tree import search_trees
from weft.models.build import build
from weft.models.config import Bahdanau, Model, Recurrent
from weft.models.presets import vaswani
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

REST = -1  # id of the node for all tokens that a search did not see
SETTINGS = Branching(depth=5, beams=3, samples=6, seed=3, alternatives=4)


FAMILIES: dict[str, Model] = {
    "decoder": decoder().config,
    "recurrent": Recurrent(vocab_size=VOCAB, d_model=16),
    "vaswani": vaswani(2, 16, 2, d_ff=32, dropout=0.0, vocab_size=VOCAB),
    "bahdanau": Bahdanau(vocab_size=VOCAB, d_model=16),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_are_the_decoded_texts(family: str) -> None:
    torch.manual_seed(0)
    model, prompt = sharpen(build(FAMILIES[family])), Prompt([5, 6], eos_id=3)
    source = PaddedSource(torch.tensor([[3, 9, 4, 1]])) if family in ("vaswani", "bahdanau") else None
    trees = search_trees(model, prompt, SETTINGS, source=source)

    greedy = token_ids(model, [prompt], Sampling(temperature=0.0, max_tokens=5), source=source)[0]
    assert trees.greedy.path(trees.greedy.written[0].leaf) == tuple(greedy)

    best = beam_search(model, [prompt], Beam(beams=3, max_tokens=5), source=source)[0][0]
    assert trees.beam.path(trees.beam.written[0].leaf) == best.ids
    assert trees.beam.written[0].logprob == pytest.approx(best.logprob, abs=1e-9)

    rows = None if source is None else PaddedSource(source.tokens.expand(6, -1))
    samples = token_ids(model, [prompt] * 6, Sampling(max_tokens=5, seed=3), source=rows)
    assert [list(trees.sampling.path(each.leaf)) for each in trees.sampling.written] == samples


@torch.no_grad()
def test_probabilities_are_the_models() -> None:
    model, prompt = decoder(), Prompt([5, 6], eos_id=3)
    for tree in search_trees(model, prompt, SETTINGS):
        for index, node in enumerate(tree.nodes):
            path = tree.path(index)
            if path[-1] == REST:
                continue
            log_p = model(torch.tensor([[5, 6, *path]]))[0].log_softmax(-1)
            logprobs = [float(log_p[position, id]) for position, id in enumerate(path, start=1)]
            assert node.logprob == pytest.approx(logprobs[-1], abs=1e-5)
            assert node.total == pytest.approx(sum(logprobs), abs=1e-5)
            assert node.parent < index


def test_the_beam_tree_shows_kept_and_pruned_prefixes() -> None:
    tree = search_trees(decoder(), Prompt([5, 6]), SETTINGS).beam
    depths = [len(tree.path(index)) for index in range(len(tree.nodes))]
    for depth in range(1, 6):
        at_depth = [node for node, its in zip(tree.nodes, depths, strict=True) if its == depth]
        states = [node.state for node in at_depth if node.id != REST]
        assert len(states) == 6 and states.count("pruned") == 3 and states.count("chosen") == 1
    pruned = {index for index, node in enumerate(tree.nodes) if node.state == "pruned"}
    assert not any(node.parent in pruned for node in tree.nodes)


def test_the_greedy_tree_shows_alternatives_and_samples_merge_by_prefix() -> None:
    trees = search_trees(decoder(), Prompt([5, 6]), SETTINGS)
    for parent in (-1, *(n for n, node in enumerate(trees.greedy.nodes) if node.state == "chosen")):
        children = [node for node in trees.greedy.nodes if node.parent == parent and node.id != REST]
        if children:
            assert len(children) == 4 and [node.state for node in children].count("chosen") == 1
            assert max(children, key=lambda node: node.logprob).state == "chosen"
    nodes = trees.sampling.nodes
    assert sum(node.count for node in nodes if node.parent == -1 and node.id != REST) == 6
    assert len({(node.parent, node.id) for node in nodes}) == len(nodes)


def test_greedy_search_misses_the_best_path_that_the_beam_finds() -> None:
    trees = search_trees(MODEL, Prompt([0]), Branching(depth=2, beams=2))
    assert trees.greedy.written[0].logprob == pytest.approx(math.log(FIRST[1] * SECOND[1, 0]))
    assert trees.beam.written[0].logprob == pytest.approx(math.log(FIRST[2] * SECOND[2, 0]))
    assert trees.greedy.written[0].text == "1 0" and trees.beam.written[0].text == "2 0"


def test_texts_continue_the_prompt() -> None:
    tokenizer = build_tokenizer(Byte())
    model = decoder(vocab_size=tokenizer.vocab_size)
    trees = search_trees(model, Prompt.of(tokenizer, "ab"), Branching(depth=4, samples=2))
    greedy = complete(model, tokenizer, ["ab"], Sampling(temperature=0.0, max_tokens=4))
    assert [each.text for each in trees.greedy.written] == [each.text for each in greedy]
    samples = complete(model, tokenizer, ["ab"] * 2, Sampling(max_tokens=4))
    assert [each.text for each in trees.sampling.written] == [each.text for each in samples]
