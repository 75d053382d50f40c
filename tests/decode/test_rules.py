"""Penalties, biases, bans and filters: equal to Transformers', and independent between the rows of a batch."""

from itertools import product
from unittest.mock import Mock

import pytest
import torch
from tests.decode.small import token_ids
from tests.later import Later
from torch import Tensor

from weft.config import validate
from weft.decode import sampling
from weft.decode.config import Beam, Rules, Sampling
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.sampling import PenaltyHistory, apply_rules, choose_tokens, filter_logits
from weft.errors import ConfigError, ModelError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Recurrent
from weft.nn.config import FanInInit

transformers = Later("transformers")

V, B = 50, 6


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(B, V, generator=torch.Generator().manual_seed(0)) * 3


@pytest.fixture
def prompts() -> Tensor:
    return torch.randint(V, (B, 12), generator=torch.Generator().manual_seed(1))


def history_of(prompts: Tensor, generated: Tensor) -> PenaltyHistory:
    history = PenaltyHistory(prompts.tolist(), V, torch.device("cpu"))
    for column in generated.T:
        history.push(column.tolist())
    return history


@pytest.mark.parametrize("value", [0.2, 0.5, 0.9])
def test_filters_equal_transformers(logits: Tensor, prompts: Tensor, value: float) -> None:
    for ours, theirs in [
        (filter_logits(logits, [Sampling(temperature=value)] * B), transformers.TemperatureLogitsWarper(value)),
        (sampling.top_k(logits, int(value * 20)), transformers.TopKLogitsWarper(int(value * 20))),
        (sampling.top_p(logits, value), transformers.TopPLogitsWarper(value)),
        (sampling.min_p(logits, value), transformers.MinPLogitsWarper(value)),
        (sampling.typical(logits, value), transformers.TypicalLogitsWarper(value)),
    ]:
        torch.testing.assert_close(ours, theirs(prompts, logits.clone()))


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_penalties_and_bans_equal_transformers(logits: Tensor, prompts: Tensor, penalty: float) -> None:
    seen = torch.zeros(B, V, dtype=torch.bool).scatter(1, prompts, True)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)(prompts, logits.clone())
    torch.testing.assert_close(sampling.repetition_penalty(logits, seen, penalty), theirs)

    bias = transformers.SequenceBiasLogitsProcessor([[[5], penalty], [[9], -penalty]])
    for rule, processor in [
        (Rules(banned=(3, 7)), transformers.SuppressTokensLogitsProcessor([3, 7])),
        (Rules(logit_bias={5: penalty, 9: -penalty}), bias),
        (Rules(forced=(8,)), transformers.ForcedBOSTokenLogitsProcessor(8)),
    ]:
        ours = apply_rules(logits, [rule] * B, [0] * B)
        torch.testing.assert_close(ours, processor(prompts[:, :1], logits.clone()))

    minimum = transformers.MinNewTokensLengthLogitsProcessor(10, 4, 2)
    for count in (1, 4):
        ids = torch.cat([prompts, prompts], 1)[:, : 10 + count]
        ours = apply_rules(logits, [Rules(min_tokens=4)] * B, [count] * B, eos_id=2)
        torch.testing.assert_close(ours, minimum(ids, logits.clone()))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_banned_ngrams_equal_transformers(logits: Tensor, size: int) -> None:
    ids = torch.randint(3, (B, 14), generator=torch.Generator().manual_seed(size))  # few tokens: many repeats
    history = history_of(ids[:, :9], ids[:, 9:])
    assert history.texts == ids.tolist()
    theirs = transformers.NoRepeatNGramLogitsProcessor(size)
    expected = theirs(ids, logits.clone())
    assert (expected == -torch.inf).any(dim=1).sum() > B // 2
    ours = apply_rules(logits, [Rules(no_repeat_ngram=size)] * B, [5] * B, history=history)
    torch.testing.assert_close(ours, expected)
    for short in (ids[:, :1], ids[:, :2]):
        ours = sampling.no_repeat_ngram(logits, short.tolist(), [size] * B)
        torch.testing.assert_close(ours, theirs(short, logits.clone()))
    history.reorder([B - 1, *range(B - 1)])
    assert history.texts == ids.roll(1, 0).tolist()


def test_frequency_and_presence_follow_their_formulas(logits: Tensor) -> None:
    counts = torch.randint(4, (B, V), generator=torch.Generator().manual_seed(2)).float()
    history = PenaltyHistory([[]] * B, V, logits.device)
    history.counts = counts
    found = apply_rules(logits, [Rules(frequency_penalty=0.4, presence_penalty=1.5)] * B, [9] * B, history=history)
    for row, column in product(range(B), range(V)):
        times = int(counts[row, column])
        expected = float(logits[row, column]) - 0.4 * times - (1.5 if times else 0.0)
        assert float(found[row, column]) == pytest.approx(expected, abs=1e-5)


def test_only_the_repetition_penalty_counts_the_prompt(logits: Tensor, prompts: Tensor) -> None:
    history = history_of(prompts, torch.full((B, 2), 20))
    presence = apply_rules(logits, [Rules(presence_penalty=2.0)] * B, [2] * B, history=history)
    assert (presence != logits).nonzero()[:, 1].unique().tolist() == [20]
    repetition = apply_rules(logits, [Rules(repetition_penalty=2.0)] * B, [2] * B, history=history)
    assert set((repetition[0] != logits[0]).nonzero()[:, 0].tolist()) == {20, *prompts[0].tolist()}


MIXED = [
    Sampling(temperature=0.7, top_k=5, repetition_penalty=1.4),
    Sampling(temperature=0.0, frequency_penalty=0.5),
    Sampling(top_p=0.6, logit_bias={3: 4.0}),
    Sampling(min_p=0.1, presence_penalty=-1.0, banned=(1, 2)),
    Sampling(typical_p=0.5, temperature=1.5, min_tokens=5),
    Sampling(forced=(4, 5, 6), no_repeat_ngram=2),
]


def test_rows_with_different_settings_are_independent(logits: Tensor, prompts: Tensor) -> None:
    before, generated = logits.clone(), prompts[:, :2].flip(1)
    together = apply_rules(logits, MIXED, [2] * B, history=history_of(prompts, generated), eos_id=0)
    uniforms = [row / B for row in range(B)]
    filtered = filter_logits(together, MIXED)
    drawn = choose_tokens(together, MIXED, uniforms).tolist()
    assert torch.equal(logits, before)  # not modified in place
    for row in range(B):
        history = history_of(prompts[row : row + 1], generated[row : row + 1])
        alone = apply_rules(logits[row : row + 1], [MIXED[row]], [2], history=history, eos_id=0)
        assert torch.equal(alone[0], together[row])
        assert torch.equal(filter_logits(alone, [MIXED[row]])[0], filtered[row])
        assert choose_tokens(alone, [MIXED[row]], uniforms[row : row + 1]).tolist() == [drawn[row]]


# ---- whole texts


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    return build(Recurrent(vocab_size=V, d_model=16, cell="gru", init=FanInInit(embedding_std=1.0))).eval()


def generated(model: LanguageModel, settings: Sampling, eos_id: int | None = None) -> list[int]:
    return token_ids(model, [Prompt([7, 8, 9], eos_id=eos_id)], settings, seeds=[0])[0]


def test_a_batch_of_different_settings_equals_each_row_alone(model: LanguageModel) -> None:
    settings = [each.replace(max_tokens=4 + 2 * row) for row, each in enumerate(MIXED)]
    prompts = [Prompt([7, 8, 9 + row], eos_id=0) for row in range(B)]
    together = token_ids(model, prompts, settings, seeds=range(B))
    for row in range(B):
        assert token_ids(model, prompts[row : row + 1], settings[row], seeds=[row]) == [together[row]]
    assert together[5][:3] == [4, 5, 6]
    assert not {1, 2} & set(together[3])
    assert 0 not in together[4][:5]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_repeats_in_a_text(model: LanguageModel, size: int) -> None:
    def distinct(settings: Sampling) -> int:
        text = [7, 8, 9, *generated(model, settings)]
        return len({tuple(text[at : at + size]) for at in range(len(text) - size + 1)})

    for settings in (Sampling(temperature=0.0, max_tokens=30), Sampling(temperature=0.3, max_tokens=30)):
        assert distinct(settings.replace(no_repeat_ngram=size)) == 34 - size
    assert distinct(Sampling(temperature=0.0, max_tokens=30)) < 34 - size


def test_a_strong_penalty_never_repeats(model: LanguageModel) -> None:
    assert len(set(generated(model, Sampling(max_tokens=30, presence_penalty=100.0)))) == 30
    strong = Sampling(max_tokens=30, temperature=0.0, repetition_penalty=100.0, logit_bias={7: 9.0})
    assert len({7, *generated(model, strong)}) >= 30


def test_min_tokens_delays_eos(model: LanguageModel) -> None:
    ends = Sampling(logit_bias={0: 50.0})
    assert generated(model, ends, eos_id=0) == [0]
    assert generated(model, ends.replace(min_tokens=3), eos_id=0).index(0) == 3


def test_equal_prompts_are_read_once_and_continued_apart(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Mock(wraps=model.advance)
    monkeypatch.setattr(model, "advance", advance)
    prompts, settings = [[1, 2]] * 3 + [[3]] * 3, Sampling(max_tokens=6)
    texts = token_ids(model, prompts, settings)
    batches = [len(call.args[0]) for call in advance.call_args_list]
    assert batches[0] == 2 and set(batches[1:]) == {6}
    assert texts == [token_ids(model, [prompt], settings, seeds=[row])[0] for row, prompt in enumerate(prompts)]
    assert len({tuple(text) for text in texts}) == 6


def test_log_probabilities_are_the_models_own(model: LanguageModel) -> None:
    settings = Sampling(max_tokens=5, temperature=0.5, top_k=3, logprobs=4, logit_bias={5: 3.0})
    chunks = list(generate(model, [[1, 2]], settings))
    with torch.no_grad():
        log_p = model(torch.tensor([[1, 2, *(chunk.id for chunk in chunks)]]))[0].log_softmax(-1)
    for position, chunk in enumerate(chunks, start=1):
        assert chunk.logprob == pytest.approx(float(log_p[position, chunk.id]), abs=1e-5)
        best = log_p[position].topk(4)
        assert [id for id, _ in chunk.top] == best.indices.tolist()
        assert [value for _, value in chunk.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert next(generate(model, [[1]], Sampling())).logprob is None
    without_top = next(generate(model, [[1]], Sampling(logprobs=0)))
    assert without_top.logprob is not None and without_top.top == ()


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Sampling, {"repetition_penalty": 0.0}, "repetition_penalty = 0.0: expected a number greater than 0"),
        (Sampling, {"min_tokens": 9, "max_tokens": 8}, "min_tokens = 9: more than max_tokens = 8"),
        (Sampling, {"banned": [4], "forced": [4]}, "forced: token 4 is banned as well"),
        (Sampling, {"temperature": 0.0, "typical_p": 0.5}, "greedy"),
        (Sampling, {"temperature": 0.0, "top_k": 5}, "greedy"),
        (Beam, {"beams": 2, "n": 3}, "n = 3: a beam of 2 holds at most 2 texts"),
        (Beam, {"beams": 0}, "beams = 0"),
        (Beam, {"temperature": 0.5}, "temperature: unknown key"),
    ],
)
def test_contradictory_rules_are_refused(kind: type[Rules], settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(kind, settings)


def test_ids_outside_the_vocabulary_are_refused(model: LanguageModel) -> None:
    for rule in (Sampling(banned=(V,)), Sampling(forced=(V,)), Sampling(logit_bias={V: 1.0})):
        name = next(iter(rule.model_fields_set))
        with pytest.raises(ModelError, match=f"{name}: token 50 is outside the vocabulary of 50"):
            generate(model, [[1]], rule)
    with pytest.raises(ModelError, match="all 50 tokens"):
        generate(model, [[1]], Sampling(banned=tuple(range(V))))
