"""The vocabularies of a CTranslate2 folder, and the tokenizers that give their ids."""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer as WordTokenizer
from tokenizers import models, pre_tokenizers

from weft.errors import InteropError, TokenizerError
from weft.interop.settings import Settings
from weft.interop.tokenizer_json import framed
from weft.storage.untrusted import read_bytes, read_json, read_text
from weft.text import sentencepiece
from weft.text.bounds import call_library
from weft.text.config import Role
from weft.text.tokenizer import Tokenizer

START = "<pad>"  # the token that stands for the zero vector from which Marian's decoder starts


def read_vocabularies(folder: Path) -> dict[str, list[str]]:
    """The tokens of source and target, in the order of their ids; they may be one list for both sides."""
    found = {}
    for side in ("source", "target"):
        names = [f"{name}_vocabulary.{end}" for name in ("shared", side) for end in ("json", "txt")]
        file = next((folder / name for name in names if (folder / name).is_file()), None)
        if file is None:
            raise InteropError(f"{folder}: no {side} vocabulary; expected one of {', '.join(names)}")
        if file.suffix == ".json":
            tokens = read_json(file)
        else:
            tokens = [line.removesuffix("\r") for line in read_text(file).split("\n")]
            tokens = tokens if tokens[-1] else tokens[:-1]
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise InteropError(f"{file}: expected a list of tokens")
        if len(set(tokens)) < len(tokens):
            raise InteropError(f"{file}: a token appears twice")
        found[side] = tokens
    return found


def read_tokenizers(
    folder: Path, config: Settings, vocabularies: Mapping[str, list[str]], zero_start: bool
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
    opens = config.text("bos_token", "<s>")
    begin = start if zero_start else config.text("decoder_start_token", opens)
    unk, eos = config.text("unk_token", "<unk>"), config.text("eos_token", "</s>")
    roles: dict[Role, str] = {"unk": unk, "eos": eos, "pad": START, "bos": begin}
    # what transformers' converter makes of Marian's models leaves eos to their tokenizer, which adds it
    ends = zero_start or config.flag("add_source_eos", False)
    before, after = [opens] * config.flag("add_source_bos", False), [eos] * ends
    needed = (("target", target, (roles["bos"], eos)), ("source", source, (*before, *after)))
    for side, tokens, its in needed:
        missing = next((token for token in its if token not in tokens), None)
        if missing is not None:
            raise InteropError(f"{folder}: its settings ask for {missing!r}, which the {side} vocabulary lacks")
    source_file, target_file = _sentencepiece_file(folder, "source"), _sentencepiece_file(folder, "target")
    ours = _tokenizer(target_file, target, roles)
    if shared and source_file == target_file:
        return framed(ours, before, after), None
    return ours, framed(_tokenizer(source_file, source, roles), before, after)


def marian_files(folder: Path, vocabularies: Mapping[str, list[str]]) -> dict[str, bytes]:
    """The files of Marian's own tokenizer, by which an export of its model reads and writes with two of them."""
    files = {f"{side}.spm": _sentencepiece_file(folder, side) for side in ("source", "target")}
    tokens = vocabularies["target"]
    if vocabularies["source"] != tokens or START in tokens or None in files.values():
        return {}
    vocabulary = {token: id for id, token in enumerate([*tokens, START])}
    settings = {"tokenizer_class": "MarianTokenizer", "source_lang": None, "target_lang": None}
    made = {"vocab.json": vocabulary, "tokenizer_config.json": {**settings, "separate_vocabs": False}}
    read = {name: read_bytes(file) for name, file in files.items() if file is not None}
    return read | {name: json.dumps(tree, ensure_ascii=False).encode() for name, tree in made.items()}


def _sentencepiece_file(folder: Path, side: str) -> Path | None:
    """The SentencePiece model of one side, beside the model or, in some packages, in the folder above."""
    named = [folder / f"{side}.spm", folder / "sentencepiece.model", folder / "spm.model"]
    return next((file for file in [*named, folder.parent / "sentencepiece.model"] if file.is_file()), None)


def _tokenizer(file: Path | None, tokens: list[str], roles: Mapping[Role, str]) -> Tokenizer:
    """SentencePiece with these ids; without its file, for text whose tokens are separated by spaces already."""
    vocabulary = {token: id for id, token in enumerate(tokens)}
    try:
        if file is not None:
            backend = call_library(lambda: sentencepiece.to_tokenizer(read_bytes(file), vocabulary))[0]
        else:
            backend = call_library(lambda: WordTokenizer(models.WordLevel(vocabulary, unk_token=roles["unk"])))
            backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return Tokenizer.from_json(backend.to_str(), roles)
    except TokenizerError as error:
        raise InteropError(f"{file or 'the vocabulary'}: {error}") from None
