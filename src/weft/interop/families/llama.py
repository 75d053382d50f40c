"""LLaMA and its relatives: rotary positions, RMSNorm before each sublayer, gated feed-forward.

LLaMA 1–3 (Touvron et al. 2023; Dubey et al. 2024) and SmolLM2, which has the same architecture; Mistral (Jiang et al.
2023) adds a window, Qwen2 biases, Qwen3 norms of queries and keys, SmolLM3 layers without positions, Granite factors,
Phi-3 joins matrices; OLMo (Groeneveld et al. 2024) has norms without weights, OLMo 2 norms after each sublayer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.config import Tree
from weft.interop.families.base import Family
from weft.interop.families.decoder_heads import architectures, head, head_rules
from weft.interop.families.layers import depth, kinds_of, layer_types, window, windows_of, with_windows, write_windows
from weft.interop.families.rotary import rotary
from weft.interop.settings import Flat, Settings, repeated
from weft.interop.table import Row, Special, Table, activation, even_heads, flag, follows, number, whole
from weft.interop.weight_map import Rule, module, tensor
from weft.models.config import Decoder

BLOCK, LAYER = "decoder.blocks.{layer}", "model.layers.{layer}"

RULES = (
    tensor("embedding.weight", "model.embed_tokens.weight"),
    *module(f"{BLOCK}.attention_skip.norm", f"{LAYER}.input_layernorm"),
    *module(f"{BLOCK}.attention.qkv", *(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")),
    tensor(f"{BLOCK}.attention.q_norm.weight", f"{LAYER}.self_attn.q_norm.weight"),
    tensor(f"{BLOCK}.attention.k_norm.weight", f"{LAYER}.self_attn.k_norm.weight"),
    *module(f"{BLOCK}.attention.out", f"{LAYER}.self_attn.o_proj"),
    *module(f"{BLOCK}.feedforward_skip.norm", f"{LAYER}.post_attention_layernorm"),
    *module(f"{BLOCK}.feedforward.gate_up", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
    *module(f"{BLOCK}.feedforward.down", f"{LAYER}.mlp.down_proj"),
    *module("decoder.norm", "model.norm"),
    tensor("output.weight", "lm_head.weight"),
)
# the same where norms come after the sublayers
OLMO2_RULES = (
    *(rule for rule in RULES if "_skip.norm" not in rule.ours),
    *module(f"{BLOCK}.attention_skip.norm_out", f"{LAYER}.post_attention_layernorm"),
    *module(f"{BLOCK}.feedforward_skip.norm_out", f"{LAYER}.post_feedforward_layernorm"),
)
PHI3_RULES = (
    *(rule for rule in RULES if len(rule.theirs) == 1),
    *module(f"{BLOCK}.attention.qkv", f"{LAYER}.self_attn.qkv_proj"),
    *module(f"{BLOCK}.feedforward.gate_up", f"{LAYER}.mlp.gate_up_proj"),
)


# ---- settings


SIZES: tuple[Row, ...] = (
    whole("vocab_size", "vocab_size"),
    whole("d_model", "hidden_size"),
    whole("feedforward.d_ff", "intermediate_size"),
    whole("layers", "num_hidden_layers"),
    whole("attention.heads", "num_attention_heads"),
    whole("attention.kv_heads", "num_key_value_heads", lambda model: model["attention.heads"]),
    whole("context", "max_position_embeddings", 2048),
    number("attention.dropout", "attention_dropout", 0.0),
    number("init.std", "initializer_range", 0.02, written=False),
)
WIDTH = whole("attention.d_head", "head_dim", even_heads)
EPS = number("norm.eps", "rms_norm_eps", 1e-6)
DROPOUT = number("dropout", "resid_pdrop", 0.0)
TIED = flag("head.tied", "tie_word_embeddings", False)
SHARED: tuple[Row, ...] = (*SIZES, WIDTH, EPS, rotary())
ACTIVATION = activation("feedforward.activation", "hidden_act", "silu")
FIXED = {"feedforward.kind": "gated", "norm.kind": "rms", "position.kind": "rotary", "init.kind": "normal"}
ATTENTION_BIAS = Special(
    lambda settings, model: {"attention.bias": "all" if settings.flag("attention_bias", False) else "none"},
    lambda model: {"attention_bias": model["attention.bias"] == "all"},
)
FEEDFORWARD_BIAS = flag("feedforward.bias", "mlp_bias", False)


def one_window(default: int | None = None) -> Special:
    """A window that all layers have."""
    return Special(
        lambda settings, model: {"attention.window": window(settings, default)},
        lambda model: {"sliding_window": model["attention.window"]},
    )


def _read_qwen_window(settings: Settings, model: Flat) -> Flat:
    """Qwen gives a window to the upper layers, from max_window_layers on."""
    if not settings.flag("use_sliding_window", False):
        return {}
    first = settings.tree.get("max_window_layers", 28)
    if not isinstance(first, int | None) or isinstance(first, bool):
        raise settings.refusal("max_window_layers", "expected a whole number")
    upper = [first is not None and layer >= first for layer in range(depth(model))]
    windowed = layer_types(settings, model, upper)
    return with_windows(windowed, window(settings, 4096)) if any(windowed) else {}


def _write_qwen_window(model: Flat) -> Tree:
    sizes = windows_of(model)
    first = next((layer for layer, size in enumerate(sizes) if size), len(sizes))
    return {"use_sliding_window": any(sizes), "max_window_layers": first, **write_windows(model)}


QWEN_WINDOW = Special(_read_qwen_window, _write_qwen_window)


def _read_no_positions(settings: Settings, model: Flat) -> Flat:
    """SmolLM3's every fourth layer knows no positions, and may have a window."""
    layers, step = depth(model), settings.whole("no_rope_layer_interval", 4)
    rotated = settings.get("no_rope_layers") or [int((layer + 1) % step != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(each not in (0, 1) for each in rotated):
        raise settings.refusal("no_rope_layers", f"expected 0 or 1 for each of {model['layers']} layers")
    size = window(settings, None) if settings.flag("use_sliding_window", False) else None
    windowed = layer_types(settings, model, [size is not None and not each for each in rotated])
    none = {"kind": "none"}
    return repeated(
        [
            {"window": size if narrow else None, "position": None if turned else none}
            for turned, narrow in zip(rotated[:layers], windowed, strict=True)
        ]
    )


def _write_no_positions(model: Flat) -> Tree:
    rotated = [int(kind["position"] is None) for kind in kinds_of(model)]
    return {"no_rope_layers": rotated, "use_sliding_window": any(windows_of(model)), **write_windows(model)}


def _read_factors(settings: Settings, model: Flat) -> Flat:
    """Granite multiplies embeddings, scores and what sublayers add, and divides the logits."""
    found: Flat = {
        "embedding_scale": settings.number("embedding_multiplier", 1.0),
        "attention.scale": settings.number("attention_multiplier", 1.0),
        "residual_scale": settings.number("residual_multiplier", 1.0),
    }
    divisor = settings.number("logits_scaling", 1.0)
    if min(*found.values(), divisor) <= 0:
        raise settings.refusal("logits_scaling", "Granite's factors are all above 0")
    if found["embedding_scale"] == 1.0:
        found["embedding_scale"] = False
    return found | ({"head.scale": 1 / divisor} if model["head.kind"] == "lm" and divisor != 1.0 else {})


def _write_factors(model: Flat) -> Tree:
    embedded = model["embedding_scale"]
    if isinstance(embedded, bool):
        embedded = model["d_model"] ** 0.5 if embedded else 1.0
    divisor = 1 / (model.get("head.scale") or 1.0)
    return {
        "embedding_multiplier": embedded,
        "attention_multiplier": model["attention.scale"],
        "residual_multiplier": model["residual_scale"],
        "logits_scaling": float(round(divisor)) if abs(divisor - round(divisor)) < 1e-9 else divisor,
    }


def _read_clip(settings: Settings, model: Flat) -> Flat:
    """OLMo may cut queries, keys and values off."""
    if settings.get("clip_qkv") is None:
        return {}
    bound = settings.number("clip_qkv")
    if bound <= 0:
        raise settings.refusal("clip_qkv", "expected a number above 0")
    return {"attention.clip": bound}


def _write_clip(model: Flat) -> Tree:
    return {"clip_qkv": model["attention.clip"]}


def _rules(rules: tuple[Rule, ...], kind: str) -> Callable[[Any], tuple[Rule, ...]]:
    """A family's names. In some, those below the head that finds answers begin with another word."""
    usual = head_rules(rules, tags="score")
    if kind not in TRANSFORMER:
        return usual
    named = (tuple(name.replace("model.", "transformer.", 1) for name in rule.theirs) for rule in rules)
    finding = head_rules(tuple(replace(rule, theirs=names) for rule, names in zip(rules, named, strict=True)))
    return lambda model: (finding if model.head.kind == "span" else usual)(model)


def family(kind: str, title: str, rows: tuple[Row, ...], rules: tuple[Rule, ...] = RULES, **table: Any) -> Family:
    """A relative of LLaMA's: its rows after the sizes, its names, and what else its table has."""
    name = table.pop("name", kind.capitalize())
    words = table.pop("words", f"{name}ForCausalLM")
    fixed = {**FIXED, **table.pop("fixed", {})}
    return Family(
        kind=kind,
        title=title,
        model=Decoder,
        architectures=architectures(name, words, without=table.pop("without", ())),
        settings=Table(rows=rows, fixed=fixed, **table),
        rules=_rules(rules, kind),
        prefix="model.",
        copies=lambda model: {"lm_head.weight": "model.embed_tokens.weight"},
        unused=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\..*",),
    )


TRANSFORMER = ("llama", "qwen2", "qwen3", "smollm3")  # whose ForQuestionAnswering is named in an older way
NO_ANSWERS = ("ForQuestionAnswering",)
ONLY_TEXTS = ("ForTokenClassification", "ForQuestionAnswering")
NO_LABELS = ("ForSequenceClassification", *ONLY_TEXTS)
LLAMA = family("llama", "LLaMA", (*SHARED, head(TIED), ACTIVATION, ATTENTION_BIAS, FEEDFORWARD_BIAS))
MISTRAL = family(
    "mistral",
    "Mistral",
    (*SHARED, head(TIED), ACTIVATION, one_window(4096)),
    only={"layer_types": None},
    defaults={"max_position_embeddings": 4096 * 32},
)
QWEN2 = family(
    "qwen2",
    "Qwen2",
    (*SHARED, head(TIED), ACTIVATION, QWEN_WINDOW),
    fixed={"attention.bias": "qkv"},
    defaults={"max_position_embeddings": 32768},
)
QWEN3 = family(
    "qwen3",
    "Qwen3",
    (
        *SHARED,
        head(TIED),
        ACTIVATION,
        QWEN_WINDOW,
        follows("attention.qk_norm.eps", "norm.eps"),
        ATTENTION_BIAS,
    ),
    fixed={"attention.qk_norm.kind": "rms"},
    defaults={"max_position_embeddings": 32768, "head_dim": 128},
)
SMOLLM3 = family(
    "smollm3",
    "SmolLM3",
    (
        *SIZES,
        WIDTH,
        EPS,
        rotary(2000000.0),
        head(TIED),
        ACTIVATION,
        ATTENTION_BIAS,
        FEEDFORWARD_BIAS,
        Special(_read_no_positions, _write_no_positions),
    ),
    name="SmolLM3",
    defaults={"max_position_embeddings": 32768, "tie_word_embeddings": True, "num_key_value_heads": 4},
)
GRANITE = family(
    "granite",
    "Granite",
    (*SHARED, head(TIED), ACTIVATION, ATTENTION_BIAS, FEEDFORWARD_BIAS, Special(_read_factors, _write_factors)),
    without=NO_LABELS,
)
PHI3 = family(
    "phi3",
    "Phi-3",
    (*SIZES, EPS, rotary(fraction=1.0), head(TIED), ACTIVATION, one_window(), DROPOUT),
    PHI3_RULES,
    without=NO_ANSWERS,
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
)
OLMO = family(
    "olmo",
    "OLMo",
    (*SIZES, rotary(), head(TIED), ACTIVATION, ATTENTION_BIAS, Special(_read_clip, _write_clip)),
    fixed={"norm.kind": "layer", "norm.gain": False, "norm.bias": False, "norm.eps": 1e-5},
    without=ONLY_TEXTS,
)
OLMO2 = family(
    "olmo2",
    "OLMo 2",
    (*SHARED, head(TIED), ACTIVATION, ATTENTION_BIAS, follows("attention.qk_norm.eps", "norm.eps")),
    OLMO2_RULES,
    fixed={"placement": "res-post", "attention.qk_norm.kind": "rms", "attention.qk_norm_over": "heads"},
    without=ONLY_TEXTS,
    defaults={"rms_norm_eps": 1e-5},
)
