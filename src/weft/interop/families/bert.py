"""BERT and its relatives: an encoder with learned positions, post-norm, and one of several heads.

BERT (Devlin et al. 2019) and the many sentence encoders that are BERTs without a head (MiniLM, E5, BGE); RoBERTa
(Liu et al. 2019), whose positions begin at 2, and in other languages XLM-RoBERTa (Conneau et al. 2020) and CamemBERT
(Martin et al. 2020); DistilBERT (Sanh et al. 2019), which has no segments; ELECTRA (Clark et al. 2020), a discriminator
that tells which tokens were replaced, and the generator that does so, with embeddings narrower than their layers unless
they are as wide; ALBERT (Lan et al. 2020), whose layers share their weights; and MPNet (Song et al. 2020), of which
many sentence encoders are made, a RoBERTa with T5's bias for distances.
"""

from functools import partial
from typing import Any

import torch

from weft.interop.families.base import POST_NORM, Called, Family
from weft.interop.families.heads import Heads, encoder_head, pooled, words_head
from weft.interop.settings import Flat, Settings
from weft.interop.table import Key, Row, Special, constant, embedding_width, keys, without
from weft.interop.weight_map import Rules, block, module, tensor
from weft.models.config import Encoder
from weft.tensors import LazyWeights


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
    qkv = tuple(f"attention.self.{part}" for part in ("query", "key", "value"))
    return (*embeddings(f"{base}.embeddings"), *layers(f"{base}.encoder.layer.{{layer}}", qkv))


TAGS, ANSWERS = module("output.out", "classifier"), module("output.out", "qa_outputs")
OTHERS: Heads = {"token": TAGS, "span": ANSWERS, "embedding": ()}
BERT_WORDS = tuple(f"cls.predictions.{part}" for part in ("transform.dense", "transform.LayerNorm", "decoder", "bias"))
_NEXT_SENTENCE = ("bert.pooler.dense", "cls.seq_relationship")
ROBERTA_HEADS: Heads = {
    "mlm": words_head("output", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
    "sequence": pooled("output", "classifier.dense", "classifier.out_proj"),
    **OTHERS,
}


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
        "mlm": words_head("output", *BERT_WORDS),
        "nsp": pooled("output", *_NEXT_SENTENCE),
        "sequence": pooled("output", "bert.pooler.dense", "classifier"),
        **OTHERS,
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


def _roberta(called: Called) -> Family:
    return family(
        called,
        (*BODY, Special(_read_offset, _write_offset), encoder_head("tanh", BERT_DROPOUTS, words="gelu")),
        body=body("roberta"),
        heads=ROBERTA_HEADS,
        root="roberta",
        pooler="roberta.pooler.dense",
        unused=(r"lm_head\..*",),
        renames=GAMMA_AND_BETA,
    )


ROBERTA = _roberta(("roberta", "RoBERTa", "Roberta"))
XLM_ROBERTA = _roberta(("xlm-roberta", "XLM-RoBERTa", "XLMRoberta"))
CAMEMBERT = _roberta(("camembert", "CamemBERT", "Camembert"))


DISTILBERT_SIZES = keys(
    vocab_size=("vocab_size", 30522), context=("max_position_embeddings", 512), layers=("n_layers", 6),
    d_model=("dim", 768), heads=("n_heads", 12), attention_dropout=("attention_dropout", 0.1),
    d_ff=("hidden_dim", 3072), activation=("activation", "gelu"), dropout=("dropout", 0.1),
    std=("initializer_range", 0.02),
)  # fmt: skip
DISTILBERT_DROPOUTS = {"sequence": ("seq_classif_dropout",), "span": ("qa_dropout",), "token": ("dropout",)}
DISTILBERT = family(
    ("distilbert", "DistilBERT", "DistilBert"),
    (*DISTILBERT_SIZES, encoder_head("relu", DISTILBERT_DROPOUTS)),
    fixed={**FIXED, "norm.eps": 1e-12, "segments": 0},
    only={},
    defaults={"seq_classif_dropout": 0.2},
    body=(
        *embeddings("distilbert.embeddings"),
        *layers(
            *("distilbert.transformer.layer.{layer}", "attention.*_lin", "attention.out_lin"),
            norm="sa_layer_norm",
            up="ffn.lin1",
            down="ffn.lin2",
            ff_norm="output_layer_norm",
        ),
    ),
    heads={
        "mlm": words_head("output", "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
        "sequence": pooled("output", "pre_classifier", "classifier"),
        **OTHERS,
    },
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
        "mlm": words_head("output", *_GENERATOR, "generator_lm_head.bias"),
        "sequence": pooled("output", "classifier.dense", "classifier.out_proj"),
        **OTHERS,
    },
    unused=(r"(generator|discriminator)_(predictions|lm_head)\..*",),
)


def _read_groups(settings: Settings, model: Flat) -> Flat:
    groups = settings.whole("num_hidden_groups", 1)
    if model["layers"] % groups:
        raise settings.refusal("num_hidden_groups", f"it does not divide num_hidden_layers = {model['layers']}")
    return {"distinct_layers": groups}


_ALBERT_WORDS = tuple(f"predictions.{part}" for part in ("dense", "LayerNorm", "decoder", "bias"))
ALBERT_DEFAULTS = {
    "hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384, "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
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
        *layers(
            "albert.encoder.albert_layer_groups.{layer}.albert_layers.0",
            ("attention.query", "attention.key", "attention.value"),
            "attention.dense",
            norm="attention.LayerNorm",
            up="ffn",
            down="ffn_output",
            ff_norm="full_layer_layer_norm",
        ),
    ),
    heads={
        # it learns the order of two sentences where BERT learns whether one follows the other
        "mlm+nsp": (
            *words_head("output.words", *_ALBERT_WORDS),
            *pooled("output.next_sentence", "albert.pooler", "sop_classifier.classifier"),
        ),
        "mlm": words_head("output", *_ALBERT_WORDS),
        "sequence": pooled("output", "albert.pooler", "classifier"),
        **OTHERS,
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
