"""Hugging Face's tokenizer.json of a BPE, from the lists that other formats keep: tokens, merges, scores.

Two kinds: byte-level (GPT-2) and SentencePiece's, whose merges follow from scores and which spells in bytes what no
piece holds. It is text and nothing else, so what is wrong in it is found when it is read.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

SPACE = "▁"
LONGEST = 256  # characters of a piece that is taken apart again; beyond, a hostile file would cost minutes

Json = dict[str, Any]


def _tokenizer_json(
    model: Json, cut: Json, decoder: Json, added: list[Json], begin: str | None, end: str | None
) -> str:
    """The file; `begin` and `end` are tokens that other programs put around a text unasked."""
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": cut,
            "post_processor": _around(model["vocab"], begin, end),
            "decoder": decoder,
            "model": {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
            | model,
        },
        ensure_ascii=False,
    )


def _around(vocab: Mapping[str, int], begin: str | None, end: str | None) -> Json | None:
    if begin is None and end is None:
        return None
    tokens = [token for token in (begin, end) if token is not None]

    def place(token: str | None) -> list[Json]:
        return [] if token is None else [{"SpecialToken": {"id": token, "type_id": 0}}]

    sequences: list[list[Json]] = [[{"Sequence": {"id": id, "type_id": 0}}] for id in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [*place(begin), *sequences[0], *place(end)],
        "pair": [*place(begin), *sequences[0], *place(end), *place(begin), *sequences[1], *place(end)],
        "special_tokens": {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in tokens},
    }


def _added(vocab: Mapping[str, int], special: Mapping[str, bool]) -> list[Json]:
    """Tokens that are found whole in a text, in the order of their ids."""
    return [
        {
            "id": vocab[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special[token],
        }
        for token in sorted(special, key=vocab.__getitem__)
    ]


def byte_level(
    tokens: Sequence[str],
    merges: Sequence[Sequence[str]],
    special: Mapping[str, bool],
    cut: Json,
    begin: str | None = None,
    end: str | None = None,
    whole_words: bool = False,
) -> str:
    """tokenizer.json of a byte-level BPE. `special` names the tokens found whole: True hidden, False as text.

    `cut` is the pre-tokenizer; with `whole_words` a word that is in the vocabulary is not merged from its parts.
    """
    vocab = {token: id for id, token in enumerate(tokens)}
    model = {
        "unk_token": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": whole_words,
        "vocab": vocab,
        "merges": [list(merge) for merge in merges],
    }
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _tokenizer_json(model, cut, decoder, _added(vocab, special), begin, end)


def sentencepiece(
    tokens: Sequence[str],
    merges: Sequence[Sequence[str]],
    special: Mapping[str, bool],
    unk: str | None,
    space_first: bool = True,
    begin: str | None = None,
    end: str | None = None,
) -> str:
    """tokenizer.json of a SentencePiece BPE with byte fallback; `space_first` puts a space before a text."""
    vocab = {token: id for id, token in enumerate(tokens)}
    model = {
        "unk_token": unk,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [list(merge) for merge in merges],
    }
    scheme = "first" if space_first else "never"
    cut = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if space_first:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    decoder = {"type": "Sequence", "decoders": steps}
    return _tokenizer_json(model, cut, decoder, _added(vocab, special), begin, end)


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], pieces: Sequence[bool]) -> list[tuple[str, str]]:
    """The merges that SentencePiece would make, best first: any two pieces whose union is a piece, by its score.

    `pieces` tells which tokens are text; the others never come out of a merge.
    """
    ids = {token: id for id, token in enumerate(tokens) if pieces[id]}
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
