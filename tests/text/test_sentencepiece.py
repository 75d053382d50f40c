"""SentencePiece files give the ids that SentencePiece gives."""

import io
import random
import struct
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.text.conftest import TEXTS

from weft.errors import TokenizerError
from weft.text.config import Pretrained
from weft.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, to_tokenizer
from weft.text.token_bytes import byte_tokens
from weft.text.tokenizer import Tokenizer, build_tokenizer

LOOK_ALIKE = "</s><s><unk> <0x41>"
HARD = [
    *["", " ", "  two  spaces ", "a\tb\nc\r\nd", "naïve café ﬁne ①½ ｆｕｌｌ", "aaaaaaaaaaaaaaaaaaa", "▁x ▁▁"],
    *["日本語 한국어 🙂 e\u0301 \u00a0x\u200by", unicodedata.normalize("NFD", "한국어 Việt"), LOOK_ALIKE],
    *["a<sep>b <sep> c<sep><sep>", "<sep>begins, and ends <sep>", "line\nand line\n"],
]


# ---- handwritten files


def varint(value: int) -> bytes:
    value %= 2**64
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def block(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def piece(text: str, score: float = 0.0, kind: int = NORMAL) -> bytes:
    return block(1, block(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind))


SPECIALS = piece("<unk>", 0, UNKNOWN) + piece("<s>", 0, CONTROL) + piece("</s>", 0, CONTROL)
PIECES = SPECIALS + piece("▁", -3) + piece("a", -2) + piece("b", -2.5) + piece("ab", -3) + piece("▁a", -3.5)
PLAIN = block(3, number(3, 1) + number(4, 1))


def tokenizer_of(data: bytes) -> Tokenizer:
    backend, roles = to_tokenizer(data)
    return Tokenizer.from_json(backend.to_str(), roles)


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(id) for id in tokenizer.encode(text)]


def test_unigram_takes_the_highest_sum_of_scores() -> None:
    unigram = tokenizer_of(PIECES + block(2, number(3, 1)) + PLAIN)
    assert unigram.kind == "unigram"
    assert unigram.roles == {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
    assert tokens(unigram, "ab ab") == ["▁", "ab", "▁", "ab"]  # −6, before ▁a b (−6)
    assert tokens(unigram, " a  zz a") == ["▁a", "▁", "<unk>", "▁a"]
    assert unigram.decode(unigram.encode("ab a")) == "ab a"


def test_bpe_merges_the_highest_score_first_and_a_char_model_nothing() -> None:
    bpe = tokenizer_of(PIECES + block(2, number(3, 2)) + PLAIN)
    assert bpe.kind == "bpe"
    assert tokens(bpe, "ab a") == ["▁", "ab", "▁a"]
    assert tokens(tokenizer_of(PIECES + block(2, number(3, 4)) + PLAIN), "ab") == ["▁", "a", "b"]


def test_byte_fallback() -> None:
    with_bytes = PIECES + b"".join(piece(token, 0, BYTE) for token in byte_tokens())
    for kind in (1, 2):
        tokenizer = tokenizer_of(with_bytes + block(2, number(3, kind) + number(35, 1)) + PLAIN)
        assert tokens(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
        assert "<0x61>" not in tokens(tokenizer, "<0x61>")  # a look-alike of a byte token
        assert tokenizer.decode(tokenizer.encode("aé\nb")) == "aé\nb"


def test_normalization_follows_the_file() -> None:
    bare = block(3, number(3, 0) + number(4, 0))
    assert tokens(tokenizer_of(PIECES + bare), "a  b ") == ["a", "▁", "▁", "b", "▁"]
    assert tokens(tokenizer_of(PIECES + PLAIN), "a  b ") == ["▁a", "▁", "b"]


def test_symbols_stay_whole_and_control_pieces_are_no_text() -> None:
    symbol = piece("<sep>", 0, USER_DEFINED) + piece("<ctl>", 0, CONTROL)
    for kind in (1, 2):
        tokenizer = tokenizer_of(PIECES + symbol + block(2, number(3, kind)) + PLAIN)
        assert tokens(tokenizer, "a<sep> b") == ["▁a", "<sep>", "▁", "b"]
        assert tokenizer.id("<ctl>") not in tokenizer.encode("<ctl></s>")
        assert tokenizer.special_tokens.keys() == {"<unk>", "<s>", "</s>", "<ctl>"}


def test_another_vocabulary_changes_the_ids() -> None:
    order = ["</s>", "<unk>", "▁a", "b", "a", "▁", "ü", "<pad>"]
    for kind in (1, 2):
        data = PIECES + block(2, number(3, kind)) + PLAIN
        backend, roles = to_tokenizer(data, {token: id for id, token in enumerate(order)})
        tokenizer = Tokenizer.from_json(backend.to_str(), {**roles, "pad": "<pad>"})
        assert tokenizer.encode("ab ü z") == [2, 3, 5, 6, 5, 1]
        assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.vocab_size) == (0, 7, None, 8)
        assert 7 not in tokenizer.encode("<pad>")
    with pytest.raises(TokenizerError, match="ids do not run from 0 to 1"):
        to_tokenizer(PIECES + PLAIN, {"<unk>": 0, "a": 7})


# ---- against SentencePiece itself


def train_sentencepiece(texts: Sequence[str], kind: str, vocab_size: int, **options: object) -> tuple[bytes, Any]:
    """The file of a trained model, and SentencePiece's processor of it."""
    theirs, file = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed"), io.BytesIO()
    options |= {"model_type": kind, "vocab_size": vocab_size, "hard_vocab_limit": False, "num_threads": 1}
    theirs.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=file, minloglevel=2, **options)
    return file.getvalue(), theirs.SentencePieceProcessor(model_proto=file.getvalue())


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"byte_fallback": True, "pad_id": 3},
        {"user_defined_symbols": ["<sep>", "\n"], "control_symbols": ["<ctl>"], "remove_extra_whitespaces": False},
        {"normalization_rule_name": "identity", "add_dummy_prefix": False, "user_defined_symbols": ["<sep>"]},
    ],
    ids=["plain", "bytes", "symbols", "bare"],
)
def test_sentencepiece_agrees(kind: str, options: dict[str, object], tmp_path: Path) -> None:
    file, theirs = train_sentencepiece(TEXTS, kind, 420 if "byte_fallback" in options else 150, **options)
    (tmp_path / "x.model").write_bytes(file)
    ours = build_tokenizer(Pretrained(path=str(tmp_path / "x.model")))
    assert ours.vocab_size == theirs.get_piece_size()
    roles = {"unk_id": theirs.unk_id(), "bos_id": theirs.bos_id(), "eos_id": theirs.eos_id()}
    assert {name: getattr(ours, name) for name in roles} == roles
    assert ours.pad_id == (3 if "pad_id" in options else None)
    for text in [*TEXTS[:4], *HARD]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_pieces_of_another_vocabulary(kind: str) -> None:
    """As in CTranslate2 and Marian: SentencePiece segments, and pieces that the vocabulary lacks are unknown."""
    texts = ["the cat sat on the mat", "a dog and a cat", "the mat is red, the dog is not"]
    file, cutter = train_sentencepiece(texts, kind, 30)
    pieces = [cutter.id_to_piece(id) for id in range(cutter.get_piece_size())]
    order = ["</s>", "▁Hund", "é", "<unk>", "house", *reversed(pieces[3:]), "<s>", "п", "р", "▁caté", "<pad>"]
    vocabulary, rng = {token: id for id, token in enumerate(order)}, random.Random(0)
    backend, roles = to_tokenizer(file, vocabulary)
    ours = Tokenizer.from_json(backend.to_str(), {**roles, "pad": "<pad>"})
    words = ["the ", "cat", "é", "п", "пр", "привет", "東", "🙂", " house", "Hund", *pieces[:3], "<pad>", "zz", " "]
    for text in [*TEXTS[:4], *("".join(rng.choices(words, k=rng.randrange(1, 7))) for _ in range(300))]:
        expected = [vocabulary.get(piece, vocabulary["<unk>"]) for piece in cutter.encode(text, out_type=str)]
        assert ours.encode(text) == expected, text


# ---- invalid files


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (PIECES[:-3] + PLAIN, "not a SentencePiece model"),
        ((PIECES + PLAIN)[:-1], "truncated"),
        (PIECES[len(piece("<unk>", 0, UNKNOWN)) :] + PLAIN, "no unknown piece"),
        (PIECES + piece("a") + PLAIN, "occurs twice"),
        (PIECES + piece("x", float("nan")), "damaged"),
        (PIECES + piece("x", 0, 9), "damaged"),
        (PIECES + block(1, block(1, b"\xff\xfe")), "not UTF-8"),
        (PIECES + block(2, number(3, 3)), "kind word is not supported"),
        (PIECES + block(2, number(24, 1)), "end of words"),
        (PIECES + block(3, number(5, 0)), "escape_whitespaces"),
        (PIECES + block(2, number(35, 1)), "byte fallback without the piece <0x00>"),
        (PIECES + block(3, block(2, b"\xff\xff\xff\x7f....")), "cut short"),
        (PIECES + block(3, block(2, struct.pack("<I", 8) + b"\xff" * 12)), "not a tokenizer|damaged"),
        (PIECES + b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "truncated"),
        (PIECES + block(2, block(3, b"x")), "field 3 is not a number"),
    ],
)
def test_invalid_files_are_refused_in_one_line(data: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "bad.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=expected) as error:
        Tokenizer.load(tmp_path / "bad.model")
    assert "\n" not in str(error.value)
    assert "bad.model" in str(error.value)
