"""Beam search against an implementation that nobody here wrote, against looking at every text, and at its edges."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.decode.small import complete
from tests.later import Later
from tests.models.contract import SomeSource
from tests.models.test_parity import fill, randomise
from tests.pairwise import pairwise

from weft.data.batch import Source
from weft.decode.beam import beam_search, search_texts
from weft.decode.config import Beam, GNMTLength, PowerLength, Sampling
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.sampling import top_log_probs
from weft.errors import ConfigError, ModelError
from weft.interop.families.llama import LLAMA
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Bahdanau, NGram, Recurrent
from weft.models.presets import gpt, llama, vaswani
from weft.recipe.resolve import resolve
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

transformers = Later("transformers")

VOCAB, D, EOS = 23, 16, 3


@pytest.fixture(scope="module")
def pair() -> tuple[LanguageModel, Any]:
    """The same weights here and there, sharp enough that texts end at different lengths."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    randomise(theirs)
    with torch.no_grad():
        theirs.lm_head.weight.mul_(4.0)
    ours = build(llama(2, D, 2, 24, 64, vocab_size=VOCAB)).eval()
    fill(ours, theirs, LLAMA)
    return ours, theirs


PROMPTS = [[5, 6, 7], [11], [20, 1, 1, 2, 9], [8, 14]]


def ending(*prompts: list[int], eos_id: int = EOS) -> list[Prompt]:
    """Prompts whose texts may end by themselves."""
    return [Prompt(prompt, eos_id=eos_id) for prompt in prompts]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_equals_transformers(pair: tuple[LanguageModel, Any], prompt: list[int]):  # type: ignore[no-untyped-def]
    ours, theirs = pair
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    tokens = list(generate(ours, ending(prompt), Sampling(temperature=0.0, max_tokens=12)))
    assert [token.id for token in tokens] == expected


ENDS: list[tuple[bool | str, dict[str, object]]] = [  # theirs and ours
    ("never", {}),
    (False, {"settled": "likely"}),
    (True, {"patience": 1.0}),
]


@pytest.mark.parametrize(("alpha", "how", "beams"), pairwise([0.0, 1.0, 2.0, -0.5], ENDS, [2, 5]), ids=str)
def test_beams_and_scores_equal_transformers(
    pair: tuple[LanguageModel, Any],
    alpha: float,
    how: tuple[bool | str, dict[str, object]],
    beams: int,
) -> None:
    (ours, theirs), (early, ends) = pair, how
    settings = Beam(beams=beams, n=beams, max_tokens=9, length_penalty=PowerLength(alpha=alpha)).replace(**ends)
    found = beam_search(ours, ending(*PROMPTS), settings)  # ragged prompts together
    finishes = set()
    for prompt, hypotheses in zip(PROMPTS, found, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=9,
            do_sample=False,
            num_beams=beams,
            num_return_sequences=beams,
            length_penalty=alpha,
            early_stopping=early,
            output_scores=True,
            return_dict_in_generate=True,
        )
        texts = [row[len(prompt) :].tolist() for row in expected.sequences]
        sizes = [row.index(EOS) + 1 if EOS in row else len(row) for row in texts]
        assert [list(h.ids) for h in hypotheses] == [row[:size] for row, size in zip(texts, sizes, strict=True)]
        assert [h.score for h in hypotheses] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        finishes |= {h.finish for h in hypotheses}
    if early == "never":  # where length is rewarded twice over, nothing that ends by itself is left
        assert finishes >= ({"length"} if alpha == 2.0 else {"eos", "length"})


@pytest.mark.parametrize("renormalise", [False, True])
def test_rules_change_scores_as_in_transformers(pair: tuple[LanguageModel, Any], renormalise: bool) -> None:
    """What rules leave is as likely as the model has it, unless it is renormalised; then ours penalise logits."""
    ours, theirs = pair
    penalty = 1.0 if renormalise else 1.3
    rules = Beam(max_tokens=9, no_repeat_ngram=2, repetition_penalty=penalty, banned=(3, 7), min_tokens=2)
    settings = rules.replace(beams=4, n=4)
    found = beam_search(ours, ending(*PROMPTS), settings.replace(settled="likely", renormalise=renormalise))
    for prompt, hypotheses in zip(PROMPTS, found, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=9,
            min_new_tokens=2,
            do_sample=False,
            num_beams=4,
            num_return_sequences=4,
            no_repeat_ngram_size=2,
            repetition_penalty=penalty,
            suppress_tokens=[3, 7],
            renormalize_logits=renormalise,
            output_scores=True,
            return_dict_in_generate=True,
        )
        texts = [row[len(prompt) :].tolist() for row in expected.sequences]
        sizes = [row.index(EOS) + 1 if EOS in row else len(row) for row in texts]
        assert [list(h.ids) for h in hypotheses] == [row[:size] for row, size in zip(texts, sizes, strict=True)]
        assert [h.score for h in hypotheses] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


def test_fewer_texts_are_the_first_of_more(pair: tuple[LanguageModel, object]) -> None:
    """Stopping as soon as the n best are certain changes none of them."""
    for n in (1, 2, 4):
        few = beam_search(pair[0], ending(*PROMPTS), Beam(beams=4, n=n, max_tokens=9))
        many = beam_search(pair[0], ending(*PROMPTS), Beam(beams=4, n=4, max_tokens=9))
        assert [[h.ids for h in row] for row in few] == [[h.ids for h in row[:n]] for row in many]


def test_a_search_that_is_settled_reads_no_further(pair: tuple[LanguageModel, object]) -> None:
    """With no reward for length and an end that is certain at once, one step is enough."""
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    handle = pair[0].decoder.blocks[0].register_forward_hook(count)
    settings = Beam(beams=2, max_tokens=50, length_penalty=PowerLength(alpha=0.0), logit_bias={EOS: 40.0})
    assert beam_search(pair[0], ending([5]), settings)[0][0].ids == (EOS,)
    handle.remove()
    assert steps == 1


@pytest.mark.parametrize("penalty", [PowerLength(alpha=0.0), PowerLength(alpha=1.0), GNMTLength(alpha=0.6)])
def test_a_wide_beam_finds_the_best_of_all_texts(penalty: PowerLength | GNMTLength) -> None:
    V, steps, eos = 4, 3, 0
    torch.manual_seed(1)
    model = build(Recurrent(vocab_size=V, d_model=8, cell="elman")).eval()
    with torch.no_grad():
        model.output_bias.normal_(std=2.0)
    every: dict[tuple[int, ...], float] = {}
    for ids in itertools.product(range(V), repeat=steps):
        text = ids[: ids.index(eos) + 1] if eos in ids else ids
        with torch.no_grad():
            log_p = model(torch.tensor([[1, *text]]))[0].log_softmax(-1)
        total = sum(float(log_p[place, token]) for place, token in enumerate(text))
        every[text] = total / penalty.divisor(len(text))
    best = sorted(every, key=lambda text: -every[text])
    settings = Beam(beams=V**steps, n=10, max_tokens=steps, length_penalty=penalty)
    found = beam_search(model, ending([1], eos_id=eos), settings)[0]
    assert [h.ids for h in found] == best[:10]
    assert [h.score for h in found] == pytest.approx([every[text] for text in best[:10]], abs=1e-5)


def naive_search(
    model: LanguageModel, prompt: list[int], settings: Beam, limit: int
) -> list[tuple[tuple[int, ...], float]]:
    """Beam search by reading every beginning anew, to the limit; with a patience, until that many texts have ended."""
    alive: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[tuple[int, ...], float]] = []
    while alive and (settings.patience is None or len(ended) < settings.patience * settings.beams):
        longer = []
        for total, ids in alive:
            with torch.no_grad():
                log_p = model(torch.tensor([[*prompt, *ids]]))[0, -1].double().log_softmax(-1)
            longer += [(total + float(each), (*ids, token)) for token, each in enumerate(log_p)]
        longer.sort(reverse=True)
        alive = []
        for place, (total, ids) in enumerate(longer):
            if len(alive) < settings.beams and ids[-1] != EOS and len(ids) < limit:
                alive.append((total, ids))
            elif place < settings.beams:
                ended.append((ids, total / settings.length_penalty.divisor(len(ids))))
    return sorted(ended, key=lambda each: -each[1])[: settings.n]


@pytest.mark.parametrize("patience", [None, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "penalty", [PowerLength(alpha=0.0), PowerLength(alpha=1.0), PowerLength(alpha=-0.5), GNMTLength(alpha=0.6)]
)
def test_a_search_that_ends_early_finds_what_one_to_the_limit_finds(
    patience: float | None, penalty: PowerLength | GNMTLength
) -> None:
    torch.manual_seed(0)
    model = build(gpt(1, 12, 2, 24, 9)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.6)
    settings = Beam(beams=3, n=2, max_tokens=30, length_penalty=penalty, patience=patience)
    prompts, limits = [[1], [5, 6, 2], [8, 0]], [4, 6, 8]
    asked = [replace(prompt, max_tokens=most) for prompt, most in zip(ending(*prompts), limits, strict=True)]
    found = beam_search(model, asked, settings)
    for prompt, most, hypotheses in zip(prompts, limits, found, strict=True):
        expected = naive_search(model, prompt, settings, most)
        assert [h.ids for h in hypotheses] == [ids for ids, _ in expected]
        assert [h.score for h in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_patience_ends_a_search_whose_length_is_rewarded(pair: tuple[LanguageModel, object]) -> None:
    """Where a text may have a thousand tokens, only certain ones could settle it."""
    read: list[int] = []
    hook = pair[0].decoder.blocks[0].register_forward_hook(lambda *_: read.append(1))
    settings = Beam(beams=4, max_tokens=60, logit_bias={EOS: 3.0})
    beam_search(pair[0], ending([5, 6, 7]), settings.replace(patience=1.0))
    patient = len(read)
    beam_search(pair[0], ending([5, 6, 7]), settings)
    hook.remove()
    assert 3 * patient < len(read) - patient


def test_the_likeliest_of_a_large_vocabulary() -> None:
    torch.manual_seed(0)
    for size in (7, 300, 20_013):
        logits = torch.randn(5, size) * 4
        logits[1, : size // 2] = -torch.inf
        logits[2] = -torch.inf
        log_p, ids = top_log_probs(logits, 6)
        expected, places = logits.double().log_softmax(-1).topk(6)
        alive = [0, 1, 3, 4]
        assert ids[alive].equal(places[alive])
        torch.testing.assert_close(log_p[alive], expected[alive], atol=1e-5, rtol=0)
        assert (log_p[2] == -torch.inf).all()
        logits[3, 1] = torch.nan
        with pytest.raises(ModelError, match="NaN or infinite"):
            top_log_probs(logits, 6)


def test_gnmt_is_the_papers_formula() -> None:
    assert GNMTLength(alpha=0.6).divisor(7) == pytest.approx(2.0**0.6)
    assert GNMTLength(alpha=0.6).divisor(1) == 1.0
    assert PowerLength(alpha=2.0).divisor(3) == 9.0


FAMILIES = {
    "ngram": NGram(vocab_size=VOCAB, order=3),
    "elman": Recurrent(vocab_size=VOCAB, cell="elman", d_model=16, layers=2),
    "lstm": Recurrent(vocab_size=VOCAB, cell="lstm", d_model=16),
    "bahdanau": Bahdanau(vocab_size=VOCAB, d_model=16),
    "vaswani": vaswani(1, 24, 4, 32, 0.0, vocab_size=VOCAB),
    "gpt": gpt(1, 24, 4, 32, VOCAB),
    "llama": llama(1, 24, 4, 32, 32, vocab_size=VOCAB, kv_heads=2),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_searches_and_a_beam_of_one_is_greedy(name: str) -> None:
    torch.manual_seed(2)
    model: LanguageModel = build(FAMILIES[name]).eval()
    if name == "ngram":
        model.fit(torch.randint(VOCAB, (400,)).numpy())
    prompts = [[1, 2, 3], [4]]
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    source = SomeSource(torch.randint(VOCAB, (2, 5)), mask) if name in ("bahdanau", "vaswani") else None
    greedy: list[list[int]] = [[], []]
    for token in generate(model, ending(*prompts), Sampling(temperature=0.0, max_tokens=7), source=source):
        greedy[token.row].append(token.id)
    one = beam_search(model, ending(*prompts), Beam(beams=1, max_tokens=7), source=source)
    assert [list(row[0].ids) for row in one] == greedy
    four = beam_search(model, ending(*prompts), Beam(beams=4, n=2, max_tokens=7), source=source)
    for row in range(2):
        assert four[row][0].score >= four[row][1].score
        assert four[row][0].ids != four[row][1].ids
        alone = beam_search(
            model, ending(prompts[row]), Beam(beams=4, n=2, max_tokens=7), source=source and source.row(row)
        )[0]
        assert [h.ids for h in alone] == [h.ids for h in four[row]]
        given = {} if source is None else {"source": source.row(row)}
        best = four[row][0]
        with torch.no_grad():
            log_p = model(torch.tensor([[*prompts[row], *best.ids]]), **given)[0].log_softmax(-1)
        places = range(len(prompts[row]) - 1, len(prompts[row]) - 1 + len(best.ids))
        assert best.logprob == pytest.approx(
            sum(float(log_p[p, t]) for p, t in zip(places, best.ids, strict=True)), abs=1e-4
        )


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
    model = build(gpt(1, 16, 2, 8, VOCAB)).eval()
    found = beam_search(model, [[1] * 8, [2, 3]], Beam(beams=3, max_tokens=30))
    assert [len(row[0].ids) for row in found] == [1, 7]
    with pytest.raises(ModelError, match="9 tokens long, but the model reads at most 8"):
        beam_search(model, [[1] * 9], Beam())


def test_more_beams_than_texts() -> None:
    torch.manual_seed(0)
    model = build(Recurrent(vocab_size=3, d_model=8, cell="elman")).eval()
    found = beam_search(model, ending([1], eos_id=0), Beam(beams=50, n=50, max_tokens=2))[0]
    assert len(found) == len({h.ids for h in found}) == 1 + 2 * 3
    assert sum(torch.tensor(h.logprob).exp() for h in found) == pytest.approx(1.0, abs=1e-5)


def test_stop_strings_end_a_beam_and_never_show() -> None:
    tokenizer = build_tokenizer(Byte(), ["any"])
    torch.manual_seed(4)
    model = build(Recurrent(vocab_size=tokenizer.vocab_size, d_model=8, cell="gru")).eval()
    e, stop = tokenizer.encode("e")[0], tokenizer.encode("!")[0]
    settings = Beam(beams=3, n=3, max_tokens=8, stop=("!",), logit_bias={e: 9.0, stop: 8.0})
    texts = search_texts(model, [Prompt.of(tokenizer, text) for text in ("a", "")], settings)
    assert len(texts) == 2
    ended = [text for row in texts for text in row if text.finish == "stop"]
    assert ended
    assert all("!" not in text.text for row in texts for text in row)
    greedy = complete(model, tokenizer, ["a"], Sampling(temperature=0.0, max_tokens=8))[0]
    assert search_texts(model, [Prompt.of(tokenizer, "a")], Beam(beams=1, max_tokens=8))[0][0].text == greedy.text


@pytest.mark.parametrize("kind", ["vaswani-tiny", "bahdanau-tiny"])
def test_coverage_lowers_the_score_by_what_was_left_out(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "d_model": 16}
    if kind == "vaswani-tiny":
        sizes |= {"layers": 2, "attention": {"heads": 2}, "feedforward": {"d_ff": 32}}  # type: ignore[dict-item]
    model = build(resolve(kind, {"model": sizes}).model).eval()
    read = torch.tensor([[3, 4, 5, 6], [7, 8, 1, 0]])
    source = Source(read, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool))
    plain = Beam(beams=3, n=3, max_tokens=6)
    watched = plain.replace(coverage_penalty=0.7)
    for row, found in enumerate(beam_search(model, ending([2], [2], eos_id=1), watched, source=source)):
        for text in found:
            # the same weights, from one reading of the whole text
            seen: list[torch.Tensor] = []
            stop = model.alignment.watch(seen.append)
            one = Source(source.tokens[row : row + 1], source.mask[row : row + 1])
            with torch.no_grad():
                model(torch.tensor([[2, *text.ids[:-1]]]), source=one)
            stop()
            weights = seen[0].mean(1) if seen[0].dim() == 4 else seen[0]
            total = weights[0].sum(0)[one.mask[0]]
            expected = text.logprob / len(text.ids) + 0.7 * float(total.clamp(max=1.0).log().sum())
            assert text.score == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ConfigError, match="no attention to a source"):
        beam_search(build(resolve("gpt-tiny").model).eval(), [[1]], watched)
