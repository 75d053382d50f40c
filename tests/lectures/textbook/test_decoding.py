"""lectures/decoding.py finds weft's texts and scores, and samples from the model's distribution."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.later import Later
from tests.lectures.textbook.lecture import load
from tests.pairwise import each_once
from tests.spread import slow
from torch import Tensor

from weft.decode.beam import beam_search
from weft.decode.config import Beam, GNMTLength, LengthPenalty, PowerLength, Sampling
from weft.decode.generate import generate
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.ngram import NGram
from weft.models.presets import preset

stats = Later("scipy.stats")
decoding = load("decoding")
END = 0


@cache
def model(name: str) -> LanguageModel:
    """weft's preset at a small size, with weights that give peaked distributions."""
    torch.manual_seed(0)
    if name == "ngram-3":
        counted = NGram(preset(name).replace(vocab_size=6)).eval()
        counted.fit(np.random.default_rng(0).integers(0, 6, 200), np.array([0, 70]))
        return counted
    sizes: dict[str, Any] = {"vocab_size": 9, "d_model": 8}
    if name == "gpt-tiny":
        sizes |= {"layers": 1, "context": 32, "attention": {"heads": 2, "bias": "all"}}
        sizes |= {"feedforward": {"kind": "plain", "d_ff": 16, "activation": "gelu-tanh"}}
    found = build(type(preset(name)).model_validate(preset(name).model_dump() | sizes)).double().eval()
    with torch.no_grad():
        for weight in found.parameters():
            weight.mul_(6.0) if name == "gpt-tiny" else weight.normal_(std=0.9)
    return found


def logits(name: str) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model(name)(tokens[None])[0].detach()


def tabulated(name: str, max_tokens: int) -> Callable[[Tensor], Tensor]:
    """`logits` after token 1 and up to `max_tokens` others, each text read once."""
    paths = (path for n in range(max_tokens + 1) for path in product(range(9), repeat=n))
    rows = {path: logits(name)(torch.tensor([1, *path])) for path in paths}
    return lambda tokens: rows[tuple(tokens[1:].tolist())]


PENALTIES: dict[str, tuple[LengthPenalty, Callable[[int], float]]] = {
    "mean": (PowerLength(), decoding.mean),
    "none": (PowerLength(alpha=0.0), lambda length: 1.0),
    "longer": (PowerLength(alpha=1.7), lambda length: length**1.7),
    "gnmt": (GNMTLength(), decoding.gnmt),
}


NAMES = ["elman", "lstm", "gru", "gpt-tiny"]  # an n-gram model has texts of equal scores


@pytest.mark.parametrize(("name", "penalty", "K"), each_once(NAMES, PENALTIES, [1, 2, 4]))
def test_beams_are_wefts(name: str, K: int, penalty: str) -> None:
    """The K best texts and their scores, which end with END or at the limit."""
    settings, divisor = PENALTIES[penalty]
    for prompt, max_tokens in (([1], 7), ([3, 2, 5], 4), ([4], 1)):
        beam = Beam(beams=K, n=K, max_tokens=max_tokens, stop_ids=(END,), length_penalty=settings)
        expected = beam_search(model(name), [prompt], beam)[0]
        found = decoding.beam_search(logits(name), prompt, END, max_tokens, K, divisor)
        assert [tuple(text.tokens) for text in found[: len(expected)]] == [text.ids for text in expected]
        assert [text.log_p for text in found] == pytest.approx([text.logprob for text in expected], rel=1e-6, abs=1e-6)
        assert [text.score for text in found] == pytest.approx([text.score for text in expected], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ["lstm", "gru", "gpt-tiny", "ngram-3"])
def test_greedy_is_wefts_and_a_beam_of_one(name: str) -> None:
    for prompt in ([1], [2, 4], [5]):
        settings = Sampling(temperature=0.0, max_tokens=9, stop_ids=(END,))
        expected = [token.id for token in generate(model(name), [prompt], settings)]
        assert decoding.greedy(logits(name), prompt, END, 9) == expected
        assert decoding.beam_search(logits(name), prompt, END, 9, 1)[0].tokens == expected


def test_a_beam_as_wide_as_the_tree_finds_the_best_path() -> None:
    """Among all texts of three tokens, and in the lecture's tree, where greedy search fails."""
    assert decoding.greedy(decoding.tree, [0], None, 2) == [1, 0]
    best = decoding.beam_search(decoding.tree, [0], None, 2, 2)[0]
    assert best.tokens == [2, 0] and best.log_p == pytest.approx(np.log(0.36), rel=1e-6)
    paths = texts("gru", 3)
    found = decoding.beam_search(logits("gru"), [1], END, 3, 81, lambda length: 1.0)
    assert tuple(found[0].tokens) == max(paths, key=lambda path: paths[path])
    assert found[0].log_p == pytest.approx(np.log(max(paths.values())))


def texts(name: str, max_tokens: int) -> dict[tuple[int, ...], float]:
    """p of every text after token 1 that ends with END or has `max_tokens` tokens."""
    found: dict[tuple[int, ...], float] = {}
    for path in product(range(9), repeat=max_tokens):
        p = logits(name)(torch.tensor([1, *path]))[:-1].double().softmax(-1)
        stop = path.index(END) + 1 if END in path else max_tokens
        found[path[:stop]] = float(torch.stack([p[i, path[i]] for i in range(stop)]).prod())
    return found


def assert_drawn(drawn: list[tuple[int, ...]], paths: dict[tuple[int, ...], float]) -> None:
    """χ² test over the texts expected at least five times, and one cell for all others."""
    counts, n = Counter(drawn), len(drawn)
    assert counts.keys() <= paths.keys()
    common = [path for path, p in paths.items() if n * p >= 5]
    observed = [counts[path] for path in common]
    expected = [n * paths[path] for path in common]
    assert stats.chisquare([*observed, n - sum(observed)], [*expected, n - sum(expected)]).pvalue > 1e-3


@pytest.mark.parametrize("draft", ["lstm", slow("gru"), slow("uniform")])
def test_speculative_decoding_samples_from_the_target(draft: str) -> None:
    """The draft may be another model, the model itself, or uniform."""
    generator, paths = torch.Generator().manual_seed(0), texts("gru", 2)
    drafts = {"gru": tabulated("gru", 2), "lstm": tabulated("lstm", 2)}
    drafts["uniform"] = lambda tokens: torch.zeros(len(tokens), 9)
    runs = [decoding.speculative_decoding(drafts["gru"], drafts[draft], [1], END, 2, generator) for _ in range(1500)]
    assert_drawn([tuple(written) for written, _ in runs], paths)
    assert all(calls <= len(written) for written, calls in runs)
    if draft == "gru":
        assert all(calls == 1 for _, calls in runs), "guesses of the model itself are always kept"


def test_ancestral_sampling_draws_from_the_model() -> None:
    generator, target = torch.Generator().manual_seed(0), tabulated("gru", 1)
    drawn = [tuple(decoding.ancestral_sampling(target, [1], END, 2, generator)) for _ in range(1500)]
    assert_drawn(drawn, texts("gru", 2))


def test_the_counting_model_is_a_distribution() -> None:
    rows = decoding.ngram([0, 1, 2, 1, 0, 1, 2, 2, 0], 3, 4)(torch.tensor([0, 1, 3, 3]))
    torch.testing.assert_close(rows.exp().sum(-1), torch.ones(4))
    assert rows[1].argmax() == 2
    # c(0 1 2) = 2 of c(0 1) = 2; c(1 2) = 2 of 3; c(2) = 3 of 9; 1/4
    p = (2 + 2 * (2 + 2 * (3 + 2 / 4) / 11) / 5) / 4
    assert rows[1, 2].exp().item() == pytest.approx(p, rel=1e-6)
