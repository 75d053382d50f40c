"""Finished tokenizers in the files of other programs: which format a file has, and the tokenizer it describes.

SentencePiece models and tiktoken's rank files have rooms of their own (`sentencepiece.py`, `tiktoken.py`). Here are
the two that are a list of tokens: BERT's vocab.txt, and GPT-2's vocab.json with merges.txt beside it.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from weft.errors import TokenizerError
from weft.text import sentencepiece, tiktoken
from weft.text.config import Pattern, Role
from weft.untrusted import parse_json, read_bytes, read_text

# what a folder may hold instead of a tokenizer.json, in the order of preference
FILES = ("tokenizer.model", "spiece.model", "spm.model", "vocab.json", "encoder.json", "vocab.txt")
MERGES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}
MAX_WORD_CHARACTERS = 100  # BERT makes longer words unknown

Found = tuple[Tokenizer, dict[Role, str] | None]  # None: customary names take their roles


def in_folder(folder: Path) -> Path | None:
    """The vocabulary that a folder holds, if it holds one."""
    named = [folder / name for name in FILES] + sorted(folder.glob("*.tiktoken"))
    whole = (file for file in named if file.is_file() and (folder / MERGES.get(file.name, file.name)).is_file())
    return next(whole, None)


def is_vocabulary(file: Path) -> bool:
    """Whether a file is one of these formats, rather than a tokenizer.json, whatever its name."""
    if file.name in MERGES or file.suffix == ".json":
        return file.name in MERGES
    try:
        with file.open("rb") as opened:
            return not opened.read(64).lstrip().startswith(b"{")
    except OSError as error:
        raise TokenizerError(f"{file}: cannot be read: {error.strerror}") from None


def read(file: Path, pattern: Pattern | None = None) -> Found:
    """The tokenizer that a file describes. `pattern` is for rank files, which do not say how text is cut."""
    partner = {merges: vocab for vocab, merges in MERGES.items()}.get(file.name)
    if partner is not None:
        file = file.parent / partner
    if file.name in MERGES:
        return _merged(file, file.parent / MERGES[file.name]), None
    data = read_bytes(file, TokenizerError)
    if tiktoken.is_tiktoken(data):
        return tiktoken.to_tokenizer(data, pattern)
    if pattern is not None:
        raise TokenizerError(f"pattern = '{pattern}' applies to rank files only, and this is not one")
    if sentencepiece.is_sentencepiece(data):
        return sentencepiece.to_tokenizer(data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise TokenizerError("not a tokenizer: neither a SentencePiece model, nor ranks, nor UTF-8 text") from None
    return _bert(text), None


def _bert(text: str) -> Tokenizer:
    """BERT's vocab.txt: a piece a line. It lowercases unless its own pieces hold capitals."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    vocab = {piece: id for id, piece in enumerate(lines)}
    if "[UNK]" not in vocab or not any(piece.startswith("##") for piece in lines):
        raise TokenizerError("not a tokenizer: not a vocab.txt with [UNK] and pieces that begin with ##")
    if len(vocab) < len(lines):
        again = next(piece for id, piece in enumerate(lines) if vocab[piece] != id)
        raise TokenizerError(f"not a tokenizer: the piece {again!r} occurs twice in the vocabulary")
    cased = any(piece != piece.lower() for piece in lines if not (piece[:1] == "[" and piece[-1:] == "]"))
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS))
    backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    if "[CLS]" in vocab and "[SEP]" in vocab:  # the frame that other programs put around a text
        backend.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    return backend


def _merged(vocab_file: Path, merges_file: Path) -> Tokenizer:
    """GPT-2's pair: token → id as JSON, and a merge a line, in order."""
    vocab = parse_json(read_text(vocab_file, TokenizerError), vocab_file.name, TokenizerError)
    merges = read_text(merges_file, TokenizerError)
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if not ids or not all(type(id) is int and 0 <= id < 2**31 for id in ids) or len(set(ids)) < len(ids):
        raise TokenizerError("expected a JSON object that gives each token an id of its own")
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(merges.split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not all(part in vocab for part in (left, right, left + right)):
            raise TokenizerError(f"{merges_file.name}, line {number}: {line!r} does not merge two tokens into a third")
        pairs.append((left, right))
    backend = Tokenizer(models.BPE(vocab, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend
