"""What a tokenizer.json from elsewhere may ask for, checked before the library sees it.

A few lines can ask for gigabytes: steps that each make a text ten times as long, a frame of millions of tokens, a
vocabulary whose search tree holds a node a letter. What is checked here bounds the text that comes of a text, and the
memory that the tokenizer itself takes.
"""

import base64
import binascii
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from math import prod
from os.path import commonprefix
from threading import Lock
from typing import Any, TypeVar

from tokenizers import Regex, normalizers

from weft.errors import TokenizerError
from weft.storage.untrusted import MAX_WHOLE_BYTES, parse_json, refuse_beyond

MAX_STEPS = 512  # of preparing a text, or of putting it together again
MAX_GROWTH = 64  # times as many bytes that a text may become; Unicode's own compositions make up to 11 of one
MAX_FRAME_TOKENS = 256  # around a text
MAX_AFFIX_BYTES = 256  # that mark a piece's place in a word
MAX_NODES = 4_000_000  # of the tree in which pieces are searched, some 350 bytes each; the largest have a million
MAX_LETTERS = 8_000_000  # of a vocabulary whose merges are looked for, a place in a piece each; the largest: 2 million
MAX_WORD_CHARACTERS = 1_000  # that WordPiece cuts: the work grows with the square
COPIES = 16  # of a text that is tried, so that what is added at its ends counts little
PROBES = [letter * 32 + "\x01" for letter in "a 1.\n"]  # on which an expression that takes for ever gives up
SUBSEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")

Json = dict[str, Any]
T = TypeVar("T")


def check(text: str) -> None:
    """Refuse a tokenizer.json that asks for too much. What is of a wrong type is left for the library to refuse."""
    _refuse(len(text), MAX_WHOLE_BYTES, f"{len(text):,} characters")
    tree = parse_json(text, "not a tokenizer", TokenizerError)
    if not isinstance(tree, dict):
        raise TokenizerError("not a tokenizer: expected a JSON object")
    for part in ("normalizer", "decoder"):
        _check_growth(list(steps(tree.get(part))), part)
    for step in steps(tree.get("post_processor")):
        _check_frame(step)
    model = tree.get("model")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        _refuse(_size(_get(model, key)), MAX_AFFIX_BYTES, f"model.{key} is long")
    longest = _get(model, "max_input_chars_per_word")
    if isinstance(longest, int):
        _refuse(longest, MAX_WORD_CHARACTERS, f"model.max_input_chars_per_word = {longest}")
    vocab = _get(model, "vocab")
    if isinstance(vocab, list):  # of a unigram model; the others have no tree
        check_pieces(_text(entry[0]) for entry in vocab if isinstance(entry, list) and entry)
    added = tree.get("added_tokens")
    check_pieces(_text(_get(each, "content")) for each in (added if isinstance(added, list) else ()))


def _refuse(size: float, most: int, what: str) -> None:
    refuse_beyond(size, most, f"not a tokenizer: {what}", kind=TokenizerError)


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _size(value: Any) -> int:
    return len(_text(value).encode("utf-8", "surrogatepass"))


def steps(part: Any) -> Iterator[Json]:
    """The steps of a part of a tokenizer.json, those inside sequences one by one, to be changed where they are."""
    waiting, count = [part], 0
    while waiting:
        step = waiting.pop()
        inside = next((step[key] for key in SUBSEQUENCES if isinstance(_get(step, key), list)), None)
        if inside is not None:
            waiting += reversed(inside)
        elif isinstance(step, dict):
            count += 1
            _refuse(count, MAX_STEPS, f"more than {MAX_STEPS} steps in one of its parts")
            yield step


def _check_growth(steps: list[Json], part: str) -> None:
    """First by what each step could do to what the one before made; if that is too much, by what they do."""
    for step in steps:
        _refuse(_size(step.get("prepend")), MAX_AFFIX_BYTES, f"its {part} prepends a text")
    if prod(map(_growth, steps)) <= MAX_GROWTH:  # it may be infinite
        return
    made = [_replacement(step) for step in steps]
    others = min(prod(_growth(step) for step, replaced in zip(steps, made, strict=True) if not replaced), 1e12)
    worst = max((_grown(place, steps, made) for place, step in enumerate(made) if step), default=1.0)
    _refuse(others * worst, MAX_GROWTH, f"its {part} makes a text more than {MAX_GROWTH} times as long")


def _growth(step: Json) -> float:
    if "pattern" in step and "content" in step:  # a replacement, also in old files, which don't name the type
        return max(1.0, _size(step["content"]) / _shortest(step) + (_get(step["pattern"], "Regex") is not None))
    # SentencePiece's compiled table: the tree's size, the tree, then the replacements, each with a zero behind
    try:
        table = base64.b64decode(_text(step.get("precompiled_charsmap")), validate=False)
    except (binascii.Error, ValueError):
        return 1.0  # the library refuses it
    replacements = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1.0, max(map(len, replacements)) / 2)


def _shortest(step: Json) -> int:
    """The bytes that a replacement takes the place of; an expression may match one, or none."""
    return max(1, _size(_get(step.get("pattern"), "String")))


def _replacement(step: Json) -> normalizers.Replace | None:
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or not isinstance(step.get("content"), str):
        return None
    plain, expression = pattern.get("String"), pattern.get("Regex")
    try:
        return normalizers.Replace(plain if isinstance(plain, str) else Regex(_text(expression)), step["content"])
    except Exception as error:  # the expression is none
        raise TokenizerError(f"not a tokenizer: {' '.join(str(error).split())}") from None


def _grown(place: int, steps: list[Json], made: list[normalizers.Replace | None]) -> float:
    """What the later steps make of the text that one puts in, in bytes for each byte that it takes out."""
    text, shortest = COPIES * _text(steps[place].get("content")), COPIES * _shortest(steps[place])
    for later in made[place + 1 :]:
        if _size(text) > 16 * MAX_GROWTH * shortest:
            break
        text = text if later is None else later.normalize_str(text)
    return _size(text) / shortest


def _check_frame(step: Json) -> None:
    """A template names special tokens, each of which stands for a list of ids, and the text, which comes once."""
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


def check_pieces(pieces: Iterable[str]) -> None:
    """Refuse pieces whose search tree, with a node for each byte that no other piece has in its place, is too large."""
    spelled = [piece.encode("utf-8", "surrogatepass") for piece in pieces]
    nodes = sum(map(len, spelled))
    if nodes <= MAX_NODES:
        return
    spelled.sort()
    nodes -= sum(len(commonprefix(pair)) for pair in pairwise(spelled))  # noqa: RUF071 — letters are meant
    _refuse(nodes, MAX_NODES, f"{len(spelled):,} pieces with {nodes:,} bytes to search in")


def check_letters(pieces: Iterable[str | bytes]) -> None:
    """Refuse pieces in which it would take minutes to look for merges."""
    letters = sum(map(len, pieces))
    _refuse(letters, MAX_LETTERS, f"{letters:,} letters in its pieces")


def is_failure(error: BaseException) -> bool:
    """Whether the library failed: it panics where a regular expression takes too long, and panics are no Exceptions."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Quiet:
    """Keeps what a panic prints from the terminal: the error that is raised says it. Threads share one silence."""

    def __init__(self) -> None:
        self._lock, self._inside, self._kept = Lock(), 0, -1

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                with suppress(OSError):  # there is no standard error
                    self._kept = os.dup(2)
                    os.dup2(NOWHERE, 2)

    def __exit__(self, *failure: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._kept >= 0:
                os.dup2(self._kept, 2)
                os.close(self._kept)
                self._kept = -1


NOWHERE = os.open(os.devnull, os.O_WRONLY)
quiet = Quiet()


def careful(make: Callable[[], T]) -> T:
    """What `make` gives; a fault in the file, even one that makes the library panic, becomes one line."""
    try:
        with quiet:
            return make()
    except (TokenizerError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library's panics are no Exceptions
        raise TokenizerError(f"not a tokenizer: {' '.join(str(error).split())}") from None
