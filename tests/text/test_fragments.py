"""Fragments between split points have the ids of the whole text, for every kind of tokenizer and random texts."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from weft.text.config import BPE, Byte, Char, TrainedConfig, Unigram, Word, WordPiece
from weft.text.fragments import EXPRESSIONS, SplitPoints, TextFragment
from weft.text.tokenizer import Tokenizer, build_tokenizer
from weft.text.vocabularies import PATTERNS

# hard cases: all kinds of whitespace, combining marks, letters that decompose to a space, look-alikes of tokens
BITS = [
    *["the", "frog", "river", " ", "\n", "  ", "\r\n", "\t", "\n\n", ".", ",", "'s", "'S", "/", "-", "_"],
    *["12", "1234", "ö", "o\u0308", "\u0308", "İ", "ͺ", "Σ", "ς", "漢字", "。", "🎈", "👩\u200d🚀", "\u00a0", "\u2028"],
    *["\u3000", "\u00ad", "ﬁ", "ａ", "▁", "▁▁", "<eos>", "<unk>", "[CLS]", "<0x0A>", "<|x|>", "\u0085", "हिन्दी", "กำ"],
    *["aa", "aaa"],
]  # fmt: skip
SPECIAL = ["<unk>", "<eos>"]
LINES = "The frogs {} sat by the river, and it's one frog's song.\nDie Kröte sang 漢字 {}.\n\n"
TRAINING_TEXT = " ".join(LINES.format(n, n * 7) for n in range(30))


def texts(seed: int, count: int = 60) -> list[str]:
    rng = random.Random(seed)
    between = ["", "", " ", " ", " ", "\n", "  ", "\r\n"]
    return ["".join(rng.choice(BITS) + rng.choice(between) for _ in range(rng.randint(1, 30))) for _ in range(count)]


def trained(config: TrainedConfig) -> Callable[[], Tokenizer]:
    return lambda: build_tokenizer(config, [TRAINING_TEXT])


def bpe(
    pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None, *, later: bool = False
) -> Callable[[], Tokenizer]:
    """A BPE tokenizer; if `later`, the pre-tokenizer is for training only, and afterwards a text is one word."""

    def make() -> Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        backend.pre_tokenizer = pre
        if normalizer is not None and not later:
            backend.normalizer = normalizer
        alphabet = pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in str(pre) else []
        special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet)
        backend.train_from_iterator([TRAINING_TEXT + "".join(BITS)], trainer)
        backend.decoder = decoders.ByteLevel() if alphabet else decoders.Metaspace()
        if later:
            backend.pre_tokenizer = None
            backend.normalizer = normalizer
        return Tokenizer.from_json(backend.to_str())

    return make


def unigram(pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.normalizer, backend.pre_tokenizer = normalizer, pre
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>")
        backend.train_from_iterator([TRAINING_TEXT + "".join(BITS)], trainer)
        return Tokenizer.from_json(backend.to_str())

    return make


def added(make: Callable[[], Tokenizer], *tokens: AddedToken) -> Callable[[], Tokenizer]:
    def more() -> Tokenizer:
        backend = tokenizers.Tokenizer.from_str(make().to_json())
        backend.add_tokens(list(tokens))
        return Tokenizer.from_json(backend.to_str())

    return more


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def meta(scheme: Literal["always", "never", "first"], splits: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=splits)


SPACES = normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")
SQUEEZED = normalizers.Sequence([normalizers.NFKC(), *SPACES])
WORDS_THEN_METASPACE = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), meta("first")])
byte_level = pre_tokenizers.ByteLevel
LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS: dict[str, tuple[Callable[[], Tokenizer], SplitPoints | None]] = {
    "own-byte": (trained(Byte()), "anywhere"),
    "own-char": (trained(Char(lowercase=True)), "anywhere"),
    "own-word": (trained(Word()), "lines"),
    "own-bpe": (trained(BPE()), "lines"),
    "own-wordpiece": (trained(WordPiece()), "lines"),
    "own-unigram": (trained(Unigram()), "spaces"),
    "gpt-2": (bpe(byte_level(False)), "lines"),
    "roberta": (bpe(byte_level(True)), "lines"),
    "llama-3": (bpe(split(PATTERNS["cl100k"])), "lines"),
    "gpt-4o": (bpe(split(PATTERNS["o200k"]), normalizers.NFC()), "lines"),
    "qwen-2": (bpe(split(PATTERNS["qwen2"]), normalizers.NFKC()), "lines"),
    "smollm": (bpe(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level(False)])), "lines"),
    "prefix-after-digits": (bpe(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level(True)])), "spaces"),
    "gemma": (bpe(meta("never")), "spaces"),
    "metaspace-always": (bpe(meta("always"), normalizers.NFC()), "spaces"),
    "llama-2": (bpe(meta("always"), LLAMA, later=True), "spaces"),
    "one-word": (bpe(meta("first", False)), None),  # its merges cross words
    "t5": (unigram(meta("always"), SQUEEZED), "spaces"),
    "words-then-metaspace": (unigram(WORDS_THEN_METASPACE, SQUEEZED), "lines"),
    "added": (added(bpe(byte_level(False)), AddedToken("  "), AddedToken("frog", single_word=True)), "lines"),
    "added-metaspace": (added(bpe(meta("always")), AddedToken("frog"), AddedToken(" ")), "spaces"),
    "added-across": (added(trained(BPE()), AddedToken("frog the")), None),
    "added-strips": (added(trained(BPE()), AddedToken("frog", rstrip=True)), None),
    "added-prefix": (added(bpe(meta("always"), LLAMA, later=True), AddedToken("frog")), None),
    "unknown-expression": (bpe(split(r"\w+ \w+|\s+|\S")), None),
    "accents": (trained(WordPiece(lowercase=True)), "lines"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_fragments_have_the_ids_of_the_whole_text(kind: str) -> None:
    make, points = KINDS[kind]
    tokenizer = make()
    assert tokenizer.split_points == points
    if points is None:
        return
    rng, splits = random.Random(1), 0
    for text in texts(len(kind)):
        anywhere = list(range(1, len(text)))
        positions = anywhere if points == "anywhere" else [m.start() for m in EXPRESSIONS[points].finditer(text)]
        chosen = sorted(rng.sample(positions, rng.randint(0, len(positions))))
        splits += len(chosen)
        borders = pairwise([0, *(position for position in chosen if position), len(text)])
        fragments = [TextFragment(text[a:b], a == 0, b == len(text)) for a, b in borders]
        ids = [id for each in tokenizer.encode_fragments(fragments) for id in each.ids]
        assert ids == tokenizer.encode(text), (text, chosen)
    assert splits > 30
