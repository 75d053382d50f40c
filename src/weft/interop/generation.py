"""Translate generation_config.json, the makers' defaults for generating text, to weft's settings.

The file is untrusted: invalid values are reported and ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any

from weft.config import Tree

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
MAX_NUMBER = 10**9  # of any setting


def _between(low: float, high: float, integer: bool = False) -> Callable[[Any], bool]:
    kinds = int if integer else (int, float)
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


# their key → our setting, a check of its value, and the value that turns it off
FIELDS: dict[str, tuple[str, Callable[[Any], bool], float | None]] = {
    "temperature": ("temperature", _between(0.0, 100.0), None),
    "top_k": ("top_k", _between(0, MAX_NUMBER, integer=True), 0),
    "top_p": ("top_p", _between(1e-9, 1.0), 1.0),
    "min_p": ("min_p", _between(0.0, 1.0), 0.0),
    "typical_p": ("typical_p", _between(1e-9, 1.0), 1.0),
    "repetition_penalty": ("repetition_penalty", _between(1e-9, 100.0), 1.0),
    "max_new_tokens": ("max_tokens", _between(1, MAX_NUMBER, integer=True), None),
    "min_new_tokens": ("min_tokens", _between(0, MAX_NUMBER, integer=True), 0),
    "no_repeat_ngram_size": ("no_repeat_ngram", _between(0, MAX_NUMBER, integer=True), 0),
}
# settings that weft does not have → the value that turns them off
UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("begin_suppress_tokens", "constraints", "exponential_decay_length_penalty")),
    **dict.fromkeys(("forced_decoder_ids", "sequence_bias", "watermarking_config")),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beam_groups"), 1),
    "penalty_alpha": 0,
}


class _Values:
    """Reads values of a generation_config.json; an invalid one counts as absent and is added to `invalid`."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = tree
        self.invalid: list[str] = []

    def get(self, key: str, is_valid: Callable[[Any], bool]) -> Any:
        value = self.tree.get(key)
        if value is None or is_valid(value):
            return value
        return self.reject(key)

    def reject(self, key: str) -> None:
        self.invalid.append(_shown(key, self.tree[key]))


def generation_settings(tree: Mapping[str, Any], vocab_size: int, answers: bool = False) -> tuple[Tree, list[str]]:
    """Settings of a generation_config.json by weft's names, and its invalid `key = value` pairs.

    As in transformers, a file that sets the temperature or another sampling setting without `do_sample` asks for
    greedy decoding; with it, the temperature is 1 by default. Ids that end a text become `stop_ids`. In
    transformers, `min_length` counts all tokens of the decoder: for a model that `answers` a source, the start token
    and the answer.
    """
    settings: Tree = {}
    values = _Values(tree)
    is_id, is_natural = _between(0, vocab_size - 1, integer=True), _between(0, MAX_NUMBER, integer=True)
    minimum = "min_length" if tree.get("min_new_tokens") is None else "min_new_tokens"
    if answers and minimum == "min_length" and (length := values.get(minimum, is_natural) or 0) > 1:
        settings["min_tokens"] = length - 1
    for key, (ours, is_valid, off) in FIELDS.items():
        value = values.get(key, is_valid)
        if value is not None and value != off:
            settings[ours] = value
    if settings.get("min_tokens", 0) > settings.get("max_tokens", MAX_NUMBER):
        values.reject(minimum)
        del settings["min_tokens"]
    samples = values.get("do_sample", _is_flag)
    if samples:
        settings.setdefault("temperature", 1.0)
    elif samples is False or any(FIELDS[key][0] in settings for key in SAMPLING_KEYS):
        settings["temperature"] = 0.0
    if settings.get("temperature") == 0:  # greedy
        settings = {key: value for key, value in settings.items() if key not in SAMPLING_KEYS} | {"temperature": 0.0}
    if ends := _as_list(values.get("eos_token_id", lambda value: all(map(is_id, _as_list(value))))):
        settings["stop_ids"] = tuple(ends)
    for key, ours in (("forced_bos_token_id", "forced"), ("suppress_tokens", "banned"), ("bad_words_ids", "banned")):
        ids = _as_list(tree.get(key))
        if key == "bad_words_ids":  # words of several tokens are reported by `unsupported_settings`
            ids = [word[0] if isinstance(word, list) and len(word) == 1 else word for word in ids]
            ids = [word for word in ids if not isinstance(word, list)]
        if not all(map(is_id if ours == "forced" else is_natural, ids)):
            values.reject(key)
        elif ids := [id for id in ids if id < vocab_size]:  # other ids are never generated
            settings[ours] = (*settings.get(ours, ()), *ids)
    last = values.get("forced_eos_token_id", lambda value: len(_as_list(value)) == 1 and is_id(*_as_list(value)))
    if last is not None:
        (settings["last"],) = _as_list(last)
    texts = values.get("stop_strings", lambda value: all(isinstance(s, str) and s for s in _as_list(value)))
    if stops := _as_list(texts):
        settings["stop"] = tuple(stops)
    if set(settings.get("banned", ())) & set(settings.get("forced", ())):
        values.reject("forced_bos_token_id")
        del settings["forced"]
    return settings, values.invalid


def search_settings(tree: Mapping[str, Any]) -> tuple[Tree, list[str]]:
    """Beam-search settings of a generation_config.json by weft's names, and its invalid `key = value` pairs.

    Absent settings have the defaults of transformers: the search ends when a better text is unlikely, and logits are
    not renormalised after constraints.
    """
    values = _Values(tree)
    ends = values.get("early_stopping", lambda value: value is True or value in (False, "never"))
    settings: Tree = {"patience": 1.0 if ends is True else None, "settled": "certain" if ends == "never" else "likely"}
    settings["renormalise"] = bool(values.get("renormalize_logits", _is_flag))
    if (beams := values.get("num_beams", _between(1, 1000, integer=True))) is not None:
        settings["beams"] = beams
    if (alpha := values.get("length_penalty", _between(-10.0, 10.0))) is not None:
        settings["length_penalty"] = {"kind": "power", "alpha": alpha}
    if values.get("replace_unknowns", _is_flag):  # CTranslate2's key
        settings["replace_unknown"] = True
    return settings, values.invalid


def unsupported_settings(tree: Mapping[str, Any], answers: bool) -> list[str]:
    """List the `key = value` pairs of a generation_config.json that weft does not support.

    They include `min_length` unless the model `answers` a source: weft's minimum does not count the prompt.
    """
    off = UNSUPPORTED if answers else {**UNSUPPORTED, "min_length": 0}
    pairs = [_shown(key, tree[key]) for key, value in off.items() if tree.get(key) not in (None, value, [])]
    words = tree.get("bad_words_ids")
    several = [word for word in words if isinstance(word, list) and len(word) > 1] if isinstance(words, list) else []
    return pairs + ([_shown("bad_words_ids", several)] if several else [])


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _shown(key: str, value: Any) -> str:
    text = repr(value)
    return f"{key} = {text if len(text) <= 40 else text[:40] + '…'}"
