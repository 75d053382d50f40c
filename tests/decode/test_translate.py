"""Translation of many lines: the same answers in the same order, whatever is answered together, and no endless ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from weft.data.batch import Frame
from weft.decode import translate as decoding
from weft.decode.config import Beam, Sampling
from weft.decode.translate import Direction, Translator
from weft.models.build import build
from weft.models.presets import vaswani
from weft.models.transformer import TransformerState
from weft.text.config import Byte
from weft.text.tokenizer import Tokenizer, build_tokenizer

LINES = ["a b", "", "a dog runs", "two", "cats and", "a dog ran", "   ", "x"]


@pytest.fixture(scope="module")
def translator() -> Translator:
    tokenizer: Tokenizer = build_tokenizer(Byte())
    torch.manual_seed(0)
    model = build(vaswani(1, 16, 2, 24, 0.0, vocab_size=tokenizer.vocab_size)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0) if weight.ndim > 1 else weight.normal_(std=0.5)
        model.embedding.weight[tokenizer.need("eos")] *= 3.0
    eos = (tokenizer.need("eos"),)
    frame = Frame((), eos, eos, eos[0])
    return Translator(model, tokenizer, tokenizer, Direction(frame, tokenizer.need("bos")), 512)


@pytest.mark.parametrize("settings", [Beam(beams=3, patience=1.0), Beam(beams=3), Sampling(temperature=0.0)])
def test_answers_are_those_of_each_line_alone(
    translator: Translator, settings: Beam | Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    answers = Translator._answers
    monkeypatch.setattr(
        Translator,
        "_answers",
        lambda self, source, *given: together.append(len(source.tokens)) or answers(self, source, *given),
    )
    found = translator.translate(LINES, settings)
    assert [not text for text in found] == [not line.strip() for line in LINES]
    assert len(set(found)) > 3 and together == [6]
    assert found == [translator.translate([line], settings)[0] for line in LINES]
    together.clear()
    monkeypatch.setattr(decoding, "BATCH_LIMITS", (50, 6))
    assert translator.translate(LINES, settings) == found
    assert sum(together) == 6 and max(together) <= 6 // getattr(settings, "beams", 1)


@pytest.mark.parametrize("settings", [Beam(beams=2, patience=1.0), Sampling(temperature=0.0)])
def test_an_answer_is_bounded_by_its_source(
    translator: Translator, settings: Beam | Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that never ends its text writes twice the line's tokens, its end among them, and 50 more."""
    counts: list[int] = []
    for name in ("search_texts", "complete"):
        decode = getattr(decoding, name)

        def counted(*given: object, decode: Any = decode, **more: object) -> object:
            found = decode(*given, **more)
            counts.extend(done.tokens for done in (each[0] if isinstance(each, list) else each for each in found))
            return found

        monkeypatch.setattr(decoding, name, counted)
    endless = settings.replace(banned=(translator.target.need("eos"),), max_tokens=100)
    lines = ["x", "a b", "cats"]  # the longest are read first
    translator.translate(lines, endless)
    assert counts == [2 * 5 + 50, 2 * 4 + 50, 2 * 2 + 50]
    counts.clear()
    translator.translate(lines, endless.replace(max_tokens=55))
    assert counts == [55, 55, 54]
    counts.clear()
    replace(translator, ratio=None).translate(lines, endless)
    assert counts == [100, 100, 100]


def test_beams_share_their_source(translator: Translator) -> None:
    """The source's keys and values stay where they are until a line leaves, whatever the beams do."""
    model = translator.model
    source = decoding.Source(torch.randint(5, 100, (3, 4)), torch.ones(3, 4, dtype=torch.bool))
    with torch.inference_mode():
        state = model.start(3, 8, source)
        assert isinstance(state, TransformerState) and state.source_cache is not None
        kept = state.source_cache
        state.reorder(torch.arange(3).repeat_interleave(4))
        state.reorder(torch.tensor([1, 0, 0, 3, 7, 7, 7, 4, 8, 9, 10, 11]))
        assert state.source_cache is kept and state.sharing == 4
        state.reorder(torch.tensor([8, 9, 9, 9, 4, 5, 6, 7]))
        assert state.sharing == 4
        for (keys, values), (before, values_before) in zip(state.source_cache, kept, strict=True):
            assert keys.equal(before[[2, 1]]) and values.equal(values_before[[2, 1]])
