"""llama.cpp's architectures: how each calls its settings in a GGUF file, and which of them it takes for granted."""

from collections.abc import Container, Mapping
from typing import Any

from weft.config import Tree
from weft.interop.families.llama import granite_factors
from weft.interop.families.positions import all_but_every, depth, kinds_of, rotated_part, with_windows
from weft.interop.settings import Flat, Settings, repeated
from weft.interop.table import Key, Row, Special, Table, even_heads, follows, four_times, keys, same, switch

# what frequencies are divided by: LLaMA 3.1's scaling of positions, and both lists of LongRoPE
FREQUENCIES, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
WINDOW, STEP = "attention.sliding_window", "attention.sliding_window_pattern"
SCALINGS = "position.scaling."


def _read_scaling(settings: Settings, model: Flat) -> Flat:
    """How positions were scaled for longer texts; LLaMA 3.1's way is a tensor, not a key."""
    kind = settings.get("rope.scaling.type", "none")
    settings.whole("rope.scaling.original_context_length", 8192)
    if f"{SCALINGS}kind" in model:
        return {}
    if kind == "linear":
        return {f"{SCALINGS}kind": "linear", f"{SCALINGS}factor": settings.number("rope.scaling.factor")}
    if kind != "none":
        raise settings.error("rope.scaling.type", f"weft has none, linear, and LLaMA 3.1's '{FREQUENCIES}'")
    return {}


def _write_scaling(model: Flat) -> Tree:
    kind = model.get(f"{SCALINGS}kind")
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": model[f"{SCALINGS}factor"]}
    if kind not in ("llama3", "longrope"):
        return {}
    factor = {"rope.scaling.attn_factor": model[f"{SCALINGS}attention_factor"]} if kind == "longrope" else {}
    return {"rope.scaling.original_context_length": model[f"{SCALINGS}original_context"], **factor}


def _read_window(settings: Settings, model: Flat) -> Flat:
    """A window is read and not written: llama.cpp gives it to some layers only, as the architecture says."""
    return {"attention.window": settings.whole(WINDOW)} if settings.get(WINDOW, 0) != 0 else {}


SIZES: tuple[Row, ...] = (
    Special(write=lambda model: {"vocab_size": model["vocab_size"]}),
    *keys(context="context_length", d_model="embedding_length", layers="block_count"),
    *keys(d_ff=("feed_forward_length", four_times), heads="attention.head_count"),
)


def _rotated(*width: Row) -> tuple[Row, ...]:
    """The rows of an architecture with rotary positions, `width` those of attention.d_head."""
    return (
        *SIZES,
        *keys(kv_heads=("attention.head_count_kv", lambda model: model["attention.heads"])),
        *width,
        *keys(base=("rope.freq_base", 10000.0)),
        Special(_read_scaling, _write_scaling),
    )


def _even(theirs: str) -> Special:
    """A key that must be the width of a head, where heads have to share d_model evenly."""
    return Special(same(theirs, "attention.d_head").read, lambda model: {theirs: even_heads(model)})


WIDTH = keys(d_head=("attention.key_length", even_heads))
ROTATED = _rotated(*WIDTH, same("attention.value_length", "attention.d_head"))
EVEN = _rotated(
    Special(read=lambda settings, model: {"attention.d_head": even_heads(model)}),
    _even("attention.key_length"),
    _even("attention.value_length"),
)
EVEN_HEADS = _even("rope.dimension_count")
WHOLE_HEADS = same("rope.dimension_count", "attention.d_head")
RMS, LAYER_NORM = (keys(eps=f"attention.layer_norm_{kind}epsilon")[0] for kind in ("rms_", ""))
UNROTATED = (*SIZES, same("attention.head_count_kv", "attention.heads"), LAYER_NORM)
QK_EPS = follows("attention.qk_norm.eps", "norm.eps")
# a part of each head is rotated
FRACTION = rotated_part("rope.dimension_count", lambda model: model["attention.d_head"])
PARALLEL = switch("use_parallel_residual", True, {"sublayers": "parallel-two-norms"}, {"sublayers": "sequential"})


def _read_every_other(settings: Settings, model: Flat) -> Flat:
    """Gemma 2's window is that of every other layer, from the lowest on."""
    return with_windows([layer % 2 == 0 for layer in range(depth(model))], settings.whole(WINDOW, 4096))


def _read_kinds(settings: Settings, model: Flat) -> Flat:
    """Gemma 3's layers: five of six have a window and a base of their own, and positions that are not scaled."""
    if settings.get(WINDOW, 0) == 0:
        return {}
    layers, given, size = depth(model), settings.get(STEP, 6), settings.whole(WINDOW)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        given = all_but_every(given, model)
    if not isinstance(given, list) or len(given) < layers or any(each not in (0, 1) for each in given):
        raise settings.error(STEP, f"expected a whole number, or true or false for each of {model['layers']} layers")
    position = {"kind": "rotary", "base": settings.number("rope.freq_base_swa", 10000.0)}
    alike = position["base"] == model["position.base"] and f"{SCALINGS}kind" not in model
    return with_windows(given[:layers], size, None if alike else position)


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
    """The factor of scores, for which there is no key: d_model / heads is in it where there are so many layers."""
    return Special(
        lambda settings, model: {"attention.scale": even_heads(model) ** -0.5} if model["layers"] == layers else {}
    )


def _read_no_positions(settings: Settings, model: Flat) -> Flat:
    """SmolLM3's every fourth layer knows no positions."""
    rotated = all_but_every(4, model)
    return repeated([{"window": None, "position": None if each else {"kind": "none"}} for each in rotated])


def _above_zero(ours: str, theirs: str) -> Special:
    """A number that is absent or 0 where there is none."""

    def read(settings: Settings, model: Flat) -> Flat:
        value = settings.number(theirs, 0.0)
        if value < 0:
            raise settings.error(theirs, "expected a number above 0")
        return {ours: value or None}

    return Special(read, lambda model: {theirs: model[ours]} if model.get(ours) is not None else {})


def _llama_like(fixed: Mapping[str, Any], *more: Row) -> Table:
    """RMSNorm, rotary positions, a gated feed-forward."""
    usual = {"norm.kind": "rms", "position.kind": "rotary", "feedforward.kind": "gated"}
    rows = (*ROTATED, RMS, WHOLE_HEADS, *(more or (Special(_read_window),)))
    return Table(rows, {**usual, **fixed}, only={"expert_count": 0})


GELU = {"feedforward.kind": "plain", "feedforward.activation": "gelu-tanh"}
BIASED = {**GELU, "norm.kind": "layer", "attention.bias": "all"}


def _plain(fixed: Mapping[str, Any], *more: Row) -> Table:
    """LayerNorm, rotary positions, a plain feed-forward, and biases everywhere."""
    return Table((*EVEN, LAYER_NORM, *more), {**BIASED, "position.kind": "rotary", **fixed})


def _bare(fixed: Mapping[str, Any], *rows: Row) -> Table:
    """Rotary positions, heads that share d_model evenly, and no biases but those of norms."""
    usual = {"position.kind": "rotary", "attention.bias": "none", "feedforward.bias": False}
    return Table((*EVEN, *rows), {**usual, **fixed})


def shown_by_tensors(architecture: str, names: Container[str]) -> Flat:
    """Settings that no key holds, for the tensors of the first layer show them."""
    if architecture == "falcon":
        return {"sublayers": "parallel-two-norms" if "blk.0.attn_norm_2.weight" in names else "parallel"}
    if architecture != "stablelm":
        return {}
    found: Flat = {"sublayers": "sequential" if "blk.0.ffn_norm.weight" in names else "parallel"}
    found["attention.bias"] = "qkv" if "blk.0.attn_q.bias" in names else "none"
    if "blk.0.attn_q_norm.weight" in names:
        norm = {"attention.qk_norm.kind": "layer", "attention.qk_norm.bias": False}
        found |= {**norm, "attention.qk_norm_over": "each-head"}
    return found


def names_of_first(model: Flat) -> set[str]:
    """Those tensors of a model's first layer that `shown_by_tensors` looks for."""
    there = {
        "blk.0.attn_norm_2.weight": model["sublayers"] == "parallel-two-norms",
        "blk.0.ffn_norm.weight": model["sublayers"] != "parallel",
        "blk.0.attn_q.bias": model["attention.bias"] in ("qkv", "all"),
        "blk.0.attn_q_norm.weight": model.get("attention.qk_norm.kind") is not None,
    }
    return {name for name, is_there in there.items() if is_there}


# files of these store queries and keys for rotary pairs that are adjacent
ADJACENT = ("llama", "granite", "smollm3", "olmo")
# files of these store queries, keys and values as one
JOINED = ("gpt2", "gptneox", "phi2", "phi3", "falcon", "bloom")
# files of these have a table of the output even where it is that of the embeddings; GPT-2's may have one
REPEATED = ("olmo2", "gptneox", "phi2", "stablelm")
# scalings of positions that are tensors, and the architectures in which llama.cpp looks for them
IN_TENSORS = {"llama3": ("llama", "granite"), "longrope": ("phi3",)}
NO_BIAS = {"attention.bias": "none"}
GEMMA = {**NO_BIAS, "feedforward.activation": "gelu-tanh", "embedding_scale": True, "norm.offset": 1.0}
QK_NORM = {**NO_BIAS, "attention.qk_norm.kind": "rms"}
QK_EPS_OF_EACH = Special(
    lambda settings, model: {"attention.qk_norm.eps": model["norm.eps"]} if "attention.qk_norm.kind" in model else {},
    lambda model: {"use_parallel_residual": model["sublayers"] == "parallel"},
)
# where several can hold a model, the first one is written
ARCHITECTURES = {
    "qwen2": _llama_like({"attention.bias": "qkv"}),
    "llama": _llama_like({}),
    "qwen3": _llama_like(QK_NORM, QK_EPS, Special(_read_window)),
    "gemma": _llama_like({**GEMMA, "head.tied": True}),
    "gemma2": _llama_like(
        {**GEMMA, "head.tied": True, "placement": "sandwich"},
        Special(_read_every_other, lambda model: {WINDOW: size} if (size := kinds_of(model)[0]["window"]) else {}),
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
    "granite": _llama_like({}, *granite_factors("embedding_scale", "residual_scale", "attention.scale", "logit_scale")),
    "starcoder2": _plain({}, EVEN_HEADS),
    "gptneox": _plain({}, FRACTION, PARALLEL),
    "phi2": _plain({"sublayers": "parallel", "head.bias": True}, FRACTION),
    "falcon": _bare({**BIASED, "attention.bias": "none"}, LAYER_NORM, EVEN_HEADS),
    "stablelm": _bare({"norm.kind": "layer", "feedforward.kind": "gated"}, LAYER_NORM, FRACTION, QK_EPS_OF_EACH),
    "olmo": _bare(
        {"norm.kind": "layer", "norm.gain": False, "norm.bias": False, "feedforward.kind": "gated"},
        *(LAYER_NORM, EVEN_HEADS, _above_zero("attention.clip", "attention.clamp_kqv")),
    ),
    "gpt2": Table(UNROTATED, {**BIASED, "position.kind": "learned"}),
    "bloom": Table(UNROTATED, {**BIASED, "position.kind": "alibi", "embedding_norm": True}),
}
