"""The tokenizer of a Hugging Face folder, from whichever files it has, and back."""

import json
import re
from pathlib import Path
from typing import Any

from weft.config import Tree
from weft.errors import TokenizerError
from weft.interop.bundle import ModelBundle
from weft.interop.framing import framed, framed_as_its_class, languages_of
from weft.interop.hf_pieces import numbered, read_pieces, tokens_by_id
from weft.models.config import EncoderDecoder, Model
from weft.text import vocabularies
from weft.text.config import ROLES, Role
from weft.text.tokenizer import FILE, Tokenizer
from weft.text.tokenizer_config import FILE as SETTINGS
from weft.untrusted import read_object

SPECIALS = "special_tokens_map.json"
SOURCE = "source"  # the folder of the source's tokenizer in an export of weft; transformers takes it as a subfolder
TOKENIZER_FILES = (
    FILE,
    SETTINGS,
    SPECIALS,
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    *(f"{SOURCE}/{name}" for name in (FILE, SETTINGS, SPECIALS)),
)
MARIAN = ("source.spm", "target.spm", "vocab.json")
LANGUAGE = re.compile(r">>[^<>]+<<$")  # a token that says which language to write


def read_tokenizer(folder: Path, config: Tree, model: Model) -> tuple[Tokenizer | None, Tokenizer | None]:
    """The folder's tokenizer, and another one for the source where it has two; None where it has none.

    Roles come from the tokenizer's own files and then, for those that are missing, from the ids in config.json. What
    an encoder–decoder generates begins with `decoder_start_token_id`, which therefore takes the role of bos.
    """
    found, source = _find(folder, config)
    if found is None:
        return None, None
    roles = {**_special_tokens(folder), **found.roles}
    for role in ROLES:
        token = _token(found, config.get(f"{role}_token_id"))
        if token is not None:
            roles.setdefault(role, token)
    settings = _settings(folder)
    found, source = (
        None if each is None else framed_as_its_class(_with_roles(each, roles), settings, config.get("model_type"))
        for each in (found, source)
    )
    assert found is not None
    if isinstance(model, EncoderDecoder):
        start = _token(found, config.get("decoder_start_token_id"))
        roles |= {"bos": start} if start is not None else {}
    return _with_roles(found, roles), source


def read_languages(folder: Path, config: Tree, tokenizer: Tokenizer) -> Tree | None:
    """How a model of several languages is told which; None for others."""
    return languages_of(tokenizer, _settings(folder), config)


def _settings(folder: Path) -> Tree:
    return read_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}


def _with_roles(tokenizer: Tokenizer, roles: dict[Role, str]) -> Tokenizer:
    """The tokenizer with those of the roles whose tokens it has."""
    return (
        tokenizer
        if roles == tokenizer.roles
        else tokenizer.from_json(tokenizer.to_json(), roles, tokenizer.chat_template)
    )


def _find(folder: Path, config: Tree) -> tuple[Tokenizer | None, Tokenizer | None]:
    """The tokenizer, and the source's where it is another."""
    renumbered = None if (folder / FILE).is_file() else numbered(folder, str(config.get("model_type")))
    if renumbered is not None:
        return renumbered, None
    if (folder / FILE).is_file() or vocabularies.in_folder(folder) is not None:
        other = folder / SOURCE
        return Tokenizer.load(folder), Tokenizer.load(other) if (other / FILE).is_file() else None
    if all((folder / name).is_file() for name in MARIAN):
        vocabulary = tokens_by_id(folder / "vocab.json")
        languages = [token for token in vocabulary if LANGUAGE.match(token)]
        target, source = (read_pieces(folder / name, vocabulary, languages) for name in MARIAN[1::-1])
        return target, source
    return None, None


def _special_tokens(folder: Path) -> dict[Role, str]:
    """The roles that special_tokens_map.json gives, which older folders have beside tokenizer_config.json."""
    tree = read_object(folder / SPECIALS) if (folder / SPECIALS).is_file() else {}
    given = {role: tree.get(f"{role}_token") for role in ROLES}
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in given.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _token(tokenizer: Tokenizer, id: Any) -> str | None:
    id = id[0] if isinstance(id, list) and id else id
    if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < tokenizer.vocab_size:
        return None
    try:
        return tokenizer.token(id)
    except TokenizerError:
        return None


# ---- writing


def tokenizer_files(bundle: ModelBundle) -> dict[str, bytes]:
    """The files of a tokenizer: the ones that were read if the tokenizer has not changed, otherwise new ones."""
    assert bundle.tokenizer is not None
    files = {name: data for name, data in bundle.files.items() if name in TOKENIZER_FILES}
    if not files or bundle.notes.get("tokenizer") != bundle.tokenizer.fingerprint:
        files = _new_files(bundle.tokenizer, bundle)
    if bundle.source_tokenizer is not None and not any(name.startswith(SOURCE) for name in files):
        source = _new_files(bundle.source_tokenizer, bundle)
        files |= {f"{SOURCE}/{name}": data for name, data in source.items()}
    return files


def _new_files(tokenizer: Tokenizer, bundle: ModelBundle) -> dict[str, bytes]:
    """With what the model reads around a text in them, so that other programs put it there too."""
    if bundle.frame is not None and bundle.frame != tokenizer.frame:
        tokenizer = framed(tokenizer, *([tokenizer.token(id) for id in side] for side in bundle.frame))
    roles = {f"{role}_token": token for role, token in tokenizer.roles.items()}
    settings: Tree = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": getattr(bundle.model, "context", None),
        **roles,
    }
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    files = {FILE: tokenizer.to_json().encode(), SETTINGS: json_bytes(settings)}
    return files | {SPECIALS: json_bytes(roles)} if roles else files


def json_bytes(tree: Any) -> bytes:
    """A JSON file as transformers writes it."""
    return (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()
