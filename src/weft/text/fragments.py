"""Encoding a long text in fragments whose ids, concatenated, equal those of the whole text.

A tokenizer looks beyond a token: it prepends a space to a text, strips spaces at its ends, and merges across every
position where its pre-tokenizer doesn't split. So a long text is split only at positions that, by the tokenizer's
steps, nothing reaches across; and a fragment that doesn't begin a text is encoded without the steps for the beginning
of a text. Split points are

    spaces   before a single space between two visible characters: `word| word`
    lines    after a single newline between two visible characters: `line⏎|line`

If the steps don't guarantee it, there are no split points, and a text is encoded as a whole.
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
SplitPoints = Literal["anywhere", "lines", "spaces"]  # "lines": at both lines and spaces

# \w and printable ASCII: characters that no normalizer treats as whitespace or combines with a space beside them
SPACES = r"(?<=[\w!-~]) (?=[\w!-~])"
LINES = r"(?<=[\w!-~]\n)(?=[^\W_])"
EXPRESSIONS = {"spaces": re.compile(SPACES), "lines": re.compile(f"{SPACES}|{LINES}")}
NEAR_END = 512  # characters in which the last split point is searched first

LOCAL = ("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents")  # normalizers that keep spaces and newlines
SPACING = ("Nmt", "Precompiled", "BertNormalizer")  # normalizers that may turn newlines and other characters to spaces
DROPPING = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")  # pre-tokenizers that drop whitespace
# the pattern of `look_alikes`: the first character of each look-alike of a special token, which holds no whitespace
LOOK_ALIKES = re.compile(r"(?:\\?\S\(\?=(?:\\\S|[^\\()\[\].*+?{}|^$\s])*\)(?:\||$))+")


class TextFragment(NamedTuple):
    """Text between two split points; whether it begins and ends a text, and inner positions to count tokens at."""

    text: str
    begins: bool = True
    ends: bool = True
    cuts: Sequence[int] = ()


class FragmentIds(NamedTuple):
    """Ids of a fragment, with the counts of the stretches between its cuts."""

    ids: Any  # integers: a list, or an array on its way to disk
    counts: list[int]  # tokens that begin in each stretch
    sizes: list[int]  # bytes of each stretch
    over: list[int]  # bytes after each cut that belong to a token from before it


class FragmentEncoder:
    """Encodes fragments of texts; `split_points` is None if texts have to be encoded as a whole."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._tree: Json = json.loads(backend.to_str())
        self.split_points: SplitPoints | None = _split_points(self._tree)
        self._variants: dict[tuple[bool, bool], tokenizers.Tokenizer] = {(True, True): backend}

    def encode(self, fragments: Sequence[TextFragment]) -> list[FragmentIds]:
        """Return the ids of fragments, encoded on all cores."""
        groups: dict[tuple[bool, bool, bool], list[int]] = defaultdict(list)
        for index, fragment in enumerate(fragments):
            groups[fragment.begins, fragment.ends, bool(fragment.cuts)].append(index)
        results: dict[int, FragmentIds] = {}
        for (begins, ends, cut), indices in groups.items():
            backend = self._variant(begins, ends)
            encode = backend.encode_batch if cut else backend.encode_batch_fast  # faster, without offsets
            encodings = encode([fragments[index].text for index in indices], add_special_tokens=False)
            for index, encoding in zip(indices, encodings, strict=True):
                results[index] = _count(fragments[index], encoding)
        return [results[index] for index in range(len(fragments))]

    def _variant(self, begins: bool, ends: bool) -> tokenizers.Tokenizer:
        """The tokenizer without its steps for the beginning, or the end, of a text."""
        if (begins, ends) not in self._variants:
            tree = _inner_tree(self._tree, begins, ends)
            backend = self._backend
            if tree != self._tree:
                backend = tokenizers.Tokenizer.from_str(json.dumps(tree))
                backend.encode_special_tokens = True
            self._variants[begins, ends] = backend
        return self._variants[begins, ends]


def _count(fragment: TextFragment, encoding: tokenizers.Encoding) -> FragmentIds:
    ids, text = encoding.ids, fragment.text
    if not fragment.cuts:
        return FragmentIds(ids, [len(ids)], [utf8_size(text)], [])
    offsets, token, reached = encoding.offsets, 0, 0
    tokens, over = [0], []
    for cut in fragment.cuts:
        while token < len(ids) and offsets[token][0] < cut:
            reached = max(reached, offsets[token][1])
            token += 1
        tokens.append(token)
        over.append(utf8_size(text[cut : max(cut, reached)]))
    counts = [stop - start for start, stop in pairwise([*tokens, len(ids)])]
    sizes = [utf8_size(text[start:stop]) for start, stop in pairwise([0, *fragment.cuts, len(text)])]
    return FragmentIds(ids, counts, sizes, over)


def first_split_point(points: SplitPoints, text: str, start: int) -> int | None:
    """Return the first split point at or after `start`, but not at the end of the text."""
    if points == "anywhere":
        return start
    match = EXPRESSIONS[points].search(text, start)
    return None if match is None else match.start()


def last_split_point(points: SplitPoints, text: str) -> int | None:
    """Return the last split point inside a text."""
    if points == "anywhere":
        return None
    for start in (max(0, len(text) - NEAR_END), 0):
        positions = [match.start() for match in EXPRESSIONS[points].finditer(text, start)]
        if positions and positions[-1]:
            return positions[-1]
    return None


def _ordinary_tokens(tree: Json) -> list[Json]:
    return [token for token in tree["added_tokens"] if not token["special"]]


def _split_points(tree: Json) -> SplitPoints | None:
    normalizers, pre_tokenizers = list(steps(tree["normalizer"])), list(steps(tree["pre_tokenizer"]))
    added = _ordinary_tokens(tree)
    if _never_merges(tree["model"], normalizers, pre_tokenizers) and not added:
        return "anywhere"
    for token in added:
        if token["lstrip"] or token["rstrip"] or re.search(r"\S\s|\s\S", token["content"]):
            return None
    # steps for the beginning of a text are repeated after each added token, which a fragment's beginning doesn't show
    if added and any(_acts_at_ends(step) for step in (*normalizers, *pre_tokenizers[:1])):
        return None
    if (mark := _space_mark(normalizers)) is None:
        return None
    lines = all(step["type"] in LOCAL for step in normalizers)
    for index, step in enumerate(pre_tokenizers):
        kind = step["type"]
        if kind in DROPPING and mark == " ":
            return "lines"
        # None of tiktoken's expressions looks behind, matches a visible character before a space, or continues from a
        # newline to a letter or digit; and (?!\S) is tried after whitespace only.
        known = _isolates(step) and step["pattern"].get("Regex") in PATTERNS.values()
        if known or (kind == "ByteLevel" and step["use_regex"]):
            prefixed = index > 0 and bool(step.get("add_prefix_space"))  # before every stretch
            return None if mark != " " else "lines" if lines and not prefixed else "spaces"
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
    # If no token of a BPE model has a space after another character, no merge crosses a space. A unigram model's sums
    # are rounded, which may decide between segmentations of equal score, so it reads texts as a whole.
    model, crossing = tree["model"], re.compile(f"[^{re.escape(mark)}]{re.escape(mark)}")
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return None
    return "spaces" if mark in model["vocab"] and not any(map(crossing.search, model["vocab"])) else None


def _isolates(step: Json) -> bool:
    """Whether a step splits before and after every match."""
    isolating = (("Isolated", False), ("Isolated", True), ("Removed", True))
    return step["type"] == "Split" and (step["behavior"], step["invert"]) in isolating


def _never_merges(model: Json, normalizers: Sequence[Json], pre_tokenizers: Sequence[Json]) -> bool:
    """Whether each character becomes separate tokens, so that a text can be split anywhere."""
    plain = model["type"] == "BPE" and not model["merges"] and not model["fuse_unk"] and not model["ignore_merges"]
    known = all(step["type"] in ("Split", "Digits", "Punctuation", "ByteLevel") for step in pre_tokenizers)
    prefixed = any(step["type"] == "ByteLevel" and step["add_prefix_space"] for step in pre_tokenizers)
    kept = all(step.get("behavior", "Isolated") != "Removed" for step in pre_tokenizers)
    return plain and known and not prefixed and kept and all(step["type"] == "Lowercase" for step in normalizers)


def _space_mark(normalizers: Sequence[Json]) -> str | None:
    """The character for a space after these normalizers; None if one of them may reach across a split point."""
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
    """Whether it is an expression of weft's SentencePiece reader that applies to the ends of a text only."""
    return expression == sentencepiece.TRIM or expression.startswith(sentencepiece.PREFIX)


def _acts_at_ends(step: Json) -> bool:
    anchored = step["type"] == "Replace" and _anchored(step["pattern"].get("Regex") or "")
    return anchored or step["type"] in ("Strip", "Prepend") or bool(step.get("add_prefix_space"))


def _inner_tree(tree: Json, begins: bool, ends: bool) -> Json:
    """A tokenizer without the steps for the beginning and the end of a text that a fragment doesn't have."""
    tree = json.loads(json.dumps(tree))
    for part in ("normalizer", "pre_tokenizer"):
        tree[part] = _without_ends(tree[part], begins, ends)
    for index, step in enumerate(steps(tree["pre_tokenizer"])):
        if not begins and index == 0 and "add_prefix_space" in step:
            step["add_prefix_space"] = False
        if not begins and step["type"] == "Metaspace":
            always = step["prepend_scheme"] == "always" and (index > 0 or bool(_ordinary_tokens(tree)))
            step["prepend_scheme"] = "always" if always else "never"  # "always" applies to every stretch without one
    return tree


def _without_ends(part: Json | None, begins: bool, ends: bool) -> Json | None:
    if part is None:
        return None
    for key in ("normalizers", "pretokenizers"):
        if isinstance(part.get(key), list):
            kept = [step for each in part[key] if (step := _without_ends(each, begins, ends)) is not None]
            return {**part, key: kept}
    expression = part["pattern"].get("Regex") or "" if part["type"] == "Replace" else ""
    if expression == sentencepiece.TRIM:
        alternatives = zip(sentencepiece.TRIM.split("|"), (begins, ends), strict=True)
        left = "|".join(each for each, applies in alternatives if applies)
        return {**part, "pattern": {"Regex": left}} if left else None
    if not begins and (part["type"] == "Prepend" or expression.startswith(sentencepiece.PREFIX)):
        return None
    if part["type"] == "Strip":
        return {**part, "strip_left": part["strip_left"] and begins, "strip_right": part["strip_right"] and ends}
    return part
