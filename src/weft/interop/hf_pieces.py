"""SentencePiece models whose pieces have other ids in a model than in their file, as fairseq's and PEGASUS's have.

fairseq puts four symbols of its own before the pieces, and after them the languages of a translator and the mask. Those
that it lists are in the folder's files; what is not there can't be named.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken

from weft.errors import TokenizerError
from weft.interop.framing import M2M100
from weft.text import sentencepiece
from weft.text.bounds import careful
from weft.text.config import Role
from weft.text.tokenizer import Tokenizer
from weft.text.tokenizer_config import FILE as SETTINGS
from weft.untrusted import read_bytes, read_object

FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
LISTS = ("special_tokens_map.json", SETTINGS)
LISTED = ("additional_special_tokens", "extra_special_tokens")


def numbered(folder: Path, family: str) -> Tokenizer | None:
    """The tokenizer of a folder with such a file, by the model_type of its config.json; None where it has none."""
    pieces = folder / "sentencepiece.bpe.model"
    match family:
        case "m2m_100" if pieces.is_file() and (folder / "vocab.json").is_file():
            languages = _listed(folder) or [f"__{code}__" for code in M2M100.split()]  # their ids follow
            return read_pieces(pieces, [*tokens_by_id(folder / "vocab.json"), *languages], ("<pad>", *languages))
        case "m2m_100" | "mbart" | "xlm-roberta" if pieces.is_file():
            texts = _texts(pieces)
            after = [text for text in _listed(folder) if text not in (*texts, *FAIRSEQ, "<mask>")]
            after = ["<mask>", *after] if family == "xlm-roberta" else [*after, "<mask>"]  # which has no languages
            return read_pieces(pieces, [*FAIRSEQ, *texts[3:], *after], ("<pad>", *after))
        case "pegasus" if (pieces := folder / "spiece.model").is_file():
            offset = read_object(folder / SETTINGS).get("offset", 103) if (folder / SETTINGS).is_file() else 103
            if not isinstance(offset, int) or not 3 <= offset < 2**16:
                raise TokenizerError(f"{folder / SETTINGS}: offset = {offset!r}: expected a whole number above 2")
            masks = ["<mask_1>", "<mask_2>", *(f"<unk_{number}>" for number in range(2, offset))]
            texts = _texts(pieces)
            return read_pieces(pieces, [*texts[:2], *masks, *texts[2:]], masks)
        case _:
            return None


def tokens_by_id(path: Path) -> list[str]:
    """The tokens of a vocab.json, whose ids run from 0 on."""
    tree = read_object(path)
    if not all(isinstance(id, int) and 0 <= id < len(tree) for id in tree.values()):
        raise TokenizerError(f"{path}: expected tokens with their ids, 0 … {len(tree) - 1}")
    return sorted(tree, key=tree.__getitem__)


def read_pieces(path: Path, tokens: list[str], special: Sequence[str] = ()) -> Tokenizer:
    """A SentencePiece model whose pieces are `tokens`, in this order; those that are `special` are never text."""
    vocabulary = {text: id for id, text in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(text for id, text in enumerate(tokens) if vocabulary[text] != id)
        raise TokenizerError(f"{path}: '{twice}' would have two ids")
    try:
        backend, roles = careful(lambda: sentencepiece.to_tokenizer(read_bytes(path), vocabulary))
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special if text in vocabulary])
    usual: dict[Role, str] = {"pad": "<pad>", "mask": "<mask>"} if special else {}
    return Tokenizer.from_json(backend.to_str(), {r: t for r, t in {**usual, **roles}.items() if t in vocabulary})


def _texts(path: Path) -> list[str]:
    try:
        return [piece.text for piece in careful(lambda: sentencepiece.parse(read_bytes(path))).pieces]
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def _listed(folder: Path) -> list[str]:
    """The further special tokens that the folder lists, such as languages."""
    for name in LISTS:
        tree = read_object(folder / name) if (folder / name).is_file() else {}
        for key in LISTED:
            given = tree.get(key)
            if isinstance(given, list) and given:
                texts = [each.get("content") if isinstance(each, dict) else each for each in given]
                return [text for text in texts if isinstance(text, str) and text]
    return []
