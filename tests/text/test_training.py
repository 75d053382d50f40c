"""Training of each kind of tokenizer: results, reproducibility, and refusals."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.text.conftest import CONFIGS, TEXTS

from weft.config import Config, validate
from weft.errors import ConfigError, DataError, TokenizerError
from weft.text.config import BPE, Byte, Char, Specials, TokenizerConfig, TrainedConfig, Unigram, Word, WordPiece
from weft.text.tokenizer import Tokenizer, build_tokenizer


def test_kinds_and_sizes(tokenizers: dict[str, Tokenizer]) -> None:
    assert {kind: tokenizer.kind for kind, tokenizer in tokenizers.items()} == {kind: kind for kind in CONFIGS}
    assert tokenizers["byte"].vocab_size == 256 + 3
    assert tokenizers["char"].vocab_size == 4 + 256 + len(set("".join(TEXTS)))
    for kind in ("bpe", "wordpiece", "unigram"):
        assert tokenizers[kind].vocab_size == CONFIGS[kind].vocab_size  # type: ignore[union-attr]


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert sorted(tokenizer.special_tokens.values()) == list(range(len(tokenizer.special_tokens)))
    assert tokenizer.pad_id == 0


@pytest.mark.parametrize("kind", ["word", "char", "byte", "bpe", "wordpiece", "unigram"])
def test_training_is_reproducible(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    for _ in range(3):
        repeated = build_tokenizer(CONFIGS[kind], iter(TEXTS))
        assert repeated.to_json() == tokenizers[kind].to_json()
        assert repeated.fingerprint == tokenizers[kind].fingerprint


def test_training_is_reproducible_in_another_process(tokenizers: dict[str, Tokenizer]) -> None:
    program = (
        "from tests.text.conftest import *\n"
        "for kind in ('wordpiece', 'unigram'): print(build_tokenizer(CONFIGS[kind], TEXTS).fingerprint)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert run.stdout.split() == [tokenizers[kind].fingerprint for kind in ("wordpiece", "unigram")]


def test_fingerprints_distinguish_vocabularies_and_roles(tokenizers: dict[str, Tokenizer]) -> None:
    other = build_tokenizer(Byte(specials=Specials(pad="<pad>", bos="<eos>", eos="<bos>")), [])
    assert len({other.fingerprint, *(t.fingerprint for t in tokenizers.values())}) == len(tokenizers) + 1


def test_words_by_frequency_or_by_code_point() -> None:
    only_pad = Specials(pad="<PAD>")
    given = ["b a b C", "a b"]
    by_frequency = build_tokenizer(Word(specials=only_pad), given)
    by_code_point = build_tokenizer(Word(specials=only_pad, order="codepoint"), given)
    assert [by_frequency.token(id) for id in range(4)] == ["<PAD>", "b", "a", "C"]
    assert [by_code_point.token(id) for id in range(4)] == ["<PAD>", "C", "a", "b"]
    most_frequent = build_tokenizer(Word(specials=only_pad, order="codepoint", vocab_size=3), given)
    assert [most_frequent.token(id) for id in range(3)] == ["<PAD>", "a", "b"]
    with pytest.raises(TokenizerError, match="'C' is not in the vocabulary, and this tokenizer has no unk token"):
        most_frequent.encode("a C")


def test_words_end_at_whitespace_or_also_at_punctuation() -> None:
    text = "We'll see, he said."
    whitespace, punctuation = build_tokenizer(Word(), [text]), build_tokenizer(Word(split="punctuation"), [text])
    assert [p.text for p in whitespace.token_spans(text)] == ["We'll", "see,", "he", "said."]
    assert [p.text for p in punctuation.token_spans(text)] == ["We", "'", "ll", "see", ",", "he", "said", "."]


@pytest.mark.parametrize("kind", [Word, Char, BPE, Unigram])
def test_lower_casing(kind: Any) -> None:
    tokenizer = build_tokenizer(kind(lowercase=True), ["Some TEXT"])
    assert tokenizer.decode(tokenizer.encode("TEXT Some")) == "text some"


def test_rare_characters_become_bytes_in_a_small_vocabulary() -> None:
    char = build_tokenizer(Char(vocab_size=4 + 256 + 2), ["aaabbc"])
    assert [char.token(id) for id in char.encode("abc")] == ["a", "b", "<0x63>"]
    assert char.decode(char.encode("cab")) == "cab"


def test_wordpiece_holds_every_character_in_both_forms(tokenizers: dict[str, Tokenizer]) -> None:
    piece = tokenizers["wordpiece"]
    letters = "".join(sorted(set("".join(TEXTS).lower()) & set("abcdefghijklmnopqrstuvwxyz")))
    assert piece.unk_id not in piece.encode(f"{letters} {letters[::-1]}")  # in unseen positions
    assert {f"##{letter}" for letter in letters} <= {piece.token(id) for id in range(piece.vocab_size)}


def test_without_a_size_the_text_decides() -> None:
    assert 259 < build_tokenizer(BPE(), TEXTS).vocab_size < 8192


@pytest.mark.parametrize(
    "config",
    [
        Word(specials=Specials(unk="the", eos="dog.")),
        Word(split="punctuation", specials=Specials(unk="<unk>", eos="dog")),
        BPE(specials=Specials(pad="quick", eos="!!")),
        WordPiece(specials=Specials(unk="[UNK]", mask="quick", sep="dog")),
        Unigram(specials=Specials(unk="quick", eos="dog.", extra=("the fox", "(or"))),
    ],
)
def test_special_tokens_that_are_words_of_the_text(config: TrainedConfig) -> None:
    tokenizer = build_tokenizer(config, [*TEXTS, "wow!! !!"])
    ids = tokenizer.encode("The quick the fox and the dog. (or wow!! quick<pad>)")
    assert set(tokenizer.special_tokens.values()) & set(ids) <= {tokenizer.unk_id}
    loaded = Tokenizer.from_json(tokenizer.to_json(), tokenizer.roles)
    assert loaded.encode("The quick the fox and the dog. (or wow!! quick<pad>)") == ids


# ---- refusals


@pytest.mark.parametrize("config", [Word(), Char(), BPE(), WordPiece(), Unigram()], ids=lambda c: c.kind)
def test_an_empty_corpus_is_refused(config: TrainedConfig) -> None:
    for nothing in ([], [""], ["", ""]):
        with pytest.raises(TokenizerError, match="no text to train the tokenizer on"):
            build_tokenizer(config, nothing)
    if isinstance(config, Word | WordPiece):
        with pytest.raises(TokenizerError, match="only white space"):
            build_tokenizer(config, ["  \n"])


@pytest.mark.parametrize("kind", ["word", "char", "bpe", "wordpiece", "unigram"])
def test_a_vocabulary_too_large_for_the_text_or_too_small_for_its_alphabet_is_refused(kind: str) -> None:
    with pytest.raises(TokenizerError, match=r"vocab_size = 9999: the text supports (\d+) at most") as raised:
        build_tokenizer(CONFIGS[kind].replace(vocab_size=9999), TEXTS)
    supported = int(str(raised.value).split("supports ")[1].split()[0])
    assert build_tokenizer(CONFIGS[kind].replace(vocab_size=supported), TEXTS).vocab_size == supported
    with pytest.raises(TokenizerError, match=r"vocab_size = 3: too small; .* need at least (\d+)") as raised:
        build_tokenizer(CONFIGS[kind].replace(vocab_size=3), TEXTS)
    minimum = int(str(raised.value).split("at least ")[1].split()[0])
    with pytest.raises(TokenizerError, match=f"need at least {minimum}"):
        build_tokenizer(CONFIGS[kind].replace(vocab_size=minimum - 1), TEXTS)
    assert build_tokenizer(CONFIGS[kind].replace(vocab_size=minimum), TEXTS).vocab_size == minimum


def test_lone_surrogates_are_refused() -> None:
    for config in (Char(), BPE(), Unigram()):
        with pytest.raises(TokenizerError, match=r"lone surrogate, U\+D800 at character 1"):
            build_tokenizer(config, ["fine", "a\ud800"])


def test_errors_of_the_source_are_passed_on() -> None:
    def failing() -> Iterator[str]:
        yield "some text"
        raise DataError("the disk is gone")

    for config in (Word(), Char(), BPE(), WordPiece(), Unigram()):
        with pytest.raises(DataError, match="the disk is gone"):
            build_tokenizer(config, failing())


class Recipe(Config):
    tokenizer: TokenizerConfig


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"kind": "bpee"}, r"tokenizer\.kind = 'bpee': unknown kind; did you mean 'bpe'"),
        ({"kind": "bpe", "vocab_size": 0}, r"tokenizer\.vocab_size = 0"),
        ({"kind": "byte", "vocab_size": 300}, r"tokenizer\.vocab_size: unknown key"),
        ({"kind": "char", "fallback": "unk", "specials": {"pad": "<p>"}}, r"needs specials\.unk"),
        ({"kind": "wordpiece", "specials": {"pad": "<p>"}}, r"needs specials\.unk"),
        ({"kind": "unigram", "specials": {"pad": "<p>"}}, r"needs specials\.unk"),
        ({"kind": "word", "specials": {"pad": "p"}}, "'p' cannot be a special token"),
        ({"kind": "word", "specials": {"extra": ["<0x41>"]}}, "'<0x41>' cannot be a special token"),
    ],
)
def test_invalid_configs_are_refused(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(Recipe, {"tokenizer": tree})
