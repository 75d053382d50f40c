"""SentencePiece model files (Kudo and Richardson 2018), made into tokenizers that give the same ids.

The file is a protocol-buffers message; what is needed of it is read here: pieces with scores and kinds, the kind of
model, and how a text is prepared. The text is prepared as a whole before anything is found in it, as SentencePiece
does, so that white space beside a symbol counts as it does there.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.errors import TokenizerError
from weft.text.bounds import check_letters, check_pieces
from weft.text.config import Role
from weft.text.token_bytes import BYTE_TOKEN, byte_tokens

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
FOREIGN = 7  # here alone: a piece that a vocabulary has and the model lacks
UNIGRAM, BPE, WORD, CHAR = range(1, 5)
ROLE_FIELDS: dict[Role, tuple[int, int]] = {"pad": (43, -1), "unk": (40, 0), "bos": (41, 1), "eos": (42, 2)}  # and id
SPACE = "▁"
STAND_IN = 0xE000  # private use: symbols that the replacement of characters would change hide behind these
MAX_MERGED_CHARACTERS = 256  # of a piece whose merges are looked for: each place in it costs a copy
TRIM = rf"\A +|[ {SPACE}]+\z"  # what goes at a text's ends
SEVERAL = " {2,}"  # which become one
PREFIX = r"\A(?"  # so begin the expressions that put a space before a text
ABSENT = -1e3  # the score of a foreign character: better than unk, worse than all else
NEVER = -1e6  # of a foreign piece of several: worse than pieces that spell it
UNKNOWN_RUN = "\x1a"  # ASCII's substitute: stands for characters that make one unknown piece

V = TypeVar("V", int, bytes)


class Piece(NamedTuple):
    """An entry of the vocabulary."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePiece:
    """The content of a model file."""

    pieces: list[Piece]
    kind: int
    roles: dict[Role, str]
    byte_fallback: bool
    charsmap: bytes  # how characters are replaced, compiled; empty for none
    composes: bool  # the replacement composes characters, as NFKC does
    dummy_prefix: bool
    squeeze: bool  # white space at both ends goes, and the rest becomes single spaces


def is_sentencepiece(data: bytes) -> bool:
    """Whether a file begins as these do: with a piece, which begins with its text."""
    return len(data) > 3 and data[0] == 0x0A and b"\x0a" in data[2:6]


def to_tokenizer(data: bytes, vocabulary: Mapping[str, int] | None = None) -> tuple[Tokenizer, dict[Role, str]]:
    """The tokenizer of a model file's content, and its special tokens by role.

    `vocabulary` gives pieces other ids, as Marian's models have it, where one vocabulary serves two model files: what
    it lacks is never cut, and what only it has is cut where it is the one character that the model doesn't know.
    """
    model = parse(data)
    (check_pieces if model.kind == UNIGRAM else check_letters)(piece.text for piece in model.pieces)
    pieces = model.pieces if vocabulary is None else _renumbered(model, vocabulary)
    unknown = next(place for place, piece in enumerate(pieces) if piece.kind == UNKNOWN)
    if model.kind == UNIGRAM:  # the cut whose pieces' scores sum to the most (Kudo 2018)
        vocab = [(p.text, ABSENT if p.kind == UNUSED else p.score) for p in pieces]
        backend = Tokenizer(models.Unigram(vocab, unk_id=unknown, byte_fallback=model.byte_fallback))
    else:
        ids, merges = {piece.text: id for id, piece in enumerate(pieces)}, _merges(model, pieces)
        unk = pieces[unknown].text
        backend = Tokenizer(models.BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=model.byte_fallback))
    symbols = [piece.text for piece in pieces if piece.kind == USER_DEFINED]
    steps = _preparation(model, symbols)
    if not model.byte_fallback and (runs := _unknown(model, pieces)):
        steps.append(normalizers.Replace(Regex(runs), UNKNOWN_RUN))
    backend.normalizer = normalizers.Sequence(steps)
    if model.kind == UNIGRAM and (cuts := _cuts(pieces)):  # entries of the vocabulary that are no text are never found
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(cuts), "merged_with_previous")
    ending = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix or model.squeeze else []
    joining = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*joining, *ending])
    special = [piece.text for piece in pieces if piece.kind in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(symbol, normalized=True) for symbol in symbols])
    return backend, model.roles


def _cuts(pieces: list[Piece]) -> str:
    """A pattern for the character after which what looks like an entry that is no text is cut: where the model cuts it
    if it has no such entry. So what stands around it is read as ever, and a run of unknown characters stays one."""
    hidden = {piece.text: piece.kind for piece in pieces if piece.kind in (CONTROL, UNKNOWN, BYTE)}
    texts = [(UNKNOWN_RUN, 0.0), *((piece.text, piece.score) for piece in pieces if piece.text not in hidden)]
    model, cuts = models.Unigram(texts, unk_id=0, byte_fallback=False), []
    for text, kind in hidden.items():
        first = len(model.tokenize(text)[0].value)
        if first == len(text) and kind == UNKNOWN:
            continue  # of unknown characters alone: unknown either way
        end = min(first, len(text) - 1) or 1
        before, last, after = (re.escape(part) for part in (text[: end - 1], text[end - 1], text[end:]))
        cuts.append(f"(?<={before}){last}(?={after})" if before else f"{last}(?={after})")
    return "|".join(cuts)


def _unknown(model: SentencePiece, pieces: list[Piece]) -> str:
    """A pattern for what is one unknown piece to the model, unless the vocabulary has it; empty if it has none such."""
    known = {SPACE, *"".join(piece.text for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED))}
    foreign = {piece.text for piece in pieces if piece.kind == FOREIGN and len(piece.text) == 1} - known
    if not foreign:
        return ""
    either, neither = ("".join(map(re.escape, sorted(some))) for some in (known, known | foreign))
    return f"[^{either}]{{2,}}|[^{neither}]"


def _renumbered(model: SentencePiece, vocabulary: Mapping[str, int]) -> list[Piece]:
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise TokenizerError(f"the vocabulary's ids do not run from 0 to {len(vocabulary) - 1}")
    known = {piece.text: piece for piece in model.pieces}
    order = sorted(vocabulary, key=vocabulary.__getitem__)
    pieces = [known.get(text, Piece(text, ABSENT if len(text) == 1 else NEVER, FOREIGN)) for text in order]
    if not any(piece.kind == UNKNOWN for piece in pieces):
        raise TokenizerError(f"the vocabulary has no {model.roles.get('unk', '<unk>')}, which SentencePiece needs")
    return pieces


def _merges(model: SentencePiece, pieces: list[Piece]) -> list[tuple[str, str]]:
    """In the order of what they make: SentencePiece joins the two neighbours whose union scores highest."""
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


def _preparation(model: SentencePiece, symbols: list[str]) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if compiled := model.charsmap:
        size = struct.unpack_from("<I", compiled)[0] if len(compiled) >= 4 else len(compiled)
        if size % 4 or size > len(compiled) - 4:
            raise TokenizerError(f"a damaged SentencePiece file: its normalizer of {len(compiled)} bytes is cut short")
        try:
            table = normalizers.Precompiled(compiled)
        except Exception as error:
            raise TokenizerError(f"a damaged SentencePiece file: its normalizer: {error}") from None
        stand_ins = {symbol: chr(STAND_IN + place) for place, symbol in enumerate(symbols)}
        kept = [(symbol, each) for symbol, each in stand_ins.items() if table.normalize_str(symbol) != symbol]
        steps += [normalizers.Replace(symbol, stand_in) for symbol, stand_in in kept]
        # composed first: the library looks characters up one by one where a composition is longer than five bytes
        steps += [normalizers.NFC(), table] if model.composes else [table]
        steps += [normalizers.Replace(stand_in, symbol) for symbol, stand_in in kept]
    if model.squeeze:
        steps += [normalizers.Replace(Regex(TRIM), ""), normalizers.Replace(Regex(SEVERAL), " ")]
    if model.dummy_prefix:
        # The library looks for symbols in the prepared text, and prepares them too: alone they get no prefix.
        alone = "|".join(re.escape(symbol) for symbol in symbols)
        unless = f"!(?:{alone})\\z)(?" if symbols else ""
        steps.append(normalizers.Replace(Regex(rf"{PREFIX}{unless}=[\s\S])"), " "))
    steps.append(normalizers.Replace(" ", SPACE))
    return steps


def parse(data: bytes) -> SentencePiece:
    """The content of a model file; what is no vocabulary, or cannot be given the same ids, is refused."""
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    preparation: dict[int, int | bytes] = {}
    for field, value in _fields(data):
        if field in (1, 2, 3):
            inner = dict(_fields(_value({field: value}, field, b"")))
            if field == 1:
                pieces.append(_piece(inner))
            else:
                (trainer if field == 2 else preparation).update(inner)
    unknown = [piece.text for piece in pieces if piece.kind == UNKNOWN]
    if len(unknown) != 1:
        raise TokenizerError("not a SentencePiece model: it has no unknown piece, or several")
    if len({piece.text for piece in pieces}) < len(pieces):
        raise TokenizerError("a damaged SentencePiece file: a piece occurs twice")
    kind, byte_fallback = _value(trainer, 3, UNIGRAM), bool(_value(trainer, 35, 0))
    if kind not in (UNIGRAM, BPE, CHAR):
        named = "word" if kind == WORD else str(kind)
        raise TokenizerError(f"a SentencePiece model of kind {named} is not supported; unigram, bpe and char are")
    if _value(trainer, 24, 0):
        raise TokenizerError("a SentencePiece model that marks the end of words (whitespace as suffix) is unsupported")
    if not _value(preparation, 5, 1):
        raise TokenizerError("a SentencePiece model that leaves spaces as they are (escape_whitespaces) is unsupported")
    missing = set(byte_tokens()) - {piece.text for piece in pieces if piece.kind == BYTE}
    if byte_fallback and missing:
        raise TokenizerError(f"a damaged SentencePiece file: byte fallback without the piece {sorted(missing)[0]}")
    ids = {role: _value(trainer, field, usual) for role, (field, usual) in ROLE_FIELDS.items()}
    played = {role: pieces[id] for role, id in ids.items() if 0 <= id < len(pieces)}
    roles = {role: piece.text for role, piece in played.items() if piece.kind in (CONTROL, UNKNOWN)}
    return SentencePiece(
        pieces=pieces,
        kind=kind,
        roles=roles | {"unk": unknown[0]},
        byte_fallback=byte_fallback,
        charsmap=_value(preparation, 2, b""),
        composes=b"nfkc" in _value(preparation, 1, b""),
        dummy_prefix=bool(_value(preparation, 3, 1)),
        squeeze=bool(_value(preparation, 4, 1)),
    )


def _piece(fields: Mapping[int, int | bytes]) -> Piece:
    try:
        text = _value(fields, 1, b"").decode("utf-8")
    except UnicodeDecodeError:
        raise TokenizerError("a damaged SentencePiece file: a piece is not UTF-8 text") from None
    score = struct.unpack("<f", _value(fields, 2, b"\0" * 4))[0]
    kind = _value(fields, 3, NORMAL)
    if not text or not NORMAL <= kind <= BYTE or score != score or (kind == BYTE and not BYTE_TOKEN.fullmatch(text)):
        raise TokenizerError(f"a damaged SentencePiece file: piece {text!r} of kind {kind}, score {score}")
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, (number, value): protocol buffers' wire format."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        match key & 7:
            case 0:
                value, place = _varint(data, place)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, place = _varint(data, place)
            case 5:
                size = 4
            case _:
                raise TokenizerError(f"not a SentencePiece model: no field begins at byte {place}")
        if size > len(data) - place:
            raise TokenizerError(f"not a SentencePiece model, or a truncated one: no {size} bytes at byte {place}")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise TokenizerError(f"not a SentencePiece model, or a truncated one: a number breaks off at byte {place}")


def _value(fields: Mapping[int, int | bytes], field: int, default: V) -> V:
    """A field's number or bytes, as the default is; negative numbers are stored in 64 bits of two's complement."""
    value = fields.get(field, default)
    if type(value) is not type(default):
        kind = "a number" if isinstance(default, int) else "text"
        raise TokenizerError(f"not a SentencePiece model: field {field} is not {kind}")
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value
