"""Read the vocabularies of a CTranslate2 folder, and tokenizers that return their ids."""

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

START = "<pad>"  # the token for the zero vector with which Marian's decoder starts


def read_vocabularies(folder: Path) -> dict[str, list[str]]:
    """Tokens of source and target in the order of their ids; both may be the same list."""
    vocabularies = {}
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
        vocabularies[side] = tokens
    return vocabularies


def read_tokenizers(
    folder: Path, config: Settings, vocabularies: Mapping[str, list[str]], *, zero_start: bool
) -> tuple[Tokenizer, Tokenizer | None]:
    """Read the tokenizer of the target and, if it differs, that of the source.

    With `zero_start`, the target gets an additional token for the zero vector with which the decoder starts.
    """
    source, target = vocabularies["source"], vocabularies["target"]
    shared = source == target
    start = START if START not in target else "<start>"
    if zero_start:
        target = [*target, start]
        source = target if shared else source
    bos = config.text("bos_token", "<s>")
    begin = start if zero_start else config.text("decoder_start_token", bos)
    unk, eos = config.text("unk_token", "<unk>"), config.text("eos_token", "</s>")
    roles: dict[Role, str] = {"unk": unk, "eos": eos, "pad": START, "bos": begin}
    # in Marian models converted by transformers, the tokenizer adds eos
    adds_eos = zero_start or config.flag("add_source_eos", False)
    before, after = [bos] * config.flag("add_source_bos", False), [eos] * adds_eos
    needed = (("target", target, (begin, eos)), ("source", source, (*before, *after)))
    for side, tokens, required in needed:
        missing = next((token for token in required if token not in tokens), None)
        if missing is not None:
            raise InteropError(f"{folder}: its settings require {missing!r}, which the {side} vocabulary lacks")
    source_file, target_file = _sentencepiece_file(folder, "source"), _sentencepiece_file(folder, "target")
    tokenizer = _read_tokenizer(target_file, target, roles)
    if shared and source_file == target_file:
        return framed(tokenizer, before, after), None
    return tokenizer, framed(_read_tokenizer(source_file, source, roles), before, after)


def marian_files(folder: Path, vocabularies: Mapping[str, list[str]]) -> dict[str, bytes]:
    """Files of Marian's tokenizer for an export to Hugging Face, which keeps separate SentencePiece models."""
    files = {f"{side}.spm": _sentencepiece_file(folder, side) for side in ("source", "target")}
    tokens = vocabularies["target"]
    if vocabularies["source"] != tokens or START in tokens or None in files.values():
        return {}
    vocabulary = {token: id for id, token in enumerate([*tokens, START])}
    settings = {"tokenizer_class": "MarianTokenizer", "source_lang": None, "target_lang": None}
    trees = {"vocab.json": vocabulary, "tokenizer_config.json": {**settings, "separate_vocabs": False}}
    pieces = {name: read_bytes(file) for name, file in files.items() if file is not None}
    return pieces | {name: json.dumps(tree, ensure_ascii=False).encode() for name, tree in trees.items()}


def _sentencepiece_file(folder: Path, side: str) -> Path | None:
    """SentencePiece model of one side, beside model.bin or, in some packages, in the parent folder."""
    files = [folder / f"{side}.spm", folder / "sentencepiece.model", folder / "spm.model"]
    return next((file for file in [*files, folder.parent / "sentencepiece.model"] if file.is_file()), None)


def _read_tokenizer(file: Path | None, tokens: list[str], roles: Mapping[Role, str]) -> Tokenizer:
    """SentencePiece tokenizer with these ids; without its file, one for text that is already tokenised by spaces."""
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
