"""Encoder–decoders.

Marian (Junczys-Dowmunt et al. 2018) and BART (Lewis et al. 2020); with the same blocks in pre-norm mBART (Liu et al.
2020), M2M-100 and NLLB (Fan et al. 2021; Costa-jussà et al. 2022), PEGASUS (Zhang et al. 2020) and Blenderbot (Roller
et al. 2021); LED (Beltagy et al. 2020), a BART whose encoder has windows; T5, T5 v1.1 (Raffel et al. 2020; Shazeer
2020), and with the blocks of T5 v1.1 mT5 (Xue et al. 2021) and UMT5 (Chung et al. 2023), whose layers have separate
position biases.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weft.config import Tree
from weft.interop.families import positions
from weft.interop.families.base import (
    POST_NORM,
    TIED,
    Family,
    FamilyNames,
    count_labels,
    pooled_head,
    sizes,
    write_labels,
)
from weft.interop.families.bert import QKV
from weft.interop.settings import ACTIVATIONS, THEIR_ACTIVATIONS, Flat, Settings
from weft.interop.table import Row, Special, constant, decoder_copy, follows, keys
from weft.interop.weight_map import ONE_ROW, Rules, block, module, tensor
from weft.models.config import EncoderDecoder
from weft.nn.position import sinusoids
from weft.storage.tensors import LazyWeights


def _stack(side: str) -> Rules:
    layer = f"model.{side}.layers.{{layer}}"
    return (
        *block(side, layer, qkv="self_attn.*_proj", out="self_attn.out_proj", norm="self_attn_layer_norm"),
        *block(side, layer, cross_q="encoder_attn.q_proj", cross_kv="encoder_attn.*_proj"),
        *block(side, layer, cross_out="encoder_attn.out_proj", cross_norm="encoder_attn_layer_norm"),
        *block(side, layer, up="fc1", down="fc2", ff_norm="final_layer_norm"),
        tensor(f"{side}.position.weight", f"model.{side}.embed_positions.weight"),
        *module(f"{side}.embedding_norm", f"model.{side}.layernorm_embedding"),
        *module(f"{side}.norm", f"model.{side}.layer_norm"),
    )


STACKS = (*_stack("encoder"), *_stack("decoder"))
TABLE = "model.shared.weight"
ONE_TABLE = (tensor("embedding.weight", TABLE),)
TWO_TABLES = (
    tensor("embedding.weight", "model.decoder.embed_tokens.weight"),
    tensor("source_embedding.weight", "model.encoder.embed_tokens.weight"),
)
LM_HEAD = (tensor("output.weight", "lm_head.weight"), tensor("output.bias", "final_logits_bias", layout=ONE_ROW))


def _zero_bias(model: EncoderDecoder) -> LazyWeights:
    """Zeros for the bias of the logits; transformers always adds one, and warns if it is missing."""
    return (
        {}
        if model.head.bias or model.head.kind != "lm"
        else {"final_logits_bias": partial(torch.zeros, 1, model.vocab_size)}
    )


def _sinusoids(model: EncoderDecoder) -> LazyWeights:
    """Sinusoidal positions; transformers warns if they are missing, although it computes them."""
    make = partial(sinusoids, torch.arange(model.context), model.d_model, "halves")
    return dict.fromkeys((f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")), make)


SIZES = sizes("bart")


def _head(*lm: Row, wrapped: bool = False) -> Special:
    """Row of the head: rows of an LM head, or those of a classifier of texts on eos, their last token. If `wrapped`,
    the decoder begins with the last token, a language, and eos is before it unless other files say otherwise."""

    def read(settings: Settings, model: Flat) -> Flat:
        if model["head.kind"] == "lm":
            return {key: value for row in lm for key, value in row.read(settings, model).items()}
        start = "last" if wrapped else settings.get("decoder_start_token_id")
        if start != "last" and (not isinstance(start, int) or isinstance(start, bool) or start < 0):
            raise settings.error("decoder_start_token_id", "expected the id of a token")
        dropout = settings.number("classifier_dropout", 0.0)
        labels = {"head.labels": count_labels(settings), "head.dropout": dropout}
        pooling = model.get("head.pooling", "next-to-last") if wrapped else "last"
        return {"start": start, "head.pooling": pooling, **labels}

    def write(model: Flat) -> Tree:
        if model["head.kind"] == "lm":
            return {key: value for row in lm for key, value in row.write(model).items()}
        start = {} if wrapped else {"decoder_start_token_id": model["start"]}
        return {**start, "classifier_dropout": model["head.dropout"], **write_labels(model)}

    return Special(read, write)


LM = _head(TIED)
CLASSIFIER = pooled_head("output", "classification_head.dense", "classification_head.out_proj")
SHARED: tuple[Row, ...] = (
    *SIZES,
    decoder_copy("decoder_attention_heads", "attention.heads", 16),
    decoder_copy("decoder_ffn_dim", "feedforward.d_ff", 4096),
    constant("is_encoder_decoder", True),
)
POST_NORM_KEYS = {"normalize_before": False, "add_final_layer_norm": False}
PRE_NORM_KEYS = {"normalize_before": True, "add_final_layer_norm": True}
SINUSOIDS = (r"model\.(encoder|decoder)\.embed_positions\.weights?",)  # weft computes them


def _read_tables(settings: Settings, model: Flat) -> Flat:
    """Marian's source and target may have separate embeddings and vocabularies."""
    if settings.flag("share_encoder_decoder_embeddings", True):
        return {}
    source = model["vocab_size"]
    return {"source_vocab_size": source, "vocab_size": settings.integer("decoder_vocab_size", source)}


def _write_tables(model: Flat) -> Tree:
    source = model["source_vocab_size"]
    if source is None:
        return {"share_encoder_decoder_embeddings": True}
    return {"share_encoder_decoder_embeddings": False, "vocab_size": source, "decoder_vocab_size": model["vocab_size"]}


def _family(
    family_names: FamilyNames, *rows: Row, pre_norm: bool, position: Tree, head: Row = LM, **fields: Any
) -> Family:
    """Define a family with these stacks; embeddings are normalised if positions are learned."""
    learned = position["kind"] == "learned"
    positions = {f"position.{key}": value for key, value in position.items()}
    static = {} if learned else {"static_position_embeddings": True}
    defaults = {
        "classes": {"lm": f"{family_names[2]}ForConditionalGeneration"},
        "only": {**(PRE_NORM_KEYS if pre_norm else POST_NORM_KEYS), **static, "normalize_embedding": learned},
        "by_weights": {"head.bias": lambda names: "final_logits_bias" in names},
        "heads": {"lm": LM_HEAD},
        "fillers": _zero_bias,
    }
    return Family(
        rows=(*SHARED, head, *rows),
        fixed={**POST_NORM, "placement": "pre" if pre_norm else "post", **positions, "embedding_norm": learned},
        names=family_names,
        model=EncoderDecoder,
        body=lambda model: (*(ONE_TABLE if model.source_vocab_size is None else TWO_TABLES), *STACKS),
        copied=dict.fromkeys((f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")), TABLE),
        unused=() if learned else SINUSOIDS,
        **{**defaults, **fields},
    )


LEARNED: Tree = {"kind": "learned", "offset": 2}
HALVES: Tree = {"kind": "sinusoidal", "layout": "halves", "amplitude": 1.0}
# positions begin after the id of the padding token
AFTER_PADDING = Special(
    lambda settings, model: {"position.offset": settings.integer("pad_token_id", 1) + 1},
    lambda model: {"pad_token_id": max(1, model.get("position.offset", 0) - 1)},
)
MARIAN = _family(
    ("marian", "Marian", "Marian"),
    Special(_read_tables, _write_tables),
    pre_norm=False,
    position=HALVES,
    classes={"lm": "MarianMTModel"},
    base=None,
    prefix="",
)
BART = _family(
    ("bart", "BART", "Bart"), pre_norm=False, position=LEARNED, heads={"lm": LM_HEAD, "sequence": CLASSIFIER}
)
MBART = _family(
    ("mbart", "mBART", "MBart"),
    pre_norm=True,
    position=LEARNED,
    head=_head(TIED, wrapped=True),
    heads={"lm": LM_HEAD, "sequence": CLASSIFIER},
)
PEGASUS = _family(
    ("pegasus", "PEGASUS", "Pegasus"),
    pre_norm=True,
    position=HALVES,
    fillers=lambda model: {**_zero_bias(model), **_sinusoids(model)},
)
BLENDERBOT = replace(
    MBART,
    heads={"lm": LM_HEAD},
    names=("blenderbot", "Blenderbot", "Blenderbot"),
    fixed={**MBART.fixed, "position.offset": 0, "embedding_norm": False},
    only={**MBART.only, "normalize_embedding": False},
    classes={"lm": "BlenderbotForConditionalGeneration"},
    defaults={"max_position_embeddings": 128, "decoder_attention_heads": 32, "decoder_ffn_dim": 10240},
)
M2M100 = _family(
    ("m2m_100", "M2M-100", "M2M100"),
    AFTER_PADDING,
    pre_norm=True,
    position={"kind": "sinusoidal", "layout": "tensor2tensor"},
    only=PRE_NORM_KEYS,  # it always has the other two, even if config.json contradicts
    defaults={"activation_function": "relu", "scale_embedding": True, "attention_dropout": 0.1},
    by_weights={},
    fillers=lambda model: {},
)


def _led_body() -> Rules:
    """Rules of BART with other names for the encoder's attention, and another prefix."""
    layer, attention = "model.encoder.layers.{layer}", "self_attn.longformer_self_attn"
    qkv, wide = (tuple(f"{attention}.{part}{end}" for part in QKV) for end in ("", "_global"))
    renamed = block("encoder", layer, qkv=qkv, global_qkv=wide, out="self_attn.output")
    names = {rule.ours for rule in renamed}
    rules = (*ONE_TABLE, *(rule for rule in STACKS if rule.ours not in names), *renamed)
    return tuple(
        replace(rule, theirs=tuple(name.replace("model.", "led.", 1) for name in rule.theirs)) for rule in rules
    )


def _read_led(settings: Settings, model: Flat) -> Flat:
    return {"encoder_pattern": positions.windows_around(settings, model["encoder_layers"])}


def _write_led(model: Flat) -> Tree:
    kinds = model["encoder_pattern"] or [{"window": 1}]
    sizes = [kinds[layer % len(kinds)]["window"] for layer in range(model["encoder_layers"])]
    return {"attention_window": [2 * ((size or 1) - 1) for size in sizes]}


LED_SIZES = tuple(row for row in SHARED if getattr(row, "ours", None) not in ("context", "embedding_scale"))
LED_CONTEXT = keys(
    context=("max_decoder_position_embeddings", 1024), source_context=("max_encoder_position_embeddings", 16384)
)
LED = replace(
    BART,
    names=("led", "LED", "LED"),
    rows=(*LED_SIZES, *LED_CONTEXT, LM, Special(_read_led, _write_led)),
    fixed={**BART.fixed, "position.offset": 0, "attention.global_tokens": 0},
    only={},
    body=_led_body(),
    heads={"lm": LM_HEAD},
    prefix="led.",
    copied=dict.fromkeys((f"led.{side}.embed_tokens.weight" for side in ("encoder", "decoder")), "led.shared.weight"),
    classes={"lm": "LEDForConditionalGeneration"},
    ids={"pad": 1},
)


def _t5_stack(side: str, feedforward: int) -> Rules:
    """Rules of one of T5's stacks; `feedforward` is the index of that sublayer."""
    layer, attention, dense = f"{side}.block.{{layer}}.layer", "0.SelfAttention", f"{feedforward}.DenseReluDense"
    bias = f"{attention}.relative_attention_bias.weight"
    return (
        tensor(f"{side}.position.weight", f"{side}.block.0.layer.{bias}"),
        tensor(f"{side}.blocks.{{layer}}.attention.relative_bias", f"{layer}.{bias}"),
        *block(side, layer, qkv=f"{attention}.*", out=f"{attention}.o", norm="0.layer_norm"),
        *block(side, layer, cross_q="1.EncDecAttention.q", cross_kv="1.EncDecAttention.*"),
        *block(side, layer, cross_out="1.EncDecAttention.o", cross_norm="1.layer_norm"),
        *block(side, layer, up=f"{dense}.wi", gate_up=(f"{dense}.wi_0", f"{dense}.wi_1"), down=f"{dense}.wo"),
        *block(side, layer, ff_norm=f"{feedforward}.layer_norm"),
        *module(f"{side}.norm", f"{side}.final_layer_norm"),
    )


def _read_feedforward(settings: Settings, model: Flat) -> Flat:
    projection = settings.get("feed_forward_proj", "relu")
    gate, _, name = (projection if isinstance(projection, str) else "").rpartition("-")
    if gate not in ("", "gated") or name not in ACTIVATIONS:
        raise settings.error("feed_forward_proj", f"weft has {', '.join(ACTIVATIONS)}, each also gated-…")
    # newer files also have the values that transformers derives from it, which take precedence
    default = "gelu_new" if projection == "gated-gelu" else name
    activation: Flat = {"feedforward.activation": settings.activation("dense_act_fn", default)}
    if settings.flag("is_gated_act", bool(gate)):
        return {"feedforward.kind": "gated", **activation}
    return {"feedforward.kind": "plain", **activation, "feedforward.bias": False}


def _write_feedforward(model: Flat) -> Tree:
    name, gated = THEIR_ACTIVATIONS[model["feedforward.activation"]], model["feedforward.kind"] == "gated"
    projection = "gated-gelu" if gated and name == "gelu_new" else f"gated-{name}" if gated else name
    return {"feed_forward_proj": projection, "dense_act_fn": name, "is_gated_act": gated}


def _read_scale(settings: Settings, model: Flat) -> Flat:
    """T5 scales its output and v1.1 does not; in older files, tie_word_embeddings distinguishes them."""
    scaled = settings.flag("scale_decoder_outputs", settings.flag("tie_word_embeddings", True))
    return {"head.scale": model["d_model"] ** -0.5 if scaled else None}


T5_SIZES = sizes("t5")


T5_BODY = (tensor("embedding.weight", "shared.weight"), *_t5_stack("encoder", 1), *_t5_stack("decoder", 2))
T5_PREFIXED = tuple(replace(rule, theirs=tuple(f"transformer.{name}" for name in rule.theirs)) for rule in T5_BODY)


def _t5(family_names: FamilyNames, *lm: Row, **fields: Any) -> Family:
    return Family(
        rows=(
            *T5_SIZES,
            Special(_read_feedforward, _write_feedforward),
            follows("attention.dropout", "dropout"),
            follows("feedforward.dropout", "dropout"),
            constant("is_encoder_decoder", True),
            _head(*lm),
        ),
        fixed={"attention.scale": 1.0, "norm.kind": "rms", "position.kind": "t5", "init.kind": "xavier"},
        names=family_names,
        model=EncoderDecoder,
        body=lambda model: T5_BODY if model.head.kind == "lm" else T5_PREFIXED,
        heads={"lm": (tensor("output.weight", "lm_head.weight"),), "sequence": CLASSIFIER},
        classes={"lm": f"{family_names[2]}ForConditionalGeneration"},
        base=None,
        prefix="",
        # not in config.json: tied, unless a different LM head is stored
        by_weights={"head.tied": lambda names: True},
        copied=dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"),
        # the first T5 files also have an unused bias for the cross-attention
        unused=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
        **fields,
    )


SCALE = Special(_read_scale, lambda model: {"tie_word_embeddings": model["head.scale"] is not None})
SCALED = Special(read=lambda settings, model: {"head.scale": model["d_model"] ** -0.5})
T5 = _t5(("t5", "T5", "T5"), SCALE)
MT5 = _t5(("mt5", "mT5", "MT5"), defaults={"feed_forward_proj": "gated-gelu"})
UMT5 = replace(
    _t5(("umt5", "UMT5", "UMT5"), SCALED, defaults={"feed_forward_proj": "gated-gelu"}),
    fixed={**T5.fixed, "position.kind": "layered-t5"},
)
FAMILIES = (MARIAN, BART, MBART, PEGASUS, M2M100, T5, MT5, UMT5, BLENDERBOT, LED)
