"""Settings of generation from keyword arguments, with the defaults of an imported checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from weft.api.arguments import checked, takes_settings
from weft.config import Tree, validate
from weft.decode.config import TRANSLATION_DEFAULTS, Beam, LengthPenalty, Rules, Sampling
from weft.interop.generation import SAMPLING_KEYS
from weft.progress import log_to_stderr
from weft.runs.folder import RunFolder
from weft.runs.imported import generation
from weft.text.tokenizer import Tokenizer


class RulesSettings(TypedDict, total=False):
    """The fields of `Rules`, for editors and type checkers. None keeps the default."""

    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str] | None
    stop_ids: Sequence[int] | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    no_repeat_ngram: int | None
    logit_bias: Mapping[int, float] | None
    banned: Sequence[int] | None
    forced: Sequence[int] | None
    last: int | None


class SamplingSettings(RulesSettings, total=False):
    """The fields of `Sampling`."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    seed: int | None
    logprobs: int | None
    slide: bool | None


class BeamSettings(RulesSettings, total=False):
    """The fields of `Beam`."""

    beams: int | None
    n: int | None
    length_penalty: LengthPenalty | Mapping[str, Any] | None
    coverage_penalty: float | None
    patience: float | None
    settled: Literal["certain", "likely"] | None
    renormalise: bool | None
    replace_unknown: bool | None


@checked
@takes_settings(Sampling)
def sampling(**settings: Unpack[SamplingSettings]) -> Sampling:
    """Return settings for sampling: temperature, top_k, top_p, max_tokens, seed, stop …; None keeps the default."""
    return validate(Sampling, {key: value for key, value in settings.items() if value is not None})


@checked
@takes_settings(Beam)
def beam(**settings: Unpack[BeamSettings]) -> Beam:
    """Return settings for beam search: beams, n, length_penalty, max_tokens, stop …; None keeps the default."""
    return validate(Beam, {key: value for key, value in settings.items() if value is not None})


def with_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> Tree:
    """Return `settings`, with `defaults` for those that are None or left out.

    Defaults that contradict a setting are dropped: filters where decoding is greedy, greedy decoding where a filter is
    set, and a `min_tokens` above `max_tokens`.
    """
    chosen = {key: value for key, value in settings.items() if value is not None}
    usable = dict(defaults)
    if chosen.get("temperature") == 0:
        usable = {key: value for key, value in usable.items() if key not in SAMPLING_KEYS}
    elif usable.get("temperature") == 0 and any(key in chosen for key in SAMPLING_KEYS):
        del usable["temperature"]
    merged = usable | chosen
    max_tokens = merged.get("max_tokens", Rules.model_fields["max_tokens"].default)
    if isinstance(max_tokens, int) and "min_tokens" in usable and "min_tokens" not in chosen:
        merged["min_tokens"] = min(merged["min_tokens"], max_tokens)
    return merged


def generation_defaults(run: RunFolder, tokenizer: Tokenizer) -> tuple[Tree, Tree]:
    """Return an imported checkpoint's defaults for sampling and for beam search; log those that cannot be used."""
    sampled, searched, problems = generation(run, tokenizer.vocab_size)
    for line in problems:
        log_to_stderr(f"weft: {line}")
    stop_ids = tuple(id for id in sampled.pop("stop_ids", ()) if id != tokenizer.eos_id)
    sampled |= {"stop_ids": stop_ids} if stop_ids else {}
    return sampled, searched | {key: value for key, value in sampled.items() if key in Rules.model_fields}


def translation_beam(length: int, defaults: Mapping[str, Any]) -> Beam:
    """Return the default beam search of a run that translates at most `length` tokens."""
    return beam(**with_defaults({}, {**TRANSLATION_DEFAULTS, "max_tokens": length, **defaults}))
