"""BERT and its relatives: an encoder with learned positions, post-norm, and one of several heads.

BERT (Devlin et al. 2019) and the many sentence encoders that are BERT without a head (MiniLM, E5, BGE); RoBERTa (Liu et
al. 2019), with positions from 2, and for other languages XLM-RoBERTa (Conneau et al. 2020) and CamemBERT (Martin et al.
2020); DistilBERT (Sanh et al. 2019), without segments; ELECTRA (Clark et al. 2020), a discriminator that detects
replaced tokens and the generator that replaces them, whose embeddings may be narrower than their layers; ALBERT (Lan et
al. 2020), whose layers share weights; MPNet (Song et al. 2020), the base of many sentence encoders, a RoBERTa with T5's
relative position bias.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weft.interop.families.base import (
    POST_NORM,
    TABLES,
    Family,
    FamilyNames,
    Heads,
    encoder_head,
    mlm_head,
    pooled_head,
    sizes,
)
from weft.interop.settings import Flat, Settings
from weft.interop.table import Key, Row, Special, constant, embedding_width, without
from weft.interop.weight_map import Rules, block, module, tensor
from weft.models.config import Encoder
from weft.storage.tensors import LazyWeights

QKV = ("query", "key", "value")


def embeddings(base: str) -> Rules:
    """Rules of BERT's embeddings."""
    names = {"embedding": "word", "encoder.position": "position", "segments": "token_type"}
    tables = (tensor(f"{ours}.weight", f"{base}.{theirs}_embeddings.weight") for ours, theirs in names.items())
    return (*tables, *module("encoder.embedding_norm", f"{base}.LayerNorm"))


def layers(layer: str, qkv: tuple[str, ...] | str, out: str = "attention.output.dense", **changes: str) -> Rules:
    """Rules of BERT's layers; `qkv`, `out` and `changes` are names that differ between its relatives."""
    names = {"norm": "attention.output.LayerNorm", "ff_norm": "output.LayerNorm"}
    names |= {"up": "intermediate.dense", "down": "output.dense", **changes}
    return block("encoder", layer, qkv=qkv, out=out, **names)


def body(base: str) -> Rules:
    """Rules of BERT's and RoBERTa's weights below the head."""
    qkv = tuple(f"attention.self.{part}" for part in QKV)
    return (*embeddings(f"{base}.embeddings"), *layers(f"{base}.encoder.layer.{{layer}}", qkv))


def usual_heads(mlm: tuple[str, ...], pooler: str, out: str = "classifier") -> Heads:
    """Rules of the heads that all relatives have: masked words, labels of a text or its tokens, answers, and none."""
    return {
        "mlm": mlm_head("output", mlm),
        "sequence": pooled_head("output", pooler, out),
        "token": module("output.out", "classifier"),
        "span": module("output.out", "qa_outputs"),
        "embedding": (),
    }


BERT_MLM = tuple(f"cls.predictions.{part}" for part in ("transform.dense", "transform.LayerNorm", "decoder", "bias"))
ROBERTA_MLM = tuple(f"lm_head.{part}" for part in ("dense", "layer_norm", "decoder", "bias"))
ROBERTA_HEADS = usual_heads(ROBERTA_MLM, "classifier.dense", "classifier.out_proj")
BERT_LM, ROBERTA_LM = ({"lm": mlm_head("output", names, ".transform")} for names in (BERT_MLM, ROBERTA_MLM))
_NEXT_SENTENCE = ("bert.pooler.dense", "cls.seq_relationship")


def unused_pooler(pooler: str, model: Encoder) -> LazyWeights:
    """Zeros for the pooler of a headless BERT; transformers warns if it is missing, although nothing uses it here."""
    size = model.d_model
    shapes = {f"{pooler}.weight": (size, size), f"{pooler}.bias": (size,)} if model.head.kind == "embedding" else {}
    return {name: partial(torch.zeros, shape) for name, shape in shapes.items()}


BERT_DROPOUTS = dict.fromkeys(("sequence", "token"), ("classifier_dropout", "hidden_dropout_prob"))
BODY = sizes("bert")
FIXED = {**POST_NORM, "position.kind": "learned", "embedding_norm": True}
NO_CROSS = {"add_cross_attention": False, "position_embedding_type": "absolute"}
NO_DECODER = {"is_decoder": False, **NO_CROSS}
GAMMA_AND_BETA = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def family(
    family_names: FamilyNames,
    rows: tuple[Row, ...],
    heads: Heads,
    *,
    root: str = "",
    pooler: str | None = None,
    unused: tuple[str, ...] = (),
    **fields: Any,
) -> Family:
    """Define a relative of BERT. `root` begins the names of its weights (default: its kind), `pooler` names the pooler
    of a headless model; `fields` are other fields of `Family`."""
    root = root or family_names[0]
    mlm = {rule.ours: rule.theirs[0] for rule in heads["mlm"]}
    bias, second = mlm["output.bias"], f"{mlm['output.weight'].removesuffix('weight')}bias"
    return Family(
        rows=rows,
        names=family_names,
        model=Encoder,
        heads=heads,
        base="embedding",
        prefix=f"{root}.",
        copied={second: bias} if second != bias else {},  # the bias is stored twice
        unused=(rf"{root}\.embeddings\.(position_ids|token_type_ids)", rf"{root}\.pooler\..*", *unused),
        fillers=partial(unused_pooler, pooler) if pooler is not None else lambda model: {},
        **{"fixed": FIXED, "only": NO_DECODER, **fields},
    )


BERT = family(
    ("bert", "BERT", "Bert"),
    (*BODY, encoder_head("tanh", BERT_DROPOUTS)),
    body=body("bert"),
    heads={
        "mlm+nsp": (*mlm_head("output.words", BERT_MLM), *pooled_head("output.next_sentence", *_NEXT_SENTENCE)),
        "nsp": pooled_head("output", *_NEXT_SENTENCE),
        **BERT_LM,
        **usual_heads(BERT_MLM, "bert.pooler.dense"),
    },
    classes={"lm": "BertLMHeadModel"},
    only=NO_CROSS,
    pooler="bert.pooler.dense",
    unused=(r"cls\.(seq_relationship|predictions)\..*",),
    renames=GAMMA_AND_BETA,
)


def _read_offset(settings: Settings, model: Flat) -> Flat:
    """RoBERTa's positions begin after the id of the padding token."""
    offset = settings.integer("pad_token_id", 1) + 1
    return {"position.offset": offset, "context": model["context"] - offset}


def _write_offset(model: Flat) -> Flat:
    offset = max(2, model.get("position.offset", 0))
    return {"max_position_embeddings": model["context"] + offset, "pad_token_id": offset - 1}


OFFSET = Special(_read_offset, _write_offset)
ROBERTA = family(
    ("roberta", "RoBERTa", "Roberta"),
    (*BODY, OFFSET, encoder_head("tanh", BERT_DROPOUTS, mlm="gelu")),
    body=body("roberta"),
    heads={**ROBERTA_LM, **ROBERTA_HEADS},
    only=NO_CROSS,
    pooler="roberta.pooler.dense",
    unused=(r"lm_head\..*",),
    renames=GAMMA_AND_BETA,
)
XLM_ROBERTA = replace(ROBERTA, names=("xlm-roberta", "XLM-RoBERTa", "XLMRoberta"))
CAMEMBERT = replace(ROBERTA, names=("camembert", "CamemBERT", "Camembert"))

DISTILBERT_SIZES = sizes("distilbert")
DISTILBERT_DROPOUTS = {"sequence": ("seq_classif_dropout",), "span": ("qa_dropout",), "token": ("dropout",)}
DISTILBERT_MLM = tuple(f"vocab_{part}" for part in ("transform", "layer_norm", "projector", "projector.bias"))
DISTILBERT = family(
    ("distilbert", "DistilBERT", "DistilBert"),
    (*DISTILBERT_SIZES, encoder_head("relu", DISTILBERT_DROPOUTS)),
    fixed={**FIXED, "norm.eps": 1e-12, "segments": 0},
    only={},
    defaults={"seq_classif_dropout": 0.2},
    body=(
        *embeddings("distilbert.embeddings"),
        *layers("distilbert.transformer.layer.{layer}", **TABLES["modules"]["distilbert"]),
    ),
    heads=usual_heads(DISTILBERT_MLM, "pre_classifier"),
    unused=(r"vocab_(transform|layer_norm|projector)\..*",),
)

_GENERATOR = ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head")
ELECTRA = family(
    ("electra", "ELECTRA", "Electra"),
    (*BODY, embedding_width("embedding_size", 128), encoder_head("gelu", BERT_DROPOUTS, mlm="gelu")),
    defaults={"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    body=(*body("electra"), *module("encoder.projection", "electra.embeddings_project")),
    heads={
        "replaced": (
            *module("output.dense", "discriminator_predictions.dense"),
            *module("output.out", "discriminator_predictions.dense_prediction"),
        ),
        **usual_heads((*_GENERATOR, "generator_lm_head.bias"), "classifier.dense", "classifier.out_proj"),
    },
    unused=(r"(generator|discriminator)_(predictions|lm_head)\..*",),
)


def _read_groups(settings: Settings, model: Flat) -> Flat:
    groups = settings.integer("num_hidden_groups", 1)
    if model["layers"] % groups:
        raise settings.error("num_hidden_groups", f"it does not divide num_hidden_layers = {model['layers']}")
    return {"distinct_layers": groups}


_ALBERT_MLM = tuple(f"predictions.{part}" for part in ("dense", "LayerNorm", "decoder", "bias"))
ALBERT_LAYER = "albert.encoder.albert_layer_groups.{layer}.albert_layers.0"
ALBERT = family(
    ("albert", "ALBERT", "Albert"),
    (
        *BODY,
        Key("d_embedding", "embedding_size", 128, kind="integer"),
        Special(_read_groups, lambda model: {"num_hidden_groups": model["distinct_layers"] or model["layers"]}),
        constant("inner_group_num", 1),
        encoder_head("tanh", dict.fromkeys(("sequence", "token"), ("classifier_dropout_prob",))),
    ),
    only={**NO_DECODER, "inner_group_num": 1},
    defaults=TABLES["defaults"]["albert"],
    body=(
        *embeddings("albert.embeddings"),
        *module("encoder.projection", "albert.encoder.embedding_hidden_mapping_in"),
        *layers(ALBERT_LAYER, **TABLES["modules"]["albert"]),
    ),
    heads={
        # predicts the order of two sentences, where BERT predicts whether one follows the other
        "mlm+nsp": (
            *mlm_head("output.words", _ALBERT_MLM),
            *pooled_head("output.next_sentence", "albert.pooler", "sop_classifier.classifier"),
        ),
        **usual_heads(_ALBERT_MLM, "albert.pooler"),
    },
    pooler="albert.pooler",
    unused=(r"(predictions|sop_classifier)\..*",),
)

BUCKETS = 32  # of distances up to 128, the only number that transformers supports
# positions begin at 2 whatever the padding token is: a constant in transformers
FROM_TWO = Special(
    lambda settings, model: {"position.offset": 2, "context": model["context"] - 2},
    lambda model: {"max_position_embeddings": model["context"] + 2},
)
MPNET = family(
    ("mpnet", "MPNet", "MPNet"),
    (
        *without(BODY, "segments"),
        FROM_TWO,
        constant("relative_attention_num_buckets", BUCKETS),
        encoder_head("tanh", BERT_DROPOUTS, mlm="gelu"),
    ),
    fixed={**FIXED, "position.kind": "learned+t5", "position.buckets": BUCKETS, "segments": 0},
    only={**NO_DECODER, "relative_attention_num_buckets": BUCKETS},
    body=(
        *embeddings("mpnet.embeddings"),
        tensor("encoder.position.added.weight", "mpnet.embeddings.position_embeddings.weight"),
        tensor("encoder.position.scored.weight", "mpnet.encoder.relative_attention_bias.weight"),
        *layers("mpnet.encoder.layer.{layer}", "attention.attn.*", "attention.attn.o", norm="attention.LayerNorm"),
    ),
    heads=ROBERTA_HEADS,
    pooler="mpnet.pooler.dense",
    unused=(r"lm_head\..*",),
)

FAMILIES = (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, ELECTRA, ALBERT, MPNET)
