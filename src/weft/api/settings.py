"""Settings for writing, from what a person gives and what a checkpoint's makers had in mind."""

from collections.abc import Mapping
from typing import Any

from weft.config import Tree, validate
from weft.decode.config import Beam, Rules, Sampling
from weft.interop.generation import DRAWING


def sampling(**given: Any) -> Sampling:
    """How to write: temperature, top_k, top_p, max_tokens, seed, stop …; what is None keeps its default."""
    return validate(Sampling, {key: value for key, value in given.items() if value is not None})


def beam(**given: Any) -> Beam:
    """How to search: beams, n, length_penalty, max_tokens, stop …; what is None keeps its default."""
    return validate(Beam, {key: value for key, value in given.items() if value is not None})


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Tree:
    """What was given, and the defaults for what was not (None).

    Greedy decoding draws nothing, so of settings that are given or default it leaves out what it would contradict.
    """
    wanted = {key: value for key, value in given.items() if value is not None}
    left = dict(defaults)
    if wanted.get("temperature") == 0:
        left = {key: value for key, value in left.items() if key not in DRAWING}
    elif left.get("temperature") == 0 and any(key in wanted for key in DRAWING):
        del left["temperature"]
    return left | wanted


def for_beam(defaults: Mapping[str, Any]) -> Tree:
    """Those of the defaults that hold for beam search too."""
    return {key: value for key, value in defaults.items() if key in Rules.model_fields}
