"""Vocabularies of other programs: BERT's vocab.txt, GPT-2's vocab.json and merges.txt, tiktoken's rank files.

SentencePiece models are read by `sentencepiece.py`. tokenizer_config.json may accompany any of them.
"""

import base64
import binascii
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from weft.errors import TokenizerError, os_errors
from weft.storage.files import write_text
from weft.storage.untrusted import parse_json, read_bytes, read_text
from weft.text import sentencepiece
from weft.text.bounds import check_letters
from weft.text.config import ROLES, Pattern, Role
from weft.text.token_bytes import byte_letters

# instead of a tokenizer.json, in order of preference
FILES = ("tokenizer.model", "spiece.model", "spm.model", "vocab.json", "encoder.json", "vocab.txt")
MERGES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}
SETTINGS = "tokenizer_config.json"
MAX_WORD_CHARACTERS = 100  # of a word in BERT; longer ones are unknown
MAX_TOKEN_BYTES = 512  # of a token in a rank file

RANK = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\s*")
END = "<|endoftext|>"
_RANKS = tomllib.loads(Path(__file__).with_name("tiktoken.toml").read_text(encoding="utf-8"))
PATTERNS: dict[Pattern, str] = _RANKS["patterns"]
# number of ranks → the pattern that splits text, and the special tokens
KNOWN: dict[int, tuple[Pattern, dict[str, int]]] = {
    known["ranks"]: (known["pattern"], known["specials"]) for known in _RANKS["vocabularies"]
}

Vocabulary = tuple[Tokenizer, dict[Role, str] | None]  # None: roles by customary names


def in_folder(folder: Path) -> Path | None:
    """Return the vocabulary file of a folder, or None."""
    candidates = [folder / name for name in FILES] + sorted(folder.glob("*.tiktoken"))
    complete = (file for file in candidates if file.is_file() and (folder / MERGES.get(file.name, file.name)).is_file())
    return next(complete, None)


def is_vocabulary(file: Path) -> bool:
    """Return whether a file has one of these formats, judged by its content, rather than being a tokenizer.json."""
    if file.name in MERGES or file.suffix == ".json":
        return file.name in MERGES
    with os_errors(file, TokenizerError), file.open("rb") as stream:
        return not stream.read(64).lstrip().startswith(b"{")


def read(file: Path, pattern: Pattern | None = None) -> Vocabulary:
    """Return the tokenizer of a file; `pattern` is for rank files, which don't say how text is split."""
    partners = {merges: vocab for vocab, merges in MERGES.items()}
    file = file.with_name(partners.get(file.name, file.name))
    if file.name in MERGES:
        return _gpt2(file, file.parent / MERGES[file.name]), None
    data = read_bytes(file, TokenizerError)
    if RANK.fullmatch(data[: data.find(b"\n") + 1]):
        return from_ranks(data, pattern)
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
    """Return the tokenizer of BERT's vocab.txt, a piece per line; it lowercases unless pieces have capitals."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    vocab = {piece: id for id, piece in enumerate(lines)}
    if "[UNK]" not in vocab:
        raise TokenizerError("not a tokenizer: not a vocab.txt, with a piece per line and [UNK] among them")
    if len(vocab) < len(lines):
        repeated = next(piece for id, piece in enumerate(lines) if vocab[piece] != id)
        raise TokenizerError(f"not a tokenizer: the piece {repeated!r} occurs twice in the vocabulary")
    cased = any(piece != piece.lower() for piece in lines if not (piece[:1] == "[" and piece[-1:] == "]"))
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS))
    backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    if "[CLS]" in vocab and "[SEP]" in vocab:  # added by other programs
        backend.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    return backend


def _gpt2(vocab_file: Path, merges_file: Path) -> Tokenizer:
    """Return the tokenizer of GPT-2's files: token → id as JSON, and a merge per line, in order."""
    vocab = parse_json(read_text(vocab_file, TokenizerError), vocab_file.name, TokenizerError)
    merges = read_text(merges_file, TokenizerError)
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if not ids or not all(type(id) is int and 0 <= id < 2**31 for id in ids) or len(set(ids)) < len(ids):
        raise TokenizerError("expected a JSON object that gives each token a distinct id")
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


def from_ranks(data: bytes, pattern: Pattern | None = None) -> tuple[Tokenizer, dict[Role, str]]:
    """Return the tokenizer of a rank file, and its special tokens by role. A line is a token in base64 and its rank.

    Neighbours are joined if their union has a rank, lowest first; so every split of a token into two others is a merge.
    `pattern` names the expression that splits text before that, which is not in the file; by default it follows from a
    known number of ranks. A file of another size gets one special token, `<|endoftext|>`, after its last rank.
    """
    ranks = parse_ranks(data)
    check_letters(ranks)
    if pattern is None and len(ranks) not in KNOWN:
        hint = f"set pattern, how text is split, to one of {', '.join(PATTERNS)}"
        raise TokenizerError(f"{len(ranks)} ranks match no known vocabulary; {hint}")
    known, specials = KNOWN.get(len(ranks), ("gpt2", {END: max(ranks.values()) + 1}))
    letters = {byte: letter for letter, byte in byte_letters().items()}
    spelling = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (rank, cut, (spelling[token[:cut]], spelling[token[cut:]]))
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges.sort(key=lambda merge: merge[:2])
    vocab = {spelling[token]: rank for token, rank in ranks.items()} | specials
    backend = Tokenizer(models.BPE(vocab, [pair for _, _, pair in merges], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERNS[pattern or known]), "isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    begin, end = ("<|begin_of_text|>", "<|end_of_text|>") if "<|end_of_text|>" in specials else (END, END)
    roles: dict[Role, str] = {"bos": begin, "eos": end}
    if "<|finetune_right_pad_id|>" in specials:
        roles["pad"] = "<|finetune_right_pad_id|>"
    return backend, roles


def parse_ranks(data: bytes) -> dict[bytes, int]:
    """Return token → rank, which is the token's id."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        word, _, rank = line.partition(b" ")
        try:
            token, value = base64.b64decode(word, validate=True), int(rank)
        except (binascii.Error, ValueError):
            raise TokenizerError(f"not a rank file: line {number} is not a token in base64 and its rank") from None
        if not token or len(token) > MAX_TOKEN_BYTES or token in ranks or not 0 <= value < 2**31:
            raise TokenizerError(f"a damaged rank file: line {number} repeats a token, or is not one")
        ranks[token] = value
    if len(set(ranks.values())) < len(ranks):
        raise TokenizerError("a damaged rank file: two tokens have one rank")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise TokenizerError(f"a damaged rank file, or a truncated one: the byte {missing:#04x} has no rank")
    return ranks


def write_settings(folder: Path, roles: Mapping[Role, str], chat_template: str | None) -> None:
    """Write tokenizer_config.json, where other programs find the special tokens and the template. Raises OSError."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {f"{role}_token": token for role, token in roles.items()}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    write_text(folder / SETTINGS, json.dumps(settings, ensure_ascii=False, indent=2) + "\n")


def read_settings(folder: Path) -> tuple[dict[Role, str] | None, str | None]:
    """Return the roles and the chat template in the files beside a tokenizer.json; None for missing ones."""
    text = optional_text(folder / SETTINGS)
    if text is None:
        return None, optional_text(folder / "chat_template.jinja")
    settings = parse_json(text, str(folder / SETTINGS), TokenizerError)
    if not isinstance(settings, dict):
        raise TokenizerError(f"{folder / SETTINGS}: expected a JSON object")
    named = {role: settings.get(f"{role}_token") for role in ROLES}
    tokens = {role: token.get("content") if isinstance(token, dict) else token for role, token in named.items()}
    roles = {role: token for role, token in tokens.items() if isinstance(token, str)}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates by name
        default = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = default[-1].get("template") if default else None
    template = template if isinstance(template, str) else None
    return roles, template or optional_text(folder / "chat_template.jinja")


def optional_text(path: Path) -> str | None:
    """Return the text of a file, or None if it doesn't exist."""
    return read_text(path, TokenizerError) if os.path.lexists(path) else None
