"""Many texts: the engine and lockstep batches write the same, and each is taken where it should be."""

import pytest
import torch
from tests.decode.small import complete as lockstep
from tests.decode.small import decoder

from weft.decode import generate as many
from weft.decode.bulk import BulkJob, generate_many
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import regex
from weft.decode.generate import complete, completions, engine_is_faster
from weft.decode.prompt import Prompt
from weft.errors import ModelError
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


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each engine writes at a time."""
    made: list[int] = []
    engine = many.Engine
    monkeypatch.setattr(
        many, "Engine", lambda model, tokenizer, limits: made.append(limits.rows) or engine(model, tokenizer, limits)
    )
    return made


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_both_ways_write_the_same_in_order(rows: int, engines: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(40, 40 + len(TEXTS))
    by_engine = list(completions(MODEL, prompts(), SETTINGS, seeds=seeds, rows=rows))
    assert engines == [rows]
    monkeypatch.setattr(many, "engine_is_faster", lambda *_, **__: False)
    assert [each.text for each in completions(MODEL, prompts(), SETTINGS, seeds=seeds, rows=rows)] == [
        t.text for t in by_engine
    ]
    assert engines == [rows]
    for text, seed, found in zip(TEXTS, seeds, by_engine, strict=True):
        (alone,) = lockstep(MODEL, BYTES, [text], SETTINGS, seeds=[seed])
        assert (found.text, found.tokens, found.finish) == (alone.text, alone.tokens, alone.finish)
        assert [each.id for each in found.scored] == [each.id for each in alone.scored]


def test_texts_come_as_soon_as_all_before_them_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first text is handed on while others are still being written."""
    steps = 0
    step = many.Engine.step

    def counted(engine: many.Engine) -> bool:
        nonlocal steps
        steps += 1
        return step(engine)

    monkeypatch.setattr(many.Engine, "step", counted)
    settings = Sampling(max_tokens=10, temperature=0.0, banned=(BYTES.eos_id or 0,))
    found = completions(MODEL, prompts(), settings, seeds=[0] * len(TEXTS), rows=2)
    next(found)
    first = steps
    assert len(list(found)) == len(TEXTS) - 1
    assert steps >= 3 * first


def test_where_the_engine_is_taken() -> None:
    assert engine_is_faster(MODEL, prompts(), SETTINGS, rows=4)
    assert not engine_is_faster(MODEL, prompts(), SETTINGS, rows=8)  # one batch, and a small one
    assert engine_is_faster(MODEL, prompts(TEXTS * 4), SETTINGS, rows=100)
    assert not engine_is_faster(MODEL, prompts(["one", "two"] * 20), SETTINGS, rows=4)  # of one length
    assert not engine_is_faster(MODEL, prompts(), SETTINGS.replace(max_tokens=10**9), rows=4)
    recurrent = build(Recurrent(vocab_size=BYTES.vocab_size, d_model=8)).eval()
    assert not engine_is_faster(recurrent, prompts(), SETTINGS, rows=4)
    # a window bounds what a text can reach
    learned = decoder(vocab_size=BYTES.vocab_size, position=Learned(), norm=LayerNorm(), context=64)
    assert engine_is_faster(learned, prompts(), SETTINGS.replace(max_tokens=10**9), rows=4)
    # a block of a text whose angles change as it grows would serve no other
    stretched = decoder(vocab_size=BYTES.vocab_size, position=Rotary(scaling=DynamicNTK(factor=2.0)), context=64)
    assert engine_is_faster(stretched, prompts(), SETTINGS, rows=4)
    assert not engine_is_faster(stretched, prompts(), SETTINGS.replace(max_tokens=64), rows=4)


@pytest.mark.slow
def test_blocks_are_few_but_enough(engines: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A text may take all of them, and then the others wait."""
    monkeypatch.setattr(many, "MIN_ENGINE_TEXTS", 2)
    rules = {"banned": (BYTES.eos_id or 0,), "stop": ("zzzzz",), "slide": False}
    settings = Sampling(max_tokens=1600, temperature=0.0, **rules)
    model = decoder(vocab_size=BYTES.vocab_size, position=Learned(), norm=LayerNorm(), context=600)
    found = complete(model, prompts(["a" * 40, "b"]), settings)
    assert engines == [2]
    assert [each.tokens for each in found] == [561, 600]
    assert found == [lockstep(model, BYTES, [text], settings)[0] for text in ("a" * 40, "b")]


def test_a_prompt_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "MIN_ENGINE_TEXTS", 2)
    model = decoder(vocab_size=BYTES.vocab_size, position=Learned(), norm=LayerNorm(), context=12)
    with pytest.raises(ModelError, match="prompt 2 is 13 tokens long, but the model reads at most 12"):
        complete(model, prompts(["a", "ab", "c" * 13]), SETTINGS.replace(slide=False))
    with pytest.raises(ModelError, match="banned: token 5000"):
        complete(model, prompts(["a", "ab"]), SETTINGS.replace(banned=(5000,)))


def test_weights_that_are_damaged_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "MIN_ENGINE_TEXTS", 2)
    model = decoder(vocab_size=BYTES.vocab_size)
    with torch.no_grad():
        model.decoder.norm.weight.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="NaN"):
        complete(model, prompts(), SETTINGS)


@pytest.mark.parametrize("batch", [1, 2, 8, 100])
def test_several_texts_for_each_prompt(batch: int, engines: list[int]) -> None:
    job = BulkJob(SETTINGS, n=3, batch=batch)
    found = list(generate_many(MODEL, BYTES, TEXTS, job=job, first=7))
    assert engines == ([3 * batch] if batch < 8 else [])
    for number, (text, several) in enumerate(zip(TEXTS, found, strict=True), start=7):
        seeds = range(5 + 3 * number, 8 + 3 * number)
        alone = [lockstep(MODEL, BYTES, [text], SETTINGS, seeds=[seed])[0].text for seed in seeds]
        assert [each.text for each in several] == alone


def test_patterns_and_beams_for_many_prompts() -> None:
    pattern = regex(BYTES, "(yes|no)!")
    drawn = list(generate_many(MODEL, BYTES, TEXTS, job=BulkJob(Sampling(max_tokens=9), n=2, batch=3, grammar=pattern)))
    assert {each.text for several in drawn for each in several} <= {"yes!", "no!"}
    best = list(
        generate_many(MODEL, BYTES, TEXTS, job=BulkJob(Beam(beams=4, n=2, max_tokens=9), batch=3, grammar=pattern))
    )
    assert [{each.text for each in several} for several in best] == [{"yes!", "no!"}] * len(TEXTS)
