"""Contrastive decoding: the formula, and that every decoding method takes such a model."""

import math

import pytest
import torch
from tests.decode.small import ngram_model, token_ids

from weft.decode.beam import beam_search
from weft.decode.config import Beam, Sampling
from weft.decode.contrastive import ContrastiveModel
from weft.errors import ConfigError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Recurrent
from weft.models.presets import gpt, llama
from weft.models.smoothing import MaximumLikelihood

V = 17


def models() -> tuple[LanguageModel, LanguageModel]:
    torch.manual_seed(0)
    expert = build(llama(2, 32, 2, d_ff=48, context=32, vocab_size=V)).eval()
    amateur = build(Recurrent(vocab_size=V, cell="gru", d_model=8)).eval()
    for parameter in [*expert.parameters(), *amateur.parameters()]:
        torch.nn.init.normal_(parameter, std=0.4)
    return expert, amateur


@pytest.mark.parametrize("ngram", ["neither", "amateur", "expert"])
def test_the_formula(ngram: str) -> None:
    """An n-gram model may be either side: its features are token ids, and some of its probabilities are zero."""
    trigrams = ngram_model(V, smoothing=MaximumLikelihood())
    expert, amateur = models()
    expert = trigrams if ngram == "expert" else expert
    amateur = trigrams if ngram == "amateur" else amateur
    both = ContrastiveModel(expert, amateur, strength=0.7, plausible=0.21)
    tokens = torch.randint(0, V, (2, 5))
    with torch.no_grad():
        logits = both.step(tokens, both.start(2, 8))
        strong, weak = (model(tokens).log_softmax(-1) for model in (expert, amateur))
    expected = 1.7 * strong - 0.7 * weak.clamp(min=-100)
    plausible = strong.exp() >= 0.21 * strong.exp().amax(-1, keepdim=True)
    torch.testing.assert_close(logits[plausible], expected[plausible], atol=1e-4, rtol=1e-4)
    assert (logits[~plausible] == -math.inf).all()
    assert 0 < plausible.sum() < plausible.numel()


def test_without_strength_and_with_all_tokens_plausible_it_is_the_expert() -> None:
    expert, amateur = models()
    both = ContrastiveModel(expert, amateur, strength=0.0, plausible=1e-30)
    settings = Sampling(max_tokens=10, seed=3)
    assert token_ids(both, [[1, 2]], settings) == token_ids(expert, [[1, 2]], settings)


def test_batches_and_beam_search_take_it() -> None:
    both = ContrastiveModel(*models())
    settings = Sampling(temperature=0.0, max_tokens=6)
    greedy = token_ids(both, [[1, 2, 3]], settings)[0]
    assert list(beam_search(both, [[1, 2, 3]], Beam(beams=1, max_tokens=6))[0][0].ids) == greedy
    assert token_ids(both, [[1, 2, 3], [4]], settings)[0] == greedy


def test_impossible_pairs_and_strengths_are_refused() -> None:
    expert, amateur = models()
    with pytest.raises(ConfigError, match="17 tokens can't be contrasted with one of 5"):
        ContrastiveModel(expert, build(gpt(1, 8, 1, context=8, vocab_size=5)))
    with pytest.raises(ConfigError, match="strength = -1"):
        ContrastiveModel(expert, amateur, strength=-1)
    with pytest.raises(ConfigError, match="plausible = 0"):
        ContrastiveModel(expert, amateur, plausible=0)
