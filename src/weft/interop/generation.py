"""generation_config.json: how the makers of a checkpoint have it write, read as settings of weft's.

It is a stranger's file: what makes no sense in it is named, and nothing comes of it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from weft.config import Tree

DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
MAX_NUMBER = 10**9


def _between(low: float, high: float, whole: bool = False) -> Callable[[Any], bool]:
    kinds = int if whole else (int, float)
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


# our name of a setting, which values it may have, and the one that means that it is off
FIELDS: dict[str, tuple[str, Callable[[Any], bool], float | None]] = {
    "temperature": ("temperature", _between(0.0, 100.0), None),
    "top_k": ("top_k", _between(0, MAX_NUMBER, whole=True), 0),
    "top_p": ("top_p", _between(1e-9, 1.0), 1.0),
    "min_p": ("min_p", _between(0.0, 1.0), 0.0),
    "typical_p": ("typical_p", _between(1e-9, 1.0), 1.0),
    "repetition_penalty": ("repetition_penalty", _between(1e-9, 100.0), 1.0),
    "max_new_tokens": ("max_tokens", _between(1, MAX_NUMBER, whole=True), None),
    "min_new_tokens": ("min_tokens", _between(0, MAX_NUMBER, whole=True), 0),
    "no_repeat_ngram_size": ("no_repeat_ngram", _between(0, MAX_NUMBER, whole=True), 0),
}
# what changes a text, but not in weft, with the value that means that it is off
ELSEWHERE: dict[str, Any] = {
    **dict.fromkeys(("begin_suppress_tokens", "constraints", "exponential_decay_length_penalty")),
    **dict.fromkeys(("forced_decoder_ids", "sequence_bias", "watermarking_config")),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beam_groups"), 1),
    "penalty_alpha": 0,
}


def generation_settings(tree: Mapping[str, Any], vocab_size: int, answers: bool = False) -> tuple[Tree, list[str]]:
    """The settings in a generation_config.json by weft's names, and the `key = value` that can't be used.

    If the file says how to draw at all, its temperature is 1 where it names none. Ids that end a text are `stop_ids`.
    `min_length` counts all that a decoder reads and writes: of a model that `answers` a source, the token that it
    starts from and its answer.
    """
    found: Tree = {}
    odd: list[str] = []
    is_id, natural = _between(0, vocab_size - 1, whole=True), _between(0, MAX_NUMBER, whole=True)
    least = "min_length" if tree.get("min_new_tokens") is None else "min_new_tokens"
    if answers and least == "min_length" and (given := _value(tree, least, natural, odd) or 0) > 1:
        found["min_tokens"] = given - 1
    for key, (ours, fits, off) in FIELDS.items():
        value = _value(tree, key, fits, odd)
        if value is not None and value != off:
            found[ours] = value
    if found.get("min_tokens", 0) > found.get("max_tokens", MAX_NUMBER):
        odd.append(_shown(least, tree[least]))
        del found["min_tokens"]
    draws = _value(tree, "do_sample", _is_flag, odd)
    if draws or any(key in found for key in DRAWING):
        found.setdefault("temperature", 1.0)
    if draws is False or found.get("temperature") == 0:  # greedy: it draws nothing
        found = {key: value for key, value in found.items() if key not in DRAWING} | {"temperature": 0.0}
    if ends := _listed(_value(tree, "eos_token_id", lambda given: all(map(is_id, _listed(given))), odd)):
        found["stop_ids"] = tuple(ends)
    for key, ours in (("forced_bos_token_id", "forced"), ("suppress_tokens", "banned"), ("bad_words_ids", "banned")):
        ids = _listed(tree.get(key))
        if key == "bad_words_ids":  # of words of several tokens, each alone may be written
            ids = [word[0] if isinstance(word, list) and len(word) == 1 else word for word in ids]
            ids = [word for word in ids if not isinstance(word, list)]
        if not all(map(is_id if ours == "forced" else natural, ids)):
            odd.append(_shown(key, tree[key]))
        elif ids := [id for id in ids if id < vocab_size]:  # what no token has is never written
            found[ours] = (*found.get(ours, ()), *ids)
    last = _value(tree, "forced_eos_token_id", lambda given: len(_listed(given)) == 1 and is_id(*_listed(given)), odd)
    if last is not None:
        (found["last"],) = _listed(last)
    texts = _value(tree, "stop_strings", lambda given: all(isinstance(s, str) and s for s in _listed(given)), odd)
    if stops := _listed(texts):
        found["stop"] = tuple(stops)
    if set(found.get("banned", ())) & set(found.get("forced", ())):
        odd.append(_shown("forced_bos_token_id", tree["forced_bos_token_id"]))
        del found["forced"]
    return found, odd


def search_settings(tree: Mapping[str, Any]) -> tuple[Tree, list[str]]:
    """What a generation_config.json says of beam search, by weft's names, and the `key = value` that can't be used.

    What the file doesn't say is as transformers has it: it searches until nothing better is likely, and leaves what
    rules allow as likely as the model has it.
    """
    odd: list[str] = []
    ends = _value(tree, "early_stopping", lambda given: given is True or given in (False, "never"), odd)
    found: Tree = {"patience": 1.0 if ends is True else None, "settled": "certain" if ends == "never" else "likely"}
    found["renormalise"] = bool(_value(tree, "renormalize_logits", _is_flag, odd))
    if (width := _value(tree, "num_beams", _between(1, 1000, whole=True), odd)) is not None:
        found["beams"] = width
    if (alpha := _value(tree, "length_penalty", _between(-10.0, 10.0), odd)) is not None:
        found["length_penalty"] = {"kind": "power", "alpha": alpha}
    if _value(tree, "replace_unknowns", _is_flag, odd):  # CTranslate2's word
        found["replace_unknown"] = True
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


def _value(tree: Mapping[str, Any], key: str, fits: Callable[[Any], bool], odd: list[str]) -> Any:
    """A key's value; one that makes no sense counts as absent, and is noted in `odd`."""
    value = tree.get(key)
    if value is None or fits(value):
        return value
    odd.append(_shown(key, value))
    return None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _shown(key: str, value: Any) -> str:
    text = repr(value)
    return f"{key} = {text if len(text) <= 40 else text[:40] + '…'}"
