"""What is written after a prompt goes on with it: prompt and new text together are the text of all ids."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.decode.small import Asking, complete, decoder
from tests.text.test_sentencepiece import PIECES, PLAIN, block, made, number, piece

from weft.decode.beam import search_texts
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import regex
from weft.decode.engine.engine import Limits
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
    "sentencepiece": lambda: made(PIECES + piece("▁b", -3) + block(2, number(3, 2)) + PLAIN),
}
SETTINGS = Sampling(max_tokens=9, seed=3, logprobs=0)


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return MAKERS[request.param]()


def texts_of(tokenizer: Tokenizer) -> list[str]:
    """Prompts that this tokenizer gives back."""
    found = [text for text in PROMPTS if tokenizer.decode(tokenizer.encode(text)) == text]
    assert found
    return found


def test_every_way_of_writing_goes_on_with_the_prompt(tokenizer: Tokenizer) -> None:
    model = decoder(vocab_size=tokenizer.vocab_size)
    engine = Asking(model, tokenizer, Limits(blocks=8))
    for prompt in texts_of(tokenizer):
        asked = Prompt.of(tokenizer, prompt)
        written = list(generate(model, [asked], SETTINGS))
        whole = tokenizer.decode([*asked.ids, *(each.id for each in written)])
        assert prompt + "".join(each.text for each in written) == whole
        assert complete(model, tokenizer, [prompt], SETTINGS)[0].text == whole.removeprefix(prompt)
        request = engine.ask(prompt, SETTINGS)
        engine.run()
        assert request.completion().text == whole.removeprefix(prompt)
        guessed = speculate(model, asked, SETTINGS, drafter=LookUp(2))
        assert gather(guessed, [asked])[0].text == whole.removeprefix(prompt)
        (best,) = search_texts(model, [asked], Beam(beams=1, max_tokens=9))[0]
        assert best.text == complete(model, tokenizer, [prompt], Sampling(temperature=0.0, max_tokens=9))[0].text


def test_the_tokens_that_come_with_their_probabilities_spell_the_text(tokenizer: Tokenizer) -> None:
    model = decoder(vocab_size=tokenizer.vocab_size)
    settings = SETTINGS.replace(banned=tuple(tokenizer.special_tokens.values()), max_tokens=5)
    only = complete(model, tokenizer, [texts_of(tokenizer)[0]], settings)[0]
    if "�" not in only.text:
        assert "".join(each.text for each in only.scored) == only.text


def test_an_empty_prompt_begins_a_text_without_a_space(tokenizer: Tokenizer) -> None:
    model = decoder(vocab_size=tokenizer.vocab_size)
    new = replace(Prompt.of(tokenizer, texts_of(tokenizer)[0]), mid_text=False)  # a text of its own after any prompt
    for prompt in (Prompt.of(tokenizer, ""), new):
        written = list(generate(model, [prompt], SETTINGS))
        assert "".join(each.text for each in written) == tokenizer.decode([each.id for each in written])


def test_stop_strings_with_a_space_are_found_in_the_first_word() -> None:
    tokenizer = MAKERS["word"]()
    model = decoder(vocab_size=tokenizer.vocab_size)
    forced = tokenizer.encode("dog sees")
    settings = {"forced": tuple(forced), "max_tokens": 4, "stop": (" dog",)}
    assert complete(model, tokenizer, ["the"], Sampling(**settings))[0].text == ""
    assert search_texts(model, [Prompt.of(tokenizer, "the")], Beam(**settings))[0][0].text == ""


def test_a_space_that_the_tokenizer_does_not_keep_is_the_first_words() -> None:
    word, byte = MAKERS["word"](), MAKERS["byte"]()
    assert [ends_mid_text(word, prompt) for prompt in ("the", "the ", "", " ")] == [True, False, False, False]
    assert [ends_mid_text(byte, prompt) for prompt in ("the", "the ", "", " ")] == [True, True, False, True]
    assert ends_mid_text(word, word.encode("the")) and not ends_mid_text(word, [])
    bos = MAKERS["sentencepiece"]()
    assert not ends_mid_text(bos, [bos.need("bos")])


@pytest.mark.parametrize("kind", ["word", "unigram", "sentencepiece"])
def test_patterns_know_whether_the_text_has_begun(kind: str) -> None:
    tokenizer = MAKERS[kind]()
    model, text = decoder(vocab_size=tokenizer.vocab_size), "a" if kind == "sentencepiece" else "the"
    for expression, mid_text, prompt in ((" (a|b|cat)+", True, text), ("(a|b|cat)+", False, "")):
        pattern = regex(tokenizer, expression)
        assert Prompt.of(tokenizer, prompt).mid_text == mid_text
        written = complete(model, tokenizer, [prompt], Sampling(max_tokens=3, seed=1), grammar=pattern)[0].text
        assert written and pattern.matches(written)
        assert not pattern.matches(written + "!")


def test_a_word_after_a_prompt_begins_with_a_space() -> None:
    with pytest.raises(ModelError, match="continue a prompt, whose words begin with a space"):
        regex(MAKERS["word"](), "cat").begin(True)
    with pytest.raises(ModelError, match="no token of this vocabulary can begin a text"):
        regex(MAKERS["word"](), " cat").begin(False)


@pytest.mark.parametrize("degree", [1e-31, 1e-37, 1e-38, 1e-45, 1e-320])
def test_the_coldest_temperatures_are_greedy(degree: float) -> None:
    tokenizer = MAKERS["byte"]()
    model = decoder(vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        model.embedding.weight.mul_(50.0)
    best = complete(model, tokenizer, ["the"], Sampling(temperature=0.0, max_tokens=12))
    cold = Sampling(temperature=degree, max_tokens=12, seed=5)
    assert complete(model, tokenizer, ["the"], cold) == best
    assert complete(model, tokenizer, ["the"], [cold.replace(top_p=0.9)]) == best
    mixed = complete(model, tokenizer, ["the", "a"], [cold, Sampling(max_tokens=12)])
    assert mixed[0] == best[0]
    prompt = Prompt.of(tokenizer, "the")
    assert gather(speculate(model, prompt, cold, drafter=Draft(model, prompt, cold)), [prompt]) == best
    engine = Asking(model, tokenizer, Limits(blocks=8))
    request = engine.ask("the", cold)
    engine.run()
    assert request.completion().text == best[0].text


def test_the_end_of_a_long_prompt_tells_whether_it_has_begun() -> None:
    """A long one is not cut into tokens again; and never inside a word, which a tokenizer of words may not know."""
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
