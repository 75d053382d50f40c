"""Prompt and new text together are the text of all ids, with every tokenizer and decoding method."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.decode.small import Asking, complete, decoder
from tests.text.test_sentencepiece import PIECES, PLAIN, block, number, piece, tokenizer_of

from weft.decode.beam import search_texts
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import regex
from weft.decode.engine.engine import EngineLimits
from weft.decode.generate import generate
from weft.decode.prompt import Prompt, ends_mid_text
from weft.decode.speculative import Draft, LookUp, speculate
from weft.decode.text import gather
from weft.errors import ModelError
from weft.text.config import BPE, Byte, Char, Unigram, Word, WordPiece
from weft.text.tokenizer import Tokenizer, build_tokenizer

TEXTS = ["the cat sees a dog and the dog sees a cat, no more.", "a cat and a dog go home, and the cat sleeps."] * 8
PROMPTS = ["the cat", "a", "ab a", "and the dog sees", "the cat "]
MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "word": lambda: build_tokenizer(Word(), TEXTS),
    "char": lambda: build_tokenizer(Char(), TEXTS),
    "byte": lambda: build_tokenizer(Byte(), TEXTS),
    "bpe": lambda: build_tokenizer(BPE(vocab_size=280), TEXTS),
    "wordpiece": lambda: build_tokenizer(WordPiece(vocab_size=60), TEXTS),
    "unigram": lambda: build_tokenizer(Unigram(vocab_size=280), TEXTS),
    "sentencepiece": lambda: tokenizer_of(PIECES + piece("▁b", -3) + block(2, number(3, 2)) + PLAIN),
}
SETTINGS = Sampling(max_tokens=9, seed=3, logprobs=0)


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return MAKERS[request.param]()


def lossless_prompts(tokenizer: Tokenizer) -> list[str]:
    """Prompts that survive encoding and decoding."""
    prompts = [text for text in PROMPTS if tokenizer.decode(tokenizer.encode(text)) == text]
    assert prompts
    return prompts


def test_every_decoding_method_continues_the_prompt(tokenizer: Tokenizer) -> None:
    model = decoder(vocab_size=tokenizer.vocab_size)
    engine = Asking(model, tokenizer, EngineLimits(blocks=8))
    for text in lossless_prompts(tokenizer):
        prompt = Prompt.of(tokenizer, text)
        chunks = list(generate(model, [prompt], SETTINGS))
        added = tokenizer.decode([*prompt.ids, *(chunk.id for chunk in chunks)]).removeprefix(text)
        assert "".join(chunk.text for chunk in chunks) == added
        assert complete(model, tokenizer, [text], SETTINGS)[0].text == added
        request = engine.ask(text, SETTINGS)
        engine.run()
        assert request.completion().text == added
        drafted = speculate(model, prompt, SETTINGS, drafter=LookUp(2))
        assert gather(drafted, [prompt])[0].text == added
        (best,) = search_texts(model, [prompt], Beam(beams=1, max_tokens=9))[0]
        assert best.text == complete(model, tokenizer, [text], Sampling(temperature=0.0, max_tokens=9))[0].text


def test_scored_tokens_spell_the_text(tokenizer: Tokenizer) -> None:
    model = decoder(vocab_size=tokenizer.vocab_size)
    settings = SETTINGS.replace(banned=tuple(tokenizer.special_tokens.values()), max_tokens=5)
    completion = complete(model, tokenizer, [lossless_prompts(tokenizer)[0]], settings)[0]
    if "�" not in completion.text:
        assert "".join(each.text for each in completion.scored) == completion.text


def test_an_empty_prompt_begins_a_text_without_a_space(tokenizer: Tokenizer) -> None:
    model = decoder(vocab_size=tokenizer.vocab_size)
    separate = replace(Prompt.of(tokenizer, lossless_prompts(tokenizer)[0]), mid_text=False)
    for prompt in (Prompt.of(tokenizer, ""), separate):
        chunks = list(generate(model, [prompt], SETTINGS))
        assert "".join(chunk.text for chunk in chunks) == tokenizer.decode([chunk.id for chunk in chunks])


def test_stop_strings_with_a_space_are_found_in_the_first_word() -> None:
    tokenizer = MAKERS["word"]()
    model = decoder(vocab_size=tokenizer.vocab_size)
    settings: Any = {"forced": tuple(tokenizer.encode("dog sees")), "max_tokens": 4, "stop": (" dog",)}
    assert complete(model, tokenizer, ["the"], Sampling(**settings))[0].text == ""
    assert search_texts(model, [Prompt.of(tokenizer, "the")], Beam(**settings))[0][0].text == ""


def test_a_space_that_the_tokenizer_drops_belongs_to_the_first_word() -> None:
    word, byte = MAKERS["word"](), MAKERS["byte"]()
    assert [ends_mid_text(word, prompt) for prompt in ("the", "the ", "", " ")] == [True, False, False, False]
    assert [ends_mid_text(byte, prompt) for prompt in ("the", "the ", "", " ")] == [True, True, False, True]
    assert ends_mid_text(word, word.encode("the")) and not ends_mid_text(word, [])
    bos = MAKERS["sentencepiece"]()
    assert not ends_mid_text(bos, [bos.need("bos")])


@pytest.mark.parametrize("kind", ["word", "unigram", "sentencepiece"])
def test_patterns_apply_mid_text_and_at_the_beginning(kind: str) -> None:
    tokenizer = MAKERS[kind]()
    model, text = decoder(vocab_size=tokenizer.vocab_size), "a" if kind == "sentencepiece" else "the"
    for expression, mid_text, prompt in ((" (a|b|cat)+", True, text), ("(a|b|cat)+", False, "")):
        pattern = regex(tokenizer, expression)
        assert Prompt.of(tokenizer, prompt).mid_text == mid_text
        added = complete(model, tokenizer, [prompt], Sampling(max_tokens=3, seed=1), grammar=pattern)[0].text
        assert added and pattern.matches(added)
        assert not pattern.matches(added + "!")


def test_a_word_after_a_prompt_begins_with_a_space() -> None:
    with pytest.raises(ModelError, match="continue a prompt, whose words begin with a space"):
        regex(MAKERS["word"](), "cat").begin(True)
    with pytest.raises(ModelError, match="no token of this vocabulary can begin a text"):
        regex(MAKERS["word"](), " cat").begin(False)


@pytest.mark.parametrize("temperature", [1e-31, 1e-37, 1e-38, 1e-45, 1e-320])
def test_the_lowest_temperatures_are_greedy(temperature: float) -> None:
    tokenizer = MAKERS["byte"]()
    model = decoder(vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        model.embedding.weight.mul_(50.0)
    best = complete(model, tokenizer, ["the"], Sampling(temperature=0.0, max_tokens=12))
    cold = Sampling(temperature=temperature, max_tokens=12, seed=5)
    assert complete(model, tokenizer, ["the"], cold) == best
    assert complete(model, tokenizer, ["the"], [cold.replace(top_p=0.9)]) == best
    mixed = complete(model, tokenizer, ["the", "a"], [cold, Sampling(max_tokens=12)])
    assert mixed[0] == best[0]
    prompt = Prompt.of(tokenizer, "the")
    assert gather(speculate(model, prompt, cold, drafter=Draft(model, prompt, cold)), [prompt]) == best
    engine = Asking(model, tokenizer, EngineLimits(blocks=8))
    request = engine.ask("the", cold)
    engine.run()
    assert request.completion().text == best[0].text


def test_the_end_of_a_long_prompt_decides_whether_it_is_mid_text() -> None:
    """Only the end is tokenized, from a whole word on, since a word tokenizer may not know a part of one."""
    tokenizer = build_tokenizer(Word(), TEXTS)
    for long in ("the cat sees a dog " * 40 + "and", "and " + "the dog sees a cat " * 40):
        for size in range(40):
            prompt = long[size:] if long[size - 1 : size] in ("", " ") else "the " + long
            text = tokenizer.decode(tokenizer.encode(prompt))
            lost = prompt[-1:].isspace() and not text[-1:].isspace()
            assert ends_mid_text(tokenizer, prompt) == (bool(text) and not lost)
    ids = tokenizer.encode("the cat sees a dog " * 40)
    assert ends_mid_text(tokenizer, ids)
    assert not ends_mid_text(tokenizer, [])
