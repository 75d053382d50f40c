"""Gemma 1–3 (2024, 2025): LLaMA's relatives with scaled embeddings and a gain that is counted from 1.

Gemma 2 caps scores and logits, has norms on both sides of each sublayer, and a window in every other layer; Gemma 3 a
window in five of six layers, which rotate by a base of their own, and norms of queries and keys.
"""

from weft.config import Tree
from weft.interop.families.decoder_heads import head
from weft.interop.families.layers import depth, layer_types, window, with_windows, write_windows
from weft.interop.families.llama import ATTENTION_BIAS, BLOCK, LAYER, NO_ANSWERS, RULES, SHARED, TIED, family
from weft.interop.families.rotary import two_bases
from weft.interop.settings import THEIR_ACTIVATIONS, Flat, Settings
from weft.interop.table import Special, follows
from weft.interop.weight_map import module

SANDWICH_RULES = (
    *(rule for rule in RULES if "_skip.norm" not in rule.ours),
    *module(f"{BLOCK}.attention_skip.norm", f"{LAYER}.input_layernorm"),
    *module(f"{BLOCK}.attention_skip.norm_out", f"{LAYER}.post_attention_layernorm"),
    *module(f"{BLOCK}.feedforward_skip.norm", f"{LAYER}.pre_feedforward_layernorm"),
    *module(f"{BLOCK}.feedforward_skip.norm_out", f"{LAYER}.post_feedforward_layernorm"),
)


def _read_activation(settings: Settings, model: Flat) -> Flat:
    """The first releases said gelu and meant its approximation by tanh."""
    given = settings.get("hidden_activation") or settings.get("hidden_act")
    if given in (None, "gelu"):
        return {"feedforward.activation": "gelu-tanh"}
    return {"feedforward.activation": Settings({"hidden_act": given}, settings.where).activation("hidden_act")}


def _write_activation(model: Flat) -> Tree:
    ours = model["feedforward.activation"]
    name = "gelu_pytorch_tanh" if ours == "gelu-tanh" else THEIR_ACTIVATIONS[ours]
    return {"hidden_act": name, "hidden_activation": name}


def _cap(settings: Settings, key: str, default: float | None) -> float | None:
    """A bound on scores or logits, where null is none."""
    if settings.tree.get(key, default) is None:
        return None
    bound = settings.number(key, default)
    if bound <= 0:
        raise settings.refusal(key, "expected a number above 0")
    return bound


def _caps(scores: float | None, logits: float | None) -> Special:
    """What bounds them where nothing is given."""

    def read(settings: Settings, model: Flat) -> Flat:
        found: Flat = {"attention.softcap": _cap(settings, "attn_logit_softcapping", scores)}
        if model["head.kind"] == "lm":
            found["head.softcap"] = _cap(settings, "final_logit_softcapping", logits)
        return found

    def write(model: Flat) -> Tree:
        bound = model.get("head.softcap")
        return {"attn_logit_softcapping": model["attention.softcap"], "final_logit_softcapping": bound}

    return Special(read, write)


def _read_scale(settings: Settings, model: Flat) -> Flat:
    scalar = settings.number("query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise settings.refusal("query_pre_attn_scalar", "expected a number above 0")
    return {"attention.scale": scalar**-0.5}


def _write_scale(model: Flat) -> Tree:
    scalar = model["attention.scale"] ** -2
    return {"query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar}


def _read_every_other(settings: Settings, model: Flat) -> Flat:
    windowed = layer_types(settings, model, [layer % 2 == 0 for layer in range(depth(model))])
    return with_windows(windowed, window(settings, 4096))


def _read_kinds(settings: Settings, model: Flat) -> tuple[list[bool], int | None]:
    """Layers with a window, five of six where nothing else is given, and its size."""
    step = settings.whole("sliding_window_pattern", 6)
    usual = [(layer + 1) % step != 0 for layer in range(depth(model))]
    return layer_types(settings, model, usual), window(settings, 4096)


ACTIVATION = Special(_read_activation, _write_activation)
SCALE = Special(_read_scale, _write_scale)
GAIN = {"norm.offset": 1.0, "embedding_scale": True}
SANDWICH = {**GAIN, "placement": "sandwich"}
ONE_WAY = {"use_bidirectional_attention": False}
USUAL = {"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True}

GEMMA = family(
    "gemma",
    "Gemma",
    (*SHARED, head(TIED), ACTIVATION, ATTENTION_BIAS),
    fixed=GAIN,
    without=NO_ANSWERS,
    only=ONE_WAY,
    defaults=USUAL,
)
GEMMA2 = family(
    "gemma2",
    "Gemma 2",
    (
        *SHARED,
        head(TIED),
        ACTIVATION,
        ATTENTION_BIAS,
        SCALE,
        _caps(50.0, 30.0),
        Special(_read_every_other, write_windows),
    ),
    SANDWICH_RULES,
    fixed=SANDWICH,
    without=NO_ANSWERS,
    only=ONE_WAY,
    defaults=USUAL,
)
GEMMA3 = family(
    "gemma3_text",
    "Gemma 3",
    (
        *SHARED[:-1],
        head(TIED),
        ACTIVATION,
        ATTENTION_BIAS,
        SCALE,
        _caps(None, None),
        two_bases(("rope_theta", 1e6), ("rope_local_base_freq", 1e4), _read_kinds, write_windows),
        follows("attention.qk_norm.eps", "norm.eps"),
    ),
    SANDWICH_RULES,
    name="Gemma3Text",
    words="Gemma3ForCausalLM",
    fixed={**SANDWICH, "attention.qk_norm.kind": "rms", "attention.qk_norm.offset": 1.0},
    without=("ForTokenClassification", *NO_ANSWERS),
    only=ONE_WAY,
    defaults={**USUAL, "max_position_embeddings": 131072},
)
