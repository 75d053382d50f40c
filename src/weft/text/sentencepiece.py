"""SentencePiece model files (Kudo and Richardson 2018), converted to tokenizers that give the same ids.

The file is a protocol-buffers message; this module reads the fields it needs: pieces with scores and types, the type of
model, and the normalization. Like SentencePiece, the tokenizer normalizes a text as a whole before it finds symbols in
it, so that whitespace beside a symbol counts as it does there.
"""

import re
import struct
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.errors import TokenizerError
from weft.text.bounds import check_letters, check_trie
from weft.text.config import Role
from weft.text.token_bytes import BYTE_TOKEN, byte_tokens

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces
FOREIGN = 7  # not in the file format: a piece of an external vocabulary that the model lacks
UNIGRAM, BPE, WORD, CHAR = range(1, 5)  # types of models
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # types of fields in protocol buffers

# Fields of sentencepiece_model.proto that are read: number and default. bytes stand for strings, messages and floats.
Fields = Mapping[str, tuple[int, int | bytes]]
PIECES, TRAINER_SPEC, NORMALIZER_SPEC = 1, 2, 3  # fields of the model itself
PIECE: Fields = {"piece": (1, b""), "score": (2, bytes(4)), "type": (3, NORMAL)}
_PROTO = tomllib.loads(Path(__file__).with_name("sentencepiece.toml").read_text(encoding="utf-8"))
TRAINER: Fields = {name: (number, default) for name, (number, default) in _PROTO["trainer"].items()}
NORMALIZER: Fields = {name: (n, b"" if value == "" else value) for name, (n, value) in _PROTO["normalizer"].items()}
ROLES: tuple[Role, ...] = ("pad", "unk", "bos", "eos")

SPACE = "▁"
STAND_IN = 0xE000  # first of the private-use characters that protect symbols from normalization
MAX_MERGED_CHARACTERS = 256  # of a piece whose merges are computed, which takes quadratic time
TRIM = rf"\A +|[ {SPACE}]+\z"  # spaces at the ends of a text, which are removed
SEVERAL = " {2,}"  # spaces that become one
PREFIX = r"\A(?"  # begins the expressions that prepend a space to a text
ABSENT = -1e3  # score of a foreign character: better than unk, worse than all pieces
NEVER = -1e6  # score of a longer foreign piece: worse than the pieces that spell it
UNKNOWN_RUN = "\x1a"  # ASCII's substitute character, for consecutive characters that are one unknown piece


class ModelPiece(NamedTuple):
    """An entry of the vocabulary."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """Content of a model file."""

    pieces: list[ModelPiece]
    kind: int
    roles: dict[Role, str]
    byte_fallback: bool
    charsmap: bytes  # compiled table of character replacements; may be empty
    composes: bool  # the table composes characters, as NFKC does
    dummy_prefix: bool
    squeeze: bool  # strip whitespace at both ends, and merge it elsewhere


def is_sentencepiece(data: bytes) -> bool:
    """Return whether a file begins like a model file: with a piece, which begins with its text."""
    return len(data) > 3 and data[0] == 0x0A and b"\x0a" in data[2:6]


def to_tokenizer(data: bytes, vocabulary: Mapping[str, int] | None = None) -> tuple[Tokenizer, dict[Role, str]]:
    """Return the tokenizer of a model file, and its special tokens by role.

    `vocabulary` replaces the ids, as in Marian's models, where one vocabulary serves two model files. Pieces that it
    lacks are never produced. Pieces that only it has are produced for single characters that the model doesn't know.
    """
    model = parse(data)
    (check_trie if model.kind == UNIGRAM else check_letters)(piece.text for piece in model.pieces)
    pieces = model.pieces if vocabulary is None else _renumber(model, vocabulary)
    unknown = next(id for id, piece in enumerate(pieces) if piece.kind == UNKNOWN)
    if model.kind == UNIGRAM:  # the segmentation with the highest sum of scores (Kudo 2018)
        vocab = [(p.text, ABSENT if p.kind == UNUSED else p.score) for p in pieces]
        backend = Tokenizer(models.Unigram(vocab, unk_id=unknown, byte_fallback=model.byte_fallback))
    else:
        ids, merges = {piece.text: id for id, piece in enumerate(pieces)}, _merges(model, pieces)
        unk = pieces[unknown].text
        backend = Tokenizer(models.BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=model.byte_fallback))
    symbols = [piece.text for piece in pieces if piece.kind == USER_DEFINED]
    steps = _normalization(model, symbols)
    if not model.byte_fallback and (runs := _unknown_runs(model, pieces)):
        steps.append(normalizers.Replace(Regex(runs), UNKNOWN_RUN))
    backend.normalizer = normalizers.Sequence(steps)
    if model.kind == UNIGRAM and (splits := _look_alike_splits(pieces)):
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(splits), "merged_with_previous")
    strip = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix or model.squeeze else []
    join = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*join, *strip])
    special = [piece.text for piece in pieces if piece.kind in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(symbol, normalized=True) for symbol in symbols])
    return backend, model.roles


def _look_alike_splits(pieces: list[ModelPiece]) -> str:
    """A pattern for the character after which to split text that looks like a control, unknown or byte piece.

    The split is where the model without that piece would segment the text, so that the text around it is segmented as
    usual and a run of unknown characters stays one piece.
    """
    hidden = {piece.text: piece.kind for piece in pieces if piece.kind in (CONTROL, UNKNOWN, BYTE)}
    visible = [(UNKNOWN_RUN, 0.0), *((piece.text, piece.score) for piece in pieces if piece.text not in hidden)]
    model, splits = models.Unigram(visible, unk_id=0, byte_fallback=False), []
    for text, kind in hidden.items():
        first = len(model.tokenize(text)[0].value)
        if first == len(text) and kind == UNKNOWN:
            continue  # consists of unknown characters, so it is unknown in any case
        end = min(first, len(text) - 1) or 1
        before, last, after = (re.escape(part) for part in (text[: end - 1], text[end - 1], text[end:]))
        splits.append(f"(?<={before}){last}(?={after})" if before else f"{last}(?={after})")
    return "|".join(splits)


def _unknown_runs(model: SentencePieceModel, pieces: list[ModelPiece]) -> str:
    """A pattern for characters that are one unknown piece to the model; empty if the vocabulary adds none of them."""
    known = {SPACE, *"".join(piece.text for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED))}
    foreign = {piece.text for piece in pieces if piece.kind == FOREIGN and len(piece.text) == 1} - known
    if not foreign:
        return ""
    either, neither = ("".join(map(re.escape, sorted(each))) for each in (known, known | foreign))
    return f"[^{either}]{{2,}}|[^{neither}]"


def _renumber(model: SentencePieceModel, vocabulary: Mapping[str, int]) -> list[ModelPiece]:
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise TokenizerError(f"the vocabulary's ids do not run from 0 to {len(vocabulary) - 1}")
    known = {piece.text: piece for piece in model.pieces}
    order = sorted(vocabulary, key=vocabulary.__getitem__)
    pieces = [known.get(text, ModelPiece(text, ABSENT if len(text) == 1 else NEVER, FOREIGN)) for text in order]
    if not any(piece.kind == UNKNOWN for piece in pieces):
        raise TokenizerError(f"the vocabulary has no {model.roles.get('unk', '<unk>')}, which SentencePiece needs")
    return pieces


def _merges(model: SentencePieceModel, pieces: list[ModelPiece]) -> list[tuple[str, str]]:
    """Merges in the order of their results' scores: SentencePiece joins the neighbours whose union scores highest."""
    if any(piece.kind == UNUSED for piece in pieces):
        raise TokenizerError("a SentencePiece BPE model with unused pieces is not supported")
    scores = {piece.text: piece.score for piece in pieces if piece.kind == NORMAL}
    merges: list[tuple[float, int, tuple[str, str]]] = []
    for text, score in scores.items() if model.kind == BPE else ():
        for cut in range(1, len(text) if len(text) <= MAX_MERGED_CHARACTERS else 1):
            left, right = text[:cut], text[cut:]
            if left in scores and right in scores:
                merges.append((-score, -cut, (left, right)))
    merges.sort(key=lambda merge: merge[:2])
    return [pair for _, _, pair in merges]


def _normalization(model: SentencePieceModel, symbols: list[str]) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if compiled := model.charsmap:
        size = struct.unpack_from("<I", compiled)[0] if len(compiled) >= 4 else len(compiled)
        if size % 4 or size > len(compiled) - 4:
            raise TokenizerError(f"a damaged SentencePiece file: its normalizer of {len(compiled)} bytes is cut short")
        try:
            table = normalizers.Precompiled(compiled)
        except Exception as error:
            raise TokenizerError(f"a damaged SentencePiece file: its normalizer: {error}") from None
        stand_ins = {symbol: chr(code) for code, symbol in enumerate(symbols, start=STAND_IN)}
        changed = [(symbol, each) for symbol, each in stand_ins.items() if table.normalize_str(symbol) != symbol]
        steps += [normalizers.Replace(symbol, stand_in) for symbol, stand_in in changed]
        # compose first: the library looks up single characters where a composition is longer than five bytes
        steps += [normalizers.NFC(), table] if model.composes else [table]
        steps += [normalizers.Replace(stand_in, symbol) for symbol, stand_in in changed]
    if model.squeeze:
        steps += [normalizers.Replace(Regex(TRIM), ""), normalizers.Replace(Regex(SEVERAL), " ")]
    if model.dummy_prefix:
        # the library normalizes symbols too, before it finds them in the normalized text: alone, they get no prefix
        alone = "|".join(re.escape(symbol) for symbol in symbols)
        unless = f"!(?:{alone})\\z)(?" if symbols else ""
        steps.append(normalizers.Replace(Regex(rf"{PREFIX}{unless}=[\s\S])"), " "))
    steps.append(normalizers.Replace(" ", SPACE))
    return steps


def parse(data: bytes) -> SentencePieceModel:
    """Parse a model file; refuse one that is no vocabulary, or whose ids can't be reproduced."""
    messages: dict[int, list[bytes]] = {PIECES: [], TRAINER_SPEC: [], NORMALIZER_SPEC: []}
    for number, value in _wire_fields(data):
        if number in messages:
            messages[number].append(_typed(value, b"", number))
    pieces = [_piece(_message(each, PIECE)) for each in messages[PIECES]]
    # a message that occurs several times is merged, which is what concatenation does
    trainer = _message(b"".join(messages[TRAINER_SPEC]), TRAINER)
    normalizer = _message(b"".join(messages[NORMALIZER_SPEC]), NORMALIZER)
    unknown = [piece.text for piece in pieces if piece.kind == UNKNOWN]
    if len(unknown) != 1:
        raise TokenizerError("not a SentencePiece model: it has no unknown piece, or several")
    if len({piece.text for piece in pieces}) < len(pieces):
        raise TokenizerError("a damaged SentencePiece file: a piece occurs twice")
    kind, byte_fallback = trainer["model_type"], bool(trainer["byte_fallback"])
    if kind not in (UNIGRAM, BPE, CHAR):
        name = "word" if kind == WORD else str(kind)
        raise TokenizerError(f"a SentencePiece model of kind {name} is not supported; unigram, bpe and char are")
    if trainer["treat_whitespace_as_suffix"]:
        raise TokenizerError("a SentencePiece model that marks the end of words (whitespace as suffix) is unsupported")
    if not normalizer["escape_whitespaces"]:
        raise TokenizerError("a SentencePiece model that leaves spaces as they are (escape_whitespaces) is unsupported")
    missing = set(byte_tokens()) - {piece.text for piece in pieces if piece.kind == BYTE}
    if byte_fallback and missing:
        raise TokenizerError(f"a damaged SentencePiece file: byte fallback without the piece {sorted(missing)[0]}")
    by_role = {role: pieces[id] for role in ROLES if 0 <= (id := trainer[f"{role}_id"]) < len(pieces)}
    roles = {role: piece.text for role, piece in by_role.items() if piece.kind in (CONTROL, UNKNOWN)}
    return SentencePieceModel(
        pieces=pieces,
        kind=kind,
        roles=roles | {"unk": unknown[0]},
        byte_fallback=byte_fallback,
        charsmap=normalizer["precompiled_charsmap"],
        composes=b"nfkc" in normalizer["name"],
        dummy_prefix=bool(normalizer["add_dummy_prefix"]),
        squeeze=bool(normalizer["remove_extra_whitespaces"]),
    )


def _piece(fields: Mapping[str, Any]) -> ModelPiece:
    try:
        text = fields["piece"].decode("utf-8")
    except UnicodeDecodeError:
        raise TokenizerError("a damaged SentencePiece file: a piece is not UTF-8 text") from None
    (score,), kind = struct.unpack("<f", fields["score"]), fields["type"]
    if not text or not NORMAL <= kind <= BYTE or score != score or (kind == BYTE and not BYTE_TOKEN.fullmatch(text)):
        raise TokenizerError(f"a damaged SentencePiece file: piece {text!r} of kind {kind}, score {score}")
    return ModelPiece(text, score, kind)


def _message(data: bytes, fields: Fields) -> dict[str, Any]:
    """Return the fields of a message by name, with defaults for missing ones."""
    values = dict(_wire_fields(data))
    return {name: _typed(values.get(number, default), default, number) for name, (number, default) in fields.items()}


def _typed(value: int | bytes, default: int | bytes, number: int) -> Any:
    """Check that a value has the type of the default; negative integers are 64-bit two's complement."""
    if type(value) is not type(default):
        kind = "a number" if isinstance(default, int) else "text"
        raise TokenizerError(f"not a SentencePiece model: field {number} is not {kind}")
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def _wire_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of a message's fields, in protocol buffers' wire format."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if (kind := key & 7) not in (VARINT, FIXED64, LENGTH, FIXED32):
            raise TokenizerError(f"not a SentencePiece model: no field begins at byte {at}")
        if kind == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size, at = _varint(data, at) if kind == LENGTH else (8 if kind == FIXED64 else 4, at)
        if size > len(data) - at:
            raise TokenizerError(f"not a SentencePiece model, or a truncated one: no {size} bytes at byte {at}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise TokenizerError(f"not a SentencePiece model, or a truncated one: a number breaks off at byte {at}")
