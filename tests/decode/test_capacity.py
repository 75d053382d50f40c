"""A cache that grows with the text gives the same text as one allocated in full."""

from collections.abc import Callable
from itertools import islice
from typing import Any, cast

import pytest
import torch
from tests.decode.small import VOCAB, decoder, ngram_model
from tests.spread import spread

from weft.api.settings import sampling
from weft.decode.beam import beam_search
from weft.decode.config import Beam, Sampling
from weft.decode.contrastive import ContrastiveModel
from weft.decode.fast import stepper
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.speculative import Draft, speculate
from weft.errors import ConfigError
from weft.models.base import LanguageModel, State
from weft.models.build import build
from weft.models.config import Recurrent
from weft.nn.config import LayerNorm

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]


MODELS: dict[str, Callable[[], LanguageModel]] = {
    "fast path": decoder,
    "general": lambda: decoder(norm=LayerNorm()),
    "lstm": lambda: build(Recurrent(vocab_size=VOCAB, d_model=16, cell="lstm", layers=2)).eval(),
    "ngram": lambda: ngram_model(VOCAB),
    "contrastive": lambda: ContrastiveModel(decoder(), decoder(d_model=8)).eval(),
}


@pytest.mark.parametrize("name", spread(MODELS, 2))
def test_a_text_that_outgrows_its_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    settings = Sampling(max_tokens=24, seed=2)  # beyond the window as well

    def texts() -> list[object]:
        one = list(generate(model, PROMPTS[:1], settings))
        many = list(generate(model, [prompt for prompt in PROMPTS for _ in "ab"], settings))
        best = beam_search(model, PROMPTS, Beam(beams=3, max_tokens=16))
        draft = Draft(model, Prompt(PROMPTS[0]), settings)
        return [one, many, best, list(speculate(model, PROMPTS[0], settings, drafter=draft))]

    expected = texts()
    grew: list[bool] = []
    grow = stepper.grow

    def recorded(state: State, tokens: int, limit: int) -> bool:
        grew.append(grow(state, tokens, limit))
        return grew[-1]

    monkeypatch.setattr(stepper, "grow", recorded)
    monkeypatch.setattr(stepper, "FIRST_CAPACITY", 2)
    assert texts() == expected
    assert any(grew) == (name != "contrastive")  # whose cache is allocated in full


def test_a_cache_for_a_billion_tokens_is_not_allocated_beforehand() -> None:
    chunks = generate(decoder(), [[1, 2]], Sampling(max_tokens=10**9, temperature=0.0))
    expected = generate(decoder(), [[1, 2]], Sampling(max_tokens=20, temperature=0.0))
    assert [chunk.id for chunk in islice(chunks, 20)] == [chunk.id for chunk in expected]


@pytest.mark.parametrize("name", ["max_tokens", "top_k"])
@pytest.mark.parametrize("value", [10**9 + 1, 2**63 - 1, 99999999999999999999])
def test_excessive_limits_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} = {value}: expected a number less than or equal to 1000000000"):
        sampling(**cast(Any, {name: value}))
