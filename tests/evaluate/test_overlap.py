"""Overlap with the training text against a plain search with sets of words."""

import re
import string

import numpy as np
import pytest
from tests.data import held

from weft.data.shards import Tokens
from weft.evaluate.overlap import CHARACTERS, WORDS, ngrams, overlap, words_are_long
from weft.text.config import BPE, Byte, Word
from weft.text.tokenizer import Tokenizer, build_tokenizer

RNG = np.random.default_rng(0)
VOCABULARY = ["".join(RNG.choice(list("abcdefgh"), RNG.integers(1, 7))) for _ in range(300)]
BYTES = build_tokenizer(Byte(), [])


def prose(words: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    chosen = [VOCABULARY[n].title() if n % 7 == 0 else VOCABULARY[n] for n in rng.integers(0, 300, words)]
    return "".join(word + ".,;!"[n % 4] * (n % 5 == 0) + (" " if n % 11 else "\n") for n, word in enumerate(chosen))


def tokens(documents: list[str], tokenizer: Tokenizer = BYTES) -> Tokens:
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    ids = [[*tokenizer.encode(text), *end] for text in documents]
    starts = np.cumsum([0, *map(len, ids)])[:-1].tolist()
    return held.tokens(np.concatenate(ids), starts, [len(text.encode()) for text in documents])


def words_of(text: str) -> list[str]:
    return text.lower().translate(str.maketrans("", "", string.punctuation)).split()


def grams(text: str) -> list[tuple[str, ...]]:
    words = words_of(text)
    return [tuple(words[n : n + 13]) for n in range(len(words) - 12)] or [tuple(words)]


def test_hashes_distinguish_ngrams() -> None:
    text = prose(2000, 1) + prose(500, 1)  # the second part repeats the first
    found = ngrams(text.encode(), np.array([0]), WORDS)
    expected = grams(text)
    assert len(found.hashes) == len(expected)
    assert len(set(found.hashes.tolist())) == len(set(expected))
    for n in (0, 17, 1999):
        assert words_of(text.encode()[found.firsts[n] : found.lasts[n]].decode()) == list(expected[n])


@pytest.mark.parametrize("block", [200, 1 << 18])
def test_shares_equal_those_of_a_plain_search(block: int) -> None:
    tokenizer = build_tokenizer(BPE(vocab_size=400), [prose(3000, 5)])
    training = [prose(1500, 2), prose(30, 3), "Five words, no more here.", prose(700, 4)]
    copied = " ".join(training[0].split()[300:400]).upper()
    own = [prose(400, 6) + copied + " " + prose(200, 7), "five words no MORE here", "five words no more", prose(90, 8)]
    found = overlap([tokens(own, tokenizer)], [tokens(training, tokenizer)], tokenizer, training_block=block)
    known = {gram for text in training for gram in grams(text)}
    expected = [gram in known for text in own for gram in grams(text)]
    assert (found.checked, found.found) == (len(expected), sum(expected))
    assert (found.documents, found.touched) == (4, 2)
    longest = found.longest[0]
    assert longest.document == 1 and longest.text == 1
    assert own[0].encode()[longest.byte : longest.byte + longest.bytes].decode() == copied.rstrip(string.punctuation)
    assert found.covered == sum(each.bytes for each in found.longest)
    shown = f"{sum(expected) / len(expected):.2%} of its 13-grams of words ({sum(expected):,} of {len(expected):,})"
    assert found.line.startswith(shown)


def test_nothing_in_common_and_unknown_words() -> None:
    found = overlap([tokens([prose(200, 10)])], [tokens([prose(200, 11)])], BYTES)
    assert found.found == found.covered == found.touched == 0 and not found.longest
    itself = overlap([tokens([prose(200, 10)])], [tokens([prose(200, 11)]), tokens([prose(200, 10)])], BYTES)
    assert itself.share == 1.0 and itself.covered > 0.98 * itself.bytes
    tokenizer = build_tokenizer(Word(), [prose(2000, 12)])
    same = tokens([" ".join(["salamander"] * 40)], tokenizer)
    found = overlap([same], [same], tokenizer)
    assert found.checked == 0 and found.share == 0.0 and found.line.startswith("unknown: ")


def test_a_text_without_spaces_is_compared_by_characters() -> None:
    rng = np.random.default_rng(2)
    text = "".join(chr(0x4E00 + n) + "，" * (n % 9 == 0) for n in rng.integers(0, 3000, 800).tolist())
    assert words_are_long(text.encode()) and not words_are_long(prose(100, 1).encode())
    found = overlap([tokens([text])], [tokens([text[:400]])], BYTES)
    plain = text.replace("，", "")
    half = len(text[:400].replace("，", ""))
    assert found.unit == CHARACTERS
    assert (found.checked, found.found) == (len(plain) - 49, half - 49)


def test_letters_beyond_ascii_are_lowered_and_keep_their_offsets() -> None:
    text = "İ ÄÖÜ " + " ".join(f"Straße{n} «Ő» “x” — Ж" for n in range(20))
    lower = text.translate(str.maketrans("ÄÖÜŐЖS", "äöüőжs"))
    one, other = (ngrams(each.encode(), np.array([0]), WORDS) for each in (text, lower))
    np.testing.assert_array_equal(one.hashes, other.hashes)
    np.testing.assert_array_equal(one.lasts, other.lasts)
    assert one.lasts[-1] == len(text.encode())


def test_a_long_text_is_sampled() -> None:
    text = prose(9000, 20)
    found = overlap([tokens([text])], [tokens([" ".join(text.split()[:4500])])], BYTES, max_ngrams=500)
    assert found.sampled > 5 and found.checked < 9000 / found.sampled * 1.3
    assert found.share == pytest.approx(0.5, abs=0.06) and found.covered / found.bytes == pytest.approx(0.5, abs=0.06)
    assert re.search(r" in a sample of one in \d+\)", found.line) and not found.longest
