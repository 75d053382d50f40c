"""Decoders with LayerNorm and relative positions; many compute attention and feed-forward in parallel.

GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023), Phi 1 and 2 (Li et al. 2023) and StableLM (2023) rotate
part of each head, StarCoder2 (Lozhkov et al. 2024) whole heads. The first Falcon (Almazrouei et al. 2023) has one head
of keys and values and one norm for both sublayers; newer ones have groups and two norms; two small ones have ALiBi with
penalties that are rounded and divided by √d_head. BLOOM (BigScience 2022) has ALiBi and normalised embeddings, MPT
(MosaicML 2023) ALiBi and no biases.
"""

from collections.abc import Mapping
from typing import Any

from weft.config import Tree
from weft.interop.families.base import (
    HEAD_BIAS,
    PLAIN,
    TABLES,
    TIED,
    UNTIED,
    Family,
    FamilyNames,
    decoder_head,
    on_decoder,
    sizes,
)
from weft.interop.families.llama import SIZES, names
from weft.interop.families.positions import one_window, rotary
from weft.interop.settings import Flat, Settings
from weft.interop.table import Key, Row, Special, all_biases, biases, even_heads, four_times, keys, switch, without
from weft.interop.weight_map import A_ROW, SAME, NameRule, Rules, block, grouped, module, tensor
from weft.models.config import Decoder

ROTATED = {**PLAIN, "position.kind": "rotary"}
EPS = ("layer_norm_eps", 1e-5)


def parallel(ours: str, default: bool) -> Special:
    """Row of use_parallel_residual: sublayers of kind `ours`, or sequential."""
    return switch("use_parallel_residual", default, on={"sublayers": ours}, off={"sublayers": "sequential"})


def _grouped(model: Decoder, layers: str, attention: str, *, ends: tuple[str, str], norms: Mapping[str, str]) -> Rules:
    """Rules of a decoder whose queries, keys and values are stored by group; `ends`: embedding and final norm."""
    embedding, final_norm = (f"{layers.partition('.')[0]}.{end}" for end in ends)
    layouts = {"qkv": grouped(model.attention.groups, model.d_head)}
    joined = {"qkv": f"{attention}.query_key_value", "out": f"{attention}.dense"}
    plain = {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
    return (
        tensor("embedding.weight", f"{embedding}.weight"),
        *module("decoder.embedding_norm", f"{embedding}_layernorm"),
        *block("decoder", f"{layers}.{{layer}}", layouts, **joined, **plain, **norms),
        *module("decoder.norm", final_norm),
    )


NORMS = {"norm": "input_layernorm", "ff_norm": "post_attention_layernorm"}
GPT_NEOX = Family(
    names=("gpt_neox", "GPT-NeoX", "GPTNeoX"),
    rows=(
        *without(SIZES, "attention.kv_heads"),
        *keys(eps=EPS, activation=("hidden_act", "gelu"), dropout=("hidden_dropout", 0.0)),
        rotary(fraction=0.25, keys=("rotary_emb_base", "rotary_pct")),
        parallel("parallel-two-norms", True),
        biases("attention_bias", True),
        decoder_head(UNTIED),
    ),
    fixed=ROTATED,
    body=lambda model: _grouped(
        model, "gpt_neox.layers", "attention", ends=("embed_in", "final_layer_norm"), norms=NORMS
    ),
    heads=on_decoder("embed_out"),
    prefix="gpt_neox.",
    unused=(r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\..*)",),
)


def _read_heads(settings: Settings, model: Flat) -> Flat:
    heads = model["attention.heads"]
    newer, in_parallel = settings.flag("new_decoder_architecture", False), settings.flag("parallel_attn", True)
    if newer and not in_parallel:
        raise settings.error("parallel_attn", "weft has only True with new_decoder_architecture")
    groups = settings.integer("num_kv_heads", heads) if newer else 1 if settings.flag("multi_query", True) else heads
    norms = settings.integer("num_ln_in_parallel_attn", 2 if newer else 1)
    kind = ("parallel-two-norms" if newer and norms == 2 else "parallel") if in_parallel else "sequential"
    return {"attention.kv_heads": groups, "sublayers": kind}


def _write_heads(model: Flat) -> Tree:
    heads, groups, kind = model["attention.heads"], model["attention.kv_heads"], model["sublayers"]
    return {
        "new_decoder_architecture": kind == "parallel-two-norms" or groups not in (1, heads),
        "num_kv_heads": groups,
        "multi_query": groups == 1,
        "parallel_attn": kind != "sequential",
        "num_ln_in_parallel_attn": 2 if kind == "parallel-two-norms" else 1,
    }


ROTARY = rotary()


def _read_positions(settings: Settings, model: Flat) -> Flat:
    if not settings.flag("alibi", False):
        return {"position.kind": "rotary", **ROTARY.read(settings, model)}
    return {"position.kind": "alibi", "position.factor": even_heads(model) ** -0.5, "position.rounded": True}


def _falcon(family_names: FamilyNames, rows: tuple[Row, ...], **fields: Any) -> Family:
    def body(model: Decoder) -> Rules:
        norms = {"norm": "ln_attn", "ff_norm": "ln_mlp"} if model.sublayers == "parallel-two-norms" else NORMS
        return _grouped(model, "transformer.h", "self_attention", ends=("word_embeddings", "ln_f"), norms=norms)

    return Family(
        rows=(*rows, *keys(std=("initializer_range", 0.02)), decoder_head(TIED)),
        names=family_names,
        body=body,
        heads=on_decoder(),
        prefix="transformer.",
        unused=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\..*",),
        **fields,
    )


FALCON_SIZES = sizes("falcon")
BLOOM_SIZES = sizes("bloom")
HEADS = Special(_read_heads, _write_heads)
POSITIONS = Special(_read_positions, lambda model: {"alibi": model["position.kind"] == "alibi", **ROTARY.write(model)})
FALCON_ROWS: tuple[Row, ...] = (*FALCON_SIZES, HEADS, all_biases("bias", False), POSITIONS)
FALCON = _falcon(("falcon", "Falcon", "Falcon"), FALCON_ROWS, fixed=PLAIN, only={"is_causal": True})
BLOOM = _falcon(
    ("bloom", "BLOOM", "Bloom"),
    (*BLOOM_SIZES, Special(read=lambda settings, model: {"feedforward.d_ff": four_times(model)})),
    fixed={**PLAIN, "feedforward.activation": "gelu-tanh", "attention.bias": "all"}
    | {"position.kind": "alibi", "embedding_norm": True},
    only={"apply_residual_connection_post_layernorm": False, "is_causal": True},
)


MPT_ONLY: Tree = TABLES["only"]["mpt"]
MPT_CLIP = Key("attention.clip", "clip_qkv", kind="positive", nullable=True)
MPT_SCALE = Key("attention.scale", "softmax_scale", kind="positive", nullable=True)


def _read_mpt_attention(settings: Settings, model: Flat) -> Flat:
    table = settings.get("attn_config", {})
    if not isinstance(table, dict):
        raise settings.error("attn_config", "expected a table of settings")
    attention = Settings(table, f"{settings.location}: attn_config")
    attention.only(**MPT_ONLY)
    dropout = attention.number("attn_pdrop", 0.0)
    if not 0 <= dropout < 1:
        raise attention.error("attn_pdrop", "expected a number from 0 to less than 1")
    inner = MPT_CLIP.read(attention, model) | MPT_SCALE.read(attention, model)
    return {**inner, "attention.dropout": dropout, "dropout": dropout, "feedforward.d_ff": four_times(model)}


def _write_mpt_attention(model: Flat) -> Tree:
    clip, scale, dropout = (model[f"attention.{key}"] for key in ("clip", "scale", "dropout"))
    scale = None if scale == even_heads(model) ** -0.5 else scale
    return {"attn_config": {"clip_qkv": clip, "softmax_scale": scale, "attn_pdrop": dropout or 0, **MPT_ONLY}}


MPT_SIZES = sizes("mpt")
MPT_LAYER = "transformer.blocks.{layer}"
MPT = Family(
    names=("mpt", "MPT", "Mpt"),
    rows=(*MPT_SIZES, Special(_read_mpt_attention, _write_mpt_attention), decoder_head(TIED)),
    fixed={**PLAIN, "feedforward.activation": "gelu", "feedforward.bias": False, "norm.bias": False}
    | {"position.kind": "alibi"},
    only={"expansion_ratio": 4, "no_bias": True, "logit_scale": None, "is_causal": True},
    body=(
        tensor("embedding.weight", "transformer.wte.weight"),
        *block("decoder", MPT_LAYER, norm="norm_1", qkv="attn.Wqkv", out="attn.out_proj"),
        *block("decoder", MPT_LAYER, ff_norm="norm_2", up="ffn.up_proj", down="ffn.down_proj"),
        *module("decoder.norm", "transformer.norm_f"),
    ),
    heads=on_decoder(),
    prefix="transformer.",
)


def _qk_norms(model: Decoder) -> Rules:
    """Rules of the norms of queries and keys: one for all heads, or one per head, without biases."""
    per_head = model.attention.qk_norm_over == "each-head"
    rules: list[NameRule] = []
    for part, heads in (("q", model.attention.heads), ("k", model.attention.groups)):
        name = f"model.layers.{{layer}}.self_attn.{part}_layernorm"
        theirs = [f"{name}.norms.{head}" for head in range(heads)] if per_head else [name]
        rules += module(f"decoder.blocks.{{layer}}.attention.{part}_norm", *theirs, layout=A_ROW if per_head else SAME)
    return tuple(rules)


def qk_norm(over: str, bias: bool) -> Special:
    """Row of qk_layernorm: LayerNorm of queries and keys."""

    def read(settings: Settings, model: Flat) -> Flat:
        if not settings.flag("qk_layernorm", False):
            return {}
        norm = {"kind": "layer", "eps": model["norm.eps"], "bias": bias}
        return {"attention.qk_norm_over": over, **{f"attention.qk_norm.{key}": value for key, value in norm.items()}}

    return Special(read, lambda model: {"qk_layernorm": "attention.qk_norm.kind" in model})


def _family(family_names: FamilyNames, rows: tuple[Row, ...], parts: Tree, **fields: Any) -> Family:
    """Define a family with LLaMA's names except for `parts` and the norms of queries and keys."""
    rules = names(**{"q_norm": None, "k_norm": None, **parts})
    return Family(
        rows=(*SIZES, *rows),
        names=family_names,
        body=lambda model: (*rules, *_qk_norms(model)),
        heads=on_decoder(token="score", without=("span",)),
        unused=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\..*",),
        **fields,
    )


PHI_MLP = {"gate_up": None, "up": "mlp.fc1", "down": "mlp.fc2"}
PHI = _family(
    ("phi", "Phi", "Phi"),
    (
        *keys(eps=EPS, activation=("hidden_act", "gelu_new"), dropout=("resid_pdrop", 0.0)),
        rotary(fraction=0.5),
        qk_norm("head", bias=True),
        decoder_head(UNTIED, HEAD_BIAS),
    ),
    parts={**PHI_MLP, "final_norm": "final_layernorm", "out": "self_attn.dense"},
    fixed={**ROTATED, "sublayers": "parallel", "attention.bias": "all"},
)
STABLELM = _family(
    ("stablelm", "StableLM", "StableLm"),
    (
        *keys(eps=EPS, activation=("hidden_act", "silu"), dropout=("hidden_dropout", 0.0)),
        rotary(fraction=0.25),
        *(parallel("parallel", False), biases("use_qkv_bias", False, "qkv"), qk_norm("each-head", bias=False)),
        decoder_head(UNTIED),
    ),
    parts={},
    fixed={**ROTATED, "feedforward.kind": "gated"},
    only={"is_causal": True},  # transformers honours the key only in batches with padding
    defaults={"max_position_embeddings": 4096},
)
STARCODER2 = _family(
    ("starcoder2", "StarCoder2", "Starcoder2"),
    (
        *keys(eps=("norm_epsilon", 1e-5), activation=("hidden_act", "gelu_pytorch_tanh")),
        *keys(dropout=("residual_dropout", 0.0)),
        *(rotary(), one_window(), all_biases("use_bias"), decoder_head(TIED)),
    ),
    parts={"gate_up": None, "up": "mlp.c_fc", "down": "mlp.c_proj"},
    fixed=ROTATED,
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 2, "initializer_range": 0.018042},
)
