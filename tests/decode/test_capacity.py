"""Capacity that grows with the text gives the same text as capacity that was there from the start."""

from itertools import islice

import numpy as np
import pytest
import torch
from tests.decode.small import VOCAB, decoder

from weft.api.settings import sampling
from weft.decode.beam import beam_search
from weft.decode.config import Beam, Sampling
from weft.decode.contrastive import ContrastiveModel
from weft.decode.fast import stepper
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.speculative import Draft, speculate
from weft.errors import ConfigError
from weft.models.base import LanguageModel
from weft.models.build import build as build_model
from weft.models.config import NGram, Recurrent
from weft.nn.config import LayerNorm

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]


def build(name: str) -> LanguageModel:
    torch.manual_seed(0)
    match name:
        case "fast path":
            return decoder()
        case "general":
            return decoder(norm=LayerNorm())
        case "lstm":
            return build_model(Recurrent(vocab_size=VOCAB, d_model=16, cell="lstm", layers=2)).eval()
        case "contrast":
            return ContrastiveModel(decoder(), decoder(d_model=8)).eval()
        case _:
            model = build_model(NGram(vocab_size=VOCAB, order=3))
            model.fit(np.arange(400) ** 2 % VOCAB)
            return model.eval()


@pytest.mark.parametrize("name", ["fast path", "general", "lstm", "ngram", "contrast"])
def test_a_text_that_outgrows_its_capacity(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    settings = Sampling(max_tokens=24, seed=2)  # beyond the window as well

    def texts() -> list[object]:
        one = list(generate(model, PROMPTS[:1], settings))
        many = list(generate(model, [prompt for prompt in PROMPTS for _ in "ab"], settings))
        best = beam_search(model, PROMPTS, Beam(beams=3, max_tokens=16))
        draft = Draft(model, Prompt(PROMPTS[0]), settings)
        return [one, many, best, list(speculate(model, PROMPTS[0], settings, drafter=draft))]

    whole = texts()
    grown: list[bool] = []
    grow = stepper.grow
    monkeypatch.setattr(stepper, "grow", lambda *given: grown.append(grow(*given)) or grown[-1])
    monkeypatch.setattr(stepper, "FIRST_CAPACITY", 2)
    assert texts() == whole
    assert any(grown) == (name != "contrast")  # which has all of its capacity from the start


def test_capacity_for_a_thousand_million_tokens_is_not_taken_beforehand() -> None:
    tokens = generate(decoder(), [[1, 2]], Sampling(max_tokens=10**9, temperature=0.0))
    expected = list(generate(decoder(), [[1, 2]], Sampling(max_tokens=20, temperature=0.0)))
    assert [each.id for each in islice(tokens, 20)] == [each.id for each in expected]


@pytest.mark.parametrize("name", ["max_tokens", "top_k"])
@pytest.mark.parametrize("value", [10**9 + 1, 2**63 - 1, 99999999999999999999])
def test_more_than_anyone_needs_is_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} = {value}: expected a number less than or equal to 1000000000"):
        sampling(**{name: value})
