"""Two models as one: the formula, and that whatever decodes a model decodes this."""

import math

import numpy as np
import pytest
import torch

from weft.decode.beam import beam_search
from weft.decode.config import Beam, Sampling
from weft.decode.contrastive import ContrastiveModel
from weft.decode.generate import generate
from weft.errors import ConfigError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import NGram, Recurrent
from weft.models.presets import gpt, llama
from weft.models.smoothing import MaximumLikelihood

V = 17


def models() -> tuple[LanguageModel, LanguageModel]:
    torch.manual_seed(0)
    expert = build(llama(2, 32, 2, 48, 32, vocab_size=V)).eval()
    amateur = build(Recurrent(vocab_size=V, cell="gru", d_model=8)).eval()
    for parameter in [*expert.parameters(), *amateur.parameters()]:
        torch.nn.init.normal_(parameter, std=0.4)
    return expert, amateur


def counted() -> LanguageModel:
    model = build(NGram(vocab_size=V, order=3, smoothing=MaximumLikelihood()))
    model.fit(np.random.default_rng(0).integers(0, V, 400), np.array([0]))
    return model.eval()


@pytest.mark.parametrize("which", ["neither", "amateur", "expert"])
def test_the_formula(which: str) -> None:
    """An n-gram model on either side too: its features are tokens, not real numbers, and some of its p are zero."""
    expert, amateur = models()
    expert, amateur = (counted() if which == "expert" else expert), (counted() if which == "amateur" else amateur)
    both = ContrastiveModel(expert, amateur, strength=0.7, plausible=0.21)
    tokens = torch.randint(0, V, (2, 5))
    with torch.no_grad():
        found = both.step(tokens, both.start(2, 8))
        strong, weak = (model(tokens).log_softmax(-1) for model in (expert, amateur))
    expected = 1.7 * strong - 0.7 * weak.clamp(min=-100)
    plausible = strong.exp() >= 0.21 * strong.exp().amax(-1, keepdim=True)
    torch.testing.assert_close(found[plausible], expected[plausible], atol=1e-4, rtol=1e-4)
    assert (found[~plausible] == -math.inf).all()
    assert 0 < plausible.sum() < plausible.numel()


def test_without_strength_and_with_all_plausible_it_is_the_expert() -> None:
    expert, amateur = models()
    both = ContrastiveModel(expert, amateur, strength=0.0, plausible=1e-30)
    settings = Sampling(max_tokens=10, seed=3)
    alone = [token.id for token in generate(expert, [[1, 2]], settings)]
    assert [token.id for token in generate(both, [[1, 2]], settings)] == alone


def test_it_is_sampled_and_searched_as_any_model_is() -> None:
    expert, amateur = models()
    both = ContrastiveModel(expert, amateur)
    greedy = [token.id for token in generate(both, [[1, 2, 3]], Sampling(temperature=0.0, max_tokens=6))]
    found = beam_search(both, [[1, 2, 3]], Beam(beams=1, max_tokens=6))
    assert list(found[0][0].ids) == greedy
    ragged = list(generate(both, [[1, 2, 3], [4]], Sampling(temperature=0.0, max_tokens=6)))
    assert [token.id for token in ragged if token.row == 0] == greedy


def test_what_cannot_be_contrasted() -> None:
    expert, amateur = models()
    with pytest.raises(ConfigError, match="17 tokens can't be contrasted with one of 5"):
        ContrastiveModel(expert, build(gpt(1, 8, 1, 8, 5)))
    with pytest.raises(ConfigError, match="strength = -1"):
        ContrastiveModel(expert, amateur, strength=-1)
    with pytest.raises(ConfigError, match="plausible = 0"):
        ContrastiveModel(expert, amateur, plausible=0)
