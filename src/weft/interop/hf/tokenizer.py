"""Read and write the tokenizer of a Hugging Face folder.

A tokenizer.json defines the special tokens around a text. For older files (a SentencePiece model, the lists of GPT-2 or
BERT), the class of transformers defines them. Some models have other ids than their SentencePiece file: fairseq puts
four symbols before the pieces, and the languages of a translator and the mask after them; PEGASUS puts masks among
them. The folder's files list these symbols.
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
SOURCE = "source"  # folder of the source's tokenizer in an export of weft; transformers reads it as a subfolder
PIECES, PEGASUS_PIECES, MARIAN = "sentencepiece.bpe.model", "spiece.model", ("source.spm", "target.spm", "vocab.json")
TOKENIZER_FILES = (
    *(FILE, SETTINGS, SPECIALS, "added_tokens.json", "chat_template.jinja", "merges.txt", "vocab.txt"),
    *("tokenizer.model", PEGASUS_PIECES, PIECES, *MARIAN),
    *(f"{SOURCE}/{name}" for name in (FILE, SETTINGS, SPECIALS)),
)
LANGUAGE = re.compile(r">>[^<>]+<<$")  # a token that names the target language
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
EXTRA_KEYS = ("additional_special_tokens", "extra_special_tokens")

FrameRoles = tuple[Sequence[Role], Sequence[Role]]  # of the tokens before and after a text
_TABLE = tomllib.loads(Path(__file__).with_name("tokenizers.toml").read_text(encoding="utf-8"))
CLASSES: Mapping[str, FrameRoles] = _TABLE["frames"]
BY_MODEL: Mapping[str, str] = _TABLE["models"]
LANGUAGES: Mapping[str, Tree] = _TABLE["languages"]
M2M100: list[str] = _TABLE["m2m100"].split()
SWITCHED = ("Llama", "Gemma", "GPT2")  # classes with the settings `add_bos_token` and `add_eos_token`


def read_tokenizer(folder: Path, config: Tree, model: Model) -> tuple[Tokenizer | None, Tokenizer | None]:
    """Read the folder's tokenizer and, if it has two, that of the source; None for a missing one.

    Roles come from the tokenizer's files and, if missing there, from the ids in config.json. In an encoder–decoder,
    generated text begins with `decoder_start_token_id`, which therefore has the role of bos.
    """
    target, source = _load(folder, config)
    if target is None:
        return None, None
    specials = optional_object(folder / SPECIALS)  # older folders have it beside tokenizer_config.json
    texts = {role: _text(specials.get(f"{role}_token")) for role in ROLES}
    roles = {role: text for role, text in texts.items() if text is not None} | target.roles
    by_id = {role: _token(target, config.get(f"{role}_token_id")) for role in ROLES}
    roles |= {role: token for role, token in by_id.items() if token is not None and role not in roles}
    settings, model_type = optional_object(folder / SETTINGS), config.get("model_type")
    target = _with_class_frame(_with_roles(target, roles), settings, model_type)
    source = None if source is None else _with_class_frame(_with_roles(source, roles), settings, model_type)
    if isinstance(model, EncoderDecoder):
        start = _token(target, config.get("decoder_start_token_id"))
        roles |= {"bos": start} if start is not None else {}
    return _with_roles(target, roles), source


def _with_roles(tokenizer: Tokenizer, roles: dict[Role, str]) -> Tokenizer:
    same = roles == tokenizer.roles
    return tokenizer if same else tokenizer.from_json(tokenizer.to_json(), roles, tokenizer.chat_template)


def _load(folder: Path, config: Tree) -> tuple[Tokenizer | None, Tokenizer | None]:
    renumbered = None if (folder / FILE).is_file() else _read_renumbered(folder, str(config.get("model_type")))
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
    """Text of a special token, which is a string or an object with `content`."""
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


def _read_renumbered(folder: Path, family: str) -> Tokenizer | None:
    """Tokenizer whose ids differ from those of its SentencePiece file, by model_type; None if there is no such file."""
    pieces = folder / PIECES
    match family:
        case "m2m_100" if pieces.is_file() and (folder / "vocab.json").is_file():
            languages = _extra_specials(folder) or [f"__{code}__" for code in M2M100]
            return _read_pieces(pieces, [*_tokens_by_id(folder / "vocab.json"), *languages], ("<pad>", *languages))
        case "m2m_100" | "mbart" | "xlm-roberta" if pieces.is_file():
            texts = _texts(pieces)
            after = [text for text in _extra_specials(folder) if text not in (*texts, *FAIRSEQ, "<mask>")]
            after = ["<mask>", *after] if family == "xlm-roberta" else [*after, "<mask>"]  # languages before the mask
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
    """Read a SentencePiece model and give its pieces the ids of `tokens`; `special` tokens never match text."""
    vocabulary = {text: id for id, text in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        repeated = next(text for id, text in enumerate(tokens) if vocabulary[text] != id)
        raise TokenizerError(f"{path}: '{repeated}' would have two ids")
    try:
        backend, roles = call_library(lambda: sentencepiece.to_tokenizer(read_bytes(path), vocabulary))
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special if text in vocabulary])
    default: dict[Role, str] = {"pad": "<pad>", "mask": "<mask>"} if special else {}
    return Tokenizer.from_json(backend.to_str(), {r: t for r, t in {**default, **roles}.items() if t in vocabulary})


def _texts(path: Path) -> list[str]:
    try:
        return [piece.text for piece in call_library(lambda: sentencepiece.parse(read_bytes(path))).pieces]
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def _extra_specials(folder: Path) -> list[str]:
    for name in (SPECIALS, SETTINGS):
        tree = optional_object(folder / name)
        for key in EXTRA_KEYS:
            tokens = tree.get(key)
            if isinstance(tokens, list) and tokens:
                return [text for text in map(_text, tokens) if text]
    return []


def _with_class_frame(tokenizer: Tokenizer, settings: Mapping[str, Any], model_type: object) -> Tokenizer:
    """Add the frame of the class that tokenizer_config.json names, or of the default class for the model.

    A tokenizer whose file defines a frame, or of an unknown class, is returned unchanged.
    """
    name = _class_name(settings, model_type)
    if tokenizer.has_frame or name not in CLASSES:
        return tokenizer
    before, after = CLASSES[name]
    if name in SWITCHED:
        before = ("bos",) if settings.get("add_bos_token", bool(before)) else ()
        after = ("eos",) if settings.get("add_eos_token", False) else ()
    roles = tokenizer.roles
    return framed(tokenizer, *([roles[role] for role in side if role in roles] for side in (before, after)))


def read_languages(folder: Path, config: Tree, tokenizer: Tokenizer) -> Tree | None:
    """Language settings of a multilingual model; None for other models.

    The default target language is the one that the decoder begins with, by config.json or generation_config.json.
    """
    settings = optional_object(folder / SETTINGS)
    name = _class_name(settings, config.get("model_type"))
    if name not in LANGUAGES:
        return None
    languages = dict(LANGUAGES[name])
    if settings.get("legacy_behaviour") is True and name == "Nllb":
        languages["source"] = "after"
    begin, end = languages["token"].split("{}")
    special = {id: token for token, id in tokenizer.special_tokens.items()}
    if name == "Marian" and not any(token.startswith(begin) and token.endswith(end) for token in special.values()):
        return None
    if isinstance(reads := settings.get("src_lang"), str) and languages["source"] != "none":
        languages["reads"] = reads
    start = config.get("decoder_start_token_id" if languages["target"] == "start" else "forced_bos_token_id")
    first = special.get(start) if isinstance(start, int) else None
    if first is not None and (code := re.fullmatch(f"{re.escape(begin)}([A-Za-z_-]+){re.escape(end)}", first)):
        languages["writes"] = code[1]
    elif isinstance(writes := settings.get("tgt_lang"), str):
        languages["writes"] = writes
    return languages


def _class_name(settings: Mapping[str, Any], model_type: object) -> str:
    name = settings.get("tokenizer_class")
    return str(name).removesuffix("Fast").removesuffix("Tokenizer") if name else BY_MODEL.get(str(model_type), "")


def tokenizer_files(bundle: ModelBundle) -> dict[str, bytes]:
    """Files of a tokenizer: the imported ones if it has not changed, otherwise new ones."""
    assert bundle.tokenizer is not None
    files = {name: data for name, data in bundle.files.items() if name in TOKENIZER_FILES}
    if not files or bundle.notes.get("tokenizer") != bundle.tokenizer.fingerprint:
        files = _new_files(bundle.tokenizer, bundle)
    if bundle.source_tokenizer is not None and not any(name.startswith(SOURCE) for name in files):
        files |= {f"{SOURCE}/{name}": data for name, data in _new_files(bundle.source_tokenizer, bundle).items()}
    return files


def _new_files(tokenizer: Tokenizer, bundle: ModelBundle) -> dict[str, bytes]:
    """New files of a tokenizer; its tokenizer.json includes the frame of the model."""
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
    """Encode JSON with the formatting of transformers."""
    return (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()
