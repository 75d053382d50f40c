"""Translation of many lines: answers don't depend on the batch, come in order, and are bounded in length."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from tests.spread import slow

from weft.data.batch import Frame, Source
from weft.decode import translate as decoding
from weft.decode.config import Beam, Sampling
from weft.decode.translate import Direction, Translator
from weft.models.build import build
from weft.models.presets import vaswani
from weft.models.transformer import TransformerState
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

LINES = ["a b", "", "a dog runs", "two", "cats and", "a dog ran", "   ", "x"]


@pytest.fixture(scope="module")
def translator() -> Translator:
    tokenizer = build_tokenizer(Byte())
    torch.manual_seed(0)
    model = build(vaswani(1, 16, 2, d_ff=24, dropout=0.0, vocab_size=tokenizer.vocab_size)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0) if weight.ndim > 1 else weight.normal_(std=0.5)
        model.get_parameter("embedding.weight")[tokenizer.need("eos")] *= 3.0
    eos = (tokenizer.need("eos"),)
    frame = Frame((), eos, eos, eos[0])
    direction = Direction(frame, tokenizer.need("bos"))
    return Translator(model, tokenizer, tokenizer, direction=direction, length=512)


@pytest.mark.parametrize("settings", [slow(Beam(beams=3, patience=1.0)), Beam(beams=3), Sampling(temperature=0.0)])
def test_answers_equal_those_of_each_line_alone(
    translator: Translator, settings: Beam | Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = create_autospec(Translator._answers, side_effect=Translator._answers)
    monkeypatch.setattr(Translator, "_answers", answers)
    found = translator.translate(LINES, settings)
    assert [not text for text in found] == [not line.strip() for line in LINES]
    assert len(set(found)) > 3 and [len(call.args[1].tokens) for call in answers.call_args_list] == [6]
    assert found == [translator.translate([line], settings)[0] for line in LINES]
    answers.reset_mock()
    assert replace(translator, batch_limits=(50, 6)).translate(LINES, settings) == found
    batches = [len(call.args[1].tokens) for call in answers.call_args_list]
    assert sum(batches) == 6 and max(batches) <= 6 // getattr(settings, "beams", 1)


@pytest.mark.parametrize("settings", [Beam(beams=2, patience=1.0), Sampling(temperature=0.0)])
def test_an_answer_is_bounded_by_its_source(
    translator: Translator, settings: Beam | Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text without an end has twice as many tokens as its line, eos included, and 50 more."""
    counts: list[int] = []

    def counted(decode: Any, *positional: Any, **keywords: Any) -> Any:
        results = decode(*positional, **keywords)
        counts.extend(each[0].tokens if isinstance(each, list) else each.tokens for each in results)
        return results

    for name in ("search_texts", "complete"):
        monkeypatch.setattr(decoding, name, partial(counted, getattr(decoding, name)))
    endless = settings.replace(banned=(translator.target.need("eos"),), max_tokens=100)
    lines = ["x", "a b", "cats"]  # the longest come first
    translator.translate(lines, endless)
    assert counts == [2 * 5 + 50, 2 * 4 + 50, 2 * 2 + 50]
    counts.clear()
    translator.translate(lines, endless.replace(max_tokens=55))
    assert counts == [55, 55, 54]
    counts.clear()
    replace(translator, ratio=None).translate(lines, endless)
    assert counts == [100, 100, 100]


def test_beams_share_their_source(translator: Translator) -> None:
    """Beams move without copying the source's keys and values until a line is finished."""
    model = translator.model
    source = Source(torch.randint(5, 100, (3, 4)), torch.ones(3, 4, dtype=torch.bool))
    with torch.inference_mode():
        state = model.start(3, 8, source)
        assert isinstance(state, TransformerState) and state.source_cache is not None
        cache = state.source_cache
        state.reorder(torch.arange(3).repeat_interleave(4))
        state.reorder(torch.tensor([1, 0, 0, 3, 7, 7, 7, 4, 8, 9, 10, 11]))
        assert state.source_cache is cache and state.sharing == 4
        state.reorder(torch.tensor([8, 9, 9, 9, 4, 5, 6, 7]))
        assert state.sharing == 4
        for (keys, values), (before, values_before) in zip(state.source_cache, cache, strict=True):
            assert keys.equal(before[[2, 1]]) and values.equal(values_before[[2, 1]])
