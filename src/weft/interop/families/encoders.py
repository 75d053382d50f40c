"""Encoders with parts of later decoders, encoders of long texts, and encoders of proteins.

EuroBERT (Boizard et al. 2025) is LLaMA's stack read in both directions; NomicBERT (Nussbaum et al. 2024) is BERT with
rotary positions and a gated feed-forward layer; Longformer (Beltagy et al. 2020) is RoBERTa with windows, and with
global tokens in some heads. ESM-1b and ESM-2 (Rives et al. 2021; Lin et al. 2023) read amino acids,
with learned or rotary positions in pre-norm blocks; they scale embeddings by the fraction of tokens that are masked.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weft.config import Tree
from weft.interop.families import bert, positions
from weft.interop.families.base import GATED, POST_NORM, TABLES, count_labels, encoder_head, in_stack, write_labels
from weft.interop.families.bert import (
    BERT_DROPOUTS,
    BODY,
    QKV,
    ROBERTA,
    ROBERTA_HEADS,
    body,
    embeddings,
    family,
    usual_heads,
)
from weft.interop.families.llama import ACTIVATION, ATTENTION_BIAS, EPS, FEEDFORWARD_BIAS, NAMES, SIZES, WIDTH
from weft.interop.settings import Flat, Settings, layer_pattern
from weft.interop.table import Special
from weft.interop.weight_map import block, module
from weft.models.config import Encoder
from weft.nn.position_config import Rotary
from weft.storage.tensors import LazyWeights

# our pooling, and whether it is after the dense layer
POOLING = {"bos": ("first", False), "mean": ("mean", False), "late": ("mean", True)}


def _read_head(settings: Settings, model: Flat) -> Flat:
    kind = model["head.kind"]
    if kind == "embedding":
        return {}
    if kind == "mlm":
        tied, bias = settings.flag("tie_word_embeddings", False), settings.flag("mlp_bias", False)
        return {"head.tied": tied, "head.dense": False, "head.bias": bias}
    head = {"head.labels": count_labels(settings), "head.dropout": 0.0}
    if kind == "token":
        return head
    pooling = settings.get("classifier_pooling", "late")
    if pooling not in tuple(POOLING):
        raise settings.error("classifier_pooling", f"weft has {', '.join(POOLING)}")
    ours, late = POOLING[pooling]
    return {**head, "head.activation": "gelu", "head.pooling": ours, "head.pooled_late": late}


def _write_head(model: Flat) -> Tree:
    pooling = model.get("head.pooling"), model.get("head.pooled_late")
    theirs = next((name for name, ours in POOLING.items() if ours == pooling), "late")
    return {"tie_word_embeddings": model.get("head.tied", False), "classifier_pooling": theirs, **write_labels(model)}


ROTARY = positions.rotary()
EUROBERT = family(
    ("eurobert", "EuroBERT", "EuroBert"),
    (*SIZES, WIDTH, EPS, ROTARY, ACTIVATION, ATTENTION_BIAS, FEEDFORWARD_BIAS, Special(_read_head, _write_head)),
    fixed=GATED,
    defaults={"max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
    body=in_stack("encoder", NAMES),
    heads={
        "mlm": module("output", "lm_head"),
        "sequence": (*module("output.pooler.dense", "dense"), *module("output.out", "classifier")),
        "token": module("output.out", "classifier"),
        "embedding": (),
    },
    root="model",
)

NOMIC_MLM = tuple(f"cls.predictions.{part}" for part in ("transform.dense", "transform.layer_norm", "decoder", "bias"))
NOMIC_HEADS = usual_heads(NOMIC_MLM, "nomic_bert.pooler.dense")
NOMIC_BERT = family(
    ("nomic_bert", "NomicBERT", "NomicBert"),
    (*BODY, WIDTH, positions.rotary(1000.0), encoder_head("tanh", BERT_DROPOUTS)),
    fixed={**POST_NORM, **GATED, "norm.kind": "layer", "attention.bias": "none", "embedding_norm": True},
    defaults={"vocab_size": 30528, "max_position_embeddings": 2048, "hidden_act": "silu"}
    | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    only={**TABLES["only"]["nomic_bert"], "rotary_emb_scale_base": None, "rotary_scaling_factor": None},
    older=TABLES["older"]["nomic_bert"],
    body=(
        *(rule for rule in embeddings("nomic_bert.embeddings") if "norm" not in rule.ours),
        *module("encoder.embedding_norm", "nomic_bert.emb_ln"),
        *block("encoder", "nomic_bert.encoder.layers.{layer}", **TABLES["modules"]["nomic_bert"]),
    ),
    heads={kind: rules for kind, rules in NOMIC_HEADS.items() if kind != "span"},
    unused=(r"cls\.predictions\..*",),
    ids={"pad": 0},
)


def _read_esm(settings: Settings, model: Flat) -> Flat:
    kind = settings.tree.get("position_embedding_type", "absolute")  # null means no positions
    if kind not in ("absolute", "rotary"):
        raise settings.error("position_embedding_type", "weft has absolute and rotary")
    dropped = settings.integer("mask_token_id") if settings.flag("token_dropout", False) else None
    offset = settings.integer("pad_token_id") + 1
    if kind == "rotary":
        position: Flat = {"position.kind": "rotary", "position.base": settings.positive("rope_theta", 10000.0)}
    else:
        position = {"position.kind": "learned", "position.offset": offset, "context": model["context"] - offset}
    return {**position, "dropped_token": dropped, "embedding_norm": settings.flag("emb_layer_norm_before", False)}


def _write_esm(model: Flat) -> Tree:
    learned, dropped = model["position.kind"] == "learned", model.get("dropped_token")
    offset = max(2, model["position.offset"]) if learned else 2
    return {
        "position_embedding_type": "absolute" if learned else "rotary",
        "rope_theta": model.get("position.base", 10000.0),
        "max_position_embeddings": model["context"] + (offset if learned else 0),
        "pad_token_id": offset - 1,
        "token_dropout": dropped is not None,
        "mask_token_id": dropped,
        "emb_layer_norm_before": model["embedding_norm"],
    }


def _esm_fillers(model: Encoder) -> LazyWeights:
    """Tensors that transformers warns about if they are missing: a head for contacts, the pooler, and frequencies."""
    tensors: dict[str, Any] = {
        "esm.contact_head.regression.weight": partial(torch.zeros, 1, model.layers * model.attention.heads),
        "esm.contact_head.regression.bias": partial(torch.zeros, 1),
    }
    if isinstance(model.position, Rotary):
        powers = torch.arange(0, model.d_head, 2) / model.d_head
        tensors["esm.rotary_embeddings.inv_freq"] = partial(torch.reciprocal, model.position.base**powers)
    return {**tensors, **bert.unused_pooler("esm.pooler.dense", model)}


ESM_DROPOUTS = dict.fromkeys(("sequence", "token"), ("hidden_dropout_prob",))
ESM_HEADS = {kind: rules for kind, rules in ROBERTA_HEADS.items() if kind != "span"}
ESM_ROWS = tuple(row for row in BODY if row.ours not in ("segments", "feedforward.activation"))
ESM = replace(
    family(
        ("esm", "ESM", "Esm"),
        (*ESM_ROWS, Special(_read_esm, _write_esm), encoder_head("tanh", ESM_DROPOUTS, mlm="gelu")),
        fixed={**POST_NORM, "placement": "pre", "feedforward.activation": "gelu", "segments": 0},
        only={"is_decoder": False, "add_cross_attention": False, "is_folding_model": False},
        defaults={"max_position_embeddings": 1026},
        body=(
            *embeddings("esm.embeddings")[:2],
            *module("encoder.embedding_norm", "esm.embeddings.layer_norm"),
            *block("encoder", "esm.encoder.layer.{layer}", **TABLES["modules"]["esm"]),
            *module("encoder.norm", "esm.encoder.emb_layer_norm_after"),
        ),
        heads=ESM_HEADS,
        renames=bert.GAMMA_AND_BETA,
        unused=(
            r"lm_head\..*",
            r"esm\.(contact_head|.*rotary_embeddings)\..*",
            r"esm\.embeddings\.position_embeddings\..*",
        ),
    ),
    fillers=_esm_fillers,
)


def _read_windows(settings: Settings, model: Flat) -> Flat:
    """Labels of a text make the first token global, and answers all tokens of the question."""
    windows = layer_pattern(positions.windows_around(settings, model["layers"]))
    kind, until = model["head.kind"], settings.get("sep_token_id", 2) if model["head.kind"] == "span" else None
    if until is not None and (not isinstance(until, int) or isinstance(until, bool) or until < 0):
        raise settings.error("sep_token_id", "expected the id of a token")
    return {**windows, "attention.global_tokens": int(kind == "sequence"), "attention.global_until": until}


def _write_windows(model: Flat) -> Tree:
    sizes = [2 * ((size or 1) - 1) for size in positions.windows_of(model)]
    until = model.get("attention.global_until")
    return {"attention_window": sizes, **({} if until is None else {"sep_token_id": until})}


LONGFORMER_DROPOUTS = dict.fromkeys(("sequence", "token"), ("hidden_dropout_prob",))
LONGFORMER = replace(
    ROBERTA,
    names=("longformer", "Longformer", "Longformer"),
    rows=(
        *BODY,
        bert.OFFSET,
        Special(_read_windows, _write_windows),
        encoder_head("tanh", LONGFORMER_DROPOUTS, mlm="gelu"),
    ),
    prefix="longformer.",
    body=(
        *body("longformer"),
        *block(
            "encoder",
            "longformer.encoder.layer.{layer}",
            global_qkv=tuple(f"attention.self.{part}_global" for part in QKV),
        ),
    ),
    heads=ROBERTA_HEADS,
    only=TABLES["only"]["longformer"],
    unused=(r"longformer\.embeddings\.(position_ids|token_type_ids)", r"longformer\.pooler\..*", r"lm_head\..*"),
    fillers=partial(bert.unused_pooler, "longformer.pooler.dense"),
)


FAMILIES = (EUROBERT, NOMIC_BERT, ESM, LONGFORMER)
