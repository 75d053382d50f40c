"""The tokenizer of a Hugging Face folder, from whichever files it has, and back.

A tokenizer.json says itself what is read around a text. Older files (a SentencePiece model, GPT-2's or BERT's lists)
leave it to the class that reads them. Some SentencePiece models have other ids in a model than in their file: fairseq
puts four symbols of its own before the pieces, and after them the languages of a translator and the mask; PEGASUS has
masks among them. Those that they list are in the folder's files; what is not there can't be named.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from weft.config import Tree
from weft.errors import TokenizerError
from weft.interop.bundle import ModelBundle
from weft.interop.tokenizer_json import framed
from weft.models.config import EncoderDecoder, Model
from weft.storage.untrusted import optional_object, read_bytes, read_object
from weft.text import sentencepiece, vocabularies
from weft.text.bounds import call_library
from weft.text.config import ROLES, Role
from weft.text.tokenizer import FILE, Tokenizer
from weft.text.vocabularies import SETTINGS

SPECIALS = "special_tokens_map.json"
SOURCE = "source"  # the folder of the source's tokenizer in an export of weft; transformers takes it as a subfolder
PIECES, PEGASUS_PIECES, MARIAN = "sentencepiece.bpe.model", "spiece.model", ("source.spm", "target.spm", "vocab.json")
TOKENIZER_FILES = (
    *(FILE, SETTINGS, SPECIALS, "added_tokens.json", "chat_template.jinja", "merges.txt", "vocab.txt"),
    *("tokenizer.model", PEGASUS_PIECES, PIECES, *MARIAN),
    *(f"{SOURCE}/{name}" for name in (FILE, SETTINGS, SPECIALS)),
)
LANGUAGE = re.compile(r">>[^<>]+<<$")  # a token that says which language to write
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
LISTED = ("additional_special_tokens", "extra_special_tokens")

Frame = tuple[Sequence[Role], Sequence[Role]]  # the roles of the tokens before and after a text
_TABLE = tomllib.loads(Path(__file__).with_name("tokenizers.toml").read_text(encoding="utf-8"))
CLASSES: Mapping[str, Frame] = _TABLE["frames"]
BY_MODEL: Mapping[str, str] = _TABLE["models"]
LANGUAGES: Mapping[str, Tree] = _TABLE["languages"]
M2M100: list[str] = _TABLE["m2m100"].split()
SWITCHED = ("Llama", "Gemma", "GPT2")  # classes that are asked for `add_bos_token`


def read_tokenizer(folder: Path, config: Tree, model: Model) -> tuple[Tokenizer | None, Tokenizer | None]:
    """The folder's tokenizer, and another one for the source where it has two; None where it has none.

    Roles come from the tokenizer's own files and then, for those that are missing, from the ids in config.json. What
    an encoder–decoder generates begins with `decoder_start_token_id`, which therefore takes the role of bos.
    """
    found, source = _find(folder, config)
    if found is None:
        return None, None
    named = optional_object(folder / SPECIALS)  # which older folders have beside tokenizer_config.json
    given = {role: _text(named.get(f"{role}_token")) for role in ROLES}
    roles = {role: text for role, text in given.items() if text is not None} | found.roles
    by_id = {role: _token(found, config.get(f"{role}_token_id")) for role in ROLES}
    roles |= {role: token for role, token in by_id.items() if token is not None and role not in roles}
    settings = optional_object(folder / SETTINGS)
    found, source = (
        None if each is None else _framed_as_its_class(_with_roles(each, roles), settings, config.get("model_type"))
        for each in (found, source)
    )
    assert found is not None
    if isinstance(model, EncoderDecoder):
        start = _token(found, config.get("decoder_start_token_id"))
        roles |= {"bos": start} if start is not None else {}
    return _with_roles(found, roles), source


def _with_roles(tokenizer: Tokenizer, roles: dict[Role, str]) -> Tokenizer:
    same = roles == tokenizer.roles
    return tokenizer if same else tokenizer.from_json(tokenizer.to_json(), roles, tokenizer.chat_template)


def _find(folder: Path, config: Tree) -> tuple[Tokenizer | None, Tokenizer | None]:
    renumbered = None if (folder / FILE).is_file() else _numbered(folder, str(config.get("model_type")))
    if renumbered is not None:
        return renumbered, None
    if (folder / FILE).is_file() or vocabularies.in_folder(folder) is not None:
        other = folder / SOURCE
        return Tokenizer.load(folder), Tokenizer.load(other) if (other / FILE).is_file() else None
    if all((folder / name).is_file() for name in MARIAN):
        vocabulary = _tokens_by_id(folder / "vocab.json")
        languages = [token for token in vocabulary if LANGUAGE.match(token)]
        target, source = (_read_pieces(folder / name, vocabulary, languages) for name in MARIAN[1::-1])
        return target, source
    return None, None


def _text(token: Any) -> str | None:
    """The text of a special token, which files give as it is or in a table."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _token(tokenizer: Tokenizer, id: Any) -> str | None:
    id = id[0] if isinstance(id, list) and id else id
    if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < tokenizer.vocab_size:
        return None
    try:
        return tokenizer.token(id)
    except TokenizerError:
        return None


def _numbered(folder: Path, family: str) -> Tokenizer | None:
    """The tokenizer of a folder with such a file, by the model_type of its config.json; None where it has none."""
    pieces = folder / PIECES
    match family:
        case "m2m_100" if pieces.is_file() and (folder / "vocab.json").is_file():
            languages = _listed(folder) or [f"__{code}__" for code in M2M100]  # their ids follow
            return _read_pieces(pieces, [*_tokens_by_id(folder / "vocab.json"), *languages], ("<pad>", *languages))
        case "m2m_100" | "mbart" | "xlm-roberta" if pieces.is_file():
            texts = _texts(pieces)
            after = [text for text in _listed(folder) if text not in (*texts, *FAIRSEQ, "<mask>")]
            after = ["<mask>", *after] if family == "xlm-roberta" else [*after, "<mask>"]  # which has no languages
            return _read_pieces(pieces, [*FAIRSEQ, *texts[3:], *after], ("<pad>", *after))
        case "pegasus" if (pieces := folder / PEGASUS_PIECES).is_file():
            offset = optional_object(folder / SETTINGS).get("offset", 103)
            if not isinstance(offset, int) or not 3 <= offset < 2**16:
                raise TokenizerError(f"{folder / SETTINGS}: offset = {offset!r}: expected a whole number above 2")
            masks = ["<mask_1>", "<mask_2>", *(f"<unk_{number}>" for number in range(2, offset))]
            texts = _texts(pieces)
            return _read_pieces(pieces, [*texts[:2], *masks, *texts[2:]], masks)
        case _:
            return None


def _tokens_by_id(path: Path) -> list[str]:
    tree = read_object(path)
    if not all(isinstance(id, int) and 0 <= id < len(tree) for id in tree.values()):
        raise TokenizerError(f"{path}: expected tokens with their ids, 0 … {len(tree) - 1}")
    return sorted(tree, key=tree.__getitem__)


def _read_pieces(path: Path, tokens: list[str], special: Sequence[str] = ()) -> Tokenizer:
    """A SentencePiece model whose pieces are `tokens`, in this order; those that are `special` are never text."""
    vocabulary = {text: id for id, text in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(text for id, text in enumerate(tokens) if vocabulary[text] != id)
        raise TokenizerError(f"{path}: '{twice}' would have two ids")
    try:
        backend, roles = call_library(lambda: sentencepiece.to_tokenizer(read_bytes(path), vocabulary))
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special if text in vocabulary])
    usual: dict[Role, str] = {"pad": "<pad>", "mask": "<mask>"} if special else {}
    return Tokenizer.from_json(backend.to_str(), {r: t for r, t in {**usual, **roles}.items() if t in vocabulary})


def _texts(path: Path) -> list[str]:
    try:
        return [piece.text for piece in call_library(lambda: sentencepiece.parse(read_bytes(path))).pieces]
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def _listed(folder: Path) -> list[str]:
    for name in (SPECIALS, SETTINGS):
        tree = optional_object(folder / name)
        for key in LISTED:
            given = tree.get(key)
            if isinstance(given, list) and given:
                return [text for text in map(_text, given) if text]
    return []


def _framed_as_its_class(tokenizer: Tokenizer, settings: Mapping[str, Any], model_type: object) -> Tokenizer:
    """The tokenizer framed as transformers' class has it that tokenizer_config.json names, or the model's usual one.

    A tokenizer whose file says it, and one of an unknown class, stay as they are.
    """
    name = _class(settings, model_type)
    if tokenizer.has_frame or name not in CLASSES:
        return tokenizer
    before, after = CLASSES[name]
    if name in SWITCHED:
        before = ("bos",) if settings.get("add_bos_token", bool(before)) else ()
        after = ("eos",) if settings.get("add_eos_token", False) else ()
    roles = tokenizer.roles
    return framed(tokenizer, *([roles[role] for role in side if role in roles] for side in (before, after)))


def read_languages(folder: Path, config: Tree, tokenizer: Tokenizer) -> Tree | None:
    """How a model of several languages is told which ones it reads and writes; None for one of no languages.

    The language to write is the one that the decoder begins with by its settings, those of generation_config.json too.
    """
    settings = optional_object(folder / SETTINGS)
    name = _class(settings, config.get("model_type"))
    if name not in LANGUAGES:
        return None
    found = dict(LANGUAGES[name])
    if settings.get("legacy_behaviour") is True and name == "Nllb":
        found["source"] = "after"
    begin, end = found["token"].split("{}")
    special = {id: token for token, id in tokenizer.special_tokens.items()}
    if name == "Marian" and not any(token.startswith(begin) and token.endswith(end) for token in special.values()):
        return None
    if isinstance(reads := settings.get("src_lang"), str) and found["source"] != "none":
        found["reads"] = reads
    start = config.get("decoder_start_token_id" if found["target"] == "start" else "forced_bos_token_id")
    first = special.get(start) if isinstance(start, int) else None
    if first is not None and (code := re.fullmatch(f"{re.escape(begin)}([A-Za-z_-]+){re.escape(end)}", first)):
        found["writes"] = code[1]
    elif isinstance(writes := settings.get("tgt_lang"), str):
        found["writes"] = writes
    return found


def _class(settings: Mapping[str, Any], model_type: object) -> str:
    named = settings.get("tokenizer_class")
    return str(named).removesuffix("Fast").removesuffix("Tokenizer") if named else BY_MODEL.get(str(model_type), "")


def tokenizer_files(bundle: ModelBundle) -> dict[str, bytes]:
    """The files of a tokenizer: the ones that were read if the tokenizer has not changed, otherwise new ones."""
    assert bundle.tokenizer is not None
    files = {name: data for name, data in bundle.files.items() if name in TOKENIZER_FILES}
    if not files or bundle.notes.get("tokenizer") != bundle.tokenizer.fingerprint:
        files = _new_files(bundle.tokenizer, bundle)
    if bundle.source_tokenizer is not None and not any(name.startswith(SOURCE) for name in files):
        files |= {f"{SOURCE}/{name}": data for name, data in _new_files(bundle.source_tokenizer, bundle).items()}
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
