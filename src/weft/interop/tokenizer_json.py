"""Build Hugging Face's tokenizer.json for a BPE from lists of tokens, merges and scores, and change its frame.

There are two kinds: byte-level (GPT-2) and SentencePiece's, with merges ordered by score and byte fallback. The result
is text; loading it validates it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.config import Tree
from weft.text.bounds import check_letters
from weft.text.tokenizer import Tokenizer

SPACE = "▁"
MAX_TOKEN_CHARACTERS = 256  # of a token that merges are derived for; longer ones in a hostile file would take minutes

# normalisation of text for SentencePiece's pieces, as in `text/sentencepiece.py`
SPACES: Tree = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
SPACE_FIRST: Tree = {"type": "Replace", "pattern": {"Regex": r"\A(?=[\s\S])"}, "content": " "}


@dataclass(frozen=True)
class BPEVocabulary:
    """Tokens in the order of their ids, and merges in order of priority.

    `special` tokens are matched before BPE: True for those that decoding omits, False for those that it shows. `begin`
    and `end` are the tokens around every text.
    """

    tokens: Sequence[str]
    merges: Sequence[Sequence[str]]
    special: Mapping[str, bool]
    begin: str | None = None
    end: str | None = None


def byte_level(vocabulary: BPEVocabulary, pre_tokenizer: Tree, whole_words: bool = False) -> str:
    """tokenizer.json of a byte-level BPE; with `whole_words`, a word in the vocabulary is one token without merges."""
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _tokenizer_json(vocabulary, {"ignore_merges": whole_words}, pre_tokenizer=pre_tokenizer, decoder=decoder)


def sentencepiece(vocabulary: BPEVocabulary, unk: str | None, space_first: bool = True) -> str:
    """tokenizer.json of a SentencePiece BPE with byte fallback; `space_first` adds a space before every text, even one
    that begins with a space (unlike the library's Metaspace)."""
    normalizer = {"type": "Sequence", "normalizers": [SPACE_FIRST, SPACES] if space_first else [SPACES]}
    spaces: Tree = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    steps: list[Tree] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if space_first:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {"unk_token": unk, "fuse_unk": True, "byte_fallback": True}
    return _tokenizer_json(vocabulary, model, decoder={"type": "Sequence", "decoders": steps}, normalizer=normalizer)


def _tokenizer_json(
    vocabulary: BPEVocabulary,
    model: Tree,
    *,
    decoder: Tree,
    pre_tokenizer: Tree | None = None,
    normalizer: Tree | None = None,
) -> str:
    ids = {token: id for id, token in enumerate(vocabulary.tokens)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = sorted(vocabulary.special.items(), key=lambda item: ids[item[0]])
    before, after = ([token] if token else [] for token in (vocabulary.begin, vocabulary.end))
    tree = {
        "added_tokens": [{"id": ids[token], "content": token, **plain, "special": hidden} for token, hidden in special],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(before, after, ids, joined=False) if before or after else None,
        "decoder": decoder,
        "model": {"type": "BPE", **model, "vocab": ids, "merges": [list(merge) for merge in vocabulary.merges]},
    }
    return json.dumps(tree, ensure_ascii=False)


def framed(tokenizer: Tokenizer, before: Sequence[str], after: Sequence[str]) -> Tokenizer:
    """Copy a tokenizer and set the tokens around every text in its tokenizer.json."""
    tree = json.loads(tokenizer.to_json())
    ids = {token: tokenizer.id(token) for token in (*before, *after)}
    tree["post_processor"] = _post_processor(before, after, ids, joined=True)
    return Tokenizer.from_json(json.dumps(tree, ensure_ascii=False), tokenizer.roles, tokenizer.chat_template)


def _post_processor(before: Sequence[str], after: Sequence[str], ids: Mapping[str, int], *, joined: bool) -> Tree:
    """Post-processor that adds tokens around a text. If a pair is `joined`, its second text follows without `before`,
    as segment 1; otherwise each text has both."""

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
    """Merges of SentencePiece in order of priority: all pairs of tokens whose concatenation is a token, by its score.

    `texts[id]`: whether a token is text; other tokens are never merged.
    """
    check_letters(tokens)
    ids = {token: id for id, token in enumerate(tokens) if texts[id]}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, id in ids.items():
        halves = [
            (token[:at], token[at:])
            for at in range(1, len(token) if len(token) <= MAX_TOKEN_CHARACTERS else 1)
            if token[:at] in ids and token[at:] in ids
        ]
        for left, right in sorted(halves, key=lambda pair: (ids[pair[0]], ids[pair[1]])):
            merges.append((-scores[id], -len(left), -len(right), left, right))
    return [(left, right) for *_, left, right in sorted(merges, key=lambda merge: merge[:3])]
