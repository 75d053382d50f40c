"""ALBERT (Lan et al. 2020): a BERT whose layers share their weights, with embeddings narrower than its layers."""

from weft.interop.families.bert import (
    BLOCK,
    BODY,
    FIXED,
    NO_DECODER,
    OTHERS,
    Heads,
    family,
    head,
    pooled,
    words_head,
)
from weft.interop.settings import Flat, Settings
from weft.interop.table import Special, Table, constant, whole
from weft.interop.weight_map import module, tensor

_GROUP = "albert.encoder.albert_layer_groups.{layer}.albert_layers.0"
NAMES = (
    tensor("embedding.weight", "albert.embeddings.word_embeddings.weight"),
    tensor("encoder.position.weight", "albert.embeddings.position_embeddings.weight"),
    tensor("segments.weight", "albert.embeddings.token_type_embeddings.weight"),
    *module("encoder.embedding_norm", "albert.embeddings.LayerNorm"),
    *module("encoder.projection", "albert.encoder.embedding_hidden_mapping_in"),
    *module(f"{BLOCK}.attention.qkv", *(f"{_GROUP}.attention.{part}" for part in ("query", "key", "value"))),
    *module(f"{BLOCK}.attention.out", f"{_GROUP}.attention.dense"),
    *module(f"{BLOCK}.attention_skip.norm", f"{_GROUP}.attention.LayerNorm"),
    *module(f"{BLOCK}.feedforward.up", f"{_GROUP}.ffn"),
    *module(f"{BLOCK}.feedforward.down", f"{_GROUP}.ffn_output"),
    *module(f"{BLOCK}.feedforward_skip.norm", f"{_GROUP}.full_layer_layer_norm"),
)
_WORDS = tuple(f"predictions.{part}" for part in ("dense", "LayerNorm", "decoder", "bias"))
HEADS: Heads = {
    # it learns the order of two sentences where BERT learns whether one follows the other
    "mlm+nsp": (
        *words_head("output.words", *_WORDS),
        *pooled("output.next_sentence", "albert.pooler", "sop_classifier.classifier"),
    ),
    "mlm": words_head("output", *_WORDS),
    "sequence": pooled("output", "albert.pooler", "classifier"),
    **OTHERS,
}


def _read_groups(settings: Settings, model: Flat) -> Flat:
    groups = settings.whole("num_hidden_groups", 1)
    if model["layers"] % groups:
        raise settings.refusal("num_hidden_groups", f"it does not divide num_hidden_layers = {model['layers']}")
    return {"distinct_layers": groups}


def _dropout(settings: Settings, kind: str) -> float:
    return 0.0 if kind == "span" else settings.number("classifier_dropout_prob", 0.1)


ALBERT = family(
    "albert",
    "ALBERT",
    Table(
        rows=(
            *BODY,
            whole("d_embedding", "embedding_size", 128),
            Special(_read_groups, lambda model: {"num_hidden_groups": model["distinct_layers"] or model["layers"]}),
            constant("inner_group_num", 1),
            head("tanh", _dropout),
        ),
        fixed=FIXED,
        only={**NO_DECODER, "inner_group_num": 1},
        defaults={
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "intermediate_size": 16384,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    NAMES,
    HEADS,
    name="Albert",
    pooler="albert.pooler",
    unused=(r"(predictions|sop_classifier)\..*",),
)
