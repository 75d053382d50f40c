"""Guessing ahead changes the time, never the text: greedy word for word, sampling in distribution."""

import itertools

import pytest
import torch
from tests.decode.small import complete
from tests.later import Later
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
from weft.models.config import NGram, Recurrent
from weft.models.presets import gpt, llama
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

stats = Later("scipy.stats")

VOCAB = 12


def sharp(model: LanguageModel, by: float) -> LanguageModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(by if parameter.ndim > 1 else 1.0)
    return model.eval()


def ngram(seed: int) -> LanguageModel:
    model = build(NGram(vocab_size=VOCAB, order=3))
    model.fit(torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(seed)).numpy())
    return model.eval()


@pytest.fixture(scope="module")
def models() -> dict[str, LanguageModel]:
    torch.manual_seed(0)
    return {
        "llama": sharp(build(llama(2, 16, 2, 24, 64, vocab_size=VOCAB)), 4.0),
        "gpt": sharp(build(gpt(1, 16, 2, 40, VOCAB)), 4.0),
        "lstm": sharp(build(Recurrent(vocab_size=VOCAB, d_model=12, cell="lstm")), 2.0),
        "ngram": ngram(1),
    }


def drafter(name: str, models: dict[str, LanguageModel], prompt: Prompt, settings: Sampling) -> Draft | LookUp:
    return LookUp(3) if name == "lookup" else Draft(models[name], prompt, settings)


RULES = [{}, {"repetition_penalty": 1.3}, {"min_tokens": 9, "logit_bias": {0: 2.0}}, {"banned": (3, 4), "forced": (7,)}]


@pytest.mark.parametrize(
    ("name", "helper", "rules"),
    [
        *itertools.product(["llama", "gpt", "lstm", "ngram"], ["lookup", "lstm", "ngram"], RULES[:1]),
        *itertools.product(["llama", "ngram"], ["lookup", "gpt"], RULES[1:]),
    ],
)
def test_greedy_text_is_the_same(
    models: dict[str, LanguageModel], name: str, helper: str, rules: dict[str, object]
) -> None:
    settings = Sampling(temperature=0.0, max_tokens=24, logprobs=2, **rules)  # type: ignore[arg-type]
    prompt = Prompt([1, 2, 3, 1, 2], eos_id=0)
    plain = list(generate(models[name], [prompt], settings))
    ahead = list(speculate(models[name], prompt, settings, drafter=drafter(helper, models, prompt, settings)))
    assert [(t.id, t.finish) for t in ahead] == [(t.id, t.finish) for t in plain]
    assert [t.logprob for t in ahead] == pytest.approx([t.logprob for t in plain], abs=1e-4)


def test_sampled_text_with_certain_guesses_is_the_same_too(models: dict[str, LanguageModel]) -> None:
    for seed in range(4):
        settings = Sampling(max_tokens=40, seed=seed, top_p=0.9)
        plain = [t.id for t in generate(models["ngram"], [[1, 2]], settings)]
        assert [t.id for t in speculate(models["ngram"], [1, 2], settings, drafter=LookUp(2))] == plain


class Bigram(LanguageModel):
    """p(word | word before) from a table, so that what should come out is known exactly."""

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
    "table",
    [
        {"temperature": 0.7, "top_k": 4},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8, "repetition_penalty": 1.5}, marks=pytest.mark.slow),
    ],
)
def test_a_draft_leaves_the_distribution_as_it_is(table: dict[str, object]) -> None:
    model, draft = Bigram(1), Bigram(2)
    words = 1500
    settings = Sampling(max_tokens=words, seed=5, **table)  # type: ignore[arg-type]
    prompt = Prompt(range(6))  # every word was seen, so the penalty is the same everywhere
    text = [5, *[t.id for t in speculate(model, prompt, settings, drafter=Draft(draft, prompt, settings))]]
    counts = torch.zeros(6, 6, dtype=torch.float64)
    for before, after in itertools.pairwise(text):
        counts[before, after] += 1
    logits = repetition_penalty(model.table, torch.ones(6, 6, dtype=torch.bool), settings.repetition_penalty)
    expected = counts.sum(1, keepdim=True) * filter_logits(logits, [settings] * 6).double().softmax(-1)
    possible = expected > 0
    assert float(counts[~possible].sum()) == 0
    many = expected >= 5
    # every row adds up to what it has to, so one cell a row is not free
    found = stats.chisquare(counts[many], expected[many], ddof=int(many.any(1).sum()) - 1, sum_check=False)
    assert found.pvalue > 0.001


def test_a_good_draft_saves_steps(models: dict[str, LanguageModel]) -> None:
    """The model as its own draft is always right: six tokens a step."""
    model = models["llama"]
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    settings = Sampling(temperature=0.0, max_tokens=30)
    torch.manual_seed(0)
    twin = sharp(build(llama(2, 16, 2, 24, 64, vocab_size=VOCAB)), 4.0)
    handle = model.decoder.blocks[0].register_forward_hook(count)
    list(speculate(model, [1, 2, 3], settings, drafter=Draft(twin, Prompt([1, 2, 3]), settings)))
    handle.remove()
    assert steps == 5


def test_look_up_takes_the_longest_and_latest_match() -> None:
    look = LookUp(3)
    assert look.draft([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == DraftTokens([9, 2], None)
    assert look.draft([1, 2, 3, 9, 2, 3, 8, 1, 2, 3, 7, 2, 3], 3) == DraftTokens([7, 2, 3], None)
    assert LookUp(2).draft([5, 6], 4) == DraftTokens([], None)
    assert LookUp(2).draft([5, 5], 4) == DraftTokens([5], None)
    with pytest.raises(ModelError, match="lookup = 0"):
        LookUp(0)


def test_a_draft_with_a_short_window_stops_guessing_and_the_text_goes_on(models: dict[str, LanguageModel]) -> None:
    torch.manual_seed(1)
    short = build(gpt(1, 16, 2, 10, VOCAB)).eval()
    settings = Sampling(temperature=0.0, max_tokens=25)
    plain = [t.id for t in generate(models["llama"], [[1, 2, 3]], settings)]
    draft = Draft(short, Prompt([1, 2, 3]), settings)
    ahead = [t.id for t in speculate(models["llama"], [1, 2, 3], settings, drafter=draft)]
    assert ahead == plain


def test_text_with_stop_strings_is_the_same() -> None:
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
