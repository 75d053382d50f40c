"""LLaMA 1–3 (Touvron et al. 2023; Dubey et al. 2024) and the rows of its relatives, whose tables are in recent.toml:
rotary positions, RMSNorm before each sublayer, gated feed-forward."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weft.config import Tree
from weft.interop.families import positions
from weft.interop.families.base import GATED, TABLES, UNTIED, Family, FamilyNames, decoder_head, on_decoder, sizes
from weft.interop.settings import THEIR_ACTIVATIONS, Flat, Settings, layer_pattern, shown
from weft.interop.table import Key, Row, Special, biases, even_heads, follows, keys, round_factor
from weft.interop.weight_map import Rules, block, module, tensor
from weft.models.config import Decoder
from weft.progress import warn
from weft.storage.tensors import LazyWeights

LAYER: dict[str, Any] = TABLES["modules"]["llama"]


XIELU_OF = "model.layers.{}.mlp.act_fn"


def names(final_norm: str = "norm", **changes: Any) -> Rules:
    """Rules of LLaMA's weights with other names for some modules, and None for modules that a family lacks."""
    return (
        tensor("embedding.weight", "model.embed_tokens.weight"),
        *block("decoder", "model.layers.{layer}", **LAYER | changes),
        *module("decoder.norm", f"model.{final_norm}"),
        *(
            tensor(f"decoder.blocks.{{layer}}.feedforward.activation.{name}", f"{XIELU_OF.format('{layer}')}.{name}")
            for name in ("alpha_p", "alpha_n")
        ),
    )


def xielu_constants(model: Decoder) -> LazyWeights:
    """Constants of xIELU, which transformers stores in every layer."""
    layers = range(model.layers if model.feedforward.activation == "xielu" else 0)
    values = {"beta": 0.5, "eps": -1e-6}.items()
    return {f"{XIELU_OF.format(n)}.{name}": partial(torch.tensor, value) for n in layers for name, value in values}


NAMES = names()


def by_head(rules: Rules) -> Callable[[Decoder], Rules]:
    """Rules of families whose ForQuestionAnswering has the prefix `transformer.` instead of `model.`."""
    roots = ((rule, tuple(name.replace("model.", "transformer.", 1) for name in rule.theirs)) for rule in rules)
    old = tuple(replace(rule, theirs=names) for rule, names in roots)
    return lambda model: old if model.head.kind == "span" else rules


SIZES = sizes("llama")
WIDTH, EPS, ACTIVATION, FEEDFORWARD_BIAS = keys(
    d_head=("head_dim", even_heads),
    eps=("rms_norm_eps", 1e-6),
    activation=("hidden_act", "silu"),
    feedforward_bias=("mlp_bias", False),
)
HEAD = decoder_head(UNTIED)
SHARED: tuple[Row, ...] = (*SIZES, WIDTH, EPS, positions.rotary())
ATTENTION_BIAS = biases("attention_bias", False)
QK_EPS = follows("attention.qk_norm.eps", "norm.eps")


def _read_qwen_window(settings: Settings, model: Flat) -> Flat:
    """Qwen's layers have a window from max_window_layers on."""
    if not settings.flag("use_sliding_window", False):
        return {}
    first = settings.tree.get("max_window_layers", 28)
    if not isinstance(first, int | None) or isinstance(first, bool):
        raise settings.error("max_window_layers", "expected a whole number")
    upper = [first is not None and layer >= first for layer in range(positions.depth(model))]
    windowed = positions.layer_types(settings, model, upper)
    return positions.with_windows(windowed, positions.window(settings, 4096)) if any(windowed) else {}


def _write_qwen_window(model: Flat) -> Tree:
    sizes = positions.windows_of(model)
    first = next((layer for layer, size in enumerate(sizes) if size), len(sizes))
    return {"use_sliding_window": any(sizes), "max_window_layers": first, **positions.write_windows(model)}


def rotated_layers(settings: Settings, model: Flat) -> list[bool]:
    """Whether each layer has rotary positions: by no_rope_layers, else all but every fourth or other step."""
    layers, step = positions.depth(model), settings.integer("no_rope_layer_interval", 4)
    rotated = settings.get("no_rope_layers") or [int(flag) for flag in positions.all_but_every(step, model)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(flag not in (0, 1) for flag in rotated):
        raise settings.error("no_rope_layers", f"expected 0 or 1 for each of {model['layers']} layers")
    return [bool(flag) for flag in rotated[:layers]]


def _read_no_positions(settings: Settings, model: Flat) -> Flat:
    """Every fourth layer of SmolLM3 has no positions, and may have a window."""
    rotated = rotated_layers(settings, model)
    size, used = positions.window(settings, None), settings.flag("use_sliding_window", False)
    windowed = positions.layer_types(settings, model, [used and size is not None and not flag for flag in rotated])
    kinds = [None if flag else {"kind": "none"} for flag in rotated]
    sizes = [size if flag else None for flag in windowed]
    return layer_pattern([{"window": w, "position": p} for w, p in zip(sizes, kinds, strict=True)])


def _write_no_positions(model: Flat) -> Tree:
    rotated = [int(kind["position"] is None) for kind in positions.kinds_of(model)]
    windows = {"use_sliding_window": any(positions.windows_of(model)), **positions.write_windows(model)}
    return {"no_rope_layers": rotated, **windows}


QWEN_WINDOW = Special(_read_qwen_window, _write_qwen_window)
NO_POSITIONS = Special(_read_no_positions, _write_no_positions)


def granite_factors(*theirs: str) -> tuple[Key, ...]:
    """Rows of Granite's factors of embeddings, sublayers' outputs and scores, and of its divisor of logits."""
    embedding, residual, attention, logits = theirs
    factor = partial(Key, default=1.0, kind="positive")

    def embedded(scale: float | bool, model: Flat) -> float:
        return (model["d_model"] ** 0.5 if scale else 1.0) if isinstance(scale, bool) else scale

    def divisor(scale: float | None, model: Flat) -> float:
        return float(round_factor(1 / (scale or 1.0), 1e-9))

    return (
        factor("embedding_scale", embedding, to_ours=lambda scale, model: scale != 1.0 and scale, to_theirs=embedded),
        factor("residual_scale", residual),
        factor("attention.scale", attention, nullable=True),
        factor("head.scale", logits, to_ours=lambda by, model: None if by == 1.0 else 1 / by, to_theirs=divisor),
    )


def family(
    family_names: FamilyNames,
    rows: tuple[Row, ...],
    without: tuple[str, ...] = (),
    *,
    body: Rules | Callable[[Any], Rules] = NAMES,
    fixed: Tree | None = None,
    **fields: Any,
) -> Family:
    """Define a relative of LLaMA: its rows, the heads that it lacks, and other fields of `Family`."""
    return Family(
        rows=rows,
        fixed={**GATED, **(fixed or {})},
        names=family_names,
        body=body,
        heads=on_decoder(token="score", without=without),
        unused=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\..*", r"model\.layers\.\d+\.mlp\.act_fn\.(beta|eps)"),
        fillers=xielu_constants,
        **fields,
    )


USUAL: tuple[Row, ...] = (*SHARED, HEAD, ACTIVATION)
LLAMA = family(("llama", "LLaMA", "Llama"), (*USUAL, ATTENTION_BIAS, FEEDFORWARD_BIAS), body=by_head(NAMES))


def _read_biases(settings: Settings, model: Flat) -> Flat:
    """Seed-OSS has one key for the biases of queries, keys and values, and another for that of the output."""
    qkv, out = settings.flag("attention_bias", True), settings.flag("attention_out_bias", False)
    return {"attention.bias": ("all" if out else "qkv") if qkv else "out" if out else "none"}


def _write_biases(model: Flat) -> Tree:
    kind = model["attention.bias"]
    return {"attention_bias": kind in ("all", "qkv"), "attention_out_bias": kind in ("all", "out")}


def _read_original(settings: Settings, model: Flat) -> Flat:
    """Ministral 3 multiplies queries beyond the original context by a factor that grows with their position. weft has
    no such factor, so the context is the original one."""
    rope = Settings(positions.table_of(settings, MINISTRAL3_ROPE)[0], f"{settings.location}: rope_parameters")
    original, context = rope.integer("original_max_position_embeddings", model["context"]), model["context"]
    if not rope.number(LATER_QUERIES, 0.0) or context <= original:
        return {}
    warn(f"{LATER_QUERIES}: weft has no factor of queries beyond {original} tokens; the context ends there")
    return {"context": original}


def _write_original(model: Flat) -> Tree:
    return {"rope_scaling": {**(positions.write_scaling(model) or {"rope_type": "default"}), LATER_QUERIES: 0.0}}


def some_windows(has_window: Callable[[int], bool], default: int) -> Special:
    """Row of a window in some layers: those of layer_types, or by default those whose number `has_window`."""

    def read(settings: Settings, model: Flat) -> Flat:
        usual = [has_window(layer) for layer in range(positions.depth(model))]
        windowed = positions.layer_types(settings, model, usual)
        return positions.with_windows(windowed, positions.window(settings, default))

    return Special(read, positions.write_windows)


LATER_QUERIES = "llama_4_scaling_beta"
MINISTRAL3_ROPE: Tree = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
    "mscale_all_dim": 1.0, LATER_QUERIES: 0.1,
}  # fmt: skip


def _read_activation(settings: Settings, model: Flat) -> Flat:
    """The first releases wrote gelu for its approximation by tanh; some files have both keys."""
    names = {key: settings.activation(key, "gelu") for key in ("hidden_act", "hidden_activation")}
    actual = {key: "gelu-tanh" if name == "gelu" else name for key, name in names.items()}
    if settings.get("hidden_activation") is not None and actual["hidden_activation"] != actual["hidden_act"]:
        raise settings.error("hidden_activation", f"contradicts hidden_act = {shown(settings.get('hidden_act'))}")
    return {"feedforward.activation": actual["hidden_act"]}


def _write_activation(model: Flat) -> Tree:
    name = THEIR_ACTIVATIONS[model["feedforward.activation"]]
    return dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh" if name == "gelu_new" else name)


def _five_of_six(settings: Settings, model: Flat) -> tuple[list[bool], int | None]:
    usual = positions.all_but_every(settings.integer("sliding_window_pattern", 6), model)
    return positions.layer_types(settings, model, usual), positions.window(settings, 4096)


SEED_BIASES = Special(_read_biases, _write_biases)
LATER, MINISTRAL3_ROTARY = Special(_read_original, _write_original), positions.rotary(default=MINISTRAL3_ROPE)
BASES = positions.two_bases(
    ("rope_theta", 1e6), ("rope_local_base_freq", 1e4), read_windows=_five_of_six, write_windows=positions.write_windows
)
GEMMA_ACTIVATION = Special(_read_activation, _write_activation)
GEMMA2_ACTIVATION = Special(keys(activation=("hidden_activation", "gelu_pytorch_tanh"))[0].read, _write_activation)
SCALE = Key(
    "attention.scale",
    "query_pre_attn_scalar",
    256,
    kind="positive",
    to_ours=lambda scalar, model: scalar**-0.5,
    to_theirs=lambda scale, model: round_factor(scale**-2, 1e-6),
)
SCORES = Key("attention.softcap", "attn_logit_softcapping", 50.0, kind="positive", nullable=True)
LOGITS = partial(Key, "head.softcap", "final_logit_softcapping", kind="positive", nullable=True)
