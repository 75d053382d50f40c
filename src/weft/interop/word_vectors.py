"""Read and write files of word vectors: word2vec's text and binary formats, and GloVe's.

word2vec, text     400000 100\n        then a line per word: the word and its numbers, separated by spaces
word2vec, binary   400000 100\n        then per word: the word, a space, float32 values, and usually a newline
GloVe              as word2vec's text, without the first line
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.errors import InteropError, TokenizerError
from weft.interop.bundle import ModelBundle, lazy_weights
from weft.models.config import GloVe, StaticVectors, Word2Vec
from weft.progress import bar
from weft.storage.files import replacing
from weft.storage.untrusted import Cursor, map_file
from weft.text.config import Specials, Word
from weft.text.tokenizer import Tokenizer
from weft.text.training import train

HEADER = re.compile(rb"(\d{1,10}) (\d{1,5})\r?\n")
MAX_WORD_BYTES = 1 << 12
MAX_LINE_BYTES = 1 << 17  # a word and its numbers
MAX_WIDTH = 2048  # numbers of a vector
UNK = "<unk>"  # added if the file has none, as zeros
TEXT, BINARY, GLOVE = "word2vec", "word2vec-binary", "glove"
TITLES = {TEXT: "word2vec, text", BINARY: "word2vec, binary", GLOVE: "GloVe"}

Floats = NDArray[np.float32]
Rows = Iterator[tuple[bytes, Floats]]


def recognises(path: Path) -> bool:
    """Whether a file begins as one with word vectors."""
    return path.suffix != ".pt" and path.is_file() and _form(path) is not None


def _form(path: Path) -> str | None:
    with path.open("rb") as file:
        start = file.read(MAX_LINE_BYTES)
    if header := HEADER.match(start):
        second = start[header.end() :].partition(b"\n")[0].split()
        return TEXT if len(second) > int(header[2]) and _number(second[-1]) else BINARY
    cells = start.partition(b"\n")[0].split()
    return (
        GLOVE
        if path.suffix in (".txt", ".vec", ".glove") and len(cells) > 2 and all(map(_number, cells[-2:]))
        else None
    )


def _number(cell: bytes) -> bool:
    return re.fullmatch(rb"[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|inf)", cell.lower()) is not None


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """Read vectors and the vocabulary. Of a word that occurs twice, the first vector counts."""
    if tokenizer is not None:
        raise InteropError(f"--tokenizer {tokenizer}: {path} has its words; leave it out")
    form = _form(path)
    assert form is not None, "only called for files that are recognised"
    cursor = Cursor(path, map_file(path))
    words: dict[str, Floats] = {}
    with bar("reading vectors", len(cursor.data), unit="bytes") as advance:
        done = 0
        for number, (raw, vector) in enumerate(_binary(cursor) if form == BINARY else _lines(cursor, form), 1):
            try:
                word = raw.decode("utf-8")
            except UnicodeDecodeError:
                raise cursor.error(f"word {number}, {raw!r:.60}, is not UTF-8") from None
            if not word or not word.isprintable() or not np.isfinite(vector).all():
                what = "is empty or not printable" if not word or not word.isprintable() else "has a number not finite"
                raise cursor.error(f"word {number}, {word!r:.60}, {what}")
            words.setdefault(word, vector)
            advance(cursor.offset - done)
            done = cursor.offset
    if not words:
        raise cursor.error("it has no words")
    vectors = np.stack(list(words.values()))
    if UNK not in words:
        words[UNK] = vectors[0]
        vectors = np.concatenate([vectors, np.zeros_like(vectors[:1])])
    kind: type[StaticVectors] = GloVe if form == GLOVE else Word2Vec
    weights = {"embedding.weight": torch.from_numpy(vectors)}
    return ModelBundle(
        model=kind(vocab_size=len(words), d_model=vectors.shape[1]),  # type: ignore[arg-type]
        weights=lazy_weights(weights.__getitem__, weights),
        tokenizer=_tokenizer(path, list(words)),
        origin=f"{path.name} ({TITLES[form]})",
    )


def _header(cursor: Cursor) -> tuple[int, int]:
    """Read the number of words and the width from the first line, refusing what the file has no bytes for."""
    header = HEADER.match(bytes(cursor.data[:64]))
    assert header is not None, "the format was recognised by it"
    count, width = int(header[1]), int(header[2])
    cursor.take(header.end(), "the header")
    return count, _check_width(cursor, width)


def _check_width(cursor: Cursor, width: int) -> int:
    if not 0 < width <= MAX_WIDTH:
        raise cursor.error(f"vectors of {width} numbers; expected 1 to {MAX_WIDTH:,}")
    return width


def _binary(cursor: Cursor) -> Rows:
    count, width = _header(cursor)
    if count * (4 * width + 2) > len(cursor.data):
        what = f"its header says {count:,} words of {width} numbers"
        raise cursor.error(f"{what}, which do not fit into its {len(cursor.data):,} bytes")
    for number in range(1, count + 1):
        start = bytes(cursor.data[cursor.offset : cursor.offset + MAX_WORD_BYTES])
        length = start.find(b" ")
        if length < 0:
            raise cursor.error(f"truncated or damaged: no end of word {number} at byte {cursor.offset:,}")
        word = bytes(cursor.take(length + 1, f"word {number}"))[:-1].lstrip(b"\n")
        raw = cursor.take(4 * width, f"the vector of word {number}")
        yield word, np.frombuffer(raw, dtype="<f4").astype(np.float32)
    if bytes(cursor.data[cursor.offset :]).strip():
        raise cursor.error(f"{cursor.left:,} bytes after the {count:,} words that its header says")


def _lines(cursor: Cursor, form: str) -> Rows:
    count, width = _header(cursor) if form == TEXT else (None, None)
    number, stream = 0, memoryview(cursor.data)
    while cursor.left:
        raw = bytes(stream[cursor.offset : cursor.offset + MAX_LINE_BYTES])
        end = raw.find(b"\n")
        if end < 0 and len(raw) == MAX_LINE_BYTES:
            raise cursor.error(f"line {number + 1} is longer than {MAX_LINE_BYTES >> 10} KiB: not word vectors")
        line = raw if end < 0 else raw[: end + 1]
        cursor.take(len(line), "a line")
        line = line.rstrip(b" \r\n")
        if not line:
            continue
        number += 1
        if width is None:
            if b"\t" in line:
                raise cursor.error("tabs in its first line; expected a word and its numbers, separated by spaces")
            width = _check_width(cursor, line.count(b" "))
        word, *cells = line.rsplit(b" ", width)
        try:
            vector = np.array([float(cell) for cell in cells], dtype=np.float32)
        except ValueError:
            vector = np.zeros(0, dtype=np.float32)
        if len(vector) != width or (b" " in word and _number(word.rpartition(b" ")[2])):
            name = word.decode("utf-8", "replace")
            raise cursor.error(f"word {number}, {name!r:.60}: expected {width} numbers after it")
        yield word, vector
    if count is not None and number != count:
        raise cursor.error(f"truncated or damaged: its header says {count:,} words, and it has {number:,}")


def _tokenizer(path: Path, words: list[str]) -> Tokenizer:
    """Return a tokenizer whose ids are the rows of the file; without capitals in it, texts are read in lower case."""
    lowercase = not any(word != word.lower() for word in words)
    settings = Word(specials=Specials(unk=UNK), lowercase=lowercase, split="punctuation")
    tree: dict[str, Any] = json.loads(train(settings, ["a"]).to_str())
    tree["model"]["vocab"] = {word: id for id, word in enumerate(words)}
    tree["added_tokens"] = [{**token, "id": words.index(UNK)} for token in tree["added_tokens"]]
    try:
        return Tokenizer.from_json(json.dumps(tree), {"unk": UNK})
    except TokenizerError as error:
        raise InteropError(f"{path}: {error}") from None


def write(bundle: ModelBundle, path: Path, form: str) -> str:
    """Write a model's vectors without those of special tokens; return a description."""
    if not isinstance(bundle.model, StaticVectors):
        raise InteropError(f"--to {form}: only word vectors (word2vec, GloVe); this is a '{bundle.model.kind}' model")
    assert bundle.tokenizer is not None
    specials = set(bundle.tokenizer.special_tokens.values())
    table = bundle.weights["embedding.weight"]().float().numpy()
    # a special token with a vector is one that the file had
    ids = [id for id in range(bundle.tokenizer.vocab_size) if id not in specials or table[id].any()]
    with replacing(path) as file, bar("writing", len(ids)) as advance:
        if form != GLOVE:
            file.write(f"{len(ids)} {table.shape[1]}\n".encode())
        for id in ids:
            _write_row(file, bundle.tokenizer.token(id), table[id], form=form)
            advance(1)
    return f"{len(ids):,} vectors of {table.shape[1]} numbers, {TITLES[form]}"


def _write_row(file: IO[bytes], word: str, vector: Floats, *, form: str) -> None:
    if form == BINARY:
        if " " in word:
            raise InteropError(f"--to {form}: {word!r:.60} contains a space, which ends a word in this format")
        file.write(word.encode() + b" " + vector.astype("<f4").tobytes() + b"\n")
    else:
        file.write(f"{word} {' '.join(map(str, vector))}\n".encode())
