"""Which models' settings each fast path is written for: all that it doesn't read has to be at its default."""

from collections.abc import Collection
from typing import Any

from weft.config import Config
from weft.decode.fast.native import ACTIVATIONS, MAX_D_HEAD
from weft.models.config import Decoder, EncoderDecoder, LMHead
from weft.nn.config import Gated, RMSNorm
from weft.nn.position_config import ALiBi, Learned, NoPosition, PositionConfig, Rotary, Sinusoidal, T5Bias
from weft.nn.scaling import LinearScaling, Llama3Scaling

ADDED: tuple[type[PositionConfig], ...] = (Sinusoidal, Learned)  # to the embeddings
BIASED: tuple[type[PositionConfig], ...] = (T5Bias, ALiBi)  # the scores, by the distance alone


def _names(*names: str, **below: str) -> frozenset[str]:
    """Names of settings, and dotted names of what stands below some."""
    return frozenset(names) | {f"{name}.{each}" for name, several in below.items() for each in several.split()}


# what each reads, with all that stands below it; dropout and initial weights don't matter in a step
LLAMA = _names(
    *("vocab_size", "context", "layers", "d_model", "embedding_scale", "dropout", "init"),
    attention="heads kv_heads d_head scale dropout",
    feedforward="d_ff dropout",
    norm="eps",
    position="base scaling",
    head="tied bias scale",
)
NATIVE = LLAMA | _names(attention="bias", feedforward="activation bias", norm="bias offset")
CPU = LLAMA | _names(
    *("feedforward", "norm", "head", "placement", "embedding_norm", "encoder_layers", "source_vocab_size"),
    attention="bias qk_norm window",
)


def llama_like(settings: Any) -> bool:
    """Whether a model is LLaMA with other sizes."""
    if not isinstance(settings, Decoder) or not isinstance(settings.position, Rotary):
        return False
    if not (isinstance(settings.feedforward, Gated) and isinstance(settings.norm, RMSNorm)):
        return False
    return settings.position.changes_after(settings.context) is None and _others_at_default(settings, LLAMA)


def native_step_reads(settings: Any) -> bool:
    """Whether c/step.c is written for a model: the shape of LLaMA or of GPT-2."""
    if not isinstance(settings, Decoder) or not isinstance(
        settings.position, Rotary | Learned | Sinusoidal | NoPosition
    ):
        return False
    if not isinstance(getattr(settings.position, "scaling", None), LinearScaling | Llama3Scaling | None):
        return False
    if settings.feedforward.activation not in ACTIVATIONS or settings.d_head > MAX_D_HEAD:
        return False
    return _others_at_default(settings, NATIVE)


def cpu_step_reads(settings: Any) -> bool:
    """Whether the CPU fast path is written for a model: a decoder whose positions do the same in every step, with or
    without a source."""
    if not isinstance(settings, Decoder | EncoderDecoder) or settings.placement not in ("pre", "post", "none"):
        return False
    if type(settings.position) not in (Rotary, NoPosition, *ADDED, *BIASED):
        return False
    return settings.position.changes_after(settings.context) is None and _others_at_default(settings, CPU)


def _others_at_default(settings: Decoder | EncoderDecoder, read: Collection[str]) -> bool:
    """Whether a model writes words, and all settings but those that are `read` are at their defaults.

    Other positions than rotary ones are read whole, from the model's own tables.
    """
    read = read if isinstance(settings.position, Rotary) else {*read, "position"}
    read_below = tuple(f"{name}." for name in read)
    return isinstance(settings.head, LMHead) and all(f"{name}.".startswith(read_below) for name in _changed(settings))


def _changed(settings: Config) -> set[str]:
    """The dotted names of settings that are not at their defaults."""
    names: set[str] = set()
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value != field.default:
            below = {f"{name}.{each}" for each in _changed(value)} if isinstance(value, Config) else set()
            names |= below or (set() if isinstance(value, Config) and field.is_required() else {name})
    return names
