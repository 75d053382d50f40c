"""Beam search against Transformers, against an exhaustive search, and at its edges."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.decode.small import complete, token_ids
from tests.later import Later
from tests.models.contract import PaddedSource
from tests.models.test_parity import load, randomise
from tests.pairwise import each_once

from weft.data.batch import Source
from weft.decode.beam import Hypothesis, beam_search, search_texts
from weft.decode.config import Beam, GNMTLength, LengthPenalty, PowerLength, Sampling
from weft.decode.prompt import Prompt
from weft.errors import ConfigError, ModelError
from weft.interop.families.llama import LLAMA
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Bahdanau, Model, NGram, Recurrent
from weft.models.ngram import NGram as NGramModel
from weft.models.presets import gpt, llama, vaswani
from weft.models.transformer import Transformer
from weft.recipe.resolve import resolve
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

transformers = Later("transformers")

VOCAB, D, EOS = 23, 16, 3


@pytest.fixture(scope="module")
def pair() -> tuple[Transformer, Any]:
    """The same weights in weft and in Transformers, sharp enough that texts end at different lengths."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": D, "intermediate_size": 24, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "rms_norm_eps": 1e-5}
    tokens = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **layers, **tokens)).eval()
    randomise(theirs)
    with torch.no_grad():
        theirs.lm_head.weight.mul_(4.0)
    ours = build(llama(2, D, 2, d_ff=24, context=64, vocab_size=VOCAB)).eval()
    assert isinstance(ours, Transformer)
    load(ours, theirs.state_dict(), LLAMA.rules(ours.config))
    return ours, theirs


PROMPTS = [[5, 6, 7], [11], [20, 1, 1, 2, 9], [8, 14]]


def ending(*prompts: list[int], eos_id: int = EOS) -> list[Prompt]:
    return [Prompt(prompt, eos_id=eos_id) for prompt in prompts]


@contextmanager
def counted_passes(model: Transformer) -> Iterator[list[int]]:
    """Collect an item for each forward pass."""
    passes: list[int] = []
    handle = model.get_submodule("decoder.blocks.0").register_forward_hook(lambda *_: passes.append(1))
    yield passes
    handle.remove()


def check_hypotheses(theirs: Any, prompt: list[int], hypotheses: Sequence[Hypothesis], **options: Any) -> None:
    """Compare n-best texts and scores with those of Transformers."""
    options |= {"max_new_tokens": 9, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    expected = theirs.generate(torch.tensor([prompt]), **options)
    texts = [row[len(prompt) :].tolist() for row in expected.sequences]
    texts = [row[: row.index(EOS) + 1] if EOS in row else row for row in texts]
    assert [list(h.ids) for h in hypotheses] == texts
    assert [h.score for h in hypotheses] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


ENDS: list[tuple[bool | str, dict[str, object]]] = [  # early_stopping in Transformers, and weft's settings
    ("never", {}),
    (False, {"settled": "likely"}),
    (True, {"patience": 1.0}),
]


@pytest.mark.parametrize(("alpha", "ends", "beams"), each_once([0.0, 1.0, 2.0, -0.5], ENDS, [2, 5]), ids=str)
def test_beams_and_scores_equal_transformers(
    pair: tuple[Transformer, Any], alpha: float, ends: tuple[bool | str, dict[str, object]], beams: int
) -> None:
    (ours, theirs), (early_stopping, changes) = pair, ends
    settings = Beam(beams=beams, n=beams, max_tokens=9, length_penalty=PowerLength(alpha=alpha)).replace(**changes)
    results = beam_search(ours, ending(*PROMPTS), settings)  # prompts of different lengths in one batch
    options = {"num_beams": beams, "num_return_sequences": beams, "early_stopping": early_stopping}
    for prompt, hypotheses in zip(PROMPTS, results, strict=True):
        check_hypotheses(theirs, prompt, hypotheses, length_penalty=alpha, **options)
    if early_stopping == "never":  # a strong reward for length leaves no text that ends with eos
        finishes = {hypothesis.finish for hypotheses in results for hypothesis in hypotheses}
        assert finishes >= ({"length"} if alpha == 2.0 else {"eos", "length"})


@pytest.mark.parametrize("renormalise", [False, True])
def test_rules_change_scores_as_in_transformers(pair: tuple[Transformer, Any], renormalise: bool) -> None:
    """Without renormalisation, Transformers penalises log-probabilities; with it, weft penalises logits."""
    ours, theirs = pair
    penalty = 1.0 if renormalise else 1.3
    rules = Beam(max_tokens=9, no_repeat_ngram=2, repetition_penalty=penalty, banned=(3, 7), min_tokens=2)
    settings = rules.replace(beams=4, n=4, settled="likely", renormalise=renormalise)
    options = {"min_new_tokens": 2, "num_beams": 4, "num_return_sequences": 4, "no_repeat_ngram_size": 2}
    rules_of_theirs = {"repetition_penalty": penalty, "suppress_tokens": [3, 7], "renormalize_logits": renormalise}
    for prompt, hypotheses in zip(PROMPTS, beam_search(ours, ending(*PROMPTS), settings), strict=True):
        check_hypotheses(theirs, prompt, hypotheses, **options, **rules_of_theirs)


def test_the_n_best_are_the_first_of_a_larger_n(pair: tuple[Transformer, Any]) -> None:
    """Stopping as soon as the n best are certain changes none of them."""
    four = beam_search(pair[0], ending(*PROMPTS), Beam(beams=4, n=4, max_tokens=9))
    for n in (1, 2):
        best = beam_search(pair[0], ending(*PROMPTS), Beam(beams=4, n=n, max_tokens=9))
        assert [[h.ids for h in row] for row in best] == [[h.ids for h in row[:n]] for row in four]


def test_a_settled_search_stops(pair: tuple[Transformer, Any]) -> None:
    """Without a reward for length and with a certain eos, one step suffices."""
    settings = Beam(beams=2, max_tokens=50, length_penalty=PowerLength(alpha=0.0), logit_bias={EOS: 40.0})
    with counted_passes(pair[0]) as passes:
        assert beam_search(pair[0], ending([5]), settings)[0][0].ids == (EOS,)
    assert len(passes) == 1


@pytest.mark.parametrize("penalty", [PowerLength(alpha=0.0), PowerLength(alpha=1.0), GNMTLength(alpha=0.6)])
def test_a_wide_beam_finds_the_best_texts(penalty: LengthPenalty) -> None:
    V, steps, eos = 4, 3, 0
    torch.manual_seed(1)
    model = build(Recurrent(vocab_size=V, d_model=8, cell="elman")).eval()
    with torch.no_grad():
        model.get_parameter("output_bias").normal_(std=2.0)
    scores: dict[tuple[int, ...], float] = {}
    for ids in itertools.product(range(V), repeat=steps):
        text = ids[: ids.index(eos) + 1] if eos in ids else ids
        with torch.no_grad():
            log_p = model(torch.tensor([[1, *text]]))[0].log_softmax(-1)
        total = sum(float(log_p[position, token]) for position, token in enumerate(text))
        scores[text] = total / penalty.divisor(len(text))
    best = sorted(scores, key=lambda text: -scores[text])
    settings = Beam(beams=V**steps, n=10, max_tokens=steps, length_penalty=penalty)
    results = beam_search(model, ending([1], eos_id=eos), settings)[0]
    assert [h.ids for h in results] == best[:10]
    assert [h.score for h in results] == pytest.approx([scores[text] for text in best[:10]], abs=1e-5)


Scored = tuple[float, tuple[int, ...]]  # a score and a text's ids


def naive_search(model: LanguageModel, prompt: list[int], settings: Beam, limit: int) -> list[Scored]:
    """Beam search without a cache, to the limit; with a patience, until patience · beams texts have ended."""
    alive: list[Scored] = [(0.0, ())]
    ended: list[Scored] = []
    while alive and (settings.patience is None or len(ended) < settings.patience * settings.beams):
        candidates = []
        for total, ids in alive:
            with torch.no_grad():
                log_p = model(torch.tensor([[*prompt, *ids]]))[0, -1].double().log_softmax(-1)
            candidates += [(total + float(each), (*ids, token)) for token, each in enumerate(log_p)]
        candidates.sort(reverse=True)
        alive = []
        for index, (total, ids) in enumerate(candidates):
            if len(alive) < settings.beams and ids[-1] != EOS and len(ids) < limit:
                alive.append((total, ids))
            elif index < settings.beams:
                ended.append((total / settings.length_penalty.divisor(len(ids)), ids))
    return sorted(ended, reverse=True)[: settings.n]


PENALTIES = [PowerLength(alpha=0.0), PowerLength(alpha=1.0), PowerLength(alpha=-0.5), GNMTLength(alpha=0.6)]


@pytest.mark.parametrize(("patience", "penalty"), each_once([None, 0.5, 1.0, 2.0], PENALTIES), ids=str)
def test_a_search_that_ends_early_equals_a_naive_one(patience: float | None, penalty: LengthPenalty) -> None:
    torch.manual_seed(0)
    model = build(gpt(1, 12, 2, context=24, vocab_size=9)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.6)
    settings = Beam(beams=3, n=2, max_tokens=30, length_penalty=penalty, patience=patience)
    prompts, limits = [[1], [5, 6, 2], [8, 0]], [4, 6, 8]
    limited = [replace(prompt, max_tokens=limit) for prompt, limit in zip(ending(*prompts), limits, strict=True)]
    for prompt, limit, hypotheses in zip(prompts, limits, beam_search(model, limited, settings), strict=True):
        expected = naive_search(model, prompt, settings, limit)
        assert [h.ids for h in hypotheses] == [ids for _, ids in expected]
        assert [h.score for h in hypotheses] == pytest.approx([score for score, _ in expected], abs=1e-5)


def test_patience_ends_a_search_that_rewards_length(pair: tuple[Transformer, Any]) -> None:
    """Without patience, the search would continue to max_tokens."""
    settings = Beam(beams=4, max_tokens=60, logit_bias={EOS: 3.0})
    with counted_passes(pair[0]) as with_patience:
        beam_search(pair[0], ending([5, 6, 7]), settings.replace(patience=1.0))
    with counted_passes(pair[0]) as without:
        beam_search(pair[0], ending([5, 6, 7]), settings)
    assert 3 * len(with_patience) < len(without)


def test_length_penalties_follow_their_formulas() -> None:
    assert GNMTLength(alpha=0.6).divisor(7) == pytest.approx(2.0**0.6)
    assert GNMTLength(alpha=0.6).divisor(1) == 1.0
    assert PowerLength(alpha=2.0).divisor(3) == 9.0


FAMILIES: dict[str, Model] = {
    "ngram": NGram(vocab_size=VOCAB, order=3),
    "elman": Recurrent(vocab_size=VOCAB, cell="elman", d_model=16, layers=2),
    "lstm": Recurrent(vocab_size=VOCAB, cell="lstm", d_model=16),
    "bahdanau": Bahdanau(vocab_size=VOCAB, d_model=16),
    "vaswani": vaswani(1, 24, 4, d_ff=32, dropout=0.0, vocab_size=VOCAB),
    "gpt": gpt(1, 24, 4, context=32, vocab_size=VOCAB),
    "llama": llama(1, 24, 4, d_ff=32, context=32, vocab_size=VOCAB, kv_heads=2),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_searches_and_one_beam_is_greedy(name: str) -> None:
    torch.manual_seed(2)
    model = build(FAMILIES[name]).eval()
    if isinstance(model, NGramModel):
        model.fit(torch.randint(VOCAB, (400,)).numpy())
    prompts = [[1, 2, 3], [4]]
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    source = PaddedSource(torch.randint(VOCAB, (2, 5)), mask) if name in ("bahdanau", "vaswani") else None
    greedy = token_ids(model, ending(*prompts), Sampling(temperature=0.0, max_tokens=7), source=source)
    one = beam_search(model, ending(*prompts), Beam(beams=1, max_tokens=7), source=source)
    assert [list(row[0].ids) for row in one] == greedy
    settings = Beam(beams=4, n=2, max_tokens=7)
    for row, (best, second) in enumerate(beam_search(model, ending(*prompts), settings, source=source)):
        assert best.score >= second.score and best.ids != second.ids
        single = None if source is None else source.row(row)
        alone = beam_search(model, ending(prompts[row]), settings, source=single)[0]
        assert [h.ids for h in alone] == [best.ids, second.ids]
        with torch.no_grad():
            inputs = {} if single is None else {"source": single}
            log_p = model(torch.tensor([[*prompts[row], *best.ids]]), **inputs)[0].log_softmax(-1)
        total = sum(float(log_p[at, token]) for at, token in enumerate(best.ids, start=len(prompts[row]) - 1))
        assert best.logprob == pytest.approx(total, abs=1e-4)


def test_rules_hold_in_a_beam() -> None:
    torch.manual_seed(3)
    model = build(Recurrent(vocab_size=VOCAB, d_model=16, cell="gru")).eval()
    base = Beam(beams=3, n=3, max_tokens=6)
    free = beam_search(model, [[1]], base)[0]
    banned = tuple({*free[0].ids})
    for h in beam_search(model, [[1]], base.replace(banned=banned))[0]:
        assert not set(banned) & set(h.ids)
    for h in beam_search(model, [[1]], base.replace(forced=(9, 8), presence_penalty=90.0))[0]:
        assert h.ids[:2] == (9, 8)
        assert len(set(h.ids)) == 6
    late = base.replace(min_tokens=4, logit_bias={EOS: 50.0})
    assert {len(h.ids) for h in beam_search(model, ending([1]), late)[0][:1]} == {5}


def test_the_window_ends_a_search() -> None:
    torch.manual_seed(0)
    model = build(gpt(1, 16, 2, context=8, vocab_size=VOCAB)).eval()
    results = beam_search(model, [[1] * 8, [2, 3]], Beam(beams=3, max_tokens=30))
    assert [len(row[0].ids) for row in results] == [1, 7]
    with pytest.raises(ModelError, match="9 tokens long, but the model reads at most 8"):
        beam_search(model, [[1] * 9], Beam())


def test_more_beams_than_possible_texts() -> None:
    torch.manual_seed(0)
    model = build(Recurrent(vocab_size=3, d_model=8, cell="elman")).eval()
    results = beam_search(model, ending([1], eos_id=0), Beam(beams=50, n=50, max_tokens=2))[0]
    assert len(results) == len({h.ids for h in results}) == 1 + 2 * 3
    assert sum(math.exp(h.logprob) for h in results) == pytest.approx(1.0, abs=1e-5)


def test_stop_strings_end_a_beam_and_are_not_shown() -> None:
    tokenizer = build_tokenizer(Byte(), ["any"])
    torch.manual_seed(4)
    model = build(Recurrent(vocab_size=tokenizer.vocab_size, d_model=8, cell="gru")).eval()
    e, stop = tokenizer.encode("e")[0], tokenizer.encode("!")[0]
    settings = Beam(beams=3, n=3, max_tokens=8, stop=("!",), logit_bias={e: 9.0, stop: 8.0})
    texts = search_texts(model, [Prompt.of(tokenizer, text) for text in ("a", "")], settings)
    completions = [text for row in texts for text in row]
    assert len(texts) == 2 and "stop" in {each.finish for each in completions}
    assert all("!" not in each.text for each in completions)
    greedy = complete(model, tokenizer, ["a"], Sampling(temperature=0.0, max_tokens=8))[0]
    assert search_texts(model, [Prompt.of(tokenizer, "a")], Beam(beams=1, max_tokens=8))[0][0].text == greedy.text


@pytest.mark.parametrize("kind", ["vaswani-tiny", "bahdanau-tiny"])
def test_the_coverage_penalty_follows_its_formula(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "d_model": 16}
    if kind == "vaswani-tiny":
        sizes |= {"layers": 2, "attention": {"heads": 2}, "feedforward": {"d_ff": 32}}  # type: ignore[dict-item]
    model = build(resolve(kind, {"model": sizes}).model).eval()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    source = Source(torch.tensor([[3, 4, 5, 6], [7, 8, 1, 0]]), mask)
    settings = Beam(beams=3, n=3, max_tokens=6, coverage_penalty=0.7)
    assert model.alignment is not None
    for row, hypotheses in enumerate(beam_search(model, ending([2], [2], eos_id=1), settings, source=source)):
        for text in hypotheses:
            # the same attention, from one forward pass over the whole text
            captured: list[torch.Tensor] = []
            stop = model.alignment.watch(captured.append)
            with torch.no_grad():
                single = Source(source.tokens[row : row + 1], mask[row : row + 1])
                model(torch.tensor([[2, *text.ids[:-1]]]), source=single)
            stop()
            attention = captured[0].mean(1) if captured[0].dim() == 4 else captured[0]
            total = attention[0].sum(0)[mask[row]]
            expected = text.logprob / len(text.ids) + 0.7 * float(total.clamp(max=1.0).log().sum())
            assert text.score == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ConfigError, match="no attention to a source"):
        beam_search(build(resolve("gpt-tiny").model).eval(), [[1]], settings)
