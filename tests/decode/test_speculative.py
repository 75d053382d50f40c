"""Speculation changes the time, not the text: greedy text is identical, samples follow the same distribution."""

import itertools
from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.decode.fast.helpers import sharpen
from tests.decode.small import complete, ngram_model, token_ids
from tests.later import Later
from tests.pairwise import each_once
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.sampling import filter_logits, repetition_penalty
from weft.decode.speculative import Draft, DraftTokens, LookUp, speculate
from weft.decode.text import gather
from weft.errors import ModelError
from weft.models.base import LanguageModel, State
from weft.models.build import build
from weft.models.config import Recurrent
from weft.models.presets import gpt, llama
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

stats = Later("scipy.stats")

VOCAB = 12
GREEDY = Sampling(temperature=0.0, max_tokens=30)


@pytest.fixture(scope="module")
def models() -> dict[str, LanguageModel]:
    torch.manual_seed(0)
    return {
        "llama": sharpen(build(llama(2, 16, 2, d_ff=24, context=64, vocab_size=VOCAB))),
        "gpt": sharpen(build(gpt(1, 16, 2, context=40, vocab_size=VOCAB))),
        "lstm": sharpen(build(Recurrent(vocab_size=VOCAB, d_model=12, cell="lstm")), 2.0),
        "ngram": ngram_model(VOCAB),
    }


RULES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"min_tokens": 9, "logit_bias": {0: 2.0}},
    {"banned": (3, 4), "forced": (7,)},
]


@pytest.mark.parametrize(
    ("name", "draft", "rules"),
    [
        *each_once(["llama", "gpt", "lstm", "ngram"], ["lookup", "lstm", "ngram"], RULES[:1]),
        *each_once(["llama", "ngram"], ["lookup", "gpt"], RULES[1:]),
    ],
)
def test_greedy_text_is_identical(models: dict[str, LanguageModel], name: str, draft: str, rules: Any) -> None:
    settings = Sampling(temperature=0.0, max_tokens=24, logprobs=2, **rules)
    prompt = Prompt([1, 2, 3, 1, 2], eos_id=0)
    expected = list(generate(models[name], [prompt], settings))
    drafter = LookUp(3) if draft == "lookup" else Draft(models[draft], prompt, settings)
    chunks = list(speculate(models[name], prompt, settings, drafter=drafter))
    assert [(chunk.id, chunk.finish) for chunk in chunks] == [(chunk.id, chunk.finish) for chunk in expected]
    assert [chunk.logprob for chunk in chunks] == pytest.approx([chunk.logprob for chunk in expected], abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_samples_are_identical_with_deterministic_drafts(models: dict[str, LanguageModel], seed: int) -> None:
    settings = Sampling(max_tokens=40, seed=seed, top_p=0.9)
    chunks = speculate(models["ngram"], [1, 2], settings, drafter=LookUp(2))
    assert [chunk.id for chunk in chunks] == token_ids(models["ngram"], [[1, 2]], settings)[0]


class Bigram(LanguageModel):
    """p(token | previous token) from a table, so that the distribution is known exactly."""

    def __init__(self, seed: int, size: int = 6):
        super().__init__()
        self.config = Recurrent(vocab_size=size, d_model=1)
        self.table = torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * 1.5
        self.eval()

    def start(self, batch: int, max_len: int, source: object = None) -> State:
        return State(batch, max_len, torch.device("cpu"))

    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        state.advance(tokens.shape[1], lengths)
        return tokens

    def head(self, features: Tensor) -> Tensor:
        return self.table[features]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7, "top_k": 4},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8, "repetition_penalty": 1.5}, marks=pytest.mark.slow),
    ],
)
def test_a_draft_model_does_not_change_the_distribution(changes: Any) -> None:
    model, draft = Bigram(1), Bigram(2)
    settings = Sampling(max_tokens=800, seed=5, **changes)
    prompt = Prompt(range(6))  # holds every token, so the penalty applies everywhere
    text = [5, *(chunk.id for chunk in speculate(model, prompt, settings, drafter=Draft(draft, prompt, settings)))]
    counts = torch.zeros(6, 6, dtype=torch.float64)
    for previous, token in itertools.pairwise(text):
        counts[previous, token] += 1
    logits = repetition_penalty(model.table, torch.ones(6, 6, dtype=torch.bool), settings.repetition_penalty)
    expected = counts.sum(1, keepdim=True) * filter_logits(logits, [settings] * 6).double().softmax(-1)
    assert float(counts[expected == 0].sum()) == 0
    enough = expected >= 5
    # each row's sum is fixed, which takes one degree of freedom per row
    result = stats.chisquare(counts[enough], expected[enough], ddof=int(enough.any(1).sum()) - 1, sum_check=False)
    assert result.pvalue > 0.001


def test_a_good_draft_saves_steps() -> None:
    """A copy of the model is always right: six tokens per step."""
    torch.manual_seed(0)
    model = sharpen(build(llama(2, 16, 2, d_ff=24, context=64, vocab_size=VOCAB)))
    draft, steps = Draft(deepcopy(model), Prompt([1, 2, 3]), GREEDY), list[int]()
    model.get_submodule("decoder.blocks.0").register_forward_hook(lambda *_: steps.append(1))
    list(speculate(model, [1, 2, 3], GREEDY, drafter=draft))
    assert len(steps) == 5


def test_look_up_takes_the_longest_and_latest_match() -> None:
    look = LookUp(3)
    assert look.draft([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == DraftTokens([9, 2], None)
    assert look.draft([1, 2, 3, 9, 2, 3, 8, 1, 2, 3, 7, 2, 3], 3) == DraftTokens([7, 2, 3], None)
    assert LookUp(2).draft([5, 6], 4) == DraftTokens([], None)
    assert LookUp(2).draft([5, 5], 4) == DraftTokens([5], None)
    with pytest.raises(ModelError, match="lookup = 0"):
        LookUp(0)


def test_the_text_continues_beyond_the_window_of_the_draft(models: dict[str, LanguageModel]) -> None:
    torch.manual_seed(1)
    draft = Draft(build(gpt(1, 16, 2, context=10, vocab_size=VOCAB)).eval(), Prompt([1, 2, 3]), GREEDY)
    chunks = speculate(models["llama"], [1, 2, 3], GREEDY, drafter=draft)
    assert [chunk.id for chunk in chunks] == token_ids(models["llama"], [[1, 2, 3]], GREEDY)[0]


def test_text_with_stop_strings_is_identical() -> None:
    tokenizer = build_tokenizer(Byte(), ["any"])
    torch.manual_seed(0)
    model = build(Recurrent(vocab_size=tokenizer.vocab_size, d_model=8, cell="gru")).eval()
    a, b = tokenizer.encode("ab")
    settings = Sampling(max_tokens=60, stop=("abba",), logit_bias={a: 9.0, b: 9.0}, seed=3)
    plain = complete(model, tokenizer, ["ab"], settings)
    assert plain[0].finish == "stop"
    prompt = Prompt.of(tokenizer, "ab")
    assert gather(speculate(model, prompt, settings, drafter=LookUp(4)), [prompt]) == plain
    greedy = settings.replace(temperature=0.0)
    drafted = gather(speculate(model, prompt, greedy, drafter=Draft(model, prompt, greedy)), [prompt])
    assert drafted == complete(model, tokenizer, ["ab"], greedy)
