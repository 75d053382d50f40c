"""BERT and its relatives: an encoder with learned positions, post-norm, and one of several heads.

BERT (Devlin et al. 2019) and the many sentence encoders that are BERTs without a head (MiniLM, E5, BGE); RoBERTa
(Liu et al. 2019), whose positions begin at 2; DistilBERT (Sanh et al. 2019), which has no segments.
"""

from collections.abc import Collection, Mapping

from weft.config import Tree
from weft.errors import InteropError
from weft.interop.families.base import THEIR_ACTIVATIONS, Family, Settings
from weft.interop.mapping import Rule, both, rule
from weft.models.config import (
    ClassificationHead,
    EmbeddingHead,
    Encoder,
    Head,
    MaskedLMHead,
    Model,
    NextSentenceHead,
    PretrainingHead,
    TaggingHead,
)
from weft.nn.config import Activation, Attention, LayerNorm, Learned, NormalInit, Plain

BLOCK = "encoder.blocks.{layer}"
Heads = Mapping[str, tuple[Rule, ...]]


def _body(base: str, layer: str) -> tuple[Rule, ...]:
    """BERT's and RoBERTa's names below the head."""
    return (
        rule("embedding.weight", f"{base}.embeddings.word_embeddings.weight"),
        rule("encoder.position.weight", f"{base}.embeddings.position_embeddings.weight"),
        rule("segments.weight", f"{base}.embeddings.token_type_embeddings.weight"),
        *both("encoder.embedding_norm", f"{base}.embeddings.LayerNorm"),
        *both(f"{BLOCK}.attention.qkv", *(f"{layer}.attention.self.{part}" for part in ("query", "key", "value"))),
        *both(f"{BLOCK}.attention.out", f"{layer}.attention.output.dense"),
        *both(f"{BLOCK}.attention_skip.norm", f"{layer}.attention.output.LayerNorm"),
        *both(f"{BLOCK}.feedforward.up", f"{layer}.intermediate.dense"),
        *both(f"{BLOCK}.feedforward.down", f"{layer}.output.dense"),
        *both(f"{BLOCK}.feedforward_skip.norm", f"{layer}.output.LayerNorm"),
    )


def _words(ours: str, transform: str, dense: str, norm: str, bias: str, table: str) -> tuple[Rule, ...]:
    """The head that says masked words."""
    return (
        *both(f"{ours}.dense", f"{transform}.{dense}" if transform else dense),
        *both(f"{ours}.norm", f"{transform}.{norm}" if transform else norm),
        rule(f"{ours}.bias", bias),
        rule(f"{ours}.weight", table),
    )


_BERT_WORDS = (
    "cls.predictions.transform",
    "dense",
    "LayerNorm",
    "cls.predictions.bias",
    "cls.predictions.decoder.weight",
)
_BERT_POOLER = both("output.pooler.dense", "bert.pooler.dense")

BERT_BODY = _body("bert", "bert.encoder.layer.{layer}")
BERT_HEADS: Heads = {
    "mlm": _words("output", *_BERT_WORDS),
    "nsp": (*_BERT_POOLER, *both("output.out", "cls.seq_relationship")),
    "mlm+nsp": (
        *_words("output.words", *_BERT_WORDS),
        *both("output.next_sentence.pooler.dense", "bert.pooler.dense"),
        *both("output.next_sentence.out", "cls.seq_relationship"),
    ),
    "sequence": (*_BERT_POOLER, *both("output.out", "classifier")),
    "token": both("output.out", "classifier"),
}

ROBERTA_BODY = _body("roberta", "roberta.encoder.layer.{layer}")
ROBERTA_HEADS: Heads = {
    "mlm": _words("output", "lm_head", "dense", "layer_norm", "lm_head.bias", "lm_head.decoder.weight"),
    "sequence": (*both("output.pooler.dense", "classifier.dense"), *both("output.out", "classifier.out_proj")),
    "token": both("output.out", "classifier"),
}

_DISTIL = "distilbert.transformer.layer.{layer}"
DISTILBERT_BODY = (
    rule("embedding.weight", "distilbert.embeddings.word_embeddings.weight"),
    rule("encoder.position.weight", "distilbert.embeddings.position_embeddings.weight"),
    *both("encoder.embedding_norm", "distilbert.embeddings.LayerNorm"),
    *both(f"{BLOCK}.attention.qkv", *(f"{_DISTIL}.attention.{part}_lin" for part in "qkv")),
    *both(f"{BLOCK}.attention.out", f"{_DISTIL}.attention.out_lin"),
    *both(f"{BLOCK}.attention_skip.norm", f"{_DISTIL}.sa_layer_norm"),
    *both(f"{BLOCK}.feedforward.up", f"{_DISTIL}.ffn.lin1"),
    *both(f"{BLOCK}.feedforward.down", f"{_DISTIL}.ffn.lin2"),
    *both(f"{BLOCK}.feedforward_skip.norm", f"{_DISTIL}.output_layer_norm"),
)
DISTILBERT_HEADS: Heads = {
    "mlm": _words(
        "output", "", "vocab_transform", "vocab_layer_norm", "vocab_projector.bias", "vocab_projector.weight"
    ),
    "sequence": (*both("output.pooler.dense", "pre_classifier"), *both("output.out", "classifier")),
    "token": both("output.out", "classifier"),
}


# ---- heads


def labels_of(settings: Settings) -> int:
    """How many labels a classifier tells apart."""
    named = settings.tree.get("id2label")
    return len(named) if isinstance(named, dict) and named else settings.whole("num_labels", 2)


def _head(kind: str, settings: Settings, activation: Activation, pooler: Activation, dropout: float) -> Head:
    tied = settings.flag("tie_word_embeddings", True)
    match kind:
        case "mlm":
            return MaskedLMHead(tied=tied, activation=activation)
        case "nsp":
            return NextSentenceHead()
        case "mlm+nsp":
            return PretrainingHead(tied=tied, activation=activation)
        case "sequence":
            return ClassificationHead(labels=labels_of(settings), activation=pooler, dropout=dropout)
        case "token":
            return TaggingHead(labels=labels_of(settings), dropout=dropout)
    return EmbeddingHead()


def _head_tree(model: Encoder) -> Tree:
    tree: Tree = {"tie_word_embeddings": getattr(model.head, "tied", True)}
    if isinstance(model.head, ClassificationHead | TaggingHead):
        names = [f"LABEL_{number}" for number in range(model.head.labels)]
        tree["id2label"] = {str(number): name for number, name in enumerate(names)}
        tree["label2id"] = {name: number for number, name in enumerate(names)}
    return tree


def _architecture(model: Encoder, known: Mapping[str, str], title: str) -> str:
    found = [name for name, kind in known.items() if kind == model.head.kind]
    if not found:
        raise InteropError(f"model.head.kind = '{model.head.kind}': {title} has no such head")
    return found[0]


# ---- BERT

BERT_ARCHITECTURES = {
    "BertForPreTraining": "mlm+nsp",
    "BertForMaskedLM": "mlm",
    "BertForNextSentencePrediction": "nsp",
    "BertForSequenceClassification": "sequence",
    "BertForTokenClassification": "token",
    "BertModel": "embedding",
}


def _encoder(settings: Settings, offset: int, head: Head) -> Encoder:
    activation = settings.activation("hidden_act", "gelu")
    return Encoder(
        vocab_size=settings.whole("vocab_size"),
        context=settings.whole("max_position_embeddings", 512) - offset,
        layers=settings.whole("num_hidden_layers", 12),
        d_model=settings.whole("hidden_size", 768),
        attention=Attention(
            heads=settings.whole("num_attention_heads", 12),
            bias="all",
            dropout=settings.number("attention_probs_dropout_prob", 0.1),
        ),
        feedforward=Plain(d_ff=settings.whole("intermediate_size", 3072), activation=activation),
        norm=LayerNorm(eps=settings.number("layer_norm_eps", 1e-12)),
        placement="post",
        position=Learned(offset=offset),
        embedding_norm=True,
        segments=settings.whole("type_vocab_size", 2),
        dropout=settings.number("hidden_dropout_prob", 0.1),
        init=NormalInit(std=settings.number("initializer_range", 0.02), depth_scaled=False),
        head=head,
    )


def _encoder_tree(model: Encoder, offset: int) -> Tree:
    return {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context + offset,
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.attention.heads,
        "attention_probs_dropout_prob": model.attention.dropout,
        "intermediate_size": model.feedforward.d_ff,
        "hidden_act": THEIR_ACTIVATIONS[model.feedforward.activation],
        "layer_norm_eps": model.norm.eps,
        "type_vocab_size": model.segments,
        "hidden_dropout_prob": model.dropout,
        **_head_tree(model),
    }


def _refuse_decoders(settings: Settings) -> None:
    settings.only(is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")


def _dropout(settings: Settings) -> float:
    return settings.number("classifier_dropout", settings.number("hidden_dropout_prob", 0.1))


def read_bert(settings: Settings, architecture: str, names: Collection[str]) -> Encoder:
    _refuse_decoders(settings)
    activation = settings.activation("hidden_act", "gelu")
    return _encoder(
        settings, 0, _head(BERT_ARCHITECTURES[architecture], settings, activation, "tanh", _dropout(settings))
    )


def write_bert(model: Encoder) -> tuple[str, Tree]:
    return _architecture(model, BERT_ARCHITECTURES, "BERT"), {"model_type": "bert", **_encoder_tree(model, 0)}


def _unused_pooler(base: str, model: Encoder) -> dict[str, tuple[int, ...]]:
    """A headless BERT has a pooler in transformers, which misses it in the file though nothing here uses it."""
    if model.head.kind != "embedding":
        return {}
    d_model = model.d_model
    return {f"{base}.pooler.dense.weight": (d_model, d_model), f"{base}.pooler.dense.bias": (d_model,)}


BERT = Family(
    kind="bert",
    title="BERT",
    models="encoder",
    architectures=BERT_ARCHITECTURES,
    rules=lambda model: (*BERT_BODY, *BERT_HEADS.get(_kind(model), ())),
    read=read_bert,
    write=write_bert,
    prefix="bert.",
    copies=lambda model: {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    idle=(
        r"bert\.embeddings\.position_ids",
        r"bert\.pooler\..*",
        r"cls\.seq_relationship\..*",
        r"cls\.predictions\..*",
    ),
    fillers=lambda model: _unused_pooler("bert", model),
    renames={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)


def _kind(model: Model) -> str:
    assert isinstance(model, Encoder)
    return model.head.kind


# ---- RoBERTa

ROBERTA_ARCHITECTURES = {
    "RobertaForMaskedLM": "mlm",
    "RobertaForSequenceClassification": "sequence",
    "RobertaForTokenClassification": "token",
    "RobertaModel": "embedding",
}


def read_roberta(settings: Settings, architecture: str, names: Collection[str]) -> Encoder:
    _refuse_decoders(settings)
    offset = settings.whole("pad_token_id", 1) + 1  # positions are counted from the one after the pad token's id
    head = _head(ROBERTA_ARCHITECTURES[architecture], settings, "gelu", "tanh", _dropout(settings))
    return _encoder(settings, offset, head)


def write_roberta(model: Encoder) -> tuple[str, Tree]:
    offset = model.position.offset if isinstance(model.position, Learned) else 0
    if offset < 2:
        raise InteropError(f"model.position.offset = {offset}: RoBERTa's is 2")
    tree = {"model_type": "roberta", **_encoder_tree(model, offset), "pad_token_id": offset - 1}
    return _architecture(model, ROBERTA_ARCHITECTURES, "RoBERTa"), tree


ROBERTA = Family(
    kind="roberta",
    title="RoBERTa",
    models="encoder",
    architectures=ROBERTA_ARCHITECTURES,
    rules=lambda model: (*ROBERTA_BODY, *ROBERTA_HEADS.get(_kind(model), ())),
    read=read_roberta,
    write=write_roberta,
    prefix="roberta.",
    copies=lambda model: {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    idle=(r"roberta\.embeddings\.(position_ids|token_type_ids)", r"roberta\.pooler\..*", r"lm_head\..*"),
    fillers=lambda model: _unused_pooler("roberta", model),
    renames={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)

# ---- DistilBERT

DISTILBERT_ARCHITECTURES = {
    "DistilBertForMaskedLM": "mlm",
    "DistilBertForSequenceClassification": "sequence",
    "DistilBertForTokenClassification": "token",
    "DistilBertModel": "embedding",
}


def read_distilbert(settings: Settings, architecture: str, names: Collection[str]) -> Encoder:
    activation = settings.activation("activation", "gelu")
    kind = DISTILBERT_ARCHITECTURES[architecture]
    dropout = settings.number("seq_classif_dropout", 0.2) if kind == "sequence" else settings.number("dropout", 0.1)
    return Encoder(
        vocab_size=settings.whole("vocab_size", 30522),
        context=settings.whole("max_position_embeddings", 512),
        layers=settings.whole("n_layers", 6),
        d_model=settings.whole("dim", 768),
        attention=Attention(
            heads=settings.whole("n_heads", 12), bias="all", dropout=settings.number("attention_dropout", 0.1)
        ),
        feedforward=Plain(d_ff=settings.whole("hidden_dim", 3072), activation=activation),
        norm=LayerNorm(eps=1e-12),
        placement="post",
        position=Learned(),
        embedding_norm=True,
        segments=0,
        dropout=settings.number("dropout", 0.1),
        init=NormalInit(std=settings.number("initializer_range", 0.02), depth_scaled=False),
        head=_head(kind, settings, activation, "relu", dropout),
    )


def write_distilbert(model: Encoder) -> tuple[str, Tree]:
    return _architecture(model, DISTILBERT_ARCHITECTURES, "DistilBERT"), {
        "model_type": "distilbert",
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context,
        "n_layers": model.layers,
        "dim": model.d_model,
        "n_heads": model.attention.heads,
        "attention_dropout": model.attention.dropout,
        "hidden_dim": model.feedforward.d_ff,
        "activation": THEIR_ACTIVATIONS[model.feedforward.activation],
        "dropout": model.dropout,
        **_head_tree(model),
    }


DISTILBERT = Family(
    kind="distilbert",
    title="DistilBERT",
    models="encoder",
    architectures=DISTILBERT_ARCHITECTURES,
    rules=lambda model: (*DISTILBERT_BODY, *DISTILBERT_HEADS.get(_kind(model), ())),
    read=read_distilbert,
    write=write_distilbert,
    prefix="distilbert.",
    copies=lambda model: {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    idle=(r"distilbert\.embeddings\.position_ids", r"vocab_(transform|layer_norm|projector)\..*"),
)
