"""A text in pieces: ids that, put together, are those of the whole text.

A tokenizer looks at more than a token: it puts a space before a text, squeezes spaces at its ends, and merges over any
place where its pre-tokenizer doesn't cut. So a long text is cut only at joints, places of which the tokenizer's own
steps show that nothing reaches across them; and a piece that doesn't begin a text is encoded without what is done at a
text's beginning. Joints are

    spaces   before a single space between two visible characters: `word| word`
    lines    after a single line end between two visible characters: `line⏎|line`

Where the steps don't show it, there are no joints, and a text is encoded whole.
"""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import tokenizers

from weft.storage.files import utf8_size
from weft.text import sentencepiece
from weft.text.bounds import steps
from weft.text.vocabularies import PATTERNS

Json = dict[str, Any]
Joints = Literal["anywhere", "lines", "spaces"]  # "lines": at both

# \w and what ASCII prints: what no normalizer takes for white space, nor joins with the space beside it
SPACES = r"(?<=[\w!-~]) (?=[\w!-~])"
LINES = r"(?<=[\w!-~]\n)(?=[^\W_])"
PLACES = {"spaces": re.compile(SPACES), "lines": re.compile(f"{SPACES}|{LINES}")}
NEAR = 512  # characters in which the last joint is looked for first

LOCAL = ("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents")  # normalizers that leave spaces and line ends alone
SPACING = ("Nmt", "Precompiled", "BertNormalizer")  # and those that make line ends, or others, spaces
DROPPING = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")  # white space is in no token
# each character of a text that looks like a special token's first; what follows holds no white space (`look_alikes`)
LOOK_ALIKES = re.compile(r"(?:\\?\S\(\?=(?:\\\S|[^\\()\[\].*+?{}|^$\s])*\)(?:\||$))+")


class Piece(NamedTuple):
    """Text from a joint to a joint; whether a text begins and ends with it, and inner places to count tokens at."""

    text: str
    begins: bool = True
    ends: bool = True
    cuts: Sequence[int] = ()


class PieceIds(NamedTuple):
    """A piece's ids; of each stretch between its cuts the tokens that begin there, and its bytes; and of each cut the
    bytes behind it that belong to a token from before it."""

    ids: Any  # whole numbers: a list, or an array where they are on their way to a disk
    counts: list[int]
    sizes: list[int]
    over: list[int]


class Pieces:
    """Encodes pieces of texts."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._tree: Json = json.loads(backend.to_str())
        self.joints: Joints | None = _joints(self._tree)
        self._inner: dict[tuple[bool, bool], tokenizers.Tokenizer] = {(True, True): backend}

    def encode(self, pieces: Sequence[Piece]) -> list[PieceIds]:
        """The ids of pieces, on all cores."""
        alike: dict[tuple[bool, bool, bool], list[int]] = defaultdict(list)
        for place, piece in enumerate(pieces):
            alike[piece.begins, piece.ends, bool(piece.cuts)].append(place)
        found: dict[int, PieceIds] = {}
        for (begins, ends, cut), places in alike.items():
            backend = self._for(begins, ends)
            encode = backend.encode_batch if cut else backend.encode_batch_fast  # without offsets it is faster
            encodings = encode([pieces[place].text for place in places], add_special_tokens=False)
            for place, encoding in zip(places, encodings, strict=True):
                found[place] = _counted(pieces[place], encoding)
        return [found[place] for place in range(len(pieces))]

    def _for(self, begins: bool, ends: bool) -> tokenizers.Tokenizer:
        """The tokenizer without what it does at a text's beginning, or end."""
        if (begins, ends) not in self._inner:
            tree = _inside(self._tree, begins, ends)
            made = self._backend
            if tree != self._tree:
                made = tokenizers.Tokenizer.from_str(json.dumps(tree))
                made.encode_special_tokens = True
            self._inner[begins, ends] = made
        return self._inner[begins, ends]


def _counted(piece: Piece, encoding: tokenizers.Encoding) -> PieceIds:
    ids, text = encoding.ids, piece.text
    if not piece.cuts:
        return PieceIds(ids, [len(ids)], [utf8_size(text)], [])
    offsets, token, reached = encoding.offsets, 0, 0
    tokens, over = [0], []
    for cut in piece.cuts:
        while token < len(ids) and offsets[token][0] < cut:
            reached = max(reached, offsets[token][1])
            token += 1
        tokens.append(token)
        over.append(utf8_size(text[cut : max(cut, reached)]))
    counts = [stop - start for start, stop in pairwise([*tokens, len(ids)])]
    sizes = [utf8_size(text[start:stop]) for start, stop in pairwise([0, *piece.cuts, len(text)])]
    return PieceIds(ids, counts, sizes, over)


def first_joint(joints: Joints, text: str, start: int) -> int | None:
    """The first joint at `start` or later, though not at the end of what is known of a text."""
    if joints == "anywhere":
        return start
    found = PLACES[joints].search(text, start)
    return None if found is None else found.start()


def last_joint(joints: Joints, text: str) -> int | None:
    """The last joint inside of a text."""
    if joints == "anywhere":
        return None
    for start in (max(0, len(text) - NEAR), 0):
        places = [found.start() for found in PLACES[joints].finditer(text, start)]
        if places and places[-1]:
            return places[-1]
    return None


def _found(tree: Json) -> list[Json]:
    return [token for token in tree["added_tokens"] if not token["special"]]


def _joints(tree: Json) -> Joints | None:
    normalizers, cutters = list(steps(tree["normalizer"])), list(steps(tree["pre_tokenizer"]))
    if _never_merges(tree["model"], normalizers, cutters) and not _found(tree):
        return "anywhere"
    for token in _found(tree):
        if token["lstrip"] or token["rstrip"] or re.search(r"\S\s|\s\S", token["content"]):
            return None
    # before each stretch between added tokens these are done again, which a piece can't tell from its beginning
    if _found(tree) and any(_at_ends(step) for step in (*normalizers, *cutters[:1])):
        return None
    if (mark := _mark(normalizers)) is None:
        return None
    lines = all(step["type"] in LOCAL for step in normalizers)
    for place, step in enumerate(cutters):
        kind = step["type"]
        if kind in DROPPING and mark == " ":
            return "lines"
        # None of tiktoken's expressions looks behind, has a visible character before a space in a match, or goes on
        # from a line end to a letter or digit; and (?!\S) is tried after white space alone.
        known = _isolates(step) and step["pattern"].get("Regex") in PATTERNS.values()
        if known or (kind == "ByteLevel" and step["use_regex"]):
            spaced = place > 0 and bool(step.get("add_prefix_space"))  # put before every stretch
            return None if mark != " " else "lines" if lines and not spaced else "spaces"
        if kind == "Metaspace" and mark in (" ", step["replacement"]):
            if step["split"]:
                return "spaces"
            mark = step["replacement"]
        elif kind == "ByteLevel" and mark == " ":
            mark = "Ġ"
        elif kind == "Split":
            pattern = step["pattern"].get("Regex")
            if pattern is None or not LOOK_ALIKES.fullmatch(pattern) or not _isolates(step):
                return None
        elif kind not in ("Digits", "Punctuation"):
            return None
    # where no token of a BPE model has a space behind something else, no merge crosses one; a unigram model's sums are
    # rounded, which may decide between cuts of equal cost: it reads texts whole
    model, across = tree["model"], re.compile(f"[^{re.escape(mark)}]{re.escape(mark)}")
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return None
    return "spaces" if mark in model["vocab"] and not any(map(across.search, model["vocab"])) else None


def _isolates(step: Json) -> bool:
    """Whether a step cuts before and behind every match, whatever else it does."""
    ways = (("Isolated", False), ("Isolated", True), ("Removed", True))
    return step["type"] == "Split" and (step["behavior"], step["invert"]) in ways


def _never_merges(model: Json, normalizers: Sequence[Json], cutters: Sequence[Json]) -> bool:
    """Whether every character is a token, or a few, of its own: then any place between two will do."""
    plain = model["type"] == "BPE" and not model["merges"] and not model["fuse_unk"] and not model["ignore_merges"]
    known = all(step["type"] in ("Split", "Digits", "Punctuation", "ByteLevel") for step in cutters)
    spaced = any(step["type"] == "ByteLevel" and step["add_prefix_space"] for step in cutters)
    kept = all(step.get("behavior", "Isolated") != "Removed" for step in cutters)
    return plain and known and not spaced and kept and all(step["type"] == "Lowercase" for step in normalizers)


def _mark(normalizers: Sequence[Json]) -> str | None:
    """What a space is after these normalizers; None where one of them might reach across a joint."""
    mark = " "
    for step in normalizers:
        if step["type"] in (*LOCAL, *SPACING, "Strip", "Prepend"):
            continue
        if step["type"] != "Replace":
            return None
        plain, expression = step["pattern"].get("String"), step["pattern"].get("Regex")
        if plain == " " and len(step["content"]) == 1:
            mark = step["content"]
        elif expression is not None:
            if not _anchored(expression) and expression != sentencepiece.SEVERAL:
                return None
        elif re.search(r"\s", f"{plain}{step['content']}") or mark in (plain, step["content"]):
            return None
    return mark


def _anchored(expression: str) -> bool:
    """An expression of weft's own SentencePiece reader that applies to a text's ends alone."""
    return expression == sentencepiece.TRIM or expression.startswith(sentencepiece.PREFIX)


def _at_ends(step: Json) -> bool:
    """Whether a step does something at a text's ends that it doesn't inside."""
    anchored = step["type"] == "Replace" and _anchored(step["pattern"].get("Regex") or "")
    return anchored or step["type"] in ("Strip", "Prepend") or bool(step.get("add_prefix_space"))


def _inside(tree: Json, begins: bool, ends: bool) -> Json:
    """A tokenizer that leaves out what is done at a text's beginning and end, where a piece has neither."""
    tree = json.loads(json.dumps(tree))
    for part in ("normalizer", "pre_tokenizer"):
        tree[part] = _without(tree[part], begins, ends)
    for place, step in enumerate(steps(tree["pre_tokenizer"])):
        if not begins and place == 0 and "add_prefix_space" in step:
            step["add_prefix_space"] = False
        if not begins and step["type"] == "Metaspace":
            always = step["prepend_scheme"] == "always" and (place > 0 or bool(_found(tree)))
            step["prepend_scheme"] = "always" if always else "never"  # each stretch that begins without one gets it
    return tree


def _without(part: Json | None, begins: bool, ends: bool) -> Json | None:
    if part is None:
        return None
    for key in ("normalizers", "pretokenizers"):
        if isinstance(part.get(key), list):
            kept = [step for each in part[key] if (step := _without(each, begins, ends)) is not None]
            return {**part, key: kept}
    expression = part["pattern"].get("Regex") or "" if part["type"] == "Replace" else ""
    if expression == sentencepiece.TRIM:
        ways = zip(sentencepiece.TRIM.split("|"), (begins, ends), strict=True)
        left = "|".join(way for way, applies in ways if applies)
        return {**part, "pattern": {"Regex": left}} if left else None
    if not begins and (part["type"] == "Prepend" or expression.startswith(sentencepiece.PREFIX)):
        return None
    if part["type"] == "Strip":
        return {**part, "strip_left": part["strip_left"] and begins, "strip_right": part["strip_right"] and ends}
    return part
