"""llama.cpp's architectures: the keys of each in a GGUF file, and the settings that it implies."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.config import Tree
from weft.interop.families.experts import (
    dense_layers,
    groups,
    mscale_all_dim,
    shared_count,
    stretched_scale,
    whole,
    write_ernie_dense,
    write_latent,
)
from weft.interop.families.llama import granite_factors
from weft.interop.families.positions import all_but_every, depth, kinds_of, rotated_part, with_windows
from weft.interop.gguf.scaling import SCALING, SCALINGS
from weft.interop.settings import Flat, Settings, layer_pattern
from weft.interop.table import (
    Key,
    Row,
    SettingsTable,
    Special,
    constant,
    even_heads,
    follows,
    four_times,
    keys,
    repeats,
    switch,
)

WINDOW, STEP = "attention.sliding_window", "attention.sliding_window_pattern"


def _read_window(settings: Settings, model: Flat) -> Flat:
    """Read a window, which is never written: llama.cpp applies it to the layers that the architecture implies."""
    return {"attention.window": settings.integer(WINDOW)} if settings.get(WINDOW, 0) != 0 else {}


SIZES: tuple[Row, ...] = (
    Special(write=lambda model: {"vocab_size": model["vocab_size"]}),
    *keys(context="context_length", d_model="embedding_length", layers="block_count"),
    *keys(d_ff=("feed_forward_length", four_times), heads="attention.head_count"),
)


def _rotated(*width: Row) -> tuple[Row, ...]:
    """Rows of an architecture with rotary positions; `width` are those of attention.d_head."""
    return (
        *SIZES,
        *keys(kv_heads=("attention.head_count_kv", lambda model: model["attention.heads"])),
        *width,
        *keys(base=("rope.freq_base", 10000.0)),
        SCALING,
    )


def _even(theirs: str) -> Special:
    """Row of a key that must be d_head, in architectures where that is d_model / heads."""
    return Special(repeats(theirs, "attention.d_head").read, lambda model: {theirs: even_heads(model)})


WIDTH = keys(d_head=("attention.key_length", even_heads))
ROTATED = _rotated(*WIDTH, repeats("attention.value_length", "attention.d_head"))
EVEN = _rotated(
    Special(read=lambda settings, model: {"attention.d_head": even_heads(model)}),
    _even("attention.key_length"),
    _even("attention.value_length"),
)
EVEN_HEADS = _even("rope.dimension_count")
WHOLE_HEADS = repeats("rope.dimension_count", "attention.d_head")
RMS, LAYER_NORM = (keys(eps=f"attention.layer_norm_{kind}epsilon")[0] for kind in ("rms_", ""))
UNROTATED = (*SIZES, repeats("attention.head_count_kv", "attention.heads"), LAYER_NORM)
QK_EPS = follows("attention.qk_norm.eps", "norm.eps")
FRACTION = rotated_part("rope.dimension_count", lambda model: model["attention.d_head"])
PARALLEL = switch(
    "use_parallel_residual", True, on={"sublayers": "parallel-two-norms"}, off={"sublayers": "sequential"}
)


def _read_every_other(settings: Settings, model: Flat) -> Flat:
    """Gemma 2 and GPT-OSS have a window in every other layer, beginning with the first."""
    return with_windows([layer % 2 == 0 for layer in range(depth(model))], settings.integer(WINDOW, 4096))


EVERY_OTHER = Special(_read_every_other, lambda model: {WINDOW: size} if (size := kinds_of(model)[0]["window"]) else {})


def _read_kinds(settings: Settings, model: Flat) -> Flat:
    """Gemma 3 has a window, a separate rotary base and no rotary scaling in five of six layers."""
    if settings.get(WINDOW, 0) == 0:
        return {}
    layers, windowed, size = depth(model), settings.get(STEP, 6), settings.integer(WINDOW)
    if isinstance(windowed, int) and not isinstance(windowed, bool) and windowed >= 0:
        windowed = all_but_every(windowed, model)
    if not isinstance(windowed, list) or len(windowed) < layers or any(flag not in (0, 1) for flag in windowed):
        raise settings.error(STEP, f"expected a whole number, or true or false for each of {model['layers']} layers")
    position = {"kind": "rotary", "base": settings.number("rope.freq_base_swa", 10000.0)}
    same = position["base"] == model["position.base"] and f"{SCALINGS}kind" not in model
    return with_windows(windowed[:layers], size, None if same else position)


def _write_kinds(model: Flat) -> Tree:
    kinds = kinds_of(model)[: depth(model)]
    narrow = next((kind for kind in kinds if kind["window"]), None)
    if narrow is None:
        return {}
    windowed = [bool(kind["window"]) for kind in kinds]
    step = next((step for step in (6, *range(len(kinds) + 1)) if all_but_every(step, model) == windowed), 6)
    base = (narrow["position"] or {}).get("base", model.get("position.base"))
    return {WINDOW: narrow["window"], "rope.freq_base_swa": base, **({STEP: step} if step != 6 else {})}


def _scale(layers: int) -> Special:
    """Row of the factor of scores, which has no key: (d_model / heads)^-0.5 in the model with this many layers."""
    return Special(
        lambda settings, model: {"attention.scale": even_heads(model) ** -0.5} if model["layers"] == layers else {}
    )


def _read_no_positions(settings: Settings, model: Flat) -> Flat:
    """Every fourth layer of SmolLM3 has no positions."""
    rotated = all_but_every(4, model)
    return layer_pattern([{"window": None, "position": None if flag else {"kind": "none"}} for flag in rotated])


def _above_zero(ours: str, theirs: str) -> Special:
    """Row of an optional number: absent or 0 means None."""

    def read(settings: Settings, model: Flat) -> Flat:
        value = settings.number(theirs, 0.0)
        if value < 0:
            raise settings.error(theirs, "expected a number above 0")
        return {ours: value or None}

    return Special(read, lambda model: {theirs: model[ours]} if model.get(ours) is not None else {})


SOFTMAX, SIGMOID, SOFTMAX_CHOSEN = 1, 2, 3  # values of expert_gating_func
EXPERTS = keys(experts="expert_count", chosen="expert_used_count")
EXPERT_WIDTH = Key(
    *("feedforward.d_ff", "expert_feed_forward_length"),
    lambda model: model["feedforward.d_ff"] // model["feedforward.chosen"],
    kind="integer",
)
# read before EXPERT_WIDTH, while d_ff is feed_forward_length
SHARED_WIDTH = keys(shared_d_ff=("expert_shared_feed_forward_length", lambda model: model["feedforward.d_ff"]))


def _read_mixture(settings: Settings, model: Flat) -> Flat:
    """Mixtral has the architecture of LLaMA, and experts."""
    if settings.get("expert_count", 0) == 0:
        return {}
    experts, chosen = (row.read(settings, model) for row in EXPERTS)
    return {"feedforward.kind": "experts", **experts, **chosen}


def _write_mixture(model: Flat) -> Tree:
    return {key: value for row in EXPERTS for key, value in row.write(model).items()}


DENSE = {"expert_count": 0}
# routers whose scores llama.cpp takes by a softmax in these architectures
SOFTMAX_SCORES = {"expert_gating_func": SOFTMAX, "expert_weights_scale": 1.0}
ALL_EXPERTS = {**SOFTMAX_SCORES, "leading_dense_block_count": 0}


def _llama_like(fixed: Mapping[str, Any], *rows: Row, only: Mapping[str, Any] = DENSE) -> SettingsTable:
    """Table of an architecture with RMSNorm, rotary positions and a gated feed-forward."""
    shared = {"norm.kind": "rms", "position.kind": "rotary", "feedforward.kind": "gated"}
    rows = (*ROTATED, RMS, WHOLE_HEADS, *(rows or (Special(_read_window),)))
    return SettingsTable(rows, {**shared, **fixed}, only)


GELU = {"feedforward.kind": "plain", "feedforward.activation": "gelu-tanh"}
BIASED = {**GELU, "norm.kind": "layer", "attention.bias": "all"}


def _sigmoids(fixed: Mapping[str, Any], *rows: Row) -> SettingsTable:
    """Table of an architecture of experts whose scores are sigmoids, with a bias for the choice."""
    scores = {"feedforward.score": "sigmoid", "feedforward.choice_bias": 0.0}
    shared = {"norm.kind": "rms", "position.kind": "rotary", "feedforward.kind": "experts", **scores}
    ungrouped = {"expert_gating_func": SIGMOID, "expert_group_count": 1, "expert_group_used_count": 1}
    rows = (*ROTATED, RMS, FRACTION, *rows, constant("expert_gating_func", SIGMOID))
    return SettingsTable(rows, {**shared, **fixed}, only=ungrouped)


def _read_layers(settings: Settings, model: Flat) -> Flat:
    """GLM-4.5's files count the layers that predict several tokens, which are not read."""
    more = whole(settings, "nextn_predict_layers", 0)
    if more >= model["layers"]:
        raise settings.error("nextn_predict_layers", f"expected a whole number below {model['layers']}")
    return {"layers": model["layers"] - more}


FIRST, EVERY = "leading_dense_block_count", "interleave_moe_layer_step"
SCORE, SHARED = "feedforward.score", "feedforward.shared_d_ff"
SHARED_COUNT = shared_count("expert_shared_count", 0)
EXPERT_SCALE = Key("feedforward.scale", "expert_weights_scale", 1.0, kind="positive")
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
YARN_FACTORS = tuple(f"rope.scaling.{name}" for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"))
CHUNK = 8192  # tokens of a chunk of Llama 4, and of those that share a temperature


def _read_dense(settings: Settings, layers: range) -> list[int]:
    first, step = whole(settings, FIRST, 0), settings.integer(EVERY, 1)
    if first >= len(layers):
        raise settings.error(FIRST, f"expected a whole number below {len(layers)}")
    return [layer for layer in layers if layer < first or (layer + 1) % step]


def _dense(*written: str) -> Special:
    """Row of the dense layers, the first or all but every n-th, in an architecture with these keys."""

    def write(dense: list[int], layers: range) -> Tree:
        found = write_ernie_dense(dense, layers)
        values = {FIRST: found["moe_layer_start_index"], EVERY: found["moe_layer_interval"]}
        return {key: values[key] for key in written}

    return dense_layers(_read_dense, write, width="feed_forward_length")


def _read_chunks(settings: Settings, model: Flat) -> Flat:
    """Llama 4 sees chunks of the text, but every fourth layer has no positions and sees all of it. Keys are normalised
    except in the model with 128 experts."""
    unrotated = {"kind": "tempered", "growth": 0.1, "interval": CHUNK}
    kinds = [
        {"window": None, "chunk": CHUNK if flag else None, "position": None if flag else unrotated}
        for flag in all_but_every(4, model)
    ]
    normalised = {**QK_NORM, "attention.qk_norm.gain": False, "attention.qk_norm_rotated": True}
    return layer_pattern(kinds) | (normalised if model["feedforward.experts"] != 128 else {})


def _read_latent(settings: Settings, model: Flat) -> Flat:
    """Newer files of DeepSeek have the sizes of one key that all heads share, and those of heads elsewhere."""
    rank, rotated = settings.integer("attention.kv_lora_rank"), settings.integer("rope.dimension_count")
    shared = settings.get("attention.key_length_mla") is not None
    end = "_mla" if shared else ""
    d_head, d_v = settings.integer(f"attention.key_length{end}"), settings.integer(f"attention.value_length{end}")
    settings.only(**{"attention.head_count_kv": 1 if shared else model["attention.heads"]})
    if shared:
        settings.only(**{"attention.key_length": rank + rotated, "attention.value_length": rank})
    ranked = settings.get("attention.q_lora_rank", 0) != 0
    return {
        "attention.d_head": d_head,
        "attention.d_v": None if d_v == d_head else d_v,
        "attention.latent.rank": rank,
        "attention.latent.query_rank": settings.integer("attention.q_lora_rank") if ranked else None,
        "position.fraction": rotated / d_head,
    }


def _write_latent(model: Flat) -> Tree:
    sizes = write_latent(model)
    rank, rotated = sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
    ranks = {f"attention.{key}": sizes[key] for key in ("kv_lora_rank", "q_lora_rank") if sizes[key]}
    shared = {"attention.head_count_kv": 1, "attention.key_length": rank + rotated, "attention.value_length": rank}
    heads = {"attention.key_length_mla": model["attention.d_head"], "attention.value_length_mla": sizes["v_head_dim"]}
    return {**ranks, **shared, **heads, "rope.dimension_count": rotated}


def _read_stretch(settings: Settings, model: Flat) -> Flat:
    """DeepSeek's factor of scores; its queries and keys have none."""
    if model.get(f"{SCALINGS}kind") != "yarn":
        return {}
    all_dims = round(10 * settings.number(LOG_MULTIPLIER, 0.0), 6)
    scale = stretched_scale(all_dims, model[f"{SCALINGS}factor"], model)
    return {f"{SCALINGS}attention_factor": 1.0, "attention.scale": scale}


def _read_scores(settings: Settings, model: Flat) -> Flat:
    """DeepSeek V3 has sigmoids, with a bias for the choice; V2 has a softmax, and ranks groups by their best expert."""
    kind = settings.get("expert_gating_func", SOFTMAX)
    if kind not in (0, SOFTMAX, SIGMOID):
        raise settings.error("expert_gating_func", f"weft has {SOFTMAX} and {SIGMOID}")
    if kind == SIGMOID:
        return {"feedforward.score": "sigmoid", "feedforward.choice_bias": 0.0}
    return {"feedforward.group_score": "maximum"}


def _plain(fixed: Mapping[str, Any], *rows: Row) -> SettingsTable:
    """Table of an architecture with LayerNorm, rotary positions, a plain feed-forward, and all biases."""
    return SettingsTable((*EVEN, LAYER_NORM, *rows), {**BIASED, "position.kind": "rotary", **fixed})


def _bare(fixed: Mapping[str, Any], *rows: Row, only: Mapping[str, Any] | None = None) -> SettingsTable:
    """Table of an architecture with rotary positions, d_head = d_model / heads, and biases only in norms."""
    shared = {"position.kind": "rotary", "attention.bias": "none", "feedforward.bias": False}
    return SettingsTable((*EVEN, *rows), {**shared, **fixed}, only or {})


NO_BIAS = {"attention.bias": "none"}
GEMMA = {**NO_BIAS, "feedforward.activation": "gelu-tanh", "embedding_scale": True, "norm.offset": 1.0}
QK_NORM = {**NO_BIAS, "attention.qk_norm.kind": "rms"}
QK_EPS_IF_NORMED = Special(
    lambda settings, model: {"attention.qk_norm.eps": model["norm.eps"]} if "attention.qk_norm.kind" in model else {}
)
QK_EPS_OF_EACH = replace(
    QK_EPS_IF_NORMED, write=lambda model: {"use_parallel_residual": model["sublayers"] == "parallel"}
)
PARTLY_DENSE = {**NO_BIAS, "feedforward.kind": "experts", "feedforward.activation": "silu"}
UNSCALED = {"feedforward.kind": "experts", "feedforward.renormalised": False}
GRANITE_FACTORS = granite_factors("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
# if several can express a model, the first is written
ARCHITECTURES = {
    "qwen2": _llama_like({"attention.bias": "qkv"}),
    "llama": _llama_like({}, Special(_read_window), Special(_read_mixture, _write_mixture), only=ALL_EXPERTS),
    "qwen3": _llama_like(QK_NORM, QK_EPS, Special(_read_window)),
    "gemma": _llama_like({**GEMMA, "head.tied": True}),
    "gemma2": _llama_like(
        {**GEMMA, "head.tied": True, "placement": "sandwich"},
        EVERY_OTHER,
        Key("attention.softcap", "attn_logit_softcapping", 50.0, kind="positive"),
        Key("head.softcap", "final_logit_softcapping", 30.0, kind="positive"),
        _scale(46),
    ),
    "gemma3": _llama_like(
        {**GEMMA, **QK_NORM, "attention.qk_norm.offset": 1.0, "placement": "sandwich"},
        QK_EPS,
        Special(_read_kinds, _write_kinds),
        _above_zero("head.softcap", "final_logit_softcapping"),
        _scale(62),
    ),
    "olmo2": _llama_like({**QK_NORM, "attention.qk_norm_over": "heads", "placement": "res-post"}, QK_EPS),
    "smollm3": _llama_like(NO_BIAS, Special(_read_no_positions)),
    "phi3": _bare({"norm.kind": "rms", "feedforward.kind": "gated"}, RMS, FRACTION, Special(_read_window)),
    "granite": _llama_like({}, *GRANITE_FACTORS),
    "starcoder2": _plain({}, EVEN_HEADS),
    "gptneox": _plain({}, FRACTION, PARALLEL),
    "phi2": _plain({"sublayers": "parallel", "head.bias": True}, FRACTION),
    "falcon": _bare({**BIASED, "attention.bias": "none"}, LAYER_NORM, EVEN_HEADS),
    "stablelm": _bare({"norm.kind": "layer", "feedforward.kind": "gated"}, LAYER_NORM, FRACTION, QK_EPS_OF_EACH),
    "olmo": _bare(
        {"norm.kind": "layer", "norm.gain": False, "norm.bias": False, "feedforward.kind": "gated"},
        *(LAYER_NORM, EVEN_HEADS, _above_zero("attention.clip", "attention.clamp_kqv")),
    ),
    "qwen2moe": _llama_like(
        {**UNSCALED, "attention.bias": "qkv", "feedforward.shared": "gated"},
        Special(_read_window),
        *(*SHARED_WIDTH, *EXPERTS, EXPERT_WIDTH),
        only=ALL_EXPERTS,
    ),
    "qwen3moe": _llama_like(
        {**QK_NORM, "feedforward.kind": "experts"},
        *(QK_EPS, Special(_read_window)),
        *(*EXPERTS, EXPERT_WIDTH),
        only=ALL_EXPERTS,
    ),
    "olmoe": _bare(
        {"norm.kind": "rms", **QK_NORM, "attention.qk_norm_over": "heads", **UNSCALED},
        *(RMS, EVEN_HEADS, QK_EPS, repeats("attention.head_count_kv", "attention.heads")),
        *EXPERTS,
        only=ALL_EXPERTS,
    ),
    "granitemoe": _llama_like(
        {**NO_BIAS, "feedforward.kind": "experts", "feedforward.score": "softmax-chosen"},
        *(*GRANITE_FACTORS, *EXPERTS),
        only=ALL_EXPERTS,
    ),
    "hunyuan-moe": _llama_like(
        {**QK_NORM, "attention.qk_norm_rotated": True, "feedforward.kind": "experts", "feedforward.shared": "added"},
        QK_EPS,
        *(*SHARED_WIDTH, *EXPERTS, EXPERT_WIDTH),
        only=ALL_EXPERTS,
    ),
    "minimax-m2": _sigmoids({**QK_NORM, "attention.qk_norm_over": "heads"}, QK_EPS, *EXPERTS, EXPERT_WIDTH),
    "glm4moe": _sigmoids(
        {"feedforward.activation": "silu"},
        Special(_read_layers),
        QK_EPS_IF_NORMED,
        *(*EXPERTS, EXPERT_WIDTH, EXPERT_SCALE),
        *(_dense(FIRST), SHARED_COUNT),
        Key("feedforward.renormalised", "expert_weights_norm", True, kind="flag"),
    ),
    "ernie4_5-moe": _llama_like(
        {**PARTLY_DENSE, "feedforward.choice_bias": 0.0},
        *(*EXPERTS, EXPERT_WIDTH),
        *(_dense(FIRST, EVERY), SHARED_COUNT),
        Special(write=lambda model: {"expert_shared_feed_forward_length": model.get(SHARED) or 0}),
        only=SOFTMAX_SCORES,
    ),
    "llama4": _llama_like(
        {**PARTLY_DENSE, **UNSCALED, SCORE: "sigmoid", "feedforward.weighs": "input", "feedforward.shared": "added"},
        *(*EXPERTS, EXPERT_WIDTH),
        *(_dense(EVERY), follows(SHARED, "feedforward.d_ff"), Special(_read_chunks), QK_EPS_IF_NORMED),
        only={"expert_gating_func": SIGMOID, "expert_weights_scale": 1.0, WINDOW: CHUNK, STEP: 4},
    ),
    "deepseek2": SettingsTable(
        (
            *(*SIZES, RMS, Special(_read_latent, _write_latent), *keys(base=("rope.freq_base", 10000.0))),
            SCALING,
            Special(_read_stretch, lambda model: {LOG_MULTIPLIER: 0.1 * mscale_all_dim(model)}),
            *(*EXPERTS, EXPERT_WIDTH, EXPERT_SCALE),
            *(_dense(FIRST), SHARED_COUNT, *groups("expert_group_count", "expert_group_used_count")),
            Key("feedforward.renormalised", "expert_weights_norm", False, kind="flag"),
            Special(_read_scores, lambda model: {"expert_gating_func": 1 + (model[SCORE] == "sigmoid")}),
        ),
        {**PARTLY_DENSE, "norm.kind": "rms", "position.kind": "rotary", "position.pairs": "adjacent"},
        only={"attention.temperature_scale": 0.0, **dict.fromkeys(YARN_FACTORS, 1.0)},
    ),
    "gpt-oss": SettingsTable(
        (
            *(*ROTATED, RMS, WHOLE_HEADS, EVERY_OTHER, *EXPERTS, EXPERT_WIDTH),
            Special(lambda settings, model: {f"{SCALINGS}whole_pairs": False} if f"{SCALINGS}kind" in model else {}),
        ),
        {
            "norm.kind": "rms",
            "position.kind": "rotary",
            "attention.bias": "all",
            "attention.sinks": True,
            "feedforward.kind": "experts",
            "feedforward.score": "softmax-chosen",
            "feedforward.router_bias": True,
            "feedforward.bias": True,
            "feedforward.up_offset": 1.0,
            "feedforward.beta": 1.702,
            "feedforward.limit": 7.0,
        },
        only={"expert_gating_func": SOFTMAX_CHOSEN, "expert_weights_scale": 1.0},
    ),
    "gpt2": SettingsTable(UNROTATED, {**BIASED, "position.kind": "learned"}),
    "bloom": SettingsTable(UNROTATED, {**BIASED, "position.kind": "alibi", "embedding_norm": True}),
}
MIXTURES = ("llama", *(name for name, table in ARCHITECTURES.items() if table.fixed["feedforward.kind"] == "experts"))
WITHOUT_EXPERTS = tuple(name for name in ARCHITECTURES if name == "llama" or name not in MIXTURES)
