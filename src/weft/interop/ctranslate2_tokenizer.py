"""The vocabularies of a CTranslate2 folder, and the tokenizers that give their ids."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as WordTokenizer
from tokenizers import models, pre_tokenizers

from weft.errors import InteropError, TokenizerError
from weft.text import sentencepiece
from weft.text.config import Role
from weft.text.tokenizer import Tokenizer

START = "<pad>"  # the token that stands for the zero vector from which Marian's decoder starts


def vocabularies(folder: Path) -> tuple[list[str], list[str]]:
    """The tokens of source and target, in the order of their ids."""
    found = []
    for side in ("source", "target"):
        names = [f"{name}_vocabulary.{end}" for name in ("shared", side) for end in ("json", "txt")]
        file = next((folder / name for name in names if (folder / name).is_file()), None)
        if file is None:
            raise InteropError(f"{folder}: no {side} vocabulary; expected one of {', '.join(names)}")
        tokens = read_json(file) if file.suffix == ".json" else _lines(file)
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise InteropError(f"{file}: expected a list of tokens")
        if len(set(tokens)) < len(tokens):
            raise InteropError(f"{file}: a token stands in it twice")
        found.append(tokens)
    return found[0], found[1]


def _lines(file: Path) -> list[str]:
    lines = [line.removesuffix("\r") for line in _text(file).split("\n")]
    return lines[:-1] if lines and not lines[-1] else lines


def read_json(file: Path) -> Any:
    try:
        return json.loads(_text(file))
    except ValueError as error:
        raise InteropError(f"{file}: not valid JSON: {error}") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InteropError(f"{file}: no UTF-8 text") from None
    except OSError as error:
        raise InteropError(f"{file}: cannot be read: {error.strerror}") from None


def tokenizers(
    folder: Path, config: Mapping[str, Any], source: list[str], target: list[str], zero_start: bool
) -> tuple[Tokenizer, Tokenizer | None]:
    """The tokenizer of the target, and the source's where it is another."""
    shared = source == target
    start = START if START not in target else "<start>"
    if zero_start:
        target = [*target, start]
        source = target if shared else source
    named = {role: config.get(f"{role}_token") for role in ("unk", "eos")} | {"pad": START}
    named["bos"] = start if zero_start else config.get("decoder_start_token") or config.get("bos_token") or "<s>"
    usual = {"unk": "<unk>", "eos": "</s>"}
    roles: dict[Role, str] = {role: named[role] or usual.get(role, "") for role in ("unk", "eos", "pad", "bos")}
    files = [_spm(folder, side) for side in ("source", "target")]
    ours = _tokenizer(files[1], target, roles)
    return ours, None if shared and files[0] == files[1] else _tokenizer(files[0], source, roles)


def _spm(folder: Path, side: str) -> Path | None:
    """The SentencePiece file that cuts one side's text, beside the model or, as some packages have it, one above."""
    named = [folder / f"{side}.spm", folder / "sentencepiece.model", folder / "spm.model"]
    return next((file for file in [*named, folder.parent / "sentencepiece.model"] if file.is_file()), None)


def _tokenizer(file: Path | None, tokens: list[str], roles: Mapping[Role, str]) -> Tokenizer:
    """SentencePiece's cut with these ids; without its file, text whose tokens stand between spaces already."""
    vocabulary = {token: id for id, token in enumerate(tokens)}
    try:
        if file is not None:
            backend = sentencepiece.to_tokenizer(file.read_bytes(), vocabulary)[0]
            return Tokenizer.from_json(backend.to_str(), roles)
        backend = WordTokenizer(models.WordLevel(vocabulary, unk_token=roles["unk"]))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return Tokenizer.from_json(backend.to_str(), roles)
    except (TokenizerError, OSError) as error:
        raise InteropError(f"{file or 'the vocabulary'}: {error}") from None
