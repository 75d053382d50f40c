"""Encoder–decoders.

Marian (Junczys-Dowmunt et al. 2018) and BART (Lewis et al. 2020), and with their blocks in pre-norm mBART (Liu et al.
2020), M2M-100 and NLLB (Fan et al. 2021; Costa-jussà et al. 2022) and PEGASUS (Zhang et al. 2020); T5, T5 v1.1 (Raffel
et al. 2020; Shazeer 2020) and mT5 (Xue et al. 2021), which has the blocks of T5 v1.1.
"""

from functools import partial
from typing import Any

import torch

from weft.config import Tree
from weft.interop.families.base import POST_NORM, Called, Family
from weft.interop.settings import ACTIVATIONS, THEIR_ACTIVATIONS, Flat, Settings
from weft.interop.table import Row, Special, constant, follows, keys, same
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
WORDS = (tensor("output.weight", "lm_head.weight"), tensor("output.bias", "final_logits_bias", layout=ONE_ROW))


def _no_bias(model: EncoderDecoder) -> LazyWeights:
    """transformers always adds a bias to the logits, and misses it in a file that has none."""
    return {} if model.head.bias else {"final_logits_bias": partial(torch.zeros, 1, model.vocab_size)}


def _waves(model: EncoderDecoder) -> LazyWeights:
    """transformers misses the sinusoids in a file that has none, though it computes them anew."""
    made = partial(sinusoids, torch.arange(model.context), model.d_model, "halves")
    return dict.fromkeys((f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")), made)


SIZES = keys(
    vocab_size="vocab_size", context=("max_position_embeddings", 1024), encoder_layers="encoder_layers",
    layers="decoder_layers", d_model="d_model", heads="encoder_attention_heads", d_ff="encoder_ffn_dim",
    activation=("activation_function", "gelu"), attention_dropout=("attention_dropout", 0.0),
    feedforward_dropout=("activation_dropout", 0.0), dropout=("dropout", 0.1),
    embedding_scale=("scale_embedding", False), tied=("tie_word_embeddings", True), std=("init_std", 0.02),
)  # fmt: skip
SHARED: tuple[Row, ...] = (
    *SIZES,
    same("decoder_attention_heads", "attention.heads", 16),
    same("decoder_ffn_dim", "feedforward.d_ff", 4096),
    constant("is_encoder_decoder", True),
)
NORM_AFTER = {"normalize_before": False, "add_final_layer_norm": False}
NORM_BEFORE = {"normalize_before": True, "add_final_layer_norm": True}
WAVES = (r"model\.(encoder|decoder)\.embed_positions\.weights?",)  # sinusoids, which weft computes


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
    return {"share_encoder_decoder_embeddings": False, "vocab_size": source, "decoder_vocab_size": model["vocab_size"]}


def _family(called: Called, *rows: Row, before: bool, position: Tree, **more: Any) -> Family:
    """A family with these stacks: whether its norms come before the sublayers, and its positions; embeddings are normed
    where these are learned."""
    learned = position["kind"] == "learned"
    placed = {f"position.{key}": value for key, value in position.items()}
    static = {} if learned else {"static_position_embeddings": True}
    shared = {
        "classes": {"lm": f"{called[2]}ForConditionalGeneration"},
        "only": {**(NORM_BEFORE if before else NORM_AFTER), **static, "normalize_embedding": learned},
        "by_weights": {"head.bias": lambda names: "final_logits_bias" in names},
        "fillers": _no_bias,
    }
    return Family(
        rows=(*SHARED, *rows),
        fixed={**POST_NORM, "placement": "pre" if before else "post", **placed, "embedding_norm": learned},
        called=called,
        model=EncoderDecoder,
        body=lambda model: (*(ONE_TABLE if model.source_vocab_size is None else TWO_TABLES), *STACKS),
        heads={"lm": WORDS},
        copied=dict.fromkeys((f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")), TABLE),
        unused=() if learned else WAVES,
        **{**shared, **more},
    )


LEARNED: Tree = {"kind": "learned", "offset": 2}
HALVES: Tree = {"kind": "sinusoidal", "layout": "halves", "amplitude": 1.0}
# positions are counted from the one after the pad token's id
COUNTED = Special(
    lambda settings, model: {"position.offset": settings.whole("pad_token_id", 1) + 1},
    lambda model: {"pad_token_id": max(1, model.get("position.offset", 0) - 1)},
)
MARIAN = _family(
    ("marian", "Marian", "Marian"),
    Special(_read_tables, _write_tables),
    before=False,
    position=HALVES,
    classes={"lm": "MarianMTModel"},
    base=None,
    prefix="",
)
BART = _family(("bart", "BART", "Bart"), before=False, position=LEARNED)
MBART = _family(("mbart", "mBART", "MBart"), before=True, position=LEARNED)
PEGASUS = _family(
    ("pegasus", "PEGASUS", "Pegasus"),
    before=True,
    position=HALVES,
    fillers=lambda model: {**_no_bias(model), **_waves(model)},
)
M2M100 = _family(
    ("m2m_100", "M2M-100", "M2M100"),
    COUNTED,
    before=True,
    position={"kind": "sinusoidal", "layout": "tensor2tensor"},
    only=NORM_BEFORE,  # the other two it has always, whatever its config.json says
    defaults={"activation_function": "relu", "scale_embedding": True, "attention_dropout": 0.1},
    by_weights={},
    fillers=lambda model: {},
)


def _t5_stack(side: str, feedforward: int) -> Rules:
    """Names in one of the two stacks, whose feed-forward is the sublayer of that number."""
    layer, own, dense = f"{side}.block.{{layer}}.layer", "0.SelfAttention", f"{feedforward}.DenseReluDense"
    return (
        tensor(f"{side}.position.weight", f"{side}.block.0.layer.{own}.relative_attention_bias.weight"),
        *block(side, layer, qkv=f"{own}.*", out=f"{own}.o", norm="0.layer_norm"),
        *block(side, layer, cross_q="1.EncDecAttention.q", cross_kv="1.EncDecAttention.*"),
        *block(side, layer, cross_out="1.EncDecAttention.o", cross_norm="1.layer_norm"),
        *block(side, layer, up=f"{dense}.wi", gate_up=(f"{dense}.wi_0", f"{dense}.wi_1"), down=f"{dense}.wo"),
        *block(side, layer, ff_norm=f"{feedforward}.layer_norm"),
        *module(f"{side}.norm", f"{side}.final_layer_norm"),
    )


def _read_feedforward(settings: Settings, model: Flat) -> Flat:
    given = settings.get("feed_forward_proj", "relu")
    gate, _, name = (given if isinstance(given, str) else "").rpartition("-")
    if gate not in ("", "gated") or name not in ACTIVATIONS:
        raise settings.error("feed_forward_proj", f"weft has {', '.join(ACTIVATIONS)}, each also gated-…")
    # what transformers makes of that word stands beside it in newer files, and counts
    usual = "gelu_new" if given == "gated-gelu" else name
    found: Flat = {"feedforward.activation": settings.activation("dense_act_fn", usual)}
    if settings.flag("is_gated_act", bool(gate)):
        return {"feedforward.kind": "gated", **found}
    return {"feedforward.kind": "plain", **found, "feedforward.bias": False}


def _write_feedforward(model: Flat) -> Tree:
    name, gated = THEIR_ACTIVATIONS[model["feedforward.activation"]], model["feedforward.kind"] == "gated"
    word = "gated-gelu" if gated and name == "gelu_new" else f"gated-{name}" if gated else name
    return {"feed_forward_proj": word, "dense_act_fn": name, "is_gated_act": gated}


def _read_scale(settings: Settings, model: Flat) -> Flat:
    """T5 scales its output and v1.1 does not; older files tell them apart by tie_word_embeddings."""
    scaled = settings.flag("scale_decoder_outputs", settings.flag("tie_word_embeddings", True))
    return {"head.scale": model["d_model"] ** -0.5 if scaled else None}


T5_SIZES = keys(
    vocab_size="vocab_size", context=("n_positions", 512), encoder_layers="num_layers",
    layers=("num_decoder_layers", lambda model: model["encoder_layers"]), d_model="d_model", heads="num_heads",
    d_head=("d_kv", 64), d_ff="d_ff", eps=("layer_norm_epsilon", 1e-6), dropout=("dropout_rate", 0.1),
    buckets=("relative_attention_num_buckets", 32), max_distance=("relative_attention_max_distance", 128),
)  # fmt: skip


def _t5(called: Called, *rows: Row, **table: Any) -> Family:
    return Family(
        rows=(
            *T5_SIZES,
            Special(_read_feedforward, _write_feedforward),
            follows("attention.dropout", "dropout"),
            follows("feedforward.dropout", "dropout"),
            constant("is_encoder_decoder", True),
            *rows,
        ),
        fixed={"attention.scale": 1.0, "norm.kind": "rms", "position.kind": "t5", "init.kind": "xavier"},
        called=called,
        model=EncoderDecoder,
        body=(tensor("embedding.weight", "shared.weight"), *_t5_stack("encoder", 1), *_t5_stack("decoder", 2)),
        heads={"lm": (tensor("output.weight", "lm_head.weight"),)},
        classes={"lm": f"{called[2]}ForConditionalGeneration"},
        base=None,
        prefix="",
        # not in config.json: tied, unless an output table is stored that differs from the embeddings
        by_weights={"head.tied": lambda names: True},
        copied=dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"),
        # the first T5 files hold a table for the cross-attention as well, which nothing reads
        unused=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
        **table,
    )


SCALE = Special(_read_scale, lambda model: {"tie_word_embeddings": model["head.scale"] is not None})
T5 = _t5(("t5", "T5", "T5"), SCALE)
MT5 = _t5(("mt5", "mT5", "MT5"), defaults={"feed_forward_proj": "gated-gelu"})
FAMILIES = (MARIAN, BART, MBART, PEGASUS, M2M100, T5, MT5)
