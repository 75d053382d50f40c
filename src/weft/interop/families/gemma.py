"""Gemma 1–3 (2024, 2025): LLaMA's relatives with scaled embeddings and a gain that is counted from 1.

Gemma 2 caps scores and logits, has norms on both sides of each sublayer, and a window in every other layer; Gemma 3 a
window in five of six layers, which rotate by a base of their own, and norms of queries and keys.
"""

from functools import partial

from weft.config import Tree
from weft.interop.families import positions
from weft.interop.families.heads import UNTIED, decoder_head
from weft.interop.families.llama import ATTENTION_BIAS, HEAD, QK_EPS, SHARED, family, names
from weft.interop.settings import THEIR_ACTIVATIONS, Flat, Settings
from weft.interop.table import Key, Special, round_factor


def _read_activation(settings: Settings, model: Flat) -> Flat:
    """The first releases said gelu and meant its approximation by tanh."""
    given = settings.get("hidden_activation") or settings.get("hidden_act")
    if given in (None, "gelu"):
        return {"feedforward.activation": "gelu-tanh"}
    return {"feedforward.activation": Settings({"hidden_act": given}, settings.place).activation("hidden_act")}


def _write_activation(model: Flat) -> Tree:
    ours = model["feedforward.activation"]
    name = "gelu_pytorch_tanh" if ours == "gelu-tanh" else THEIR_ACTIVATIONS[ours]
    return {"hidden_act": name, "hidden_activation": name}


def _read_every_other(settings: Settings, model: Flat) -> Flat:
    windowed = positions.layer_types(settings, model, [layer % 2 == 0 for layer in range(positions.depth(model))])
    return positions.with_windows(windowed, positions.window(settings, 4096))


def _read_kinds(settings: Settings, model: Flat) -> tuple[list[bool], int | None]:
    """Layers with a window, five of six where nothing else is given, and its size."""
    usual = positions.all_but_every(settings.whole("sliding_window_pattern", 6), model)
    return positions.layer_types(settings, model, usual), positions.window(settings, 4096)


EVERY_OTHER = Special(_read_every_other, positions.write_windows)
BASES = positions.two_bases(("rope_theta", 1e6), ("rope_local_base_freq", 1e4), _read_kinds, positions.write_windows)
ACTIVATION = Special(_read_activation, _write_activation)
SCALE = Key(
    "attention.scale",
    "query_pre_attn_scalar",
    256,
    kind="positive",
    to_ours=lambda scalar, model: scalar**-0.5,
    to_theirs=lambda scale, model: round_factor(scale**-2, 1e-6),
)
SCORES, LOGITS = (
    partial(Key, ours, theirs, kind="positive", none=True)
    for ours, theirs in (("attention.softcap", "attn_logit_softcapping"), ("head.softcap", "final_logit_softcapping"))
)
GAIN = {"norm.offset": 1.0, "embedding_scale": True}
SANDWICH = {**GAIN, "placement": "sandwich"}
SANDWICH_NAMES = names(
    norm_out="post_attention_layernorm",
    ff_norm="pre_feedforward_layernorm",
    ff_norm_out="post_feedforward_layernorm",
)
ONE_WAY = {"use_bidirectional_attention": False}
USUAL = {"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True}

GEMMA = family(
    ("gemma", "Gemma", "Gemma"),
    (*SHARED, HEAD, ACTIVATION, ATTENTION_BIAS),
    fixed=GAIN,
    without=("span",),
    only=ONE_WAY,
    defaults=USUAL,
)
GEMMA2 = family(
    ("gemma2", "Gemma 2", "Gemma2"),
    (*SHARED, decoder_head(UNTIED, LOGITS(30.0)), ACTIVATION, ATTENTION_BIAS, SCALE, SCORES(50.0), EVERY_OTHER),
    body=SANDWICH_NAMES,
    fixed=SANDWICH,
    without=("span",),
    only=ONE_WAY,
    defaults=USUAL,
)
GEMMA3 = family(
    ("gemma3_text", "Gemma 3", "Gemma3Text"),
    (*SHARED[:-1], decoder_head(UNTIED, LOGITS()), ACTIVATION, ATTENTION_BIAS, SCALE, SCORES(), BASES, QK_EPS),
    body=SANDWICH_NAMES,
    classes={"lm": "Gemma3ForCausalLM"},
    fixed={**SANDWICH, "attention.qk_norm.kind": "rms", "attention.qk_norm.offset": 1.0},
    without=("token", "span"),
    only=ONE_WAY,
    defaults={**USUAL, "max_position_embeddings": 131072},
)
