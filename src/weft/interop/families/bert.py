"""BERT and its relatives: an encoder with learned positions, post-norm, and one of several heads.

BERT (Devlin et al. 2019) and the many sentence encoders that are BERTs without a head (MiniLM, E5, BGE); RoBERTa
(Liu et al. 2019), whose positions begin at 2, and in other languages XLM-RoBERTa (Conneau et al. 2020) and CamemBERT
(Martin et al. 2020); DistilBERT (Sanh et al. 2019), which has no segments; ELECTRA (Clark et al. 2020), a discriminator
that tells which tokens were replaced, and the generator that does so, with embeddings narrower than their layers unless
they are as wide; ALBERT (Lan et al. 2020), whose layers share their weights; MPNet (Song et al. 2020), of which many
sentence encoders are made, a RoBERTa with T5's bias for distances; and DeBERTa v2 and v3 (He et al. 2021, 2023), whose
attention compares contents with distances and the other way round, by vectors of distances that all layers share.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weft.config import Tree
from weft.interop.families.base import POST_NORM, Called, Family, Heads, encoder_head, pooled, words_head
from weft.interop.settings import Flat, Settings, shown
from weft.interop.table import Key, Row, Special, constant, embedding_width, even_heads, keys, without
from weft.interop.weight_map import Rules, block, module, tensor
from weft.models.config import Encoder
from weft.storage.tensors import LazyWeights

QKV = ("query", "key", "value")


def embeddings(base: str) -> Rules:
    """BERT's names below the layers."""
    names = {"embedding": "word", "encoder.position": "position", "segments": "token_type"}
    tables = (tensor(f"{ours}.weight", f"{base}.{theirs}_embeddings.weight") for ours, theirs in names.items())
    return (*tables, *module("encoder.embedding_norm", f"{base}.LayerNorm"))


def layers(layer: str, qkv: tuple[str, ...] | str, out: str = "attention.output.dense", **changes: str) -> Rules:
    """BERT's names in its layers, where `qkv` and `out` differ most from one relative to the next."""
    names = {"norm": "attention.output.LayerNorm", "ff_norm": "output.LayerNorm"}
    names |= {"up": "intermediate.dense", "down": "output.dense", **changes}
    return block("encoder", layer, qkv=qkv, out=out, **names)


def body(base: str) -> Rules:
    """BERT's and RoBERTa's names below the head."""
    qkv = tuple(f"attention.self.{part}" for part in QKV)
    return (*embeddings(f"{base}.embeddings"), *layers(f"{base}.encoder.layer.{{layer}}", qkv))


def usual_heads(words: tuple[str, ...], pooler: str, out: str = "classifier") -> Heads:
    """The names of the heads that all have: masked words, labels of a text or its tokens, answers, and none."""
    tags, answers = module("output.out", "classifier"), module("output.out", "qa_outputs")
    both = {"mlm": words_head("output", *words), "sequence": pooled("output", pooler, out)}
    return {**both, "token": tags, "span": answers, "embedding": ()}


BERT_WORDS = tuple(f"cls.predictions.{part}" for part in ("transform.dense", "transform.LayerNorm", "decoder", "bias"))
ROBERTA_WORDS = tuple(f"lm_head.{part}" for part in ("dense", "layer_norm", "decoder", "bias"))
ROBERTA_HEADS = usual_heads(ROBERTA_WORDS, "classifier.dense", "classifier.out_proj")
_NEXT_SENTENCE = ("bert.pooler.dense", "cls.seq_relationship")


def unused_pooler(pooler: str, model: Encoder) -> LazyWeights:
    """A headless BERT has a pooler in transformers, which warns if it is missing though nothing here uses it."""
    size = model.d_model
    shapes = {f"{pooler}.weight": (size, size), f"{pooler}.bias": (size,)} if model.head.kind == "embedding" else {}
    return {name: partial(torch.zeros, shape) for name, shape in shapes.items()}


BERT_DROPOUTS = dict.fromkeys(("sequence", "token"), ("classifier_dropout", "hidden_dropout_prob"))
BODY = keys(
    vocab_size="vocab_size", context=("max_position_embeddings", 512), layers=("num_hidden_layers", 12),
    d_model=("hidden_size", 768), heads=("num_attention_heads", 12),
    attention_dropout=("attention_probs_dropout_prob", 0.1), d_ff=("intermediate_size", 3072),
    activation=("hidden_act", "gelu"), eps=("layer_norm_eps", 1e-12), segments=("type_vocab_size", 2),
    dropout=("hidden_dropout_prob", 0.1), std=("initializer_range", 0.02),
)  # fmt: skip
FIXED = {**POST_NORM, "position.kind": "learned", "embedding_norm": True}
NO_DECODER = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}
GAMMA_AND_BETA = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def family(called: Called, rows: tuple[Row, ...], heads: Heads, **more: Any) -> Family:
    """A relative of BERT's: what it is called, its settings, and the names of its heads' weights.

    `root` is how the names of its weights begin, if not with its kind; `pooler` is what it calls the pooler that a
    headless model has. The rest is as in `Family`.
    """
    root, pooler = more.pop("root", called[0]), more.pop("pooler", None)
    unused = (rf"{root}\.embeddings\.(position_ids|token_type_ids)", rf"{root}\.pooler\..*", *more.pop("unused", ()))
    words = {rule.ours: rule.theirs[0] for rule in heads["mlm"]}
    bias, beside = words["output.bias"], f"{words['output.weight'].removesuffix('weight')}bias"
    return Family(
        rows=rows,
        called=called,
        model=Encoder,
        heads=heads,
        base="embedding",
        prefix=f"{root}.",
        copied={beside: bias} if beside != bias else {},  # it is stored twice
        unused=unused,
        fillers=partial(unused_pooler, pooler) if pooler is not None else lambda model: {},
        **{"fixed": FIXED, "only": NO_DECODER, **more},
    )


BERT = family(
    ("bert", "BERT", "Bert"),
    (*BODY, encoder_head("tanh", BERT_DROPOUTS)),
    body=body("bert"),
    heads={
        "mlm+nsp": (*words_head("output.words", *BERT_WORDS), *pooled("output.next_sentence", *_NEXT_SENTENCE)),
        "nsp": pooled("output", *_NEXT_SENTENCE),
        **usual_heads(BERT_WORDS, "bert.pooler.dense"),
    },
    pooler="bert.pooler.dense",
    unused=(r"cls\.(seq_relationship|predictions)\..*",),
    renames=GAMMA_AND_BETA,
)


def _read_offset(settings: Settings, model: Flat) -> Flat:
    """RoBERTa's positions are counted from the one after the pad token's id."""
    offset = settings.whole("pad_token_id", 1) + 1
    return {"position.offset": offset, "context": model["context"] - offset}


def _write_offset(model: Flat) -> Flat:
    offset = max(2, model.get("position.offset", 0))
    return {"max_position_embeddings": model["context"] + offset, "pad_token_id": offset - 1}


ROBERTA = family(
    ("roberta", "RoBERTa", "Roberta"),
    (*BODY, Special(_read_offset, _write_offset), encoder_head("tanh", BERT_DROPOUTS, words="gelu")),
    body=body("roberta"),
    heads=ROBERTA_HEADS,
    pooler="roberta.pooler.dense",
    unused=(r"lm_head\..*",),
    renames=GAMMA_AND_BETA,
)
XLM_ROBERTA = replace(ROBERTA, called=("xlm-roberta", "XLM-RoBERTa", "XLMRoberta"))
CAMEMBERT = replace(ROBERTA, called=("camembert", "CamemBERT", "Camembert"))

DISTILBERT_SIZES = keys(
    vocab_size=("vocab_size", 30522), context=("max_position_embeddings", 512), layers=("n_layers", 6),
    d_model=("dim", 768), heads=("n_heads", 12), attention_dropout=("attention_dropout", 0.1),
    d_ff=("hidden_dim", 3072), activation=("activation", "gelu"), dropout=("dropout", 0.1),
    std=("initializer_range", 0.02),
)  # fmt: skip
DISTILBERT_DROPOUTS = {"sequence": ("seq_classif_dropout",), "span": ("qa_dropout",), "token": ("dropout",)}
DISTILBERT_PARTS = {"norm": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2", "ff_norm": "output_layer_norm"}
DISTILBERT_WORDS = tuple(f"vocab_{part}" for part in ("transform", "layer_norm", "projector", "projector.bias"))
DISTILBERT = family(
    ("distilbert", "DistilBERT", "DistilBert"),
    (*DISTILBERT_SIZES, encoder_head("relu", DISTILBERT_DROPOUTS)),
    fixed={**FIXED, "norm.eps": 1e-12, "segments": 0},
    only={},
    defaults={"seq_classif_dropout": 0.2},
    body=(
        *embeddings("distilbert.embeddings"),
        *layers("distilbert.transformer.layer.{layer}", "attention.*_lin", "attention.out_lin", **DISTILBERT_PARTS),
    ),
    heads=usual_heads(DISTILBERT_WORDS, "pre_classifier"),
    unused=(r"vocab_(transform|layer_norm|projector)\..*",),
)

_GENERATOR = ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head")
ELECTRA = family(
    ("electra", "ELECTRA", "Electra"),
    (*BODY, embedding_width("embedding_size", 128), encoder_head("gelu", BERT_DROPOUTS, words="gelu")),
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
    groups = settings.whole("num_hidden_groups", 1)
    if model["layers"] % groups:
        raise settings.error("num_hidden_groups", f"it does not divide num_hidden_layers = {model['layers']}")
    return {"distinct_layers": groups}


_ALBERT_WORDS = tuple(f"predictions.{part}" for part in ("dense", "LayerNorm", "decoder", "bias"))
ALBERT_DEFAULTS = {
    "hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384, "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
ALBERT_LAYER = "albert.encoder.albert_layer_groups.{layer}.albert_layers.0"
ALBERT_PARTS = {"norm": "attention.LayerNorm", "up": "ffn", "down": "ffn_output", "ff_norm": "full_layer_layer_norm"}
ALBERT = family(
    ("albert", "ALBERT", "Albert"),
    (
        *BODY,
        Key("d_embedding", "embedding_size", 128, kind="whole"),
        Special(_read_groups, lambda model: {"num_hidden_groups": model["distinct_layers"] or model["layers"]}),
        constant("inner_group_num", 1),
        encoder_head("tanh", dict.fromkeys(("sequence", "token"), ("classifier_dropout_prob",))),
    ),
    only={**NO_DECODER, "inner_group_num": 1},
    defaults=ALBERT_DEFAULTS,
    body=(
        *embeddings("albert.embeddings"),
        *module("encoder.projection", "albert.encoder.embedding_hidden_mapping_in"),
        *layers(ALBERT_LAYER, tuple(f"attention.{part}" for part in QKV), "attention.dense", **ALBERT_PARTS),
    ),
    heads={
        # it learns the order of two sentences where BERT learns whether one follows the other
        "mlm+nsp": (
            *words_head("output.words", *_ALBERT_WORDS),
            *pooled("output.next_sentence", "albert.pooler", "sop_classifier.classifier"),
        ),
        **usual_heads(_ALBERT_WORDS, "albert.pooler"),
    },
    pooler="albert.pooler",
    unused=(r"(predictions|sop_classifier)\..*",),
)

BUCKETS = 32  # of distances up to 128; transformers computes them for no other number
# positions are counted from 2 whatever the pad token is: transformers has a constant there
COUNTED = Special(
    lambda settings, model: {"position.offset": 2, "context": model["context"] - 2},
    lambda model: {"max_position_embeddings": model["context"] + 2},
)
MPNET = family(
    ("mpnet", "MPNet", "MPNet"),
    (
        *without(BODY, "segments"),
        COUNTED,
        constant("relative_attention_num_buckets", BUCKETS),
        encoder_head("tanh", BERT_DROPOUTS, words="gelu"),
    ),
    fixed={**FIXED, "position.kind": "learned+t5", "position.buckets": BUCKETS, "segments": 0},
    only={**NO_DECODER, "relative_attention_num_buckets": BUCKETS},
    body=(
        *embeddings("mpnet.embeddings"),
        tensor("encoder.position.added.weight", "mpnet.embeddings.position_embeddings.weight"),
        tensor("encoder.position.scored.weight", "mpnet.encoder.relative_attention_bias.weight"),
        *layers(*("mpnet.encoder.layer.{layer}", "attention.attn.*", "attention.attn.o"), norm="attention.LayerNorm"),
    ),
    heads=ROBERTA_HEADS,
    pooler="mpnet.pooler.dense",
    unused=(r"lm_head\..*",),
)

BOTH = ("c2p", "p2c")


def _read_distances(settings: Settings, model: Flat) -> Flat:
    if not settings.flag("relative_attention", False):
        raise settings.error("relative_attention", "weft has only True")
    given = settings.get("pos_att_type", [])
    kinds = [kind.strip() for kind in given.lower().split("|")] if isinstance(given, str) else given
    if kinds not in (list(BOTH), list(BOTH[::-1])):
        raise settings.error("pos_att_type", "weft compares contents with distances both ways, c2p and p2c")
    buckets = settings.get("position_buckets", -1)
    if not isinstance(buckets, int) or buckets < 4:
        raise settings.error("position_buckets", "weft counts distances in buckets, 4 or more on either side")
    farthest = settings.get("max_relative_positions", -1)
    if not isinstance(farthest, int) or isinstance(farthest, bool) or farthest < 1:
        farthest = model["context"]
    if farthest - 1 <= buckets // 2:
        near = f"with position_buckets = {shown(buckets)}, all distances have a bucket of their own"
        raise settings.error("max_relative_positions", near)
    normed = settings.get("norm_rel_ebd", "none")
    if not isinstance(normed, str):
        raise settings.error("norm_rel_ebd", "expected 'layer_norm' or 'none'")
    return {
        "attention.scale": (3 * even_heads(model)) ** -0.5,
        "position.buckets": settings.whole("position_buckets"),
        "position.max_distance": farthest,
        "position.norm_eps": model["norm.eps"] if "layer_norm" in normed.lower() else None,
    }


def _write_distances(model: Flat) -> Tree:
    return {
        "relative_attention": True,
        "pos_att_type": list(BOTH),
        "position_buckets": model.get("position.buckets"),
        "max_relative_positions": model.get("position.max_distance", -1),
        "norm_rel_ebd": "none" if model.get("position.norm_eps") is None else "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    }


DEBERTA_DROPOUTS = {"sequence": ("cls_dropout", "hidden_dropout_prob"), "token": ("hidden_dropout_prob",)}
SEGMENTS = Special(
    lambda settings, model: {
        "segments": 0 if settings.get("type_vocab_size", 0) == 0 else settings.whole("type_vocab_size")
    },
    lambda model: {"type_vocab_size": model.get("segments", 0)},
)
DEBERTA_ONLY = {
    "is_decoder": False, "add_cross_attention": False, "share_att_key": True, "position_biased_input": False,
    "conv_kernel_size": 0, "pooler_hidden_act": "gelu", "legacy": True,
}  # fmt: skip
DEBERTA_DEFAULTS = {
    "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24, "intermediate_size": 6144,
    "layer_norm_eps": 1e-7,
    # what transformers takes, and weft does not have
    "share_att_key": False, "position_biased_input": True,
}  # fmt: skip
DEBERTA_V2 = family(
    ("deberta-v2", "DeBERTa v2", "DebertaV2"),
    (
        *without(BODY, "segments"),
        SEGMENTS,
        Special(_read_distances, _write_distances),
        constant("pooler_hidden_act", "gelu"),
        encoder_head("gelu", DEBERTA_DROPOUTS),
    ),
    fixed={**FIXED, "position.kind": "disentangled"},
    only=DEBERTA_ONLY,
    defaults=DEBERTA_DEFAULTS,
    body=(
        *(rule for rule in embeddings("deberta.embeddings") if ".position." not in rule.ours),
        tensor("encoder.position.weight", "deberta.encoder.rel_embeddings.weight"),
        *module("encoder.position.norm", "deberta.encoder.LayerNorm"),
        *layers("deberta.encoder.layer.{layer}", tuple(f"attention.self.{part}_proj" for part in QKV)),
    ),
    heads=usual_heads(BERT_WORDS, "pooler.dense"),
    root="deberta",
    unused=(r"(cls|lm_predictions|mask_predictions|pooler)\..*", r"deberta\.embeddings\.position_embeddings\..*"),
)
FAMILIES = (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, ELECTRA, ALBERT, MPNET)
