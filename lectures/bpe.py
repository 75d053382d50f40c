"""Lecture 3: subword tokenizers. Byte-pair encoding, learned and applied, compared with WordPiece and unigram.

    python lectures/bpe.py            learn the pieces of generated words
    python lectures/bpe.py book.txt   learn the pieces of your own text

Figure: with 400 tokens learned from 9,000 words, byte-pair encoding has 5.83 bytes per token on 1,000 other words.
"""

import math
import random
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from pathlib import Path

Pair = tuple[bytes, bytes]

# ---- Words. Pieces never cross word boundaries, so it is enough to have each distinct word and its count.

WORD = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)


def stand_in(char: str) -> str:
    """ASCII character of the same kind: a for letters, 0 for numbers, a tab for white space, ! for all others."""
    if char.isascii():
        return char
    return {"L": "a", "N": "0"}.get(unicodedata.category(char)[0], "\t" if char.isspace() else "!")


def split_words(text: str) -> list[str]:
    """Split like GPT-2: a space belongs to the next word; letters, numbers and other characters are separate words."""
    return [text[match.start() : match.end()] for match in WORD.finditer("".join(map(stand_in, text)))]


# ---- Learning: start from single bytes, so that nothing is out of vocabulary, and merge

# In GPT-2's order, which breaks ties: printable bytes first.
PRINTING = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [bytes([b]) for b in PRINTING] + [bytes([b]) for b in range(256) if b not in PRINTING]


def bpe_rule(ab: int, a: int, b: int) -> float:
    """Byte-pair encoding merges the most frequent pair a b (Sennrich et al. 2016)."""
    return ab


def wordpiece_rule(ab: int, a: int, b: int) -> float:
    """WordPiece merges the pair that raises the likelihood most: p(ab) / (p(a) p(b)) (Schuster and Nakajima 2012)."""
    return ab / (a * b)


def merge(pieces: list[bytes], pair: Pair) -> list[bytes]:
    """Replace every a b in a word by ab."""
    merged: list[bytes] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def learn_merges(
    words: Mapping[str, int], size: int, rule: Callable[[int, int, int], float] = bpe_rule
) -> dict[Pair, int]:
    """Learn pairs to merge, with their ranks 0, 1, …, until there are `size` tokens or no pair occurs twice."""
    count = {word.encode(): c for word, c in words.items()}
    pieces_of = {word: [bytes([b]) for b in word] for word in count}
    pieces, pairs = Counter[bytes](), Counter[Pair]()
    words_with: defaultdict[Pair, set[bytes]] = defaultdict(set)  # words that contain, or contained, a pair

    def add(word: bytes, times: int) -> None:
        for piece in pieces_of[word]:
            pieces[piece] += times
        for pair in pairwise(pieces_of[word]):
            pairs[pair] += times
            words_with[pair].add(word)

    for word in pieces_of:
        add(word, count[word])
    ids = {piece: id for id, piece in enumerate(BYTES)}
    ranks: dict[Pair, int] = {}
    while len(ids) < size:
        scores = {(a, b): rule(c, pieces[a], pieces[b]) for (a, b), c in pairs.items() if c > 1}
        if not scores:
            break
        best = max(scores, key=lambda pair: (scores[pair], -ids[pair[0]], -ids[pair[1]]))
        ranks[best] = len(ranks)
        ids.setdefault(best[0] + best[1], len(ids))
        for word in words_with.pop(best):
            add(word, -count[word])
            pieces_of[word] = merge(pieces_of[word], best)
            add(word, count[word])
    return ranks


# ---- Applying


def bpe(word: str, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Merge in the order of learning: of all pairs in the word, always the one learned first."""
    pieces = [bytes([b]) for b in word.encode()]
    while known := [pair for pair in pairwise(pieces) if pair in ranks]:
        pieces = merge(pieces, min(known, key=lambda pair: ranks[pair]))
    return pieces


def wordpiece(word: str, vocabulary: Collection[str]) -> list[str]:
    """Take the longest piece that the rest of the word begins with, repeatedly; ## marks pieces inside a word."""
    pieces: list[str] = []
    while word:
        starts = (("##" if pieces else "") + word[:end] for end in range(len(word), 0, -1))
        piece = next((start for start in starts if start in vocabulary), None)
        if piece is None:
            return ["[UNK]"]
        word = word[len(piece) - (2 if pieces else 0) :]
        pieces.append(piece)
    return pieces


def unigram(word: str, log_p: Mapping[str, float]) -> list[str]:
    """The likeliest segmentation, argmax Σ log p(piece) (Kudo 2018): best[j] = max_i best[i] + log p(word[i:j])."""
    best, begins = [0.0], [0]
    for j in range(1, len(word) + 1):
        scores = [best[i] + log_p.get(word[i:j], -math.inf) for i in range(j)]
        best.append(max(scores))
        begins.append(scores.index(best[j]))
    pieces: list[str] = []
    while word:
        pieces.insert(0, word[begins[len(word)] :])
        word = word[: begins[len(word)]]
    return pieces


def learn_unigram(words: Mapping[str, int], size: int) -> dict[str, float]:
    """Learn log p of pieces: start with many, segment all words, count the pieces, keep the most used, repeat."""
    counts = Counter[str]()
    for word, c in words.items():
        for i in range(len(word)):
            counts.update({word[i:j]: c * (j - i) for j in range(i + 1, min(i + 12, len(word)) + 1)})
    limit = 8 * size
    while True:
        # single characters are always kept, even if unused, so that every word can be segmented
        kept = dict(counts.most_common(limit)) | {char: max(counts[char], 1) for char in set("".join(words))}
        log_p = {piece: math.log(c / sum(kept.values())) for piece, c in kept.items()}
        if limit == size:
            return log_p
        limit = max(size, limit * 3 // 4)
        counts = Counter()
        for word, c in words.items():
            counts.update(dict.fromkeys(unigram(word, log_p), c))


# ---- Text to tokenize

PARTS = ["| re| pre| un", "transform|lectur|giv|form|token|encod|merg|learn|read", "|e|er|ers|ing|ed|able|ation|s"]
SLIDE = "Henry is givin' a lectrue on transformers"
SLIDE_PIECES = ["henry", "is", "giv", "##in", "'", "a", "lec", "##true", "on", "transform", "##ers"]


def make_text(count: int) -> str:
    """Generate words such as " retransforming"."""
    rng = random.Random(0)
    words = ("".join(rng.choice(part.split("|")) for part in PARTS) for _ in range(count))
    return "".join(word if word.startswith(" ") else " " + word for word in words)


def main() -> None:
    text, size = make_text(10_000), 400
    if len(sys.argv) > 1:
        try:
            text, size = Path(sys.argv[1]).read_text(encoding="utf-8"), 1000
        except (OSError, UnicodeDecodeError) as error:
            print(f"bpe.py: {sys.argv[1]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
            sys.exit(2)
    all_words = split_words(text)
    words, held_out = Counter(all_words[: len(all_words) * 9 // 10]), all_words[len(all_words) * 9 // 10 :]
    ranks, by_likelihood = learn_merges(words, size), learn_merges(words, size, wordpiece_rule)
    log_p = learn_unigram(words, size - len(BYTES))
    print("BPE merges first:", *(repr((a + b).decode(errors="replace")) for a, b in list(ranks)[:12]))
    print("WordPiece merges first:", *(repr((a + b).decode(errors="replace")) for a, b in list(by_likelihood)[:12]))
    print("BPE:", "|".join(piece.decode(errors="replace") for word in split_words(SLIDE) for piece in bpe(word, ranks)))
    slide = [word.strip() for word in split_words(SLIDE.lower())]
    print("WordPiece with the slide's pieces:", "|".join(p for word in slide for p in wordpiece(word, SLIDE_PIECES)))
    print("unigram:", "|".join(piece for word in held_out[-12:] for piece in unigram(word, log_p)))
    size = sum(len(word.encode()) for word in held_out)
    tokens = sum(len(bpe(word, ranks)) for word in held_out)
    print(f"{size / max(tokens, 1):.2f} bytes per token on {len(held_out):,} held-out words")


if __name__ == "__main__":
    main()
