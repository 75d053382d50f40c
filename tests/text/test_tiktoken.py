"""tiktoken's rank files give the ids that tiktoken gives."""

import base64
from pathlib import Path

import pytest

from weft.config import validate
from weft.errors import ConfigError, TokenizerError
from weft.text.config import Pattern, Pretrained
from weft.text.tokenizer import Tokenizer, build_tokenizer
from weft.text.vocabularies import KNOWN, PATTERNS, from_ranks

MERGED = [b"th", b" t", b" th", b"the", b" the", b"aa", b"aaa", b"in", b"ing", "é".encode(), b"12", b"  ", b"\n\n"]
RANKS = {bytes([byte]): byte for byte in range(256)} | {token: 256 + rank for rank, token in enumerate(MERGED)}
HARD = ["", " ", "the thing's 12345 is here", "aaaaaaaa the\n\n  thé\r\n", "DON'T we'll café 日本語 🙂  ", "a/b//c\n/x"]


def rank_file(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "small.tiktoken").write_bytes(rank_file(RANKS))
    return tmp_path / "small.tiktoken"


def test_ids_are_ranks(file: Path) -> None:
    tokenizer = build_tokenizer(Pretrained(path=str(file), pattern="gpt2"))
    assert tokenizer.encode("the the") == [RANKS[b"the"], RANKS[b" the"]]
    assert tokenizer.encode("aaaa") == [RANKS[b"aa"], RANKS[b"aa"]]
    assert tokenizer.roles == {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (len(RANKS), len(RANKS) + 1)
    assert tokenizer.eos_id not in tokenizer.encode("<|endoftext|>")
    for text in HARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert Tokenizer.load(file.parent, "gpt2").fingerprint == tokenizer.fingerprint


def test_patterns_split_differently(file: Path) -> None:
    assert len({tuple(Tokenizer.load(file, name).encode("WeDon't 12345/\n")) for name in PATTERNS}) > 1


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_tiktoken_agrees(pattern: Pattern, file: Path) -> None:
    theirs = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    encoding = theirs.Encoding("small", pat_str=PATTERNS[pattern], mergeable_ranks=RANKS, special_tokens={})
    ours = Tokenizer.load(file, pattern)
    for text in HARD:
        assert ours.encode(text) == encoding.encode_ordinary(text), text


def test_a_known_number_of_ranks_decides_pattern_and_specials() -> None:
    ranks = dict(RANKS)
    ranks |= {b"\0%d" % rank: rank for rank in range(len(ranks), 50256)}
    backend, roles = from_ranks(rank_file(ranks))
    assert roles == {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
    assert backend.token_to_id("<|endoftext|>") == 50256
    for count, (_, specials) in KNOWN.items():  # only in GPT-2's vocabulary may a special token have the id of a rank
        assert min(specials.values()) >= count or count == 50280


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (rank_file(RANKS), "269 ranks match no known vocabulary; set pattern, how text is split, to one of gpt2"),
        (rank_file(RANKS)[:900], "the byte .* has no rank|not a token in base64"),
        (rank_file(RANKS) + b"YQ== 7\n", "line 270 repeats a token"),
        (rank_file(RANKS) + b"YWE9 7\n", "two tokens have one rank"),
        (rank_file(RANKS) + b"YWE9 -7\n", "line 270"),
        (rank_file(RANKS) + b"%%% 300\n", "line 270 is not a token in base64"),
    ],
)
def test_invalid_files_are_refused_in_one_line(data: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "bad.tiktoken").write_bytes(data)
    with pytest.raises(TokenizerError, match=expected) as error:
        Tokenizer.load(tmp_path / "bad.tiktoken")
    assert "\n" not in str(error.value)


def test_an_unknown_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pattern = 'cl10k'.*cl100k"):
        validate(Pretrained, {"kind": "pretrained", "path": "x", "pattern": "cl10k"})
