"""generation_config.json: how the makers of a checkpoint have it write, read as settings of weft's.

It is a stranger's file: what makes no sense in it is named, and nothing comes of it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from weft.config import Tree

DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
MOST = 10**9


class Field(NamedTuple):
    """Our name of a setting, which values it may have, and the one that means that it is off."""

    ours: str
    fits: Callable[[Any], bool]
    off: float | None = None


def _between(low: float, high: float, whole: bool = False) -> Callable[[Any], bool]:
    kinds = int if whole else (int, float)
    return lambda value: (
        isinstance(value, kinds)
        and not isinstance(value, bool)
        and low <= value <= high
        and (isinstance(value, int) or math.isfinite(value))
    )


FIELDS = {
    "temperature": Field("temperature", _between(0.0, 100.0)),
    "top_k": Field("top_k", _between(0, MOST, whole=True), off=0),
    "top_p": Field("top_p", _between(1e-9, 1.0), off=1.0),
    "min_p": Field("min_p", _between(0.0, 1.0), off=0.0),
    "typical_p": Field("typical_p", _between(1e-9, 1.0), off=1.0),
    "repetition_penalty": Field("repetition_penalty", _between(1e-9, 100.0), off=1.0),
    "max_new_tokens": Field("max_tokens", _between(1, MOST, whole=True)),
    "min_new_tokens": Field("min_tokens", _between(0, MOST, whole=True), off=0),
    "no_repeat_ngram_size": Field("no_repeat_ngram", _between(0, MOST, whole=True), off=0),
}
# what changes a text, but not in weft, with the value that means that it is off
ELSEWHERE: dict[str, Any] = {
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_decoder_ids": None,
    "guidance_scale": 1.0,
    "num_beam_groups": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": None,
    "watermarking_config": None,
}


def generation_settings(tree: Mapping[str, Any], vocab_size: int, answers: bool = False) -> tuple[Tree, list[str]]:
    """The settings in a generation_config.json by weft's names, and the `key = value` that can't be used.

    If the file says how to draw at all, its temperature is 1 where it names none. Ids that end a text are `stop_ids`.
    `min_length` counts all that a decoder reads and writes: of a model that `answers` a source, the token that it
    starts from and its answer.
    """
    found: Tree = {}
    odd: list[str] = []
    least = "min_length" if tree.get("min_new_tokens") is None else "min_new_tokens"
    if answers and least == "min_length" and (given := tree.get(least)) is not None:
        if not _between(0, MOST, whole=True)(given):
            odd.append(_shown(least, given))
        elif given > 1:
            found["min_tokens"] = given - 1
    for key, field in FIELDS.items():
        value = tree.get(key)
        if value is None:
            continue
        if not field.fits(value):
            odd.append(_shown(key, value))
        elif value != field.off:
            found[field.ours] = value
    if found.get("min_tokens", 0) > found.get("max_tokens", MOST):
        odd.append(_shown(least, tree[least]))
        del found["min_tokens"]
    draws = tree.get("do_sample")
    if draws is not None and not isinstance(draws, bool):
        odd.append(_shown("do_sample", draws))
    elif draws or any(key in found for key in DRAWING):
        found.setdefault("temperature", 1.0)
    if draws is False or found.get("temperature") == 0:  # greedy: it draws nothing
        found = {key: value for key, value in found.items() if key not in DRAWING} | {"temperature": 0.0}
    ends = tree.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if all(_between(0, vocab_size - 1, whole=True)(id) for id in ids):
        found |= {"stop_ids": tuple(ids)} if ids else {}
    else:
        odd.append(_shown("eos_token_id", ends))
    for key, ours in (("forced_bos_token_id", "forced"), ("suppress_tokens", "banned"), ("bad_words_ids", "banned")):
        value = tree.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if key == "bad_words_ids":  # of words of several tokens, each alone may be written
            listed = [word[0] if isinstance(word, list) and len(word) == 1 else word for word in listed]
            listed = [word for word in listed if not isinstance(word, list)]
        fits = _between(0, vocab_size - 1 if ours == "forced" else MOST, whole=True)
        if not all(map(fits, listed)):
            odd.append(_shown(key, value))
        elif listed := [id for id in listed if id < vocab_size]:  # what no token has is never written
            found[ours] = (*found.get(ours, ()), *listed)
    last = tree.get("forced_eos_token_id")
    last = last[0] if isinstance(last, list) and len(last) == 1 else last
    if last is not None:
        if _between(0, vocab_size - 1, whole=True)(last):
            found["last"] = last
        else:
            odd.append(_shown("forced_eos_token_id", last))
    stops = tree.get("stop_strings")
    stops = [stops] if isinstance(stops, str) else stops
    if stops:
        if isinstance(stops, list) and all(isinstance(each, str) and each for each in stops):
            found["stop"] = tuple(stops)
        else:
            odd.append(_shown("stop_strings", stops))
    if set(found.get("banned", ())) & set(found.get("forced", ())):
        odd.append(_shown("forced_bos_token_id", tree["forced_bos_token_id"]))
        del found["forced"]
    return found, odd


def search_settings(tree: Mapping[str, Any]) -> tuple[Tree, list[str]]:
    """What a generation_config.json says of beam search, by weft's names, and the `key = value` that can't be used.

    What the file doesn't say is as transformers has it: it searches until nothing better is likely, and leaves what
    rules allow as likely as the model has it.
    """
    found: Tree = {"patience": None, "settled": "likely", "renormalise": False}
    odd: list[str] = []
    ends, sums = tree.get("early_stopping"), tree.get("renormalize_logits")
    if ends is True:
        found["patience"] = 1.0
    elif ends == "never":
        found["settled"] = "certain"
    elif ends not in (None, False):
        odd.append(_shown("early_stopping", ends))
    if isinstance(sums, bool):
        found["renormalise"] = sums
    elif sums is not None:
        odd.append(_shown("renormalize_logits", sums))
    width, alpha = tree.get("num_beams"), tree.get("length_penalty")
    if _between(1, 1000, whole=True)(width):
        found["beams"] = width
    elif width is not None:
        odd.append(_shown("num_beams", width))
    if _between(-10.0, 10.0)(alpha):
        found["length_penalty"] = {"kind": "power", "alpha": alpha}
    elif alpha is not None:
        odd.append(_shown("length_penalty", alpha))
    return found, odd


def without_a_rule(tree: Mapping[str, Any], answers: bool) -> list[str]:
    """The `key = value` of a generation_config.json that change a text by rules that weft doesn't have.

    A text that goes on with a prompt has a least length of its own in weft, not one that counts the prompt.
    """
    off = ELSEWHERE if answers else {**ELSEWHERE, "min_length": 0}
    found = [_shown(key, tree[key]) for key, value in off.items() if tree.get(key) not in (None, value, [])]
    words = tree.get("bad_words_ids")
    several = [word for word in words if isinstance(word, list) and len(word) > 1] if isinstance(words, list) else []
    return found + ([_shown("bad_words_ids", several)] if several else [])


def _shown(key: str, value: Any) -> str:
    text = repr(value)
    return f"{key} = {text if len(text) <= 40 else text[:40] + '…'}"
