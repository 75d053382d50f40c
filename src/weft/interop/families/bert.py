"""BERT and its relatives: an encoder with learned positions, post-norm, and one of several heads.

BERT (Devlin et al. 2019) and the many sentence encoders that are BERTs without a head (MiniLM, E5, BGE); RoBERTa
(Liu et al. 2019), whose positions begin at 2; DistilBERT (Sanh et al. 2019), which has no segments.
"""

from collections.abc import Callable, Mapping
from functools import partial

from weft.config import Tree
from weft.interop.families.base import POST_NORM, Family
from weft.interop.settings import Flat, Settings
from weft.interop.table import Row, Special, Table, activation, number, whole
from weft.interop.weight_map import Rule, Shape, module, tensor
from weft.models.config import Encoder
from weft.nn.config import Activation

BLOCK = "encoder.blocks.{layer}"
Heads = Mapping[str, tuple[Rule, ...]]  # by the kind of head


# ---- weights


def _body(base: str) -> tuple[Rule, ...]:
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


def _words(head: str, dense: str, norm: str, table: str, bias: str) -> tuple[Rule, ...]:
    """The head that predicts masked words."""
    return (
        *module(f"{head}.dense", dense),
        *module(f"{head}.norm", norm),
        tensor(f"{head}.weight", f"{table}.weight"),
        tensor(f"{head}.bias", bias),
    )


def _pooled(head: str, pooler: str, out: str) -> tuple[Rule, ...]:
    """A head that classifies whole texts."""
    return (*module(f"{head}.pooler.dense", pooler), *module(f"{head}.out", out))


_BERT_WORDS = tuple(f"cls.predictions.{part}" for part in ("transform.dense", "transform.LayerNorm", "decoder", "bias"))
_NEXT_SENTENCE = ("bert.pooler.dense", "cls.seq_relationship")
BERT_HEADS: Heads = {
    "mlm+nsp": (*_words("output.words", *_BERT_WORDS), *_pooled("output.next_sentence", *_NEXT_SENTENCE)),
    "mlm": _words("output", *_BERT_WORDS),
    "nsp": _pooled("output", *_NEXT_SENTENCE),
    "sequence": _pooled("output", "bert.pooler.dense", "classifier"),
    "token": module("output.out", "classifier"),
    "embedding": (),
}
ROBERTA_HEADS: Heads = {
    "mlm": _words("output", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
    "sequence": _pooled("output", "classifier.dense", "classifier.out_proj"),
    "token": module("output.out", "classifier"),
    "embedding": (),
}
DISTILBERT_HEADS: Heads = {
    "mlm": _words("output", "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
    "sequence": _pooled("output", "pre_classifier", "classifier"),
    "token": module("output.out", "classifier"),
    "embedding": (),
}
# what transformers calls the class of a model with each head; the last is the base model
CLASSES = {
    "mlm+nsp": "ForPreTraining",
    "mlm": "ForMaskedLM",
    "nsp": "ForNextSentencePrediction",
    "sequence": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "embedding": "Model",
}


def _architectures(name: str, heads: Heads) -> dict[str, str]:
    return {name + CLASSES[head]: head for head in heads}


def _rules(body: tuple[Rule, ...], heads: Heads, model: Encoder) -> tuple[Rule, ...]:
    return (*body, *heads.get(model.head.kind, ()))


def _unused_pooler(base: str, model: Encoder) -> dict[str, Shape]:
    """A headless BERT has a pooler in transformers, which warns if it is missing though nothing here uses it."""
    size, pooler = model.d_model, f"{base}.pooler.dense"
    return {f"{pooler}.weight": (size, size), f"{pooler}.bias": (size,)} if model.head.kind == "embedding" else {}


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


def _head(pooler: Activation, dropout: Callable[[Settings, str], float], words: Activation | None = None) -> Special:
    """The settings of each kind of head; `words` is the activation before masked words, None for the blocks' own."""

    def read(settings: Settings, model: Flat) -> Flat:
        kind, tied = model["head.kind"], settings.flag("tie_word_embeddings", True)
        if kind in ("mlm", "mlm+nsp"):
            return {"head.tied": tied, "head.activation": words or model["feedforward.activation"]}
        if kind in ("nsp", "embedding"):
            return {}
        named = settings.get("id2label")
        labels = len(named) if isinstance(named, dict) and named else settings.whole("num_labels", 2)
        found = {"head.labels": labels, "head.dropout": dropout(settings, kind)}
        return found | {"head.activation": pooler} if kind == "sequence" else found

    def write(model: Flat) -> Tree:
        tree: Tree = {"tie_word_embeddings": model.get("head.tied", True)}
        if "head.labels" in model:
            names = [f"LABEL_{number}" for number in range(model["head.labels"])]
            tree["id2label"] = {str(number): name for number, name in enumerate(names)}
            tree["label2id"] = {name: number for number, name in enumerate(names)}
        return tree

    return Special(read, write)


def _bert_dropout(settings: Settings, kind: str) -> float:
    return settings.number("classifier_dropout", settings.number("hidden_dropout_prob", 0.1))


def _distilbert_dropout(settings: Settings, kind: str) -> float:
    return settings.number("seq_classif_dropout", 0.2) if kind == "sequence" else settings.number("dropout", 0.1)


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


BERT = Family(
    kind="bert",
    title="BERT",
    model=Encoder,
    architectures=_architectures("Bert", BERT_HEADS),
    settings=Table((*BODY, _head("tanh", _bert_dropout)), FIXED, NO_DECODER),
    rules=partial(_rules, _body("bert"), BERT_HEADS),
    prefix="bert.",
    copies=lambda model: {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    unused=(r"bert\.embeddings\.position_ids", r"bert\.pooler\..*", r"cls\.(seq_relationship|predictions)\..*"),
    zeros=partial(_unused_pooler, "bert"),
    renames=GAMMA_AND_BETA,
)

ROBERTA = Family(
    kind="roberta",
    title="RoBERTa",
    model=Encoder,
    architectures=_architectures("Roberta", ROBERTA_HEADS),
    settings=Table((*BODY, OFFSET, _head("tanh", _bert_dropout, words="gelu")), FIXED, NO_DECODER),
    rules=partial(_rules, _body("roberta"), ROBERTA_HEADS),
    prefix="roberta.",
    copies=lambda model: {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    unused=(r"roberta\.embeddings\.(position_ids|token_type_ids)", r"roberta\.pooler\..*", r"lm_head\..*"),
    zeros=partial(_unused_pooler, "roberta"),
    renames=GAMMA_AND_BETA,
)

DISTILBERT = Family(
    kind="distilbert",
    title="DistilBERT",
    model=Encoder,
    architectures=_architectures("DistilBert", DISTILBERT_HEADS),
    settings=Table(
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
            _head("relu", _distilbert_dropout),
        ),
        fixed={**FIXED, "norm.eps": 1e-12, "segments": 0},
    ),
    rules=partial(_rules, DISTILBERT_BODY, DISTILBERT_HEADS),
    prefix="distilbert.",
    copies=lambda model: {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    unused=(r"distilbert\.embeddings\.position_ids", r"vocab_(transform|layer_norm|projector)\..*"),
)
