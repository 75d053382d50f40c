"""Penalties, biases, bans and filters, held to an implementation that nobody here wrote, and mixed in one batch."""

import pytest
import torch
from tests.later import Later
from torch import Tensor

from weft.config import validate
from weft.decode.config import Beam, Rules, Sampling
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.sampling import (
    TokenHistory,
    apply_rules,
    choose_tokens,
    count_penalties,
    filter_logits,
    min_p,
    no_repeat_ngram,
    repetition_penalty,
    top_k,
    top_p,
    typical,
)
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
def read() -> Tensor:
    return torch.randint(V, (B, 12), generator=torch.Generator().manual_seed(1))


def past_of(read: Tensor, written: Tensor) -> TokenHistory:
    past = TokenHistory(read.tolist(), V, torch.device("cpu"))
    for column in written.T:
        past.push(column.tolist())
    return past


@pytest.mark.parametrize("amount", [0.2, 0.5, 0.9])
def test_filters_equal_transformers(logits: Tensor, read: Tensor, amount: float) -> None:
    for ours, theirs in [
        (filter_logits(logits, [Sampling(temperature=amount)] * B), transformers.TemperatureLogitsWarper(amount)),
        (top_k(logits, int(amount * 20)), transformers.TopKLogitsWarper(int(amount * 20))),
        (top_p(logits, amount), transformers.TopPLogitsWarper(amount)),
        (min_p(logits, amount), transformers.MinPLogitsWarper(amount)),
        (typical(logits, amount), transformers.TypicalLogitsWarper(amount)),
    ]:
        torch.testing.assert_close(ours, theirs(read, logits.clone()))


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_penalties_and_bans_equal_transformers(logits: Tensor, read: Tensor, penalty: float) -> None:
    seen = torch.zeros(B, V, dtype=torch.bool).scatter(1, read, True)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)(read, logits.clone())
    torch.testing.assert_close(repetition_penalty(logits, seen, penalty), theirs)

    banned = transformers.SuppressTokensLogitsProcessor([3, 7])(read, logits.clone())
    rules = [Rules(banned=(3, 7))] * B
    torch.testing.assert_close(apply_rules(logits, rules, [0] * B), banned)

    biased = transformers.SequenceBiasLogitsProcessor([[[5], penalty], [[9], -penalty]])(read, logits.clone())
    ours = apply_rules(logits, [Rules(logit_bias={5: penalty, 9: -penalty})] * B, [0] * B)
    torch.testing.assert_close(ours, biased)

    early = transformers.MinNewTokensLengthLogitsProcessor(10, 4, 2)
    for count, ids in ((1, read[:, :11]), (4, read[:, :14])):
        held = torch.cat([ids, ids], 1)[:, : 10 + count]
        ours = apply_rules(logits, [Rules(min_tokens=4)] * B, [count] * B, eos_id=2)
        torch.testing.assert_close(ours, early(held, logits.clone()))

    first = transformers.ForcedBOSTokenLogitsProcessor(8)(read[:, :1], logits.clone())
    torch.testing.assert_close(apply_rules(logits, [Rules(forced=(8,))] * B, [0] * B), first)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_comes_twice_as_in_transformers(logits: Tensor, size: int) -> None:
    read = torch.randint(3, (B, 14), generator=torch.Generator().manual_seed(size))  # of few tokens: much comes twice
    past = past_of(read[:, :9], read[:, 9:])
    assert past.texts == read.tolist()
    theirs = transformers.NoRepeatNGramLogitsProcessor(size)
    expected = theirs(read, logits.clone())
    assert (expected == -torch.inf).any(dim=1).sum() > B // 2
    ours = apply_rules(logits, [Rules(no_repeat_ngram=size)] * B, [5] * B, history=past)
    torch.testing.assert_close(ours, expected)
    for short in (read[:, :1], read[:, :2]):
        torch.testing.assert_close(no_repeat_ngram(logits, short.tolist(), [size] * B), theirs(short, logits.clone()))
    past.reorder([B - 1, *range(B - 1)])
    assert past.texts == read.roll(1, 0).tolist()


def test_frequency_and_presence_follow_their_formulas(logits: Tensor) -> None:
    counts = torch.randint(4, (B, V), generator=torch.Generator().manual_seed(2)).float()
    expected = logits.clone()
    for row in range(B):
        for token in range(V):
            expected[row, token] -= 0.4 * counts[row, token] + 1.5 * float(counts[row, token] > 0)
    torch.testing.assert_close(count_penalties(logits, counts, 0.4, presence=1.5), expected)


def test_only_repetition_counts_the_prompt(logits: Tensor, read: Tensor) -> None:
    written = torch.full((B, 2), 20)
    past = past_of(read, written)
    one = apply_rules(logits, [Rules(presence_penalty=2.0)] * B, [2] * B, history=past)
    changed = (one != logits).nonzero()[:, 1].unique().tolist()
    assert changed == [20]
    both = apply_rules(logits, [Rules(repetition_penalty=2.0)] * B, [2] * B, history=past)
    assert set((both[0] != logits[0]).nonzero()[:, 0].tolist()) == {20, *read[0].tolist()}


MIXED = [
    Sampling(temperature=0.7, top_k=5, repetition_penalty=1.4),
    Sampling(temperature=0.0, frequency_penalty=0.5),
    Sampling(top_p=0.6, logit_bias={3: 4.0}),
    Sampling(min_p=0.1, presence_penalty=-1.0, banned=(1, 2)),
    Sampling(typical_p=0.5, temperature=1.5, min_tokens=5),
    Sampling(forced=(4, 5, 6), no_repeat_ngram=2),
]


def test_rows_with_settings_of_their_own_come_out_as_alone(logits: Tensor, read: Tensor) -> None:
    written = read[:, :2].flip(1)
    past = past_of(read, written)
    together = apply_rules(logits, MIXED, [2] * B, history=past, eos_id=0)
    uniforms = [row / B for row in range(B)]
    drawn = choose_tokens(together, MIXED, uniforms).tolist()
    for row in range(B):
        own = past_of(read[row : row + 1], written[row : row + 1])
        alone = apply_rules(logits[row : row + 1], [MIXED[row]], [2], history=own, eos_id=0)
        assert torch.equal(alone[0], together[row])
        assert torch.equal(filter_logits(alone, [MIXED[row]])[0], filter_logits(together, MIXED)[row])
        assert choose_tokens(alone, [MIXED[row]], uniforms[row : row + 1]).tolist() == [drawn[row]]


def test_nothing_is_changed_in_place(logits: Tensor, read: Tensor) -> None:
    before = logits.clone()
    filter_logits(apply_rules(logits, MIXED, [1] * B, history=past_of(read, read), eos_id=0), MIXED)
    assert torch.equal(logits, before)


# ---- in whole texts


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    return build(Recurrent(vocab_size=V, d_model=16, cell="gru", init=FanInInit(embedding_std=1.0))).eval()


def written(
    model: LanguageModel, settings: Sampling | list[Sampling], rows: int = 1, eos_id: int | None = None
) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in range(rows)]
    prompts = [Prompt([7, 8, 9 + row], eos_id=eos_id) for row in range(rows)]
    for token in generate(model, prompts, settings, seeds=range(rows)):
        texts[token.row].append(token.id)
    return texts


def test_a_batch_of_unlike_rows_writes_what_each_writes_alone(model: LanguageModel) -> None:
    settings = [each.replace(max_tokens=4 + 2 * row) for row, each in enumerate(MIXED)]
    together = written(model, settings, B, eos_id=0)
    for row, each in enumerate(settings):
        alone: list[int] = []
        for token in generate(model, [Prompt([7, 8, 9 + row], eos_id=0)], each, seeds=[row]):
            alone.append(token.id)
        assert alone == together[row]
    assert together[5][:3] == [4, 5, 6]
    assert not {1, 2} & set(together[3])
    assert 0 not in together[4][:5]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_comes_twice_in_a_text(model: LanguageModel, size: int) -> None:
    for settings in (Sampling(temperature=0.0, max_tokens=30), Sampling(temperature=0.3, max_tokens=30)):
        text = [7, 8, 9, *written(model, settings.replace(no_repeat_ngram=size))[0]]
        grams = [tuple(text[at : at + size]) for at in range(len(text) - size + 1)]
        assert len(set(grams)) == len(grams) == 34 - size
    plain = [7, 8, 9, *written(model, Sampling(temperature=0.0, max_tokens=30))[0]]
    assert len({tuple(plain[at : at + size]) for at in range(34 - size)}) < 34 - size


def test_a_strong_penalty_never_repeats(model: LanguageModel) -> None:
    text = written(model, Sampling(max_tokens=30, presence_penalty=100.0))[0]
    assert len(set(text)) == 30
    text = written(model, Sampling(max_tokens=30, temperature=0.0, repetition_penalty=100.0, logit_bias={7: 9.0}))[0]
    assert len({7, *text}) >= 30


def test_min_tokens_holds_the_end_back(model: LanguageModel) -> None:
    wish = {0: 50.0}  # the end of the text, whatever the model says
    assert written(model, Sampling(logit_bias=wish), eos_id=0)[0] == [0]
    assert written(model, Sampling(logit_bias=wish, min_tokens=3), eos_id=0)[0].index(0) == 3


def test_equal_prompts_are_read_once_and_written_apart(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    advance = model.advance
    monkeypatch.setattr(model, "advance", lambda tokens, *more: read.append(len(tokens)) or advance(tokens, *more))
    rows = list(generate(model, [[1, 2]] * 3 + [[3]] * 3, Sampling(max_tokens=6)))
    assert read[0] == 2 and set(read[1:]) == {6}
    texts = [[t.id for t in rows if t.row == row] for row in range(6)]
    for row, text in enumerate(texts):
        prompt = [1, 2] if row < 3 else [3]
        alone = [t.id for t in generate(model, [prompt], Sampling(max_tokens=6), seeds=[row])]
        assert text == alone
    assert len({tuple(text) for text in texts}) == 6


def test_log_probabilities_are_the_models_own(model: LanguageModel) -> None:
    settings = Sampling(max_tokens=5, temperature=0.5, top_k=3, logprobs=4, logit_bias={5: 3.0})
    tokens = list(generate(model, [[1, 2]], settings))
    text = [1, 2, *[t.id for t in tokens]]
    with torch.no_grad():
        log_p = model(torch.tensor([text]))[0].log_softmax(-1)
    for place, token in enumerate(tokens, start=1):
        assert token.logprob == pytest.approx(float(log_p[place, token.id]), abs=1e-5)
        best = log_p[place].topk(4)
        assert [id for id, _ in token.top] == best.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert next(generate(model, [[1]], Sampling())).logprob is None
    only = next(generate(model, [[1]], Sampling(logprobs=0)))
    assert only.logprob is not None
    assert only.top == ()


@pytest.mark.parametrize(
    ("kind", "table", "words"),
    [
        (Sampling, {"repetition_penalty": 0.0}, "repetition_penalty = 0.0: expected a number greater than 0"),
        (Sampling, {"typical_p": 1.1}, "typical_p"),
        (Sampling, {"logit_bias": {-1: 2.0}}, "logit_bias"),
        (Sampling, {"min_tokens": 9, "max_tokens": 8}, "min_tokens = 9: more than max_tokens = 8"),
        (Sampling, {"banned": [4], "forced": [4]}, "forced: token 4 is banned as well"),
        (Sampling, {"logprobs": -1}, "logprobs"),
        (Sampling, {"temperature": 0.0, "typical_p": 0.5}, "greedy"),
        (Beam, {"beams": 2, "n": 3}, "n = 3: a beam of 2 holds at most 2 texts"),
        (Beam, {"beams": 0}, "beams = 0"),
        (Beam, {"temperature": 0.5}, "temperature: unknown key"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(kind: type[Rules], table: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(kind, table)


def test_ids_outside_the_vocabulary_are_refused(model: LanguageModel) -> None:
    for table in ({"banned": (V,)}, {"forced": (V,)}, {"logit_bias": {V: 1.0}}):
        with pytest.raises(ModelError, match=f"{next(iter(table))}: token 50 is outside the vocabulary of 50"):
            generate(model, [[1]], Sampling(**table))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="all 50 tokens"):
        generate(model, [[1]], Sampling(banned=tuple(range(V))))
