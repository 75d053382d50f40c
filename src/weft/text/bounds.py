"""Bounds on an untrusted tokenizer.json, checked before the library reads it.

A few lines can request gigabytes: steps that each make a text ten times as long, a template with millions of tokens, a
vocabulary whose trie has a node per byte. The checks bound how much a text may grow, and the memory of the tokenizer.
"""

import base64
import binascii
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from math import prod
from os.path import commonprefix
from threading import Lock
from typing import Any, TypeVar

from tokenizers import Regex, normalizers

from weft.errors import TokenizerError
from weft.storage.untrusted import MAX_WHOLE_BYTES, parse_json, refuse_beyond

MAX_STEPS = 512  # of a normalizer, pre-tokenizer, post-processor or decoder
MAX_GROWTH = 64  # bytes that a byte of text may become; Unicode compositions make up to 11 of one
MAX_FRAME_TOKENS = 256  # that a post-processor puts around a text
MAX_AFFIX_BYTES = 256  # of prefixes and suffixes that mark a piece's position in a word
MAX_NODES = 4_000_000  # of the trie of pieces, about 350 bytes each; the largest known have a million
MAX_LETTERS = 8_000_000  # of a vocabulary whose merges are computed; the largest known has 2 million
MAX_WORD_CHARACTERS = 1_000  # of a word in WordPiece, whose time is quadratic
COPIES = 16  # of a probed text, so that additions at its ends hardly count
PROBES = [letter * 32 + "\x01" for letter in "a 1.\n"]  # texts that make a regular expression backtrack exponentially
SUBSEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")

Json = dict[str, Any]
T = TypeVar("T")


def check(text: str) -> None:
    """Refuse a tokenizer.json that exceeds the bounds; values of a wrong type are left to the library."""
    _refuse(len(text), MAX_WHOLE_BYTES, f"{len(text):,} characters")
    tree = parse_json(text, "not a tokenizer", TokenizerError)
    if not isinstance(tree, dict):
        raise TokenizerError("not a tokenizer: expected a JSON object")
    for part in ("normalizer", "decoder"):
        _check_growth(list(steps(tree.get(part))), part)
    for step in steps(tree.get("post_processor")):
        _check_template(step)
    model = tree.get("model")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        _refuse(_size(_get(model, key)), MAX_AFFIX_BYTES, f"model.{key} is long")
    longest = _get(model, "max_input_chars_per_word")
    if isinstance(longest, int):
        _refuse(longest, MAX_WORD_CHARACTERS, f"model.max_input_chars_per_word = {longest}")
    vocab = _get(model, "vocab")
    if isinstance(vocab, list):  # a unigram model's; the others have no trie
        check_trie(_text(entry[0]) for entry in vocab if isinstance(entry, list) and entry)
    added = tree.get("added_tokens")
    check_trie(_text(_get(each, "content")) for each in (added if isinstance(added, list) else ()))


def _refuse(size: float, limit: int, what: str) -> None:
    refuse_beyond(size, limit, f"not a tokenizer: {what}", kind=TokenizerError)


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _size(value: Any) -> int:
    return len(_text(value).encode("utf-8", "surrogatepass"))


def steps(part: Any) -> Iterator[Json]:
    """Yield the steps of a part of a tokenizer.json, those of nested sequences too; they may be modified in place."""
    stack, count = [part], 0
    while stack:
        step = stack.pop()
        nested = next((step[key] for key in SUBSEQUENCES if isinstance(_get(step, key), list)), None)
        if nested is not None:
            stack += reversed(nested)
        elif isinstance(step, dict):
            count += 1
            _refuse(count, MAX_STEPS, f"more than {MAX_STEPS} steps in one of its parts")
            yield step


def _check_growth(steps: list[Json], part: str) -> None:
    """Bound the growth of a text by the product of the steps' worst cases; if that is too large, by trying them."""
    for step in steps:
        _refuse(_size(step.get("prepend")), MAX_AFFIX_BYTES, f"its {part} prepends a text")
    if prod(map(_growth, steps)) <= MAX_GROWTH:  # may be infinite
        return
    replaces = [_replacement(step) for step in steps]
    others = min(prod(_growth(step) for step, replace in zip(steps, replaces, strict=True) if not replace), 1e12)
    worst = max((_measured_growth(index, steps, replaces) for index, step in enumerate(replaces) if step), default=1.0)
    _refuse(others * worst, MAX_GROWTH, f"its {part} makes a text more than {MAX_GROWTH} times as long")


def _growth(step: Json) -> float:
    if "pattern" in step and "content" in step:  # a replacement; old files don't name the type
        return max(1.0, _size(step["content"]) / _min_match(step) + (_get(step["pattern"], "Regex") is not None))
    # SentencePiece's compiled table: the size of a trie, the trie, then the replacements, each followed by a zero
    try:
        table = base64.b64decode(_text(step.get("precompiled_charsmap")), validate=False)
    except (binascii.Error, ValueError):
        return 1.0  # the library refuses it
    replacements = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1.0, max(map(len, replacements)) / 2)


def _min_match(step: Json) -> int:
    """Fewest bytes that a replacement replaces; a regular expression may match one, or none."""
    return max(1, _size(_get(step.get("pattern"), "String")))


def _replacement(step: Json) -> normalizers.Replace | None:
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or not isinstance(step.get("content"), str):
        return None
    plain, expression = pattern.get("String"), pattern.get("Regex")
    try:
        return normalizers.Replace(plain if isinstance(plain, str) else Regex(_text(expression)), step["content"])
    except Exception as error:  # an invalid expression
        raise TokenizerError(f"not a tokenizer: {' '.join(str(error).split())}") from None


def _measured_growth(index: int, steps: list[Json], replaces: list[normalizers.Replace | None]) -> float:
    """Bytes that later steps make of a replacement's text, per byte that it replaces."""
    text, replaced = COPIES * _text(steps[index].get("content")), COPIES * _min_match(steps[index])
    for later in replaces[index + 1 :]:
        if _size(text) > 16 * MAX_GROWTH * replaced:
            break
        text = text if later is None else later.normalize_str(text)
    return _size(text) / replaced


def _check_template(step: Json) -> None:
    """Bound a template: it names special tokens, each of which stands for a list of ids, and the text, once."""
    named = step.get("special_tokens")
    for form in ("single", "pair"):
        pieces = step.get(form) if isinstance(step.get(form), list) else []
        size = texts = 0
        for piece in pieces or ():
            texts += _get(piece, "Sequence") is not None
            name = _get(_get(piece, "SpecialToken"), "id")
            ids = _get(_get(named, name), "ids") if isinstance(name, str) else None
            size += len(ids) if isinstance(ids, list) else 1
        _refuse(size, MAX_FRAME_TOKENS, f"its post_processor puts {size:,} tokens around")
        _refuse(texts, 2, f"its post_processor repeats a text {texts} times")


def check_trie(pieces: Iterable[str], max_nodes: int = MAX_NODES) -> None:
    """Refuse pieces whose trie is too large; it has a node for each byte that is not in a common prefix."""
    encoded = [piece.encode("utf-8", "surrogatepass") for piece in pieces]
    nodes = sum(map(len, encoded))
    if nodes <= max_nodes:
        return
    encoded.sort()
    nodes -= sum(len(commonprefix(pair)) for pair in pairwise(encoded))  # noqa: RUF071 — of bytes, not of paths
    _refuse(nodes, max_nodes, f"{len(encoded):,} pieces with {nodes:,} bytes to search in")


def check_letters(pieces: Iterable[str | bytes]) -> None:
    """Refuse pieces whose merges would take minutes to compute."""
    letters = sum(map(len, pieces))
    _refuse(letters, MAX_LETTERS, f"{letters:,} letters in its pieces")


def check_ids(vocab: Mapping[str, int]) -> None:
    """Refuse ids with gaps of millions, which the library would fill when it saves the file."""
    token = max(vocab, key=vocab.__getitem__, default="")
    limit = 4 * len(vocab) + 65536
    if vocab and vocab[token] >= limit:
        shown = token if len(token) <= 40 else token[:40] + "…"
        found = f"the token {shown!r} has id {vocab[token]}, far beyond its {len(vocab)} tokens"
        raise TokenizerError(f"not a tokenizer: {found}; expected ids below {limit}")


def is_failure(error: BaseException) -> bool:
    """Return whether the library raised an error: an Exception, or a panic, as of an endless regular expression."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class QuietStderr:
    """Context manager that hides stderr, where a panic prints, since an error is raised as well; shared by threads."""

    def __init__(self) -> None:
        self._lock, self._depth, self._stderr = Lock(), 0, -1

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                with suppress(OSError):  # there is no stderr
                    self._stderr = os.dup(2)
                    os.dup2(DEVNULL, 2)

    def __exit__(self, *failure: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._stderr >= 0:
                os.dup2(self._stderr, 2)
                os.close(self._stderr)
                self._stderr = -1


DEVNULL = os.open(os.devnull, os.O_WRONLY)
quiet = QuietStderr()


def call_library(make: Callable[[], T]) -> T:
    """Return make(); an error of the library, even a panic, becomes a one-line TokenizerError."""
    try:
        with quiet:
            return make()
    except (TokenizerError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # panics are no Exceptions
        raise TokenizerError(f"not a tokenizer: {' '.join(str(error).split())}") from None
