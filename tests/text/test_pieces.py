"""Pieces of a text, cut at its joints, have the ids of the text: for every kind of tokenizer, and texts at random."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from weft.text.config import BPE, Byte, Char, TrainedConfig, Unigram, Word, WordPiece
from weft.text.pieces import PLACES, Piece
from weft.text.tokenizer import Tokenizer, build_tokenizer
from weft.text.vocabularies import PATTERNS

# what a cut could go wrong at: white space of all kinds, marks, letters that decompose to a space, look-alikes
BITS = [
    *["the", "frog", "river", " ", "\n", "  ", "\r\n", "\t", "\n\n", ".", ",", "'s", "'S", "/", "-", "_"],
    *["12", "1234", "ö", "o\u0308", "\u0308", "İ", "ͺ", "Σ", "ς", "漢字", "。", "🎈", "👩\u200d🚀", "\u00a0", "\u2028"],
    *[
        "\u3000",
        "\u00ad",
        "ﬁ",
        "ａ",
        "▁",
        "▁▁",
        "<eos>",
        "<unk>",
        "[CLS]",
        "<0x0A>",
        "<|x|>",
        "\u0085",
        "हिन्दी",
        "กำ",
        "aa",
        "aaa",
    ],
]
SOME = " ".join(
    f"The frogs {n} sat by the river, and it's one frog's song.\nDie Kröte sang 漢字 {n * 7}.\n\n" for n in range(30)
)


def texts(seed: int, count: int = 60) -> list[str]:
    rng = random.Random(seed)
    between = ["", "", " ", " ", " ", "\n", "  ", "\r\n"]
    return ["".join(rng.choice(BITS) + rng.choice(between) for _ in range(rng.randint(1, 30))) for _ in range(count)]


def own(config: TrainedConfig) -> Callable[[], Tokenizer]:
    return lambda: build_tokenizer(config, [SOME])


def bpe(
    pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None, *, later: bool = False
) -> Callable[[], Tokenizer]:
    """A BPE tokenizer; `later`: its pre-tokenizer serves the training alone, and then a text is one word."""

    def make() -> Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        backend.pre_tokenizer = pre
        if normalizer is not None and not later:
            backend.normalizer = normalizer
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in str(pre) else []
        trainer = trainers.BpeTrainer(
            vocab_size=700, special_tokens=["<unk>", "<eos>", *bytes_], initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator([SOME + "".join(BITS)], trainer)
        backend.decoder = decoders.ByteLevel() if alphabet else decoders.Metaspace()
        if later:
            backend.pre_tokenizer = None  # type: ignore[assignment]
            backend.normalizer = normalizer  # type: ignore[assignment]
        return Tokenizer.from_json(backend.to_str())

    return make


def unigram(pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.normalizer, backend.pre_tokenizer = normalizer, pre
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>", "<eos>"], unk_token="<unk>", show_progress=False
        )
        backend.train_from_iterator([SOME + "".join(BITS)], trainer)
        return Tokenizer.from_json(backend.to_str())

    return make


def added(make: Callable[[], Tokenizer], *tokens: AddedToken) -> Callable[[], Tokenizer]:
    def more() -> Tokenizer:
        backend = tokenizers.Tokenizer.from_str(make().to_json())
        backend.add_tokens(list(tokens))
        return Tokenizer.from_json(backend.to_str())

    return more


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def meta(scheme: str, cuts: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=cuts)


SQUEEZED = normalizers.Sequence(
    [normalizers.NFKC(), normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
)
LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS: dict[str, tuple[Callable[[], Tokenizer], str | None]] = {
    "own-byte": (own(Byte()), "anywhere"),
    "own-char": (own(Char(lowercase=True)), "anywhere"),
    "own-word": (own(Word()), "lines"),
    "own-bpe": (own(BPE()), "lines"),
    "own-wordpiece": (own(WordPiece()), "lines"),
    "own-unigram": (own(Unigram()), "spaces"),
    "gpt-2": (bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)), "lines"),
    "roberta": (bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)), "lines"),
    "llama-3": (bpe(split(PATTERNS["cl100k"])), "lines"),
    "gpt-4o": (bpe(split(PATTERNS["o200k"]), normalizers.NFC()), "lines"),
    "qwen-2": (bpe(split(PATTERNS["qwen2"]), normalizers.NFKC()), "lines"),
    "smollm": (
        bpe(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
        "lines",
    ),
    "prefix-after-digits": (
        bpe(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=True)])),
        "spaces",
    ),
    "gemma": (bpe(meta("never")), "spaces"),
    "metaspace-always": (bpe(meta("always"), normalizers.NFC()), "spaces"),
    "llama-2": (bpe(meta("always"), LLAMA, later=True), "spaces"),
    "one-word": (bpe(meta("first", False)), None),  # its merges cross words
    "t5": (unigram(meta("always"), SQUEEZED), "spaces"),
    "words-then-metaspace": (
        unigram(pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), meta("first")]), SQUEEZED),
        "lines",
    ),
    "added": (
        added(
            bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
            AddedToken("  "),
            AddedToken("frog", single_word=True),
        ),
        "lines",
    ),
    "added-metaspace": (added(bpe(meta("always")), AddedToken("frog"), AddedToken(" ")), "spaces"),
    "added-across": (added(own(BPE()), AddedToken("frog the")), None),
    "added-strips": (added(own(BPE()), AddedToken("frog", rstrip=True)), None),
    "added-prefix": (added(bpe(meta("always"), LLAMA, later=True), AddedToken("frog")), None),
    "unknown-expression": (bpe(split(r"\w+ \w+|\s+|\S")), None),
    "accents": (own(WordPiece(lowercase=True)), "lines"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_ids_of_the_whole(kind: str) -> None:
    make, joints = KINDS[kind]
    tokenizer = make()
    assert tokenizer.joints == joints
    if joints is None:
        return
    rng, cut = random.Random(1), 0
    for text in texts(len(kind)):
        places = range(1, len(text)) if joints == "anywhere" else [m.start() for m in PLACES[joints].finditer(text)]
        chosen = sorted(rng.sample(list(places), rng.randint(0, len(places))))
        cut += len(chosen)
        borders = [0, *(place for place in chosen if place), len(text)]
        spans = list(pairwise(borders))
        pieces = [Piece(text[a:b], a == 0, b == len(text)) for a, b in spans]
        found = [id for each in tokenizer.encode_pieces(pieces) for id in each.ids]
        assert found == tokenizer.encode(text), (text, chosen)
    assert cut > 30
