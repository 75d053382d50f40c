"""Tokenizers of GGUF files: ids equal those of transformers and sentencepiece."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tests.interop.gguf_models import TEXTS
from tests.later import Later
from tests.text.test_sentencepiece import block, number, piece

from weft.errors import InteropError
from weft.interop.gguf.file import ENCODINGS, LazyTensor, open_file, typed, write_file
from weft.interop.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    USER,
    read_tokenizer,
    tokenizer_keys,
)
from weft.text.config import BPE, Byte, Char, Specials, Unigram, Word
from weft.text.token_bytes import byte_letters, byte_tokens
from weft.text.tokenizer import Tokenizer, build_tokenizer

transformers = Later("transformers")

gguf = pytest.importorskip("gguf", reason="transformers needs the package gguf to read such files")


def keys_of(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def keys_in(path: Path) -> dict[str, Any]:
    return {key: value.value for key, value in open_file(path).keys.items()}


def write_tokenizer(path: Path, keys: dict[str, Any]) -> None:
    """Write a file with a tokenizer, and the little else that transformers requires."""
    general = {"general.architecture": "llama", "general.file_type": 0}
    general |= {f"llama.{name}": 64 for name in ("block_count", "context_length", "embedding_length")}
    typed_keys = {key: typed(value) for key, value in {**general, **keys}.items()}
    write_file(
        path, typed_keys, [LazyTensor("t", (1,), ENCODINGS[0], lambda: torch.zeros(1))], advance=lambda done: None
    )


def byte_level_keys(pre: str) -> dict[str, Any]:
    """A vocabulary with merges across all boundaries of pre-tokenizers: digits, spaces, apostrophes."""
    letters = sorted(byte_letters())
    merges = [
        "1 9",
        "8 4",
        "19 84",
        "Ġ Ġ",
        "ĠĠ 1",
        "Ġ 1",
        "t h",
        "th e",
        "Ġ the",
        "' s",
        "c a",
        "ca t",
        "cat 's",
        "1 2",
    ]
    tokens = ["<|end|>", *letters, *(merge.replace(" ", "") for merge in merges), "<think>"]
    types = [CONTROL, *[NORMAL] * (len(tokens) - 2), USER]
    ids = {"eos_token_id": 0, "bos_token_id": 0}
    return keys_of(tokens=tokens, token_type=types, model="gpt2", pre=pre, merges=merges, **ids)


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2"])
def test_byte_level_ids_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "m.gguf", byte_level_keys(pre))
    ours = read_tokenizer(keys_in(tmp_path / "m.gguf"), "")
    assert ours is not None
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in (*TEXTS, "a<think>b", "THE'S 19841984  12", "x\r\n y  1"):
        assert ours.encode(text, specials=True) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("a<|end|>b", specials=True)[1] == 0
    assert 0 not in ours.encode("a<|end|>b")


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("deepseek-v3", "19 8 4 cat 's Ġthe ĠĠ Ġthe"),  # at most three digits, and a suffix apart
        ("llama4", "19 8 4 cat's Ġthe ĠĠ Ġthe"),
    ],
)
def test_pre_tokenizers_of_mixtures(pre: str, expected: str) -> None:
    ours = read_tokenizer(byte_level_keys(pre), "")
    assert ours is not None
    assert [ours.token(id) for id in ours.encode("1984cat's the   the")] == expected.split()


def test_smollm_keeps_digits_apart() -> None:
    """As in SmolLM2's tokenizer.json and llama.cpp; transformers ignores this name."""
    ours = read_tokenizer(byte_level_keys("smollm"), "")
    assert ours is not None
    tokens = [ours.token(id) for id in ours.encode("the  1984")]
    assert tokens == ["the", "ĠĠ", "1", "9", "8", "4"]


def pieces_keys(**options: Any) -> dict[str, Any]:
    pieces = [
        "▁",
        "t",
        "h",
        "e",
        "c",
        "a",
        "s",
        "th",
        "▁t",
        "the",
        "▁the",
        "▁th",
        "at",
        "cat",
        "▁c",
        "▁cat",
        "▁▁",
        "sat",
    ]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens(), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in (9, 9, 9, 9, 9, 9, 9, 1, 0, 3, 2, 4, 5, 6, 7, 8, 10, 6)]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return keys_of(tokens=tokens, token_type=types, model="llama", scores=scores, **ids, **options)


def model_file() -> bytes:
    """A small tokenizer.model like LLaMA's, with the pieces of `pieces_keys`."""
    keys = pieces_keys()
    rows = zip(*(keys[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")), strict=True)
    trainer = block(2, number(3, 2) + number(35, 1))  # BPE with byte fallback
    return (
        b"".join(piece(*row) for row in rows) + trainer + block(3, block(1, b"identity") + number(3, 1) + number(4, 0))
    )


SPACED = (*TEXTS, "the cat", "thecatsat", "the  cat sat 🙂", " the", "cat\nthe", " ", "▁the")


def test_sentencepiece_ids_are_those_of_sentencepiece_and_transformers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "m.gguf", pieces_keys())
    ours = read_tokenizer(keys_in(tmp_path / "m.gguf"), "")
    assert ours is not None
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    reference = sentencepiece.SentencePieceProcessor(model_proto=model_file())
    for text in SPACED:
        ids = ours.encode(text)
        assert ids == reference.encode(text), text
        assert ours.decode(ids) == reference.decode(ids), text
        if not text.startswith((" ", "▁")):  # here transformers adds no space before the text
            assert ids == theirs.encode(text, add_special_tokens=False), text
            assert ours.decode(ids) == theirs.decode(ids), text
    assert ours.roles == {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
    with_bos = tokenizers.Tokenizer.from_str(ours.to_json()).encode("the").ids  # by the file's post-processor
    assert with_bos == ours.encode("the", bos=True)


def test_a_tokenizer_model_is_written_and_read(tmp_path: Path) -> None:
    """LLaMA's tokenizer.model adds a space before a text and keeps repeated spaces."""
    (tmp_path / "tokenizer.model").write_bytes(model_file())
    ours = Tokenizer.load(tmp_path)
    keys = tokenizer_keys(ours, ours.vocab_size)
    expected = pieces_keys()
    for name in ("tokens", "token_type", "model", "bos_token_id", "eos_token_id", "unknown_token_id"):
        assert keys[f"tokenizer.ggml.{name}"] == expected[f"tokenizer.ggml.{name}"]
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    again = read_tokenizer(keys, "")
    assert again is not None
    for text in SPACED:
        assert again.encode(text) == ours.encode(text), text
        assert again.decode(ours.encode(text)) == ours.decode(ours.encode(text)), text
    (tmp_path / "alone").mkdir()
    write_tokenizer(tmp_path / "alone/m.gguf", keys)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "alone", gguf_file="m.gguf")
    for text in (text for text in SPACED if not text.startswith((" ", "▁"))):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text), text


def test_a_sentencepiece_without_a_space_before_the_text() -> None:
    ours = read_tokenizer(pieces_keys(add_space_prefix=False), "")
    assert ours is not None
    assert [ours.token(id) for id in ours.encode("the cat")] == ["the", "▁cat"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_keys_are_written_as_read(pre: str) -> None:
    keys = byte_level_keys(pre)
    tokenizer = read_tokenizer(keys, "")
    assert tokenizer is not None
    stored = tokenizer_keys(tokenizer, tokenizer.vocab_size + 3, pre)
    for name in ("model", "pre", "merges"):
        assert stored[f"tokenizer.ggml.{name}"] == keys[f"tokenizer.ggml.{name}"]
    again = read_tokenizer(stored, "")
    assert again is not None
    assert again.to_json() == tokenizer.to_json()  # padding tokens are removed


def test_a_byte_tokenizer_is_written_and_read(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(Byte())
    write_tokenizer(tmp_path / "t.gguf", tokenizer_keys(tokenizer, tokenizer.vocab_size))
    again = read_tokenizer(keys_in(tmp_path / "t.gguf"), "")
    assert again is not None
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert gguf.GGUFReader(tmp_path / "t.gguf").fields["tokenizer.ggml.merges"].types[0] == gguf.GGUFValueType.ARRAY


@pytest.mark.parametrize(
    "options", [{}, {"add_space_prefix": False}, {"add_bos_token": False}, {"add_eos_token": True}]
)
def test_sentencepiece_keys_are_written_as_read(options: dict[str, Any]) -> None:
    tokenizer = read_tokenizer(pieces_keys(**options), "")
    assert tokenizer is not None
    again = read_tokenizer(tokenizer_keys(tokenizer, tokenizer.vocab_size), "")
    assert again is not None
    assert again.to_json() == tokenizer.to_json()


def test_a_character_tokenizer_is_written_and_read() -> None:
    tokenizer = build_tokenizer(Char(fallback="bytes"), TEXTS)
    again = read_tokenizer(tokenizer_keys(tokenizer, tokenizer.vocab_size), "")
    assert again is not None
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Word(), "can't have a word tokenizer"),
        (Unigram(vocab_size=285), "can't have a unigram tokenizer"),
        (Char(fallback="unk", specials=Specials(unk="<unk>")), "with byte fallback"),
        (BPE(vocab_size=260, lowercase=True), "no name for"),
    ],
)
def test_tokenizers_that_the_format_cannot_hold_are_refused(config: Any, message: str) -> None:
    tokenizer = build_tokenizer(config, TEXTS[:1])
    with pytest.raises(InteropError, match=message):
        tokenizer_keys(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model = 'bert': available: gpt2, llama"),
        ({"model": ["gpt2"]}, r"tokenizer.ggml.model = \['gpt2'\]: did you mean 'gpt2'"),
        ({"pre": "tekken-9"}, "tokenizer.ggml.pre = 'tekken-9'"),
        ({"merges": ["a b c"]}, "'a b c' is not two tokens"),
        ({"merges": ["qq ww"]}, "the tokenizer: not a tokenizer"),
        ({"eos_token_id": 5000}, "eos_token_id = 5000: there are 272 tokens"),
        ({"token_type": [1, 2, 3]}, "a number for each of the 272 tokens"),
        ({"tokens": [1, 2]}, "expected an array of strings"),
    ],
)
def test_the_message_names_the_error(change: dict[str, Any], message: str) -> None:
    keys = byte_level_keys("gpt-2") | keys_of(**change)
    with pytest.raises(InteropError, match=message) as caught:
        read_tokenizer(keys, "m.gguf")
    assert str(caught.value).startswith("m.gguf: ")
    assert "\n" not in str(caught.value)


def test_a_sentencepiece_needs_scores() -> None:
    keys = pieces_keys()
    del keys["tokenizer.ggml.scores"]
    with pytest.raises(InteropError, match=r"tokenizer\.ggml\.scores: expected a number for every token"):
        read_tokenizer(keys, "m.gguf")


def test_a_file_may_have_no_tokenizer() -> None:
    assert read_tokenizer({}, "m.gguf") is None
