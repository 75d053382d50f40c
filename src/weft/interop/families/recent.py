"""Decoders of 2023 to 2025 near LLaMA, each a table of what differs.

Cohere (Command R, R+) and Cohere 2 (R7B, Command A) compute attention and feed-forward in parallel behind one LayerNorm
and scale their logits; Cohere 2 rotates only in layers with a window, and so does EXAONE 4. GLM, GLM-4, Helium and
ERNIE 4.5 rotate adjacent pairs. OLMo 3 is OLMo 2 with a window in three of four layers. Hunyuan normalises queries and
keys after the rotation. Arcee (AFM) and Nemotron have a plain feed-forward with relu²; Nemotron adds 1 to the gains of
its LayerNorms. Ministral (8B) is Mistral with a window in some layers.
"""

from functools import partial
from typing import Any

from weft.config import Tree
from weft.interop.families import positions
from weft.interop.families.base import PLAIN, TIED, Family, decoder_head
from weft.interop.families.llama import (
    ACTIVATION,
    ATTENTION_BIAS,
    EPS,
    FEEDFORWARD_BIAS,
    HEAD,
    OLMO2,
    QK_EPS,
    SIZES,
    USUAL,
    WIDTH,
    family,
    names,
    some_windows,
)
from weft.interop.settings import Flat, Settings, layer_pattern
from weft.interop.table import Key, Special, all_biases, biases, keys

LABELS = ("sequence", "token", "span")  # heads that some families lack
ADJACENT = {"position.pairs": "adjacent"}
LAYER_NORM = {"norm.kind": "layer", "norm.bias": False}
LAYER_NORM_EPS = keys(eps=("layer_norm_eps", 1e-5))
LOGIT_SCALE = Key(
    "head.scale",
    "logit_scale",
    0.0625,
    kind="positive",
    to_ours=lambda scale, model: None if scale == 1.0 else scale,
    to_theirs=lambda scale, model: scale or 1.0,
)


def rotated_in_windows(default_step: int, *, always_without: bool) -> Special:
    """Row of layers that are rotated only if they have a window. By default, every `default_step`-th layer has none.

    If the window is null, no layer has one; with `always_without`, all layers are then rotated.
    """

    def read(settings: Settings, model: Flat) -> Flat:
        size, step = positions.window(settings, 4096), settings.get("sliding_window_pattern", default_step)
        if isinstance(step, str):
            step = len(step)  # "LLLG": the last layer of each group has no window
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise settings.error("sliding_window_pattern", "expected the number of layers from one without a window on")
        usual = positions.all_but_every(step, model)
        windowed = positions.layer_types(settings, model, usual if size is not None else [False] * len(usual))
        if size is None and always_without:
            return {}
        rotated, plain = {"window": size, "position": None}, {"window": None, "position": {"kind": "none"}}
        return layer_pattern([rotated if flag else plain for flag in windowed])

    return Special(read, positions.write_windows)


QK_NORM = Special(
    lambda settings, model: (
        {
            "attention.qk_norm_over": "each-head",
            "attention.qk_norm.kind": "layer",
            "attention.qk_norm.bias": False,
            "attention.qk_norm.eps": model["norm.eps"],
        }
        if settings.flag("use_qk_norm", False)
        else {}
    ),
    lambda model: {"use_qk_norm": "attention.qk_norm.kind" in model},
)
COHERE = family(
    ("cohere", "Cohere", "Cohere"),
    (*SIZES, *LAYER_NORM_EPS, positions.rotary(), decoder_head(TIED, LOGIT_SCALE), ACTIVATION, ATTENTION_BIAS, QK_NORM),
    fixed={**LAYER_NORM, **ADJACENT, "sublayers": "parallel"},
    without=LABELS,
    defaults={"max_position_embeddings": 8192},
)
COHERE2 = family(
    ("cohere2", "Cohere 2", "Cohere2"),
    (
        *(*SIZES, *LAYER_NORM_EPS, positions.rotary(), decoder_head(TIED, LOGIT_SCALE), ACTIVATION, ATTENTION_BIAS),
        rotated_in_windows(4, always_without=False),
    ),
    fixed={**LAYER_NORM, **ADJACENT, "sublayers": "parallel"},
    without=LABELS,
    defaults={"max_position_embeddings": 8192},
)
EXAONE4 = family(
    ("exaone4", "EXAONE 4", "Exaone4"),
    (*USUAL, QK_EPS, rotated_in_windows(4, always_without=True)),
    body=OLMO2.body,
    fixed={"placement": "res-post", "attention.qk_norm.kind": "rms"},
    without=("span",),
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32},
)
GLM_DEFAULTS = {
    "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07, "head_dim": 128, "num_key_value_heads": 2,
}  # fmt: skip
GLM_ROWS = (
    *(*SIZES, WIDTH, EPS, positions.rotary(fraction=0.5), HEAD, ACTIVATION),
    biases("attention_bias", True, "qkv"),
)
GLM = family(
    ("glm", "GLM", "Glm"),
    GLM_ROWS,
    body=names(gate_up="mlp.gate_up_proj"),
    fixed=ADJACENT,
    without=("span",),
    defaults=GLM_DEFAULTS,
)
GLM4 = family(
    ("glm4", "GLM-4", "Glm4"),
    GLM_ROWS,
    body=names(gate_up="mlp.gate_up_proj", norm_out="post_self_attn_layernorm", ff_norm_out="post_mlp_layernorm"),
    fixed={**ADJACENT, "placement": "sandwich"},
    without=("span",),
    defaults=GLM_DEFAULTS,
)
HELIUM = family(
    ("helium", "Helium", "Helium"),
    (*USUAL, biases("attention_bias", False, "qkv"), FEEDFORWARD_BIAS),
    fixed=ADJACENT,
    without=("span",),
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-8, "head_dim": 128, "num_key_value_heads": 20},
)
ERNIE4_5 = family(
    ("ernie4_5", "ERNIE 4.5", "Ernie4_5"),
    (*USUAL, all_biases("use_bias", False)),
    fixed=ADJACENT,
    without=LABELS,
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
)


def _five(settings: Settings, model: Flat) -> tuple[list[bool], int | None]:
    usual = positions.all_but_every(4, model)
    return positions.layer_types(settings, model, usual), positions.window(settings, 4096)


def _write_sides(model: Flat) -> Tree:
    """Both kinds of layers in the newer form of rotary settings, the only one with a base for each."""
    position = next((kind["position"] for kind in positions.kinds_of(model) if kind["window"]), None)
    scaling = positions.write_scaling(model) or {"rope_type": "default"}
    full = {"rope_theta": model.get("position.base"), **scaling}
    local = full if position is None else {"rope_theta": position.get("base"), "rope_type": "default"}
    return {"rope_parameters": {positions.FULL: full, positions.WINDOWED: local}, **positions.write_windows(model)}


# the older form has a base for layers without a window; the others have the default
OLMO3_ROTARY = positions.two_bases(
    ("rope_theta", 5e5), ("", 5e5), read_windows=_five, write_windows=positions.write_windows
)
OLMO3 = family(
    ("olmo3", "OLMo 3", "Olmo3"),
    (*SIZES, EPS, HEAD, ACTIVATION, ATTENTION_BIAS, QK_EPS, Special(OLMO3_ROTARY.read, _write_sides)),
    body=OLMO2.body,
    fixed={"placement": "res-post", "attention.qk_norm.kind": "rms", "attention.qk_norm_over": "heads"},
    without=("token", "span"),
    defaults={"rms_norm_eps": 1e-5},
)
ROTARY = positions.rotary()


def _read_alpha(settings: Settings, model: Flat) -> Flat:
    """A fixed alpha stretches the base, whatever the length of a text; the files call it dynamic."""
    table, key = positions.table_of(settings)
    if table.get("rope_type", table.get("type")) != "dynamic" or not table.get("alpha"):
        return ROTARY.read(settings, model)
    rope, d_head = Settings(table, f"{settings.location}: {key}"), model["attention.d_head"]
    if d_head < 4:
        raise settings.error("head_dim", "alpha needs at least two rotated pairs of coordinates")
    base = rope.positive("rope_theta", settings.number("rope_theta", 10000.0))
    rope.only(partial_rotary_factor=1.0)
    return {"position.base": base * rope.positive("alpha") ** (d_head / (d_head - 2))}


HUNYUAN = family(
    ("hunyuan_v1_dense", "Hunyuan", "HunYuanDenseV1"),
    (*SIZES, WIDTH, EPS, Special(_read_alpha, ROTARY.write), HEAD, ACTIVATION, ATTENTION_BIAS, QK_EPS),
    body=names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
    fixed={"attention.qk_norm.kind": "rms", "attention.qk_norm_rotated": True},
    without=("token", "span"),
    defaults={"rms_norm_eps": 1e-5},
)
PLAIN_NAMES = partial(names, gate_up=None, up="mlp.up_proj")
RELU2 = keys(activation=("hidden_act", "relu2"))
PLAIN_ROWS: tuple[Any, ...] = (*SIZES, WIDTH, *RELU2, HEAD, ATTENTION_BIAS, FEEDFORWARD_BIAS)
ARCEE = family(
    ("arcee", "Arcee", "Arcee"),
    (*PLAIN_ROWS, EPS, positions.rotary()),
    body=PLAIN_NAMES(),
    fixed={"feedforward.kind": "plain"},
    without=("span",),
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
)
NEMOTRON = family(
    ("nemotron", "Nemotron", "Nemotron"),
    (*PLAIN_ROWS, *keys(eps=("norm_eps", 1e-5)), positions.rotary(fraction=0.5)),
    body=PLAIN_NAMES(),
    fixed={**PLAIN, "norm.offset": 1.0},
    without=("span",),
    defaults={"max_position_embeddings": 4096, "initializer_range": 0.0134},
)
MINISTRAL = family(
    ("ministral", "Ministral", "Ministral"),
    (*USUAL, some_windows(lambda layer: True, 4096)),
    without=("span",),
    defaults={"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8},
)
FAMILIES: tuple[Family, ...] = (
    *(COHERE, COHERE2, GLM, GLM4, OLMO3, EXAONE4, HELIUM, ERNIE4_5, HUNYUAN, ARCEE, NEMOTRON, MINISTRAL),
)
