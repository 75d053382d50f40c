"""Hugging Face's tokenizer.json: made for a BPE from the lists that other formats keep (tokens, merges, scores), and
changed where a model reads something around a text.

Two kinds: byte-level (GPT-2) and SentencePiece's, whose merges follow from scores and which spells in bytes what no
token holds. The result is text; what is wrong in it is found when it is loaded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.config import Tree
from weft.text.bounds import check_letters
from weft.text.tokenizer import Tokenizer

SPACE = "▁"
MAX_TOKEN_CHARACTERS = 256  # whose merges are looked for; a hostile file of longer tokens would cost minutes

# what is done to a text for SentencePiece's pieces, as `text/sentencepiece.py` has it
SPACES: Tree = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
SPACE_FIRST: Tree = {"type": "Replace", "pattern": {"Regex": r"\A(?=[\s\S])"}, "content": " "}


@dataclass(frozen=True)
class BPEVocabulary:
    """Tokens in the order of their ids, and merges, the best first.

    `special` are the tokens that are found whole in a text: True for those that decoding hides, False for those that
    it shows. `begin` and `end` are tokens that other programs put around every text.
    """

    tokens: Sequence[str]
    merges: Sequence[Sequence[str]]
    special: Mapping[str, bool]
    begin: str | None = None
    end: str | None = None


def byte_level(vocabulary: BPEVocabulary, pre_tokenizer: Tree, whole_words: bool = False) -> str:
    """tokenizer.json of a byte-level BPE; with `whole_words` a word in the vocabulary is not merged from its parts."""
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _tokenizer_json(vocabulary, {"ignore_merges": whole_words}, pre_tokenizer, decoder)


def sentencepiece(vocabulary: BPEVocabulary, unk: str | None, space_first: bool = True) -> str:
    """tokenizer.json of a SentencePiece BPE with byte fallback; `space_first` puts a space before a text, also before
    one that begins with a space (as the library's Metaspace does not)."""
    normalizer = {"type": "Sequence", "normalizers": [SPACE_FIRST, SPACES] if space_first else [SPACES]}
    spaces: Tree = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    steps: list[Tree] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if space_first:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {"unk_token": unk, "fuse_unk": True, "byte_fallback": True}
    return _tokenizer_json(vocabulary, model, None, {"type": "Sequence", "decoders": steps}, normalizer)


def _tokenizer_json(
    vocabulary: BPEVocabulary, model: Tree, pre_tokenizer: Tree | None, decoder: Tree, normalizer: Tree | None = None
) -> str:
    ids = {token: id for id, token in enumerate(vocabulary.tokens)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = sorted(vocabulary.special.items(), key=lambda item: ids[item[0]])
    before, after = ([token] if token else [] for token in (vocabulary.begin, vocabulary.end))
    tree = {
        "added_tokens": [{"id": ids[token], "content": token, **plain, "special": hidden} for token, hidden in special],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _around(before, after, ids, joined=False) if before or after else None,
        "decoder": decoder,
        "model": {"type": "BPE", **model, "vocab": ids, "merges": [list(merge) for merge in vocabulary.merges]},
    }
    return json.dumps(tree, ensure_ascii=False)


def framed(tokenizer: Tokenizer, before: Sequence[str], after: Sequence[str]) -> Tokenizer:
    """The tokenizer with these tokens around every text, in its own file too."""
    tree = json.loads(tokenizer.to_json())
    ids = {token: tokenizer.id(token) for token in (*before, *after)}
    tree["post_processor"] = _around(before, after, ids, joined=True)
    return Tokenizer.from_json(json.dumps(tree, ensure_ascii=False), tokenizer.roles, tokenizer.chat_template)


def _around(before: Sequence[str], after: Sequence[str], ids: Mapping[str, int], joined: bool) -> Tree:
    """The step that puts tokens around a text. Of two texts that are `joined`, the second goes on where the first ends,
    in a segment of its own; others are framed each for itself."""

    def sequence(name: str, segment: int) -> list[Tree]:
        sides = ([{"SpecialToken": {"id": token, "type_id": segment}} for token in side] for side in (before, after))
        begin, end = sides
        return [*begin, {"Sequence": {"id": name, "type_id": segment}}, *end]

    second = sequence("B", 1)[len(before) :] if joined else sequence("B", 0)
    tokens = dict.fromkeys((*before, *after))
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *second],
        "special_tokens": {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in tokens},
    }


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], texts: Sequence[bool]) -> list[tuple[str, str]]:
    """The merges that SentencePiece would make, the best first: any two tokens whose union is a token, by its score.

    `texts` says which tokens are text; the others never come out of a merge.
    """
    check_letters(tokens)
    ids = {token: id for id, token in enumerate(tokens) if texts[id]}
    found: list[tuple[float, int, int, str, str]] = []
    for token, id in ids.items():
        halves = [
            (token[:at], token[at:])
            for at in range(1, len(token) if len(token) <= MAX_TOKEN_CHARACTERS else 1)
            if token[:at] in ids and token[at:] in ids
        ]
        for left, right in sorted(halves, key=lambda pair: (ids[pair[0]], ids[pair[1]])):
            found.append((-scores[id], -len(left), -len(right), left, right))
    return [(left, right) for *_, left, right in sorted(found, key=lambda each: each[:3])]
