"""LLaMA and its relatives: rotary positions, RMSNorm before each sublayer, gated feed-forward.

LLaMA 1–3 (Touvron et al. 2023; Dubey et al. 2024) and SmolLM2, which has the same architecture; Mistral (Jiang et al.
2023) adds a window, Qwen2 biases, Qwen3 norms of queries and keys, Gemma (2024) scaled embeddings and another gain.
"""

from collections.abc import Callable, Collection
from typing import Any

from weft.config import Tree
from weft.interop.families.base import THEIR_ACTIVATIONS, Family, Settings
from weft.interop.weight_map import both, rule
from weft.models.config import Decoder, LMHead, Model
from weft.nn.config import (
    Attention,
    DynamicNTK,
    Gated,
    LinearScaling,
    Llama3Scaling,
    NormalInit,
    RMSNorm,
    Rotary,
)

BLOCK, LAYER = "decoder.blocks.{layer}", "model.layers.{layer}"

RULES = (
    rule("embedding.weight", "model.embed_tokens.weight"),
    rule(f"{BLOCK}.attention_skip.norm.weight", f"{LAYER}.input_layernorm.weight"),
    *both(f"{BLOCK}.attention.qkv", *(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")),
    rule(f"{BLOCK}.attention.q_norm.weight", f"{LAYER}.self_attn.q_norm.weight"),
    rule(f"{BLOCK}.attention.k_norm.weight", f"{LAYER}.self_attn.k_norm.weight"),
    *both(f"{BLOCK}.attention.out", f"{LAYER}.self_attn.o_proj"),
    rule(f"{BLOCK}.feedforward_skip.norm.weight", f"{LAYER}.post_attention_layernorm.weight"),
    *both(f"{BLOCK}.feedforward.gate_up", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
    *both(f"{BLOCK}.feedforward.down", f"{LAYER}.mlp.down_proj"),
    rule("decoder.norm.weight", "model.norm.weight"),
    rule("output.weight", "lm_head.weight"),
)


# ---- positions


def rotary(settings: Settings, base: float) -> Rotary:
    """The rotary positions of a config.json, in the older spelling (rope_theta, rope_scaling) or the newer one."""
    key = "rope_parameters" if settings.tree.get("rope_parameters") else "rope_scaling"
    given = settings.tree.get(key) or {}
    if not isinstance(given, dict):
        raise settings.refusal(key, "expected a table of settings")
    if any(isinstance(value, dict) for value in given.values()):
        raise settings.refusal(key, "weft has one kind of rotary positions for all layers")
    rope = Settings(given, f"{settings.where}: {key}")
    settings.only(partial_rotary_factor=1.0)
    rope.only(partial_rotary_factor=1.0)
    base = rope.number("rope_theta", settings.number("rope_theta", base))
    kind = given.get("rope_type", given.get("type", "default"))
    match kind:
        case "default":
            return Rotary(base=base)
        case "linear":
            return Rotary(base=base, scaling=LinearScaling(factor=rope.number("factor")))
        case "dynamic":
            return Rotary(base=base, scaling=DynamicNTK(factor=rope.number("factor")))
        case "llama3":
            scaling = Llama3Scaling(
                factor=rope.number("factor"),
                low=rope.number("low_freq_factor"),
                high=rope.number("high_freq_factor"),
                original_context=rope.whole("original_max_position_embeddings"),
            )
            return Rotary(base=base, scaling=scaling)
    raise settings.refusal(key, "weft scales rotary positions by linear, dynamic or llama3")


def their_rotary(position: Any) -> Tree:
    """The keys of config.json that say the same."""
    if not isinstance(position, Rotary):
        return {}
    scaling: Tree | None = None
    match position.scaling:
        case LinearScaling(factor=factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case DynamicNTK(factor=factor):
            scaling = {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling(factor=factor, low=low, high=high, original_context=context):
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    return {"rope_theta": position.base, "rope_scaling": scaling}


# ---- settings


def _read(
    settings: Settings,
    attention: Callable[[Settings], dict[str, Any]],
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    tied: bool = False,
    scaled: bool = False,
    bias: bool = False,
    activation: str = "silu",
    context: int = 2048,
    base: float = 10000.0,
) -> Decoder:
    """What the relatives share; `attention` gives what is each one's own, and the rest are its defaults."""
    heads = settings.whole("num_attention_heads")
    d_model = settings.whole("hidden_size")
    d_head = settings.whole("head_dim", max(d_model // heads, 1))
    eps = settings.number("rms_norm_eps", eps)
    return Decoder(
        vocab_size=settings.whole("vocab_size"),
        context=settings.whole("max_position_embeddings", context),
        layers=settings.whole("num_hidden_layers"),
        d_model=d_model,
        attention=Attention(
            heads=heads,
            kv_heads=settings.whole("num_key_value_heads", heads),
            d_head=None if d_head * heads == d_model else d_head,
            dropout=settings.number("attention_dropout", 0.0),
            **attention(settings),
        ),
        feedforward=Gated(
            d_ff=settings.whole("intermediate_size"),
            activation=settings.activation("hidden_act", activation),
            bias=bias,
        ),
        norm=RMSNorm(eps=eps, offset=offset),
        position=rotary(settings, base),
        embedding_scale=scaled,
        init=NormalInit(std=settings.number("initializer_range", 0.02)),
        head=LMHead(tied=settings.flag("tie_word_embeddings", tied)),
    )


def _write(model: Decoder) -> Tree:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.feedforward.d_ff,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention.heads,
        "num_key_value_heads": model.attention.groups,
        "head_dim": model.d_head,
        "hidden_act": THEIR_ACTIVATIONS[model.feedforward.activation],
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm.eps,
        "attention_dropout": model.attention.dropout,
        "tie_word_embeddings": getattr(model.head, "tied", True),
        **their_rotary(model.position),
    }


def _biases(settings: Settings) -> dict[str, Any]:
    return {"bias": "all" if settings.flag("attention_bias", False) else "none"}


def _window(settings: Settings, default: int | None) -> int | None:
    """sliding_window, where null is none; `default` where the key is absent."""
    if settings.tree.get("sliding_window", default) is None:
        return None
    return settings.whole("sliding_window", default)


def read_llama(settings: Settings, architecture: str, names: Collection[str]) -> Decoder:
    return _read(settings, _biases, bias=settings.flag("mlp_bias", False))


def write_llama(model: Decoder) -> tuple[str, Tree]:
    biases = {"attention_bias": model.attention.bias == "all", "mlp_bias": model.feedforward.bias}
    return "LlamaForCausalLM", {"model_type": "llama", **_write(model), **biases}


def read_mistral(settings: Settings, architecture: str, names: Collection[str]) -> Decoder:
    settings.only(layer_types=None)
    return _read(settings, lambda asked: {"window": _window(asked, 4096)}, context=4096 * 32)


def write_mistral(model: Decoder) -> tuple[str, Tree]:
    return "MistralForCausalLM", {"model_type": "mistral", **_write(model), "sliding_window": model.attention.window}


def _qwen_window(settings: Settings) -> int | None:
    """The window of all layers; Qwen may give it to the upper layers alone, which weft cannot."""
    if not settings.flag("use_sliding_window", False):
        return None
    layers, first = settings.whole("num_hidden_layers"), settings.tree.get("max_window_layers", 28)
    if not isinstance(first, int | None) or isinstance(first, bool):
        raise settings.refusal("max_window_layers", "expected a whole number")
    windowed = [first is not None and layer >= first for layer in range(min(layers, 2**16))]
    if isinstance(given := settings.tree.get("layer_types"), list):
        windowed = [kind == "sliding_attention" for kind in given]
    if any(windowed) and not all(windowed):
        raise settings.refusal("max_window_layers", "weft has one window for all layers")
    return _window(settings, 4096) if any(windowed) else None


def _qwen_tree(model: Decoder) -> Tree:
    window = model.attention.window
    return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}


def read_qwen2(settings: Settings, architecture: str, names: Collection[str]) -> Decoder:
    return _read(settings, lambda asked: {"bias": "qkv", "window": _qwen_window(asked)}, context=32768)


def write_qwen2(model: Decoder) -> tuple[str, Tree]:
    return "Qwen2ForCausalLM", {"model_type": "qwen2", **_write(model), **_qwen_tree(model)}


def read_qwen3(settings: Settings, architecture: str, names: Collection[str]) -> Decoder:
    settings.only(attention_bias=False)
    norm = RMSNorm(eps=settings.number("rms_norm_eps", 1e-6))
    asked = Settings({"head_dim": 128, **settings.tree}, settings.where)
    return _read(asked, lambda asked: {"qk_norm": norm, "window": _qwen_window(asked)}, context=32768)


def write_qwen3(model: Decoder) -> tuple[str, Tree]:
    return "Qwen3ForCausalLM", {"model_type": "qwen3", **_write(model), **_qwen_tree(model), "attention_bias": False}


def read_gemma(settings: Settings, architecture: str, names: Collection[str]) -> Decoder:
    settings.only(use_bidirectional_attention=False)
    act = settings.tree.get("hidden_activation") or settings.tree.get("hidden_act")
    act = "gelu_pytorch_tanh" if act in (None, "gelu") else act  # the first releases said gelu and meant this formula
    asked = Settings({"head_dim": 256, **settings.tree, "hidden_act": act}, settings.where)
    return _read(asked, _biases, offset=1.0, tied=True, scaled=True, context=8192)


def write_gemma(model: Decoder) -> tuple[str, Tree]:
    tree = {"model_type": "gemma", **_write(model), "attention_bias": model.attention.bias == "all"}
    act = "gelu_pytorch_tanh" if model.feedforward.activation == "gelu-tanh" else tree["hidden_act"]
    return "GemmaForCausalLM", tree | {"hidden_act": act, "hidden_activation": act}


def _rules(model: Model) -> tuple[Any, ...]:
    return RULES


def _copies(model: Model) -> dict[str, str]:
    return {"lm_head.weight": "model.embed_tokens.weight"}


def _family(kind: str, title: str, read: Any, write: Any) -> Family:
    name = write.__name__.removeprefix("write_").capitalize()
    return Family(
        kind=kind,
        title=title,
        models="decoder",
        architectures={f"{name}ForCausalLM": "lm", f"{name}Model": "lm"},
        rules=_rules,
        read=read,
        write=write,
        prefix="model.",
        copies=_copies,
        idle=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\..*",),
    )


LLAMA = _family("llama", "LLaMA", read_llama, write_llama)
MISTRAL = _family("mistral", "Mistral", read_mistral, write_mistral)
QWEN2 = _family("qwen2", "Qwen2", read_qwen2, write_qwen2)
QWEN3 = _family("qwen3", "Qwen3", read_qwen3, write_qwen3)
GEMMA = _family("gemma", "Gemma", read_gemma, write_gemma)
