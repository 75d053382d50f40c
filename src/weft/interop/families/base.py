"""What a family of Hugging Face models is: its settings in both directions, and its names for weights; and the heads
that stand on one: words, labels for a text or for its tokens, or where an answer begins and ends.

On a decoder, transformers puts a matrix without bias on the last token to classify a text, and one with a bias on every
token to tag it or to find an answer.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weft.config import Tree, validate
from weft.errors import InteropError, WeftError
from weft.interop.settings import Flat, Settings, Transformer, flat, nested
from weft.interop.table import Key, Row, Special, Table, keys
from weft.interop.weight_map import Rules, module, tensor
from weft.models.config import Decoder
from weft.nn.config import Activation
from weft.storage.tensors import LazyWeights

# the blocks of GPT, of LLaMA, and of the Transformer of 2017: LayerNorm after each sublayer
PLAIN = {"feedforward.kind": "plain", "norm.kind": "layer", "init.kind": "normal"}
GATED = {"feedforward.kind": "gated", "norm.kind": "rms", "position.kind": "rotary", "init.kind": "normal"}
POST_NORM = {**PLAIN, "attention.bias": "all", "placement": "post", "init.depth_scaled": False}

Called = tuple[str, str, str]  # in config.json, in messages, and at the beginning of the names of classes
# how transformers ends the name of the class of a model with each head
CLASSES = {
    "lm": "ForCausalLM", "mlm+nsp": "ForPreTraining", "replaced": "ForPreTraining", "mlm": "ForMaskedLM",
    "nsp": "ForNextSentencePrediction", "sequence": "ForSequenceClassification", "token": "ForTokenClassification",
    "span": "ForQuestionAnswering", "embedding": "Model",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family(Table):
    """One `model_type` of config.json, and the table of its settings.

    Names of tensors are those of the whole model; a file with only the base model leaves `prefix` out.
    """

    called: Called
    model: type[Transformer] = Decoder
    body: Rules | Callable[[Any], Rules]  # the names of weights below the head, or those of a model
    heads: Mapping[str, Rules]  # the names of weights of each kind of head that weft can read
    classes: Mapping[str, str] = field(default_factory=dict)  # of heads whose class has another name than by CLASSES
    base: str | None = "lm"  # the head that the base model is given; None where it is not read
    prefix: str = "model."
    # settings that config.json does not give, from the names of the stored tensors
    by_weights: Mapping[str, Callable[[Collection[str]], bool]] = field(default_factory=dict)
    copied: Mapping[str, str] = field(default_factory=dict)  # tensors that repeat another one, besides the output table
    unused: tuple[str, ...] = ()  # patterns of tensors that weft has no use for
    fillers: Callable[[Any], LazyWeights] = lambda model: {}  # tensors that transformers warns about if missing
    # an old ending of a name, or a beginning that ends in a dot → the present one
    renames: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Its model_type."""
        return self.called[0]

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.called[1]

    @cached_property
    def architectures(self) -> dict[str, str]:
        """The classes of transformers that weft can read, each with its kind of head; the last is the base model."""
        name = self.called[2]
        named = {self.classes.get(head, name + CLASSES[head]): head for head in self.heads}
        return named if self.base is None else {**named, f"{name}Model": self.base}

    def read(self, settings: Settings, architecture: str, known: Mapping[str, Any]) -> Transformer:
        """The model of a config.json; `known` are settings that the weights or other files give."""
        model = self.settings(settings, {"head.kind": self.architectures[architecture], **known})
        try:
            return validate(self.model, nested(model), settings.place)
        except WeftError as error:
            raise InteropError(self._in_their_words(str(error))) from None

    def _in_their_words(self, line: str) -> str:
        """A line about a model's settings with the keys that these were read from."""
        keys = {row.ours: row.theirs for row in self.rows if isinstance(row, Key)}
        line = re.sub(r"; set [a-z_.]+$", "", line)  # which config.json may have no key for
        return re.sub(r"(?<![\w.'])[a-z_.]+(?= = )", lambda name: keys.get(name[0], name[0]), line)

    def write(self, model: Transformer) -> Tree:
        """The config.json of a model, as near as the family can come."""
        named = [name for name, head in self.architectures.items() if head == model.head.kind]
        if not named:
            raise InteropError(f"model.head.kind = '{model.head.kind}', which {self.title} does not have")
        return {"model_type": self.kind, "architectures": named[:1], **self.keys(flat(model))}

    def known(self, model: Transformer) -> Flat:
        """The settings of a model that would be read from its weights and other files, not from config.json."""
        pooling = ("head.pooling", "head.normalise") if model.head.kind == "embedding" else ()
        return {key: value for key, value in flat(model).items() if key in (*self.by_weights, *pooling)}

    def rules(self, model: Transformer) -> Rules:
        """The names of a model's weights."""
        return (*self._body(model), *self.heads.get(model.head.kind, ()))

    def copies(self, model: Transformer) -> dict[str, str]:
        """Tensors that may be stored though they repeat another one: those of an output table that is tied."""
        words = self.heads.get("lm") or self.heads["mlm"]
        names = {rule.ours: rule.theirs[0] for rule in (*self._body(model), *words)}
        return {names["output.weight"]: names["embedding.weight"], **self.copied}

    def _body(self, model: Transformer) -> Rules:
        return self.body(model) if callable(self.body) else self.body


Heads = Mapping[str, Rules]  # by the kind of head
Dropouts = Mapping[str, tuple[str, ...]]  # the keys of the dropout before each kind's outputs, the first that is there
TIED, UNTIED = (keys(tied=("tie_word_embeddings", default))[0] for default in (True, False))
HEAD_BIAS = Special(read=lambda settings, model: {"head.bias": True})


def count_labels(settings: Settings) -> int:
    """As many as have names, else as config.json says, else two."""
    named = settings.get("id2label")
    return len(named) if isinstance(named, dict) and named else settings.whole("num_labels", 2)


def write_labels(model: Flat) -> Tree:
    """The names that transformers gives to labels without names of their own; none for a model without labels."""
    return named_labels([f"LABEL_{n}" for n in range(model["head.labels"])]) if "head.labels" in model else {}


def named_labels(names: Sequence[str]) -> Tree:
    """The keys of labels with these names."""
    ids = {name: number for number, name in enumerate(names)}
    return {"id2label": {str(number): name for number, name in enumerate(names)}, "label2id": ids}


def on_decoder(words: str = "lm_head", tags: str = "classifier", without: tuple[str, ...] = ()) -> Heads:
    """The names of each head, less those that transformers does not have; `words` and `tags` are what the head that
    predicts words, and that of taggers, are called."""
    labels = {"sequence": "score", "token": tags, "span": "qa_outputs"}
    named = {kind: module("output.out", name) for kind, name in labels.items() if kind not in without}
    return {"lm": module("output", words), **named}


def decoder_head(*words: Row) -> Special:
    """The rows of a decoder's head: `words` are those of the one that predicts words."""

    def read(settings: Settings, model: Flat) -> Flat:
        found: Flat = {}
        if model["head.kind"] == "lm":
            for row in words:
                found |= row.read(settings, {**model, **found})
            return found
        if model["head.kind"] == "span":
            return found
        found["head.labels"] = count_labels(settings)
        if model["head.kind"] == "token":
            return found | {"head.dropout": settings.number("classifier_dropout", 0.1)}
        return found | {"head.pooling": "last", "head.pooler": False, "head.bias": False, "head.dropout": 0.0}

    def write(model: Flat) -> Tree:
        tree = write_labels(model)
        for row in words if model["head.kind"] == "lm" else ():
            tree |= row.write(model)
        return tree

    return Special(read, write)


def words_head(head: str, dense: str, norm: str, table: str, bias: str) -> Rules:
    """The head that predicts masked words."""
    return (
        *module(f"{head}.dense", dense),
        *module(f"{head}.norm", norm),
        tensor(f"{head}.weight", f"{table}.weight"),
        tensor(f"{head}.bias", bias),
    )


def pooled(head: str, pooler: str, out: str) -> Rules:
    """A head that classifies whole texts."""
    return (*module(f"{head}.pooler.dense", pooler), *module(f"{head}.out", out))


def encoder_head(pooler: Activation, dropouts: Dropouts, words: Activation | None = None) -> Special:
    """The settings of each kind of head; `words` is the activation before masked words, None for the blocks' own."""

    def read(settings: Settings, model: Flat) -> Flat:
        kind, tied = model["head.kind"], settings.flag("tie_word_embeddings", True)
        if kind in ("mlm", "mlm+nsp"):
            return {"head.tied": tied, "head.activation": words or model["feedforward.activation"]}
        if kind in ("nsp", "embedding"):
            return {}
        if kind == "replaced":
            return {"head.activation": model["feedforward.activation"]}
        dropout = 0.1 if kind in dropouts else 0.0
        for key in reversed(dropouts.get(kind, ())):
            dropout = settings.number(key, dropout)
        if kind == "span":
            return {"head.dropout": dropout}
        found = {"head.labels": count_labels(settings), "head.dropout": dropout}
        return found | {"head.activation": pooler} if kind == "sequence" else found

    def write(model: Flat) -> Tree:
        return {"tie_word_embeddings": model.get("head.tied", True), **write_labels(model)}

    return Special(read, write)
