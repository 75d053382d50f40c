"""LLaMA and its relatives: rotary positions, RMSNorm before each sublayer, gated feed-forward.

LLaMA 1–3 (Touvron et al. 2023; Dubey et al. 2024) and SmolLM2, which has the same architecture; Mistral (Jiang et al.
2023) adds a window, Qwen2 biases, Qwen3 norms of queries and keys, Gemma (2024) scaled embeddings and another gain.
"""

from collections.abc import Mapping
from typing import Any

from weft.config import Tree
from weft.interop.families.base import Family
from weft.interop.settings import THEIR_ACTIVATIONS, Flat, Settings
from weft.interop.table import Row, Special, Table, activation, constant, even_heads, flag, follows, number, whole
from weft.interop.weight_map import module, tensor
from weft.models.config import Decoder

BLOCK, LAYER = "decoder.blocks.{layer}", "model.layers.{layer}"

RULES = (
    tensor("embedding.weight", "model.embed_tokens.weight"),
    tensor(f"{BLOCK}.attention_skip.norm.weight", f"{LAYER}.input_layernorm.weight"),
    *module(f"{BLOCK}.attention.qkv", *(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")),
    tensor(f"{BLOCK}.attention.q_norm.weight", f"{LAYER}.self_attn.q_norm.weight"),
    tensor(f"{BLOCK}.attention.k_norm.weight", f"{LAYER}.self_attn.k_norm.weight"),
    *module(f"{BLOCK}.attention.out", f"{LAYER}.self_attn.o_proj"),
    tensor(f"{BLOCK}.feedforward_skip.norm.weight", f"{LAYER}.post_attention_layernorm.weight"),
    *module(f"{BLOCK}.feedforward.gate_up", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
    *module(f"{BLOCK}.feedforward.down", f"{LAYER}.mlp.down_proj"),
    tensor("decoder.norm.weight", "model.norm.weight"),
    tensor("output.weight", "lm_head.weight"),
)


# ---- positions


# their kind of scaling → ours, and its settings: ours → theirs
SCALINGS: dict[str, tuple[str, dict[str, str]]] = {
    "linear": ("linear", {"factor": "factor"}),
    "dynamic": ("dynamic-ntk", {"factor": "factor"}),
    "llama3": (
        "llama3",
        {
            "factor": "factor",
            "low": "low_freq_factor",
            "high": "high_freq_factor",
            "original_context": "original_max_position_embeddings",
        },
    ),
}


def _read_rotary(settings: Settings, model: Flat) -> Flat:
    """Rotary positions in the older spelling (rope_theta, rope_scaling) or the newer one (rope_parameters)."""
    key = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
    given = settings.get(key) or {}
    if not isinstance(given, dict):
        raise settings.refusal(key, "expected a table of settings")
    if any(isinstance(value, dict) for value in given.values()):
        raise settings.refusal(key, "weft has one kind of rotary positions for all layers")
    rope = Settings(given, f"{settings.where}: {key}")
    settings.only(partial_rotary_factor=1.0)
    rope.only(partial_rotary_factor=1.0)
    found = {"position.base": rope.number("rope_theta", settings.number("rope_theta", 10000.0))}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return found
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise settings.refusal(key, "weft scales rotary positions by linear, dynamic or llama3")
    ours, names = SCALINGS[kind]
    for name, theirs in names.items():
        read = rope.whole if name == "original_context" else rope.number
        found[f"position.scaling.{name}"] = read(theirs)
    return found | {"position.scaling.kind": ours}


def _write_rotary(model: Flat) -> Tree:
    if model["position.kind"] != "rotary":
        return {}
    scaling = None
    for theirs, (ours, names) in SCALINGS.items():
        if model.get("position.scaling.kind") == ours:
            values = {key: model[f"position.scaling.{name}"] for name, key in names.items()}
            scaling = {"rope_type": theirs, **values}
    return {"rope_theta": model["position.base"], "rope_scaling": scaling}


# ---- settings


SHARED: tuple[Row, ...] = (
    whole("vocab_size", "vocab_size"),
    whole("d_model", "hidden_size"),
    whole("feedforward.d_ff", "intermediate_size"),
    whole("layers", "num_hidden_layers"),
    whole("attention.heads", "num_attention_heads"),
    whole("attention.kv_heads", "num_key_value_heads", lambda model: model["attention.heads"]),
    whole("attention.d_head", "head_dim", even_heads),
    whole("context", "max_position_embeddings", 2048),
    number("norm.eps", "rms_norm_eps", 1e-6),
    number("attention.dropout", "attention_dropout", 0.0),
    flag("head.tied", "tie_word_embeddings", False),
    Special(_read_rotary, _write_rotary),
    number("init.std", "initializer_range", 0.02, written=False),
)
ACTIVATION = activation("feedforward.activation", "hidden_act", "silu")
FIXED = {"feedforward.kind": "gated", "norm.kind": "rms", "position.kind": "rotary", "init.kind": "normal"}
ATTENTION_BIAS = Special(
    lambda settings, model: {"attention.bias": "all" if settings.flag("attention_bias", False) else "none"},
    lambda model: {"attention_bias": model["attention.bias"] == "all"},
)


def _window(settings: Settings, default: int | None) -> int | None:
    """sliding_window, where null is none; `default` where the key is absent."""
    if settings.tree.get("sliding_window", default) is None:
        return None
    return settings.whole("sliding_window", default)


MISTRAL_WINDOW = Special(
    lambda settings, model: {"attention.window": _window(settings, 4096)},
    lambda model: {"sliding_window": model["attention.window"]},
)


def _read_qwen_window(settings: Settings, model: Flat) -> Flat:
    """The window of all layers; Qwen may give it to the upper layers only, which weft cannot."""
    if not settings.flag("use_sliding_window", False):
        return {}
    first = settings.tree.get("max_window_layers", 28)
    if not isinstance(first, int | None) or isinstance(first, bool):
        raise settings.refusal("max_window_layers", "expected a whole number")
    windowed = [first is not None and layer >= first for layer in range(min(model["layers"], 2**16))]
    if isinstance(given := settings.get("layer_types"), list):
        windowed = [kind == "sliding_attention" for kind in given]
    if any(windowed) and not all(windowed):
        raise settings.refusal("max_window_layers", "weft has one window for all layers")
    return {"attention.window": _window(settings, 4096)} if any(windowed) else {}


def _write_qwen_window(model: Flat) -> Tree:
    window = model["attention.window"]
    return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}


QWEN_WINDOW = Special(_read_qwen_window, _write_qwen_window)


def _read_gemma_activation(settings: Settings, model: Flat) -> Flat:
    """The first releases said gelu and meant its approximation by tanh."""
    given = settings.get("hidden_activation") or settings.get("hidden_act")
    if given in (None, "gelu"):
        return {"feedforward.activation": "gelu-tanh"}
    return {"feedforward.activation": Settings({"hidden_act": given}, settings.where).activation("hidden_act")}


def _write_gemma_activation(model: Flat) -> Tree:
    ours = model["feedforward.activation"]
    name = "gelu_pytorch_tanh" if ours == "gelu-tanh" else THEIR_ACTIVATIONS[ours]
    return {"hidden_act": name, "hidden_activation": name}


def _family(kind: str, title: str, rows: tuple[Row, ...], **table: Mapping[str, Any]) -> Family:
    name = kind.capitalize()
    fixed = {**FIXED, **table.pop("fixed", {})}
    return Family(
        kind=kind,
        title=title,
        model=Decoder,
        architectures={f"{name}ForCausalLM": "lm", f"{name}Model": "lm"},
        settings=Table(rows=(*SHARED, *rows), fixed=fixed, **table),
        rules=lambda model: RULES,
        prefix="model.",
        copies=lambda model: {"lm_head.weight": "model.embed_tokens.weight"},
        unused=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\..*",),
    )


LLAMA = _family("llama", "LLaMA", (ACTIVATION, ATTENTION_BIAS, flag("feedforward.bias", "mlp_bias", False)))
MISTRAL = _family(
    "mistral",
    "Mistral",
    (ACTIVATION, MISTRAL_WINDOW),
    only={"layer_types": None},
    defaults={"max_position_embeddings": 4096 * 32},
)
QWEN2 = _family(
    "qwen2",
    "Qwen2",
    (ACTIVATION, QWEN_WINDOW),
    fixed={"attention.bias": "qkv"},
    defaults={"max_position_embeddings": 32768},
)
QWEN3 = _family(
    "qwen3",
    "Qwen3",
    (ACTIVATION, QWEN_WINDOW, follows("attention.qk_norm.eps", "norm.eps"), constant("attention_bias", False)),
    fixed={"attention.qk_norm.kind": "rms"},
    only={"attention_bias": False},
    defaults={"max_position_embeddings": 32768, "head_dim": 128},
)
GEMMA = _family(
    "gemma",
    "Gemma",
    (Special(_read_gemma_activation, _write_gemma_activation), ATTENTION_BIAS),
    fixed={"norm.offset": 1.0, "embedding_scale": True},
    only={"use_bidirectional_attention": False},
    defaults={"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True},
)
