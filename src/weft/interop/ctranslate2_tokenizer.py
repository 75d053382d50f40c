"""The vocabularies of a CTranslate2 folder, and the tokenizers that give their ids."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as WordTokenizer
from tokenizers import models, pre_tokenizers

from weft.errors import InteropError, TokenizerError
from weft.text import sentencepiece
from weft.text.bounds import careful
from weft.text.config import Role
from weft.text.tokenizer import Tokenizer
from weft.untrusted import read_bytes, read_json, read_text

START = "<pad>"  # the token that stands for the zero vector from which Marian's decoder starts


def read_vocabularies(folder: Path) -> dict[str, list[str]]:
    """The tokens of source and target, in the order of their ids; they may be one list for both sides."""
    found = {}
    for side in ("source", "target"):
        names = [f"{name}_vocabulary.{end}" for name in ("shared", side) for end in ("json", "txt")]
        file = next((folder / name for name in names if (folder / name).is_file()), None)
        if file is None:
            raise InteropError(f"{folder}: no {side} vocabulary; expected one of {', '.join(names)}")
        tokens = read_json(file) if file.suffix == ".json" else _lines(file)
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise InteropError(f"{file}: expected a list of tokens")
        if len(set(tokens)) < len(tokens):
            raise InteropError(f"{file}: a token appears twice")
        found[side] = tokens
    return found


def _lines(file: Path) -> list[str]:
    lines = [line.removesuffix("\r") for line in read_text(file).split("\n")]
    return lines[:-1] if not lines[-1] else lines


def read_tokenizers(
    folder: Path, config: Mapping[str, Any], vocabularies: Mapping[str, list[str]], zero_start: bool
) -> tuple[Tokenizer, Tokenizer | None]:
    """The tokenizer of the target, and the source's where it is another.

    With `zero_start` the target gets one more token, which stands for the zero vector that the decoder starts from.
    """
    source, target = vocabularies["source"], vocabularies["target"]
    shared = source == target
    start = START if START not in target else "<start>"
    if zero_start:
        target = [*target, start]
        source = target if shared else source
    named = {key: _named(folder, config, key) for key in ("unk_token", "eos_token", "bos_token", "decoder_start_token")}
    begin = start if zero_start else named["decoder_start_token"] or named["bos_token"] or "<s>"
    unk, eos = named["unk_token"] or "<unk>", named["eos_token"] or "</s>"
    roles: dict[Role, str] = {"unk": unk, "eos": eos, "pad": START, "bos": begin}
    source_file, target_file = _sentencepiece_file(folder, "source"), _sentencepiece_file(folder, "target")
    ours = _tokenizer(target_file, target, roles)
    return ours, None if shared and source_file == target_file else _tokenizer(source_file, source, roles)


def _named(folder: Path, config: Mapping[str, Any], key: str) -> str | None:
    token = config.get(key)
    if token is not None and not isinstance(token, str):
        raise InteropError(f"{folder / 'config.json'}: {key} = {token!r:.60}: expected a token, as text")
    return token


def _sentencepiece_file(folder: Path, side: str) -> Path | None:
    """The SentencePiece model of one side, beside the model or, in some packages, in the folder above."""
    named = [folder / f"{side}.spm", folder / "sentencepiece.model", folder / "spm.model"]
    return next((file for file in [*named, folder.parent / "sentencepiece.model"] if file.is_file()), None)


def _tokenizer(file: Path | None, tokens: list[str], roles: Mapping[Role, str]) -> Tokenizer:
    """SentencePiece with these ids; without its file, for text whose tokens are separated by spaces already."""
    vocabulary = {token: id for id, token in enumerate(tokens)}
    try:
        if file is not None:
            backend = careful(lambda: sentencepiece.to_tokenizer(read_bytes(file), vocabulary))[0]
            return Tokenizer.from_json(backend.to_str(), roles)
        backend = careful(lambda: WordTokenizer(models.WordLevel(vocabulary, unk_token=roles["unk"])))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return Tokenizer.from_json(backend.to_str(), roles)
    except TokenizerError as error:
        raise InteropError(f"{file or 'the vocabulary'}: {error}") from None
