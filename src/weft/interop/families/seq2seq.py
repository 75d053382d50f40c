"""Encoder–decoders.

Marian (Junczys-Dowmunt et al. 2018) and BART (Lewis et al. 2020), and with their blocks in pre-norm mBART (Liu et al.
2020), M2M-100 and NLLB (Fan et al. 2021; Costa-jussà et al. 2022) and PEGASUS (Zhang et al. 2020); T5, T5 v1.1 (Raffel
et al. 2020; Shazeer 2020) and mT5 (Xue et al. 2021), which has the blocks of T5 v1.1.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from weft.config import Tree
from weft.interop.bundle import LazyWeights
from weft.interop.families.base import POST_NORM, Family
from weft.interop.settings import ACTIVATIONS, THEIR_ACTIVATIONS, Flat, Settings
from weft.interop.table import Row, Special, Table, activation, constant, flag, follows, number, same, whole
from weft.interop.weight_map import ONE_ROW, Rule, module, tensor
from weft.models.config import EncoderDecoder
from weft.nn.position import sinusoids

# ---- Marian and BART


def _layers(side: str) -> tuple[Rule, ...]:
    """Names in one of the two stacks."""
    block, layer = f"{side}.blocks.{{layer}}", f"model.{side}.layers.{{layer}}"
    return (
        *module(f"{block}.attention.qkv", *(f"{layer}.self_attn.{part}_proj" for part in "qkv")),
        *module(f"{block}.attention.out", f"{layer}.self_attn.out_proj"),
        *module(f"{block}.attention_skip.norm", f"{layer}.self_attn_layer_norm"),
        *module(f"{block}.cross.q", f"{layer}.encoder_attn.q_proj"),
        *module(f"{block}.cross.kv", *(f"{layer}.encoder_attn.{part}_proj" for part in "kv")),
        *module(f"{block}.cross.out", f"{layer}.encoder_attn.out_proj"),
        *module(f"{block}.cross_skip.norm", f"{layer}.encoder_attn_layer_norm"),
        *module(f"{block}.feedforward.up", f"{layer}.fc1"),
        *module(f"{block}.feedforward.down", f"{layer}.fc2"),
        *module(f"{block}.feedforward_skip.norm", f"{layer}.final_layer_norm"),
        tensor(f"{side}.position.weight", f"model.{side}.embed_positions.weight"),
        *module(f"{side}.embedding_norm", f"model.{side}.layernorm_embedding"),
        *module(f"{side}.norm", f"model.{side}.layer_norm"),
    )


STACKS = (
    *_layers("encoder"),
    *_layers("decoder"),
    tensor("output.weight", "lm_head.weight"),
    tensor("output.bias", "final_logits_bias", layout=ONE_ROW),
)
ONE_TABLE = (tensor("embedding.weight", "model.shared.weight"),)
TWO_TABLES = (
    tensor("embedding.weight", "model.decoder.embed_tokens.weight"),
    tensor("source_embedding.weight", "model.encoder.embed_tokens.weight"),
)


def _rules(model: EncoderDecoder) -> tuple[Rule, ...]:
    return (*(ONE_TABLE if model.source_vocab_size is None else TWO_TABLES), *STACKS)


def _copies(model: EncoderDecoder) -> Mapping[str, str]:
    if model.source_vocab_size is not None:
        return {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    names = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    return dict.fromkeys(names, "model.shared.weight")


def _no_bias(model: EncoderDecoder) -> LazyWeights:
    """transformers always adds a bias to the logits, and misses it in a file that has none."""
    return {} if model.head.bias else {"final_logits_bias": partial(torch.zeros, 1, model.vocab_size)}


def _waves(model: EncoderDecoder) -> LazyWeights:
    """transformers misses the sinusoids in a file that has none, though it computes them anew."""
    made = partial(sinusoids, torch.arange(model.context), model.d_model, "halves")
    return dict.fromkeys((f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")), made)


def _has(name: str) -> Callable[[Collection[str]], bool]:
    return lambda names: name in names


SHARED: tuple[Row, ...] = (
    whole("vocab_size", "vocab_size"),
    whole("context", "max_position_embeddings", 1024),
    whole("encoder_layers", "encoder_layers"),
    whole("layers", "decoder_layers"),
    whole("d_model", "d_model"),
    whole("attention.heads", "encoder_attention_heads"),
    same("decoder_attention_heads", "attention.heads"),
    number("attention.dropout", "attention_dropout", 0.0),
    whole("feedforward.d_ff", "encoder_ffn_dim"),
    same("decoder_ffn_dim", "feedforward.d_ff"),
    activation("feedforward.activation", "activation_function", "gelu"),
    number("feedforward.dropout", "activation_dropout", 0.0),
    flag("embedding_scale", "scale_embedding", False),
    number("dropout", "dropout", 0.1),
    constant("is_encoder_decoder", True),
    flag("head.tied", "tie_word_embeddings", True),
    number("init.std", "init_std", 0.02, written=False),
)
NORM_AFTER = {"normalize_before": False, "add_final_layer_norm": False}
NORM_BEFORE = {"normalize_before": True, "add_final_layer_norm": True}


def _read_tables(settings: Settings, model: Flat) -> Flat:
    """Marian's source and target may have embeddings of their own, and vocabularies of two sizes."""
    if settings.flag("share_encoder_decoder_embeddings", True):
        return {}
    source = model["vocab_size"]
    return {"source_vocab_size": source, "vocab_size": settings.whole("decoder_vocab_size", source)}


def _write_tables(model: Flat) -> Tree:
    source = model["source_vocab_size"]
    if source is None:
        return {"share_encoder_decoder_embeddings": True}
    sizes = {"vocab_size": source, "decoder_vocab_size": model["vocab_size"]}
    return {"share_encoder_decoder_embeddings": False, **sizes}


PRE_NORM = {**POST_NORM, "placement": "pre"}
BIASED = {"head.bias": _has("final_logits_bias")}
WAVES = (r"model\.(encoder|decoder)\.embed_positions\.weights?",)  # sinusoids, which weft computes


def _family(kind: str, title: str, name: str, settings: Table, **more: Any) -> Family:
    """A family with these stacks: the beginning of its classes' names, its settings, and what else it has."""
    architectures = {f"{name}ForConditionalGeneration": "lm", f"{name}Model": "lm"}
    common = {"prefix": "model.", "architectures": architectures, "by_weights": BIASED, "fillers": _no_bias}
    shared = {"kind": kind, "title": title, "model": EncoderDecoder, "rules": _rules, "copies": _copies}
    return Family(settings=settings, **{**shared, **common, **more})


def _table(norms: Mapping[str, bool], position: Mapping[str, Any], normalize: bool, **more: Any) -> Table:
    """The settings of such a family: where its norms are, its positions, and whether it norms embeddings."""
    blocks = POST_NORM if norms is NORM_AFTER else PRE_NORM
    placed = {f"position.{key}": value for key, value in position.items()}
    static = {"static_position_embeddings": True} if position["kind"] == "sinusoidal" else {}
    only = {**norms, **static, "normalize_embedding": normalize}
    fixed = {**blocks, **placed, "embedding_norm": normalize}
    return Table(rows=(*SHARED, *more.pop("rows", ())), fixed=fixed, **{"only": only, **more})


LEARNED = {"kind": "learned", "offset": 2}
HALVES = {"kind": "sinusoidal", "layout": "halves", "amplitude": 1.0}
# positions are counted from the one after the pad token's id
COUNTED = Special(
    lambda settings, model: {"position.offset": settings.whole("pad_token_id", 1) + 1},
    lambda model: {"pad_token_id": max(1, model.get("position.offset", 0) - 1)},
)
MARIAN = _family(
    "marian",
    "Marian",
    "Marian",
    _table(NORM_AFTER, HALVES, False, rows=(Special(_read_tables, _write_tables),)),
    architectures={"MarianMTModel": "lm"},
    prefix="",
    unused=WAVES,
)
BART = _family("bart", "BART", "Bart", _table(NORM_AFTER, LEARNED, True))
MBART = _family("mbart", "mBART", "MBart", _table(NORM_BEFORE, LEARNED, True))
PEGASUS = _family(
    "pegasus",
    "PEGASUS",
    "Pegasus",
    _table(NORM_BEFORE, HALVES, False),
    unused=WAVES,
    fillers=lambda model: {**_no_bias(model), **_waves(model)},
)
M2M100 = _family(
    "m2m_100",
    "M2M-100",
    "M2M100",
    _table(
        NORM_BEFORE,
        {"kind": "sinusoidal", "layout": "tensor2tensor"},
        False,
        rows=(COUNTED,),
        only=NORM_BEFORE,  # the other two it has always, whatever its config.json says
        defaults={"activation_function": "relu", "scale_embedding": True, "attention_dropout": 0.1},
    ),
    by_weights={},
    unused=WAVES,
    fillers=lambda model: {},
)


# ---- T5


def _t5_layers(side: str, feedforward: int) -> tuple[Rule, ...]:
    """Names in one of the two stacks, whose feed-forward is the sublayer of that number."""
    block, layer = f"{side}.blocks.{{layer}}", f"{side}.block.{{layer}}.layer"
    dense = f"{layer}.{feedforward}.DenseReluDense"
    return (
        tensor(f"{side}.position.weight", f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        *module(f"{block}.attention.qkv", *(f"{layer}.0.SelfAttention.{part}" for part in "qkv")),
        *module(f"{block}.attention.out", f"{layer}.0.SelfAttention.o"),
        *module(f"{block}.attention_skip.norm", f"{layer}.0.layer_norm"),
        *module(f"{block}.cross.q", f"{layer}.1.EncDecAttention.q"),
        *module(f"{block}.cross.kv", *(f"{layer}.1.EncDecAttention.{part}" for part in "kv")),
        *module(f"{block}.cross.out", f"{layer}.1.EncDecAttention.o"),
        *module(f"{block}.cross_skip.norm", f"{layer}.1.layer_norm"),
        *module(f"{block}.feedforward.up", f"{dense}.wi"),
        *module(f"{block}.feedforward.gate_up", f"{dense}.wi_0", f"{dense}.wi_1"),
        *module(f"{block}.feedforward.down", f"{dense}.wo"),
        *module(f"{block}.feedforward_skip.norm", f"{layer}.{feedforward}.layer_norm"),
        *module(f"{side}.norm", f"{side}.final_layer_norm"),
    )


T5_RULES = (
    tensor("embedding.weight", "shared.weight"),
    *_t5_layers("encoder", 1),
    *_t5_layers("decoder", 2),
    tensor("output.weight", "lm_head.weight"),
)


def _read_feedforward(settings: Settings, model: Flat) -> Flat:
    given = settings.get("feed_forward_proj", "relu")
    gate, _, name = (given if isinstance(given, str) else "").rpartition("-")
    if gate not in ("", "gated") or name not in ACTIVATIONS:
        raise settings.refusal("feed_forward_proj", f"weft has {', '.join(ACTIVATIONS)}, each also gated-…")
    if not gate:
        return {"feedforward.kind": "plain", "feedforward.activation": ACTIVATIONS[name], "feedforward.bias": False}
    return {"feedforward.kind": "gated", "feedforward.activation": "gelu-tanh" if name == "gelu" else ACTIVATIONS[name]}


def _write_feedforward(model: Flat) -> Tree:
    name = THEIR_ACTIVATIONS[model["feedforward.activation"]]
    if model["feedforward.kind"] == "gated":
        name = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
    return {"feed_forward_proj": name}


def _read_scale(settings: Settings, model: Flat) -> Flat:
    """T5 scales its output and v1.1 does not; older files tell them apart by tie_word_embeddings."""
    scaled = settings.flag("scale_decoder_outputs", settings.flag("tie_word_embeddings", True))
    return {"head.scale": model["d_model"] ** -0.5 if scaled else None}


T5_ROWS: tuple[Row, ...] = (
    whole("vocab_size", "vocab_size"),
    whole("context", "n_positions", 512),
    whole("encoder_layers", "num_layers"),
    whole("layers", "num_decoder_layers", lambda model: model["encoder_layers"]),
    whole("d_model", "d_model"),
    whole("attention.heads", "num_heads"),
    whole("attention.d_head", "d_kv", 64),
    whole("feedforward.d_ff", "d_ff"),
    Special(_read_feedforward, _write_feedforward),
    number("norm.eps", "layer_norm_epsilon", 1e-6),
    number("dropout", "dropout_rate", 0.1),
    follows("attention.dropout", "dropout"),
    follows("feedforward.dropout", "dropout"),
    constant("is_encoder_decoder", True),
    whole("position.buckets", "relative_attention_num_buckets", 32),
    whole("position.max_distance", "relative_attention_max_distance", 128),
)
SCALE = Special(_read_scale, lambda model: {"tie_word_embeddings": model["head.scale"] is not None})
T5_FIXED = {"attention.scale": 1.0, "norm.kind": "rms", "position.kind": "t5", "init.kind": "xavier"}


def _t5(kind: str, title: str, name: str, settings: Table) -> Family:
    return Family(
        kind=kind,
        title=title,
        model=EncoderDecoder,
        architectures={f"{name}ForConditionalGeneration": "lm"},
        settings=settings,
        rules=lambda model: T5_RULES,
        # not in config.json: tied, unless an output table is stored that differs from the embeddings
        by_weights={"head.tied": lambda names: True},
        copies=lambda model: dict.fromkeys(
            ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
        ),
        # the first T5 files hold a table for the cross-attention as well, which nothing reads
        unused=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )


T5 = _t5("t5", "T5", "T5", Table((*T5_ROWS, SCALE), T5_FIXED))
MT5 = _t5("mt5", "mT5", "MT5", Table(T5_ROWS, T5_FIXED, defaults={"feed_forward_proj": "gated-gelu"}))
