"""llama.cpp's architectures: how each calls its settings in a GGUF file, and which of them it takes for granted."""

from collections.abc import Container, Mapping
from typing import Any

from weft.config import Tree
from weft.interop.settings import Flat, Settings, repeated
from weft.interop.table import Row, Special, Table, even_heads, follows, number, same, whole

# what frequencies are divided by: LLaMA 3.1's scaling of positions, and both lists of LongRoPE
FREQUENCIES, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
DEEPEST = 2**10  # layers that are told apart
WINDOW, STEP = "attention.sliding_window", "attention.sliding_window_pattern"


def _read_scaling(settings: Settings, model: Flat) -> Flat:
    """How positions were scaled for longer texts; LLaMA 3.1's way is a tensor, not a key."""
    kind = settings.get("rope.scaling.type", "none")
    settings.whole("rope.scaling.original_context_length", 8192)
    if "position.scaling.kind" in model:
        return {}
    if kind not in ("none", "linear"):
        raise settings.refusal("rope.scaling.type", f"weft has none, linear, and LLaMA 3.1's '{FREQUENCIES}'")
    if kind == "none":
        return {}
    return {"position.scaling.kind": "linear", "position.scaling.factor": settings.number("rope.scaling.factor")}


def _write_scaling(model: Flat) -> Tree:
    kind = model.get("position.scaling.kind")
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": model["position.scaling.factor"]}
    if kind not in ("llama3", "longrope"):
        return {}
    tree = {"rope.scaling.original_context_length": model["position.scaling.original_context"]}
    if kind == "longrope":
        tree["rope.scaling.attn_factor"] = model["position.scaling.attention_factor"]
    return tree


def _read_window(settings: Settings, model: Flat) -> Flat:
    """A window is read and not written: llama.cpp gives it to some layers only, as the architecture says."""
    windowed = settings.get(WINDOW, 0) != 0
    return {"attention.window": settings.whole(WINDOW)} if windowed else {}


SIZES: tuple[Row, ...] = (
    Special(write=lambda model: {"vocab_size": model["vocab_size"]}),
    whole("context", "context_length"),
    whole("d_model", "embedding_length"),
    whole("layers", "block_count"),
    whole("feedforward.d_ff", "feed_forward_length", lambda model: 4 * model["d_model"]),
    whole("attention.heads", "attention.head_count"),
)


def _rotated(*width: Row) -> tuple[Row, ...]:
    """The rows of an architecture with rotary positions, `width` those of attention.d_head."""
    return (
        *SIZES,
        whole("attention.kv_heads", "attention.head_count_kv", lambda model: model["attention.heads"]),
        *width,
        number("position.base", "rope.freq_base", 10000.0),
        Special(_read_scaling, _write_scaling),
    )


def _even(theirs: str) -> Special:
    """A key that must be the width of a head, where heads have to share d_model evenly."""
    return Special(same(theirs, "attention.d_head").read, lambda model: {theirs: even_heads(model)})


ROTATED = _rotated(
    whole("attention.d_head", "attention.key_length", even_heads), same("attention.value_length", "attention.d_head")
)
EVEN = _rotated(
    Special(read=lambda settings, model: {"attention.d_head": even_heads(model)}),
    _even("attention.key_length"),
    _even("attention.value_length"),
)
EVEN_HEADS = _even("rope.dimension_count")
WHOLE_HEADS = same("rope.dimension_count", "attention.d_head")
RMS, LAYER_NORM = (number("norm.eps", f"attention.layer_norm_{kind}epsilon") for kind in ("rms_", ""))
LLAMA: tuple[Row, ...] = (*ROTATED, RMS, WHOLE_HEADS)
# a part of each head is rotated
FRACTION = Special(
    lambda settings, model: {
        "position.fraction": settings.whole("rope.dimension_count", model["attention.d_head"])
        / model["attention.d_head"]
    },
    lambda model: {"rope.dimension_count": round(model.get("position.fraction", 1.0) * model["attention.d_head"])},
)
PARALLEL = Special(
    lambda settings, model: {
        "sublayers": "parallel-two-norms" if settings.flag("use_parallel_residual", True) else "sequential"
    },
    lambda model: {"use_parallel_residual": model["sublayers"] == "parallel-two-norms"},
)


def _read_every_other(settings: Settings, model: Flat) -> Flat:
    """Gemma 2's window is that of every other layer, from the lowest on."""
    size = settings.whole(WINDOW, 4096)
    return repeated([{"window": size if layer % 2 == 0 else None} for layer in range(min(model["layers"], DEEPEST))])


def _write_every_other(model: Flat) -> Tree:
    kinds = model["pattern"] or [{"window": model["attention.window"]}]
    return {WINDOW: kinds[0]["window"]} if kinds[0]["window"] else {}


def _stepped(step: int, layers: int) -> list[bool]:
    """Which layers have a window: all but every `step`-th, all where it is 0."""
    return [step == 0 or (layer + 1) % step != 0 for layer in range(layers)]


def _read_kinds(settings: Settings, model: Flat) -> Flat:
    """Gemma 3's layers: five of six have a window and a base of their own, and positions that are not scaled."""
    layers = min(model["layers"], DEEPEST)
    if settings.get(WINDOW, 0) == 0:
        return {}
    given, size = settings.get(STEP, 6), settings.whole(WINDOW)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        given = _stepped(given, layers)
    if not isinstance(given, list) or len(given) < layers or any(each not in (0, 1) for each in given):
        raise settings.refusal(STEP, f"expected a whole number, or true or false for each of {model['layers']} layers")
    position = {"kind": "rotary", "base": settings.number("rope.freq_base_swa", 10000.0)}
    alike = position["base"] == model["position.base"] and "position.scaling.kind" not in model
    narrow, wide = {"window": size, "position": None if alike else position}, {"window": None, "position": None}
    return repeated([narrow if windowed else wide for windowed in given[:layers]])


def _write_kinds(model: Flat) -> Tree:
    layers = min(model["layers"], DEEPEST)
    pattern = model["pattern"] or [{"window": model["attention.window"], "position": None}]
    narrow = next((kind for kind in pattern if kind["window"]), None)
    if narrow is None:
        return {}
    windowed = [bool(pattern[layer % len(pattern)]["window"]) for layer in range(layers)]
    step = next((step for step in (6, *range(layers + 1)) if _stepped(step, layers) == windowed), 6)
    base = (narrow["position"] or {}).get("base", model.get("position.base"))
    return {WINDOW: narrow["window"], "rope.freq_base_swa": base, **({STEP: step} if step != 6 else {})}


def _scale(deepest: int) -> Special:
    """The factor of scores, for which there is no key: d_model / heads is in it where there are so many layers."""

    def read(settings: Settings, model: Flat) -> Flat:
        return {"attention.scale": even_heads(model) ** -0.5} if model["layers"] == deepest else {}

    return Special(read)


def _read_no_positions(settings: Settings, model: Flat) -> Flat:
    """SmolLM3's every fourth layer knows no positions."""
    none, layers = {"kind": "none"}, min(model["layers"], DEEPEST)
    return repeated([{"window": None, "position": None if rotated else none} for rotated in _stepped(4, layers)])


def _above_zero(ours: str, theirs: str) -> Special:
    """A number that is absent or 0 where there is none."""

    def read(settings: Settings, model: Flat) -> Flat:
        value = settings.number(theirs, 0.0)
        if value < 0:
            raise settings.refusal(theirs, "expected a number above 0")
        return {ours: value or None}

    return Special(read, lambda model: {theirs: model[ours]} if model[ours] is not None else {})


def _read_caps(settings: Settings, model: Flat) -> Flat:
    scores, logits = settings.number("attn_logit_softcapping", 50.0), settings.number("final_logit_softcapping", 30.0)
    return {"attention.softcap": scores, "head.softcap": logits}


def _write_caps(model: Flat) -> Tree:
    caps = {"attn_logit_softcapping": model["attention.softcap"], "final_logit_softcapping": model["head.softcap"]}
    return {key: cap for key, cap in caps.items() if cap is not None}


def _read_factors(settings: Settings, model: Flat) -> Flat:
    """Granite's factors; logits are divided by theirs."""
    keys = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    embedded, added, scores, divisor = (settings.number(key, 1.0) for key in keys)
    if min(embedded, added, scores, divisor) <= 0:
        raise settings.refusal("logit_scale", "Granite's factors are all above 0")
    scale = None if divisor == 1.0 else 1 / divisor
    found = {"residual_scale": added, "attention.scale": scores, "head.scale": scale}
    return {**found, "embedding_scale": False if embedded == 1.0 else embedded}


def _write_factors(model: Flat) -> Tree:
    embedded, divisor = model["embedding_scale"], 1 / (model["head.scale"] or 1.0)
    return {
        "embedding_scale": (model["d_model"] ** 0.5 if embedded else 1.0) if isinstance(embedded, bool) else embedded,
        "residual_scale": model["residual_scale"],
        "attention.scale": model["attention.scale"],
        "logit_scale": float(round(divisor)) if abs(divisor - round(divisor)) < 1e-9 else divisor,
    }


def _llama_like(fixed: Mapping[str, Any], *more: Row) -> Table:
    """RMSNorm, rotary positions, a gated feed-forward."""
    usual = {"norm.kind": "rms", "position.kind": "rotary", "feedforward.kind": "gated"}
    return Table((*LLAMA, *(more or (Special(_read_window),))), {**usual, **fixed}, only={"expert_count": 0})


def _plain(fixed: Mapping[str, Any], *more: Row) -> Table:
    """LayerNorm, rotary positions, a plain feed-forward, and biases everywhere."""
    usual = {"norm.kind": "layer", "position.kind": "rotary", "feedforward.kind": "plain", "attention.bias": "all"}
    return Table((*EVEN, LAYER_NORM, *more), {**usual, "feedforward.activation": "gelu-tanh", **fixed})


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
    found: Flat = {
        "sublayers": "sequential" if "blk.0.ffn_norm.weight" in names else "parallel",
        "attention.bias": "qkv" if "blk.0.attn_q.bias" in names else "none",
    }
    if "blk.0.attn_q_norm.weight" in names:
        found |= {"attention.qk_norm.kind": "layer", "attention.qk_norm.bias": False}
        found["attention.qk_norm_over"] = "each-head"
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
# where several can hold a model, the first one is written
ARCHITECTURES = {
    "qwen2": _llama_like({"attention.bias": "qkv"}),
    "llama": _llama_like({}),
    "qwen3": _llama_like(
        {"attention.qk_norm.kind": "rms", "attention.bias": "none"},
        follows("attention.qk_norm.eps", "norm.eps"),
        Special(_read_window),
    ),
    "gemma": _llama_like(
        {
            "feedforward.activation": "gelu-tanh",
            "embedding_scale": True,
            "norm.offset": 1.0,
            "head.tied": True,
            "attention.bias": "none",
        }
    ),
    "gemma2": _llama_like(
        {
            "feedforward.activation": "gelu-tanh",
            "embedding_scale": True,
            "norm.offset": 1.0,
            "head.tied": True,
            "attention.bias": "none",
            "placement": "sandwich",
        },
        Special(_read_every_other, _write_every_other),
        Special(_read_caps, _write_caps),
        _scale(46),
    ),
    "gemma3": _llama_like(
        {
            "feedforward.activation": "gelu-tanh",
            "embedding_scale": True,
            "norm.offset": 1.0,
            "attention.qk_norm.kind": "rms",
            "attention.qk_norm.offset": 1.0,
            "attention.bias": "none",
            "placement": "sandwich",
        },
        follows("attention.qk_norm.eps", "norm.eps"),
        Special(_read_kinds, _write_kinds),
        _above_zero("head.softcap", "final_logit_softcapping"),
        _scale(62),
    ),
    "olmo2": _llama_like(
        {
            "attention.qk_norm.kind": "rms",
            "attention.qk_norm_over": "heads",
            "attention.bias": "none",
            "placement": "res-post",
        },
        follows("attention.qk_norm.eps", "norm.eps"),
    ),
    "smollm3": _llama_like({"attention.bias": "none"}, Special(_read_no_positions)),
    "phi3": _bare({"norm.kind": "rms", "feedforward.kind": "gated"}, RMS, FRACTION, Special(_read_window)),
    "granite": _llama_like({}, Special(_read_factors, _write_factors)),
    "starcoder2": _plain({}, EVEN_HEADS),
    "gptneox": _plain({}, FRACTION, PARALLEL),
    "phi2": _plain({"sublayers": "parallel", "head.bias": True}, FRACTION),
    "falcon": _bare(
        {"norm.kind": "layer", "feedforward.kind": "plain", "feedforward.activation": "gelu-tanh"},
        LAYER_NORM,
        EVEN_HEADS,
    ),
    "stablelm": _bare(
        {"norm.kind": "layer", "feedforward.kind": "gated"},
        LAYER_NORM,
        FRACTION,
        Special(
            lambda settings, model: (
                {"attention.qk_norm.eps": model["norm.eps"]} if "attention.qk_norm.kind" in model else {}
            ),
            lambda model: {"use_parallel_residual": model["sublayers"] == "parallel"},
        ),
    ),
    "olmo": _bare(
        {"norm.kind": "layer", "norm.gain": False, "norm.bias": False, "feedforward.kind": "gated"},
        LAYER_NORM,
        EVEN_HEADS,
        _above_zero("attention.clip", "attention.clamp_kqv"),
    ),
    "gpt2": Table(
        rows=(
            *SIZES,
            same("attention.head_count_kv", "attention.heads"),
            number("norm.eps", "attention.layer_norm_epsilon"),
        ),
        fixed={
            "attention.bias": "all",
            "feedforward.kind": "plain",
            "feedforward.activation": "gelu-tanh",
            "norm.kind": "layer",
            "position.kind": "learned",
        },
    ),
    "bloom": Table(
        rows=(*SIZES, same("attention.head_count_kv", "attention.heads"), LAYER_NORM),
        fixed={
            "attention.bias": "all",
            "feedforward.kind": "plain",
            "feedforward.activation": "gelu-tanh",
            "norm.kind": "layer",
            "embedding_norm": True,
            "position.kind": "alibi",
        },
    ),
}
