"""What a person gives, as settings: for writing, with what a checkpoint's makers had in mind, and for texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from weft.config import Tree, validate
from weft.decode.config import Beam, Rules, Sampling
from weft.decode.constrain import Grammar
from weft.interop.generation import SAMPLING_KEYS
from weft.progress import log_to_stderr
from weft.runs.folder import RunFolder
from weft.runs.imported import generation
from weft.text.tokenizer import Tokenizer


class BulkOptions(TypedDict, total=False):
    """What `Run.bulk` may be given beside prompts and settings."""

    n: int
    batch: int
    out: Path | str | None
    pattern: Grammar | None
    quantize_cache: str | None
    notes: Mapping[str, Any] | None


def sampling(**given: Any) -> Sampling:
    """How to write: temperature, top_k, top_p, max_tokens, seed, stop …; what is None keeps its default."""
    return validate(Sampling, {key: value for key, value in given.items() if value is not None})


def beam(**given: Any) -> Beam:
    """How to search: beams, n, length_penalty, max_tokens, stop …; what is None keeps its default."""
    return validate(Beam, {key: value for key, value in given.items() if value is not None})


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Tree:
    """What was given, and the defaults for what was not (None).

    Greedy decoding draws nothing, so of settings that are given or default it leaves out what it would contradict; and
    a text need not be longer by default than it may be.
    """
    wanted = {key: value for key, value in given.items() if value is not None}
    left = dict(defaults)
    if wanted.get("temperature") == 0:
        left = {key: value for key, value in left.items() if key not in SAMPLING_KEYS}
    elif left.get("temperature") == 0 and any(key in wanted for key in SAMPLING_KEYS):
        del left["temperature"]
    both = left | wanted
    max_tokens = both.get("max_tokens", Rules.model_fields["max_tokens"].default)
    if isinstance(max_tokens, int) and "min_tokens" in left and "min_tokens" not in wanted:
        both["min_tokens"] = min(both["min_tokens"], max_tokens)
    return both


def generation_defaults(run: RunFolder, tokenizer: Tokenizer) -> tuple[Tree, Tree]:
    """How the makers of an imported checkpoint have it write, and search; on stderr what of that can't be used."""
    writing, search, odd = generation(run, tokenizer.vocab_size)
    for line in odd:
        log_to_stderr(f"weft: {line}")
    more = tuple(id for id in writing.pop("stop_ids", ()) if id != tokenizer.eos_id)
    writing |= {"stop_ids": more} if more else {}
    return writing, search | {key: value for key, value in writing.items() if key in Rules.model_fields}


def translation_beam(length: int, defaults: Mapping[str, Any]) -> Beam:
    """How a run translates where nobody says how; `length` is how many tokens it reads in a row at most."""
    return beam(**with_defaults({}, {"beams": 5, "patience": 1.0, "max_tokens": length, **defaults}))
