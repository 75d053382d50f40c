"""lectures/bpe.py learns and applies what weft's tokenizers do."""

import json
import random
import re
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from tests.lectures.textbook.lecture import load

from weft.text.builtin import task_rows
from weft.text.config import BPE, Unigram, WordPiece
from weft.text.token_bytes import byte_letters
from weft.text.tokenizer import Tokenizer, build_tokenizer

bpe = load("bpe")


def noise(seed: int, alphabet: str, length: int = 4000) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(alphabet) for _ in range(length))


TEXTS = {
    "generated": bpe.make_text(500),
    "english": " ".join(row["source"] for row in islice(task_rows("numbers", "train"), 300)),
    "slide": f"{bpe.SLIDE} and we'll say it's Henry's, they've said he'd do it. " * 3,
    "unicode": "Grüße aus Köln, naïve Ærø! 日本語のテキスト、日本語。 ½ of Ⅷ is ٤, кот и кошка 👩‍👩‍👧 e\u0301 " * 4,
    "spaces": "a  b\t\tc\n\n\n d   e \u00a0\u3000f\u2028g  \n" * 6,
    "overlaps": "aaaa aaaaa aa aaa abab ababab bababa aaaaaaa aaaaaa",
    "ties": noise(0, "abcd "),
    "unicode ties": noise(1, "äö\u0301日ß½ \n’'s"),
    "control": "\x00\x01 \x1c\x1d\x1f x\x7f\x85y \x00\x01" * 5,
}


def saved(tokenizer: Tokenizer) -> Any:
    """Contents of the tokenizer's file."""
    return json.loads(tokenizer._json)


def learned(text: str, size: int) -> tuple[Tokenizer, dict[tuple[bytes, bytes], int]]:
    """weft's tokenizer with up to `size` tokens besides special ones, and the merges of lectures/bpe.py."""
    tokenizer = build_tokenizer(BPE(), [text], default_size=size + 3)
    return tokenizer, bpe.learn_merges(Counter(bpe.split_words(text)), size)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [256, 300, 600])
def test_merges_are_wefts(name: str, size: int) -> None:
    tokenizer, ranks = learned(TEXTS[name], size)
    letters, merges = byte_letters(), saved(tokenizer)["model"]["merges"]
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    assert list(ranks) == [tuple(bytes(letters[letter] for letter in part) for part in pair) for pair in pairs]
    assert list(ranks.values()) == list(range(len(ranks)))


@pytest.mark.parametrize("name", TEXTS)
def test_pieces_are_wefts(name: str) -> None:
    """Pieces of the training text and of all other texts; nothing is out of vocabulary."""
    tokenizer, ranks = learned(TEXTS[name], 350)
    ids = {piece: id for id, piece in enumerate([*bpe.BYTES, *dict.fromkeys(a + b for a, b in ranks)], start=3)}
    for text in TEXTS.values():
        pieces = [piece for word in bpe.split_words(text) for piece in bpe.bpe(word, ranks)]
        assert b"".join(pieces).decode() == text
        assert [ids[piece] for piece in pieces] == tokenizer.encode(text)


def test_wordpiece_is_wefts() -> None:
    """Longest match first, with weft's vocabulary; words that it cannot spell are unknown."""
    text = TEXTS["english"] + " " + TEXTS["generated"]
    tokenizer = build_tokenizer(WordPiece(), [text], default_size=120)
    vocabulary = saved(tokenizer)["model"]["vocab"]
    for word in {*re.findall(r"\w+|-", text), "unbelievably", "tokens", "q", "жук"}:
        found = [vocabulary[piece] for piece in bpe.wordpiece(word, vocabulary)]
        assert found == tokenizer.encode(word), word


def test_the_slides_pieces() -> None:
    words = [word.strip() for word in bpe.split_words(bpe.SLIDE.lower())]
    assert [piece for word in words for piece in bpe.wordpiece(word, bpe.SLIDE_PIECES)] == bpe.SLIDE_PIECES


def test_unigram_is_wefts() -> None:
    """The likeliest segmentation, with weft's log-probabilities."""
    text = TEXTS["english"]
    tokenizer = build_tokenizer(Unigram(), [text], default_size=400)
    vocabulary = saved(tokenizer)["model"]["vocab"]
    log_p = {piece: score for piece, score in vocabulary if score < 0}
    ids = {piece: id for id, (piece, _) in enumerate(vocabulary)}
    for word in {*text.split(), "tenthirty", "onehundredandone"}:
        assert [ids[piece] for piece in bpe.unigram("▁" + word, log_p)] == tokenizer.encode(word), word


def test_unigram_finds_the_best_segmentation() -> None:
    rng = random.Random(0)
    log_p = {piece: -rng.random() - len(piece) / 9 for piece in (noise(seed, "ab", 1 + seed % 4) for seed in range(40))}
    log_p |= {"a": -3.0, "b": -3.0}

    def cuts(word: str) -> list[list[str]]:
        ends = range(1, len(word) + 1)
        return [[word[:end], *rest] for end in ends if word[:end] in log_p for rest in cuts(word[end:])] or [[]]

    for seed in range(20):
        word = noise(seed, "ab", 9)
        scores = [sum(log_p[piece] for piece in cut) for cut in cuts(word) if "".join(cut) == word]
        assert sum(log_p[piece] for piece in bpe.unigram(word, log_p)) == pytest.approx(max(scores))


def test_the_rules_of_bpe_and_wordpiece_differ() -> None:
    """ "qu" is rarer than "ab", but q and u only occur together."""
    words = {"ab": 5, "ac": 5, "bd": 5, "qu": 4}
    assert next(iter(bpe.learn_merges(words, 257))) == (b"a", b"b")
    assert next(iter(bpe.learn_merges(words, 257, bpe.wordpiece_rule))) == (b"q", b"u")


def test_unigram_learns_recurring_pieces() -> None:
    log_p = bpe.learn_unigram(Counter(bpe.split_words(bpe.make_text(3000))), 60)
    assert {"transform", "ing", "able"} <= {piece.strip() for piece in log_p}
    assert bpe.unigram(" unlearnable", log_p)[-1] == "able"
