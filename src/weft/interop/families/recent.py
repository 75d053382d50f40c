"""Relatives of LLaMA: each is a table of `recent.toml`, and its unusual settings are rows here."""

import tomllib
from pathlib import Path
from typing import Any

from weft.config import Tree, flat
from weft.interop.families import llama, positions
from weft.interop.families.base import TIED, UNTIED, Family, decoder_head
from weft.interop.families.llama import ACTIVATION, ATTENTION_BIAS, EPS, FEEDFORWARD_BIAS, HEAD, QK_EPS, SIZES, WIDTH
from weft.interop.settings import THEIR_ACTIVATIONS, Flat, Settings, layer_pattern
from weft.interop.table import Key, Row, Special, all_biases, biases, keys

TABLES: Tree = tomllib.loads(Path(__file__).with_name("recent.toml").read_text(encoding="utf-8"))
LOGIT_SCALE = Key(
    "head.scale",
    "logit_scale",
    0.0625,
    kind="positive",
    to_ours=lambda scale, model: None if scale == 1.0 else scale,
    to_theirs=lambda scale, model: scale or 1.0,
)


def rotated_in_windows(all_without: bool) -> Special:
    """Row of layers that are rotated only if they have a window; by default, every fourth layer has none.

    If the window is null, no layer has one; with `all_without`, all layers are then rotated.
    """

    def read(settings: Settings, model: Flat) -> Flat:
        size, step = positions.window(settings, 4096), settings.get("sliding_window_pattern", 4)
        step = len(step) if isinstance(step, str) else step  # "LLLG": the last layer of each group has no window
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise settings.error(
                "sliding_window_pattern", "expected the number of layers from one without a window to the next"
            )
        usual = [size is not None and flag for flag in positions.all_but_every(step, model)]
        windowed = positions.layer_types(settings, model, usual)
        if size is None and all_without:
            return {}
        rotated, plain = {"window": size, "position": None}, {"window": None, "position": {"kind": "none"}}
        return layer_pattern([rotated if flag else plain for flag in windowed])

    return Special(read, positions.write_windows)


def _read_qk_norm(settings: Settings, model: Flat) -> Flat:
    if not settings.flag("use_qk_norm", False):
        return {}
    norm = {"kind": "layer", "bias": False, "eps": model["norm.eps"]}
    return {"attention.qk_norm_over": "each-head", **{f"attention.qk_norm.{key}": norm[key] for key in norm}}


def _three_of_four(settings: Settings, model: Flat) -> tuple[list[bool], int | None]:
    usual = positions.all_but_every(4, model)
    return positions.layer_types(settings, model, usual), positions.window(settings, 4096)


def _write_bases(model: Flat) -> Tree:
    """Keys of both kinds of layers in the newer form of rotary settings, the only one with a base for each."""
    position = next((kind["position"] for kind in positions.kinds_of(model) if kind["window"]), None)
    scaling = positions.write_scaling(model) or {"rope_type": "default"}
    full = {"rope_theta": model.get("position.base"), **scaling}
    local = full if position is None else {"rope_theta": position.get("base"), "rope_type": "default"}
    return {"rope_parameters": {positions.FULL: full, positions.WINDOWED: local}, **positions.write_windows(model)}


# the older form has a base for layers without a window; the others have the default
TWO_BASES = positions.two_bases(
    ("rope_theta", 5e5), ("", 5e5), read_windows=_three_of_four, write_windows=positions.write_windows
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
    rope.only(partial_rotary_factor=1.0)
    base = rope.positive("rope_theta", settings.number("rope_theta", 10000.0))
    return {"position.base": base * rope.positive("alpha") ** (d_head / (d_head - 2))}


def _read_activation(settings: Settings, model: Flat) -> Flat:
    xielu = settings.get("hidden_act", "xielu") == "xielu"
    return {"feedforward.activation": "xielu" if xielu else settings.activation("hidden_act")}


def _write_activation(model: Flat) -> Tree:
    return {"hidden_act": THEIR_ACTIVATIONS[model["feedforward.activation"]]}


LAYER_NORM_EPS, COHERE_HEAD = keys(eps=("layer_norm_eps", 1e-5)), decoder_head(TIED, LOGIT_SCALE)
GEMMA: tuple[Row, ...] = (*SIZES, WIDTH, EPS, ATTENTION_BIAS)
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
# name in recent.toml → rows
ROWS: dict[str, tuple[Row, ...]] = {
    "sizes": (*SIZES, WIDTH, EPS, HEAD, ACTIVATION),
    "sizes_only": (*SIZES, WIDTH, EPS, HEAD),
    "cohere": (*SIZES, WIDTH, *LAYER_NORM_EPS, COHERE_HEAD, ACTIVATION, ATTENTION_BIAS),
    "norm_eps": keys(eps=("norm_eps", 1e-5)),
    "biased": (ATTENTION_BIAS,),
    "biased_qkv": (biases("attention_bias", False, "qkv"),),
    "mlp_bias": (FEEDFORWARD_BIAS,),
    "use_bias": (all_biases("use_bias", False),),
    "qk_eps": (QK_EPS,),
    "qk_norm": (Special(_read_qk_norm, lambda model: {"use_qk_norm": "attention.qk_norm.kind" in model}),),
    "rotated_in_windows": (rotated_in_windows(False),),
    "rotated_in_windows_or_all": (rotated_in_windows(True),),
    "olmo3_rotary": (Special(TWO_BASES.read, _write_bases),),
    "alpha_rotary": (Special(_read_alpha, ROTARY.write),),
    "xielu": (Special(_read_activation, _write_activation),),
    "gemma": (*GEMMA, HEAD, llama.GEMMA_ACTIVATION),
    "gemma2": (*GEMMA, decoder_head(UNTIED, llama.LOGITS(30.0)), llama.GEMMA2_ACTIVATION, llama.SCALE, llama.SCORES),
    # attn_logit_softcapping, which a file may have, has no effect
    "gemma3": (*GEMMA, decoder_head(UNTIED, llama.LOGITS()), llama.GEMMA2_ACTIVATION, llama.SCALE, llama.BASES, QK_EPS),
    "every_other": (llama.some_windows(lambda layer: layer % 2 == 0, 4096),),
    "windows": (llama.some_windows(lambda layer: True, 4096),),
    "windows_of_four": (llama.some_windows(lambda layer: layer % 4 != 0, 8192),),
    "window": (positions.one_window(),),
    "window_4096": (positions.one_window(4096),),
    "qwen_window": (llama.QWEN_WINDOW,),
    "no_positions": (llama.NO_POSITIONS,),
    "seed_biases": (llama.SEED_BIASES,),
    "ministral3_rotary": (llama.MINISTRAL3_ROTARY, llama.LATER),
    "clip": (Key("attention.clip", "clip_qkv", kind="positive", nullable=True),),
    "factors": llama.granite_factors(*MULTIPLIERS),
    "phi3": (*SIZES, EPS, HEAD, ACTIVATION, *keys(dropout=("resid_pdrop", 0.0))),
    "olmo": (*SIZES, HEAD, ACTIVATION),
    "residual_dropout": keys(dropout=("residual_dropout", 0.1)),
}


def _family(kind: str, table: Tree) -> Family:
    options: dict[str, Any] = {key: table.get(key) for key in ("fraction", "default", "original")}
    rotary = positions.rotary(table.get("base", 10000.0), **options)
    rows = {**ROWS, "rotary": (rotary,)}
    title, classes = table["names"]
    modules: dict[str, Any] = {module: name or None for module, name in table.get("modules", {}).items()}
    return llama.family(
        (kind, title, classes),
        tuple(row for name in table["rows"] for row in rows[name]),
        tuple(table.get("without", ())),
        body=llama.by_head(llama.NAMES) if table.get("old_root") else llama.names(**modules),
        fixed=flat(table.get("fixed", {})),
        only={**table.get("only", {}), **dict.fromkeys(table.get("null", ()))},
        classes=table.get("classes", {}),
        defaults=table.get("defaults", {}),
    )


FAMILIES = tuple(_family(kind, table) for kind, table in TABLES.items())
