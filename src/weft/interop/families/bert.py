"""BERT and its relatives: an encoder with learned positions, post-norm, and one of several heads.

BERT (Devlin et al. 2019) and the many sentence encoders that are BERTs without a head (MiniLM, E5, BGE); RoBERTa
(Liu et al. 2019), whose positions begin at 2, and in other languages XLM-RoBERTa (Conneau et al. 2020) and CamemBERT
(Martin et al. 2020); DistilBERT (Sanh et al. 2019), which has no segments.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from weft.config import Tree
from weft.interop.bundle import LazyWeights
from weft.interop.families.base import POST_NORM, Family
from weft.interop.families.labels import count_labels, write_labels
from weft.interop.settings import Flat, Settings
from weft.interop.table import Row, Special, Table, activation, number, whole
from weft.interop.weight_map import Rule, module, tensor
from weft.models.config import Encoder
from weft.nn.config import Activation

BLOCK = "encoder.blocks.{layer}"
Heads = Mapping[str, tuple[Rule, ...]]  # by the kind of head


# ---- weights


def body(base: str) -> tuple[Rule, ...]:
    """BERT's and RoBERTa's names below the head."""
    embeddings, layer = f"{base}.embeddings", f"{base}.encoder.layer.{{layer}}"
    return (
        tensor("embedding.weight", f"{embeddings}.word_embeddings.weight"),
        tensor("encoder.position.weight", f"{embeddings}.position_embeddings.weight"),
        tensor("segments.weight", f"{embeddings}.token_type_embeddings.weight"),
        *module("encoder.embedding_norm", f"{embeddings}.LayerNorm"),
        *module(f"{BLOCK}.attention.qkv", *(f"{layer}.attention.self.{part}" for part in ("query", "key", "value"))),
        *module(f"{BLOCK}.attention.out", f"{layer}.attention.output.dense"),
        *module(f"{BLOCK}.attention_skip.norm", f"{layer}.attention.output.LayerNorm"),
        *module(f"{BLOCK}.feedforward.up", f"{layer}.intermediate.dense"),
        *module(f"{BLOCK}.feedforward.down", f"{layer}.output.dense"),
        *module(f"{BLOCK}.feedforward_skip.norm", f"{layer}.output.LayerNorm"),
    )


def words_head(head: str, dense: str, norm: str, table: str, bias: str) -> tuple[Rule, ...]:
    """The head that predicts masked words."""
    return (
        *module(f"{head}.dense", dense),
        *module(f"{head}.norm", norm),
        tensor(f"{head}.weight", f"{table}.weight"),
        tensor(f"{head}.bias", bias),
    )


def pooled(head: str, pooler: str, out: str) -> tuple[Rule, ...]:
    """A head that classifies whole texts."""
    return (*module(f"{head}.pooler.dense", pooler), *module(f"{head}.out", out))


TAGS = module("output.out", "classifier")
OTHERS: Heads = {"token": TAGS, "span": module("output.out", "qa_outputs"), "embedding": ()}
_BERT_WORDS = tuple(f"cls.predictions.{part}" for part in ("transform.dense", "transform.LayerNorm", "decoder", "bias"))
_NEXT_SENTENCE = ("bert.pooler.dense", "cls.seq_relationship")
BERT_HEADS: Heads = {
    "mlm+nsp": (*words_head("output.words", *_BERT_WORDS), *pooled("output.next_sentence", *_NEXT_SENTENCE)),
    "mlm": words_head("output", *_BERT_WORDS),
    "nsp": pooled("output", *_NEXT_SENTENCE),
    "sequence": pooled("output", "bert.pooler.dense", "classifier"),
    **OTHERS,
}
ROBERTA_HEADS: Heads = {
    "mlm": words_head("output", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
    "sequence": pooled("output", "classifier.dense", "classifier.out_proj"),
    **OTHERS,
}
DISTILBERT_HEADS: Heads = {
    "mlm": words_head("output", "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
    "sequence": pooled("output", "pre_classifier", "classifier"),
    **OTHERS,
}
# what transformers calls the class of a model with each head; the last is the base model
CLASSES = {
    "mlm+nsp": "ForPreTraining",
    "replaced": "ForPreTraining",
    "mlm": "ForMaskedLM",
    "nsp": "ForNextSentencePrediction",
    "sequence": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "span": "ForQuestionAnswering",
    "embedding": "Model",
}


def architectures(name: str, heads: Heads) -> dict[str, str]:
    """The classes of transformers whose names begin with `name`, with the kind of head that each has."""
    return {name + CLASSES[head]: head for head in heads}


def rules(body: tuple[Rule, ...], heads: Heads, model: Encoder) -> tuple[Rule, ...]:
    """The names of a model's weights: those below the head, and its head's."""
    return (*body, *heads.get(model.head.kind, ()))


def unused_pooler(pooler: str, model: Encoder) -> LazyWeights:
    """A headless BERT has a pooler in transformers, which warns if it is missing though nothing here uses it."""
    size = model.d_model
    shapes = {f"{pooler}.weight": (size, size), f"{pooler}.bias": (size,)} if model.head.kind == "embedding" else {}
    return {name: partial(torch.zeros, shape) for name, shape in shapes.items()}


_LAYER = "distilbert.transformer.layer.{layer}"
DISTILBERT_BODY = (
    tensor("embedding.weight", "distilbert.embeddings.word_embeddings.weight"),
    tensor("encoder.position.weight", "distilbert.embeddings.position_embeddings.weight"),
    *module("encoder.embedding_norm", "distilbert.embeddings.LayerNorm"),
    *module(f"{BLOCK}.attention.qkv", *(f"{_LAYER}.attention.{part}_lin" for part in "qkv")),
    *module(f"{BLOCK}.attention.out", f"{_LAYER}.attention.out_lin"),
    *module(f"{BLOCK}.attention_skip.norm", f"{_LAYER}.sa_layer_norm"),
    *module(f"{BLOCK}.feedforward.up", f"{_LAYER}.ffn.lin1"),
    *module(f"{BLOCK}.feedforward.down", f"{_LAYER}.ffn.lin2"),
    *module(f"{BLOCK}.feedforward_skip.norm", f"{_LAYER}.output_layer_norm"),
)


# ---- heads


def head(pooler: Activation, dropout: Callable[[Settings, str], float], words: Activation | None = None) -> Special:
    """The settings of each kind of head; `words` is the activation before masked words, None for the blocks' own."""

    def read(settings: Settings, model: Flat) -> Flat:
        kind, tied = model["head.kind"], settings.flag("tie_word_embeddings", True)
        if kind in ("mlm", "mlm+nsp"):
            return {"head.tied": tied, "head.activation": words or model["feedforward.activation"]}
        if kind in ("nsp", "embedding"):
            return {}
        if kind == "replaced":
            return {"head.activation": model["feedforward.activation"]}
        if kind == "span":
            return {"head.dropout": dropout(settings, kind)}
        found = {"head.labels": count_labels(settings), "head.dropout": dropout(settings, kind)}
        return found | {"head.activation": pooler} if kind == "sequence" else found

    def write(model: Flat) -> Tree:
        return {"tie_word_embeddings": model.get("head.tied", True), **write_labels(model)}

    return Special(read, write)


def bert_dropout(settings: Settings, kind: str) -> float:
    """Before the outputs of each kind of head."""
    if kind == "span":
        return 0.0
    return settings.number("classifier_dropout", settings.number("hidden_dropout_prob", 0.1))


def _distilbert_dropout(settings: Settings, kind: str) -> float:
    own = {"sequence": ("seq_classif_dropout", 0.2), "span": ("qa_dropout", 0.1)}
    return settings.number(*own.get(kind, ("dropout", 0.1)))


# ---- settings


def _read_offset(settings: Settings, model: Flat) -> Flat:
    """RoBERTa's positions are counted from the one after the pad token's id."""
    offset = settings.whole("pad_token_id", 1) + 1
    return {"position.offset": offset, "context": model["context"] - offset}


def _write_offset(model: Flat) -> Tree:
    offset = max(2, model.get("position.offset", 0))
    return {"max_position_embeddings": model["context"] + offset, "pad_token_id": offset - 1}


OFFSET = Special(_read_offset, _write_offset)
BODY: tuple[Row, ...] = (
    whole("vocab_size", "vocab_size"),
    whole("context", "max_position_embeddings", 512),
    whole("layers", "num_hidden_layers", 12),
    whole("d_model", "hidden_size", 768),
    whole("attention.heads", "num_attention_heads", 12),
    number("attention.dropout", "attention_probs_dropout_prob", 0.1),
    whole("feedforward.d_ff", "intermediate_size", 3072),
    activation("feedforward.activation", "hidden_act", "gelu"),
    number("norm.eps", "layer_norm_eps", 1e-12),
    whole("segments", "type_vocab_size", 2),
    number("dropout", "hidden_dropout_prob", 0.1),
    number("init.std", "initializer_range", 0.02, written=False),
)
FIXED = {**POST_NORM, "position.kind": "learned", "embedding_norm": True}
NO_DECODER = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}
GAMMA_AND_BETA = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


# ---- families


def family(kind: str, title: str, settings: Table, names: tuple[Rule, ...], heads: Heads, **more: Any) -> Family:
    """A relative of BERT's: its settings, the names of its weights below the head, and those of its heads.

    `name` is how the names of its classes begin, `base` those of its weights, if not with its kind; `pooler` is what it
    calls the pooler that a headless model has. The rest is as in `Family`.
    """
    base, pooler = more.pop("base", kind), more.pop("pooler", None)
    unused = (rf"{base}\.embeddings\.(position_ids|token_type_ids)", rf"{base}\.pooler\..*", *more.pop("unused", ()))
    table = {rule.ours: rule.theirs[0] for rule in (*names, *heads["mlm"])}
    stored, bias = table["output.weight"], table["output.bias"]
    copies = {stored: table["embedding.weight"]}
    if bias != (beside := f"{stored.removesuffix('weight')}bias"):  # it is stored twice
        copies[beside] = bias
    if pooler is not None:
        more["fillers"] = partial(unused_pooler, pooler)
    return Family(
        kind=kind,
        title=title,
        model=Encoder,
        architectures=architectures(more.pop("name"), heads),
        settings=settings,
        rules=partial(rules, names, heads),
        prefix=f"{base}.",
        copies=lambda model: copies,
        unused=unused,
        **more,
    )


BERT = family(
    "bert",
    "BERT",
    Table((*BODY, head("tanh", bert_dropout)), FIXED, NO_DECODER),
    body("bert"),
    BERT_HEADS,
    name="Bert",
    pooler="bert.pooler.dense",
    unused=(r"cls\.(seq_relationship|predictions)\..*",),
    renames=GAMMA_AND_BETA,
)


def _roberta(kind: str, title: str, name: str) -> Family:
    table = Table((*BODY, OFFSET, head("tanh", bert_dropout, words="gelu")), FIXED, NO_DECODER)
    unused = (r"lm_head\..*",)
    pooler = "roberta.pooler.dense"
    named: dict[str, Any] = {"name": name, "base": "roberta", "pooler": pooler, "renames": GAMMA_AND_BETA}
    return family(kind, title, table, body("roberta"), ROBERTA_HEADS, unused=unused, **named)


ROBERTA = _roberta("roberta", "RoBERTa", "Roberta")
XLM_ROBERTA = _roberta("xlm-roberta", "XLM-RoBERTa", "XLMRoberta")
CAMEMBERT = _roberta("camembert", "CamemBERT", "Camembert")

DISTILBERT = family(
    "distilbert",
    "DistilBERT",
    Table(
        rows=(
            whole("vocab_size", "vocab_size", 30522),
            whole("context", "max_position_embeddings", 512),
            whole("layers", "n_layers", 6),
            whole("d_model", "dim", 768),
            whole("attention.heads", "n_heads", 12),
            number("attention.dropout", "attention_dropout", 0.1),
            whole("feedforward.d_ff", "hidden_dim", 3072),
            activation("feedforward.activation", "activation", "gelu"),
            number("dropout", "dropout", 0.1),
            number("init.std", "initializer_range", 0.02, written=False),
            head("relu", _distilbert_dropout),
        ),
        fixed={**FIXED, "norm.eps": 1e-12, "segments": 0},
    ),
    DISTILBERT_BODY,
    DISTILBERT_HEADS,
    name="DistilBert",
    unused=(r"vocab_(transform|layer_norm|projector)\..*",),
)
