"""Many texts: the engine and lockstep batches generate the same, and each is used where it is faster."""

from dataclasses import replace
from unittest.mock import create_autospec

import pytest
import torch
from tests.decode.small import complete as lockstep
from tests.decode.small import decoder
from tests.spread import spread

from weft.decode import generate as many
from weft.decode.bulk import BulkJob, generate_many
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import regex
from weft.decode.engine.blocks import EngineLimits
from weft.decode.generate import completions, engine_completions, engine_is_faster
from weft.decode.prompt import Prompt
from weft.errors import ModelError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Recurrent
from weft.nn.config import LayerNorm
from weft.nn.position_config import DynamicNTK, Learned, Rotary
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

BYTES = build_tokenizer(Byte(), ["any"])
MODEL = decoder(vocab_size=BYTES.vocab_size)
TEXTS = ["she sells", "sea", "", "shells by the sea shore", "a", "sea", "he sees her there, by the sea", "b"]
SETTINGS = Sampling(max_tokens=12, seed=5, temperature=0.9, logprobs=1, stop=("e",))


def prompts(texts: list[str] = TEXTS) -> list[Prompt]:
    return [Prompt.of(BYTES, text) for text in texts]


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_the_engine_and_lockstep_generate_the_same_in_order(rows: int) -> None:
    seeds = range(40, 40 + len(TEXTS))
    assert engine_is_faster(MODEL, prompts(), SETTINGS, rows=rows)
    by_engine = list(completions(MODEL, prompts(), SETTINGS, seeds=seeds, rows=rows))
    for text, seed, found in zip(TEXTS, seeds, by_engine, strict=True):
        (alone,) = lockstep(MODEL, BYTES, [text], SETTINGS, seeds=[seed])
        assert (found.text, found.tokens, found.finish) == (alone.text, alone.tokens, alone.finish)
        assert [each.id for each in found.scored] == [each.id for each in alone.scored]


def test_texts_are_yielded_as_soon_as_all_before_them_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first text is yielded while others are still generated."""
    step = create_autospec(many.Engine.step, side_effect=many.Engine.step)
    monkeypatch.setattr(many.Engine, "step", step)
    settings = Sampling(max_tokens=10, temperature=0.0, banned=(BYTES.eos_id or 0,))
    texts = completions(MODEL, prompts(), settings, seeds=[0] * len(TEXTS), rows=2)
    next(texts)
    first = step.call_count
    assert len(list(texts)) == len(TEXTS) - 1
    assert step.call_count >= 3 * first > 0


def test_where_the_engine_is_used() -> None:
    def faster(model: LanguageModel, texts: list[str] = TEXTS, rows: int = 4, max_tokens: int = 12) -> bool:
        return engine_is_faster(model, prompts(texts), SETTINGS.replace(max_tokens=max_tokens), rows=rows)

    assert faster(MODEL)
    assert not faster(MODEL, rows=8)  # one small batch
    assert faster(MODEL, TEXTS * 4, rows=100)
    assert not faster(MODEL, ["one", "two"] * 20)  # prompts of one length
    assert not faster(MODEL, max_tokens=10**9)
    assert not faster(build(Recurrent(vocab_size=BYTES.vocab_size, d_model=8)).eval())
    # a window bounds the length of a text
    learned = decoder(vocab_size=BYTES.vocab_size, position=Learned(), norm=LayerNorm(), context=64)
    assert faster(learned, max_tokens=10**9)
    # KV blocks of a text whose rotation changes as it grows can't be shared
    dynamic = decoder(vocab_size=BYTES.vocab_size, position=Rotary(scaling=DynamicNTK(factor=2.0)), context=64)
    assert faster(dynamic)
    assert not faster(dynamic, max_tokens=64)


def test_errors_of_the_engine_name_the_prompt_and_the_cause() -> None:
    model = decoder(vocab_size=BYTES.vocab_size, position=Learned(), norm=LayerNorm(), context=12)

    def run(texts: list[str], settings: Sampling) -> None:
        list(engine_completions(model, prompts(texts), settings, seeds=range(len(texts)), limits=EngineLimits(rows=2)))

    with pytest.raises(ModelError, match="prompt 2 is 13 tokens long, but the model reads at most 12"):
        run(["a", "ab", "c" * 13], SETTINGS.replace(slide=False))
    with pytest.raises(ModelError, match="banned: token 5000"):
        run(["a", "ab"], SETTINGS.replace(banned=(5000,)))
    with torch.no_grad():
        model.get_parameter("decoder.norm.weight").fill_(torch.nan)
    with pytest.raises(ModelError, match="NaN"):
        run(TEXTS, SETTINGS)


@pytest.mark.parametrize("batch", spread([1, 2, 8, 100], 2))
def test_several_texts_for_each_prompt(batch: int) -> None:
    found = generate_many(MODEL, BYTES, TEXTS, job=BulkJob(SETTINGS, n=3, batch=batch), first=7)
    for number, (text, samples) in enumerate(zip(TEXTS, found, strict=True), start=7):
        seeds = range(5 + 3 * number, 8 + 3 * number)
        expected = lockstep(MODEL, BYTES, [text] * 3, SETTINGS, seeds=seeds)
        assert [each.text for each in samples] == [each.text for each in expected]


def test_grammars_and_beams_for_many_prompts() -> None:
    grammar = regex(BYTES, "(yes|no)!")
    job = BulkJob(Sampling(max_tokens=9), n=2, batch=3, grammar=grammar)
    samples = list(generate_many(MODEL, BYTES, TEXTS, job=job))
    assert {each.text for texts in samples for each in texts} <= {"yes!", "no!"}
    best = generate_many(MODEL, BYTES, TEXTS, job=replace(job, settings=Beam(beams=4, n=2, max_tokens=9), n=1))
    assert [{each.text for each in texts} for texts in best] == [{"yes!", "no!"}] * len(TEXTS)
