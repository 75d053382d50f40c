"""Hugging Face's tokenizer.json of a BPE, from the lists that other formats keep: tokens, merges, scores.

Two kinds: byte-level (GPT-2) and SentencePiece's, whose merges follow from scores and which spells in bytes what no
token holds. The result is text; what is wrong in it is found when it is loaded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

SPACE = "▁"
LONGEST = 256  # characters of a token whose merges are looked for; a hostile file of longer ones would cost minutes

Json = dict[str, Any]


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

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of every token."""
        return {token: id for id, token in enumerate(self.tokens)}


def byte_level(vocabulary: BPEVocabulary, pre_tokenizer: Json, whole_words: bool = False) -> str:
    """tokenizer.json of a byte-level BPE; with `whole_words` a word in the vocabulary is not merged from its parts."""
    model = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": whole_words}
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _tokenizer_json(vocabulary, model, pre_tokenizer, decoder)


def sentencepiece(vocabulary: BPEVocabulary, unk: str | None, space_first: bool = True) -> str:
    """tokenizer.json of a SentencePiece BPE with byte fallback; `space_first` puts a space before a text."""
    model = {"unk_token": unk, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    scheme = "first" if space_first else "never"
    pre_tokenizer = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if space_first:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer_json(vocabulary, model, pre_tokenizer, {"type": "Sequence", "decoders": steps})


def _tokenizer_json(vocabulary: BPEVocabulary, model: Json, pre_tokenizer: Json, decoder: Json) -> str:
    tree = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(vocabulary),
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            **model,
            "vocab": vocabulary.ids,
            "merges": [list(merge) for merge in vocabulary.merges],
        },
    }
    return json.dumps(tree, ensure_ascii=False)


def _post_processor(vocabulary: BPEVocabulary) -> Json | None:
    begin, end = vocabulary.begin, vocabulary.end
    tokens = [token for token in (begin, end) if token is not None]
    if not tokens:
        return None

    def framed(sequence: str) -> list[Json]:
        before, after = ([{"SpecialToken": {"id": token, "type_id": 0}}] if token else [] for token in (begin, end))
        return [*before, {"Sequence": {"id": sequence, "type_id": 0}}, *after]

    return {
        "type": "TemplateProcessing",
        "single": framed("A"),
        "pair": [*framed("A"), *framed("B")],
        "special_tokens": {token: {"id": token, "ids": [vocabulary.ids[token]], "tokens": [token]} for token in tokens},
    }


def _added_tokens(vocabulary: BPEVocabulary) -> list[Json]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": vocabulary.ids[token], "content": token, **plain, "special": vocabulary.special[token]}
        for token in sorted(vocabulary.special, key=vocabulary.ids.__getitem__)
    ]


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], texts: Sequence[bool]) -> list[tuple[str, str]]:
    """The merges that SentencePiece would make, the best first: any two tokens whose union is a token, by its score.

    `texts` says which tokens are text; the others never come out of a merge.
    """
    ids = {token: id for id, token in enumerate(tokens) if texts[id]}
    found: list[tuple[float, int, int, str, str]] = []
    for token, id in ids.items():
        halves = [
            (token[:at], token[at:])
            for at in range(1, len(token) if len(token) <= LONGEST else 1)
            if token[:at] in ids and token[at:] in ids
        ]
        for left, right in sorted(halves, key=lambda pair: (ids[pair[0]], ids[pair[1]])):
            found.append((-scores[id], -len(left), -len(right), left, right))
    return [(left, right) for *_, left, right in sorted(found, key=lambda each: each[:3])]
