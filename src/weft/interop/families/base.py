"""`Family`, one family of Hugging Face models as data: settings in both directions, names of weights, and heads.

Heads predict tokens, labels of a text or of its tokens, or the span of an answer. On a decoder, transformers classifies
a text by a linear layer without bias on the last token, and tags tokens or finds an answer by one with bias on all.
"""

import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.config import Tree, validate
from weft.errors import InteropError, WeftError
from weft.interop.settings import Flat, Settings, Transformer, flat, nested
from weft.interop.table import Key, Row, SettingsTable, Special, even_heads, four_times, keys
from weft.interop.weight_map import Rules, module, tensor
from weft.models.config import Decoder, Encoder, EncoderDecoder
from weft.nn.config import Activation
from weft.storage.tensors import LazyWeights

# blocks of GPT, of LLaMA, and of the Transformer of 2017 (LayerNorm after each sublayer)
PLAIN = {"feedforward.kind": "plain", "norm.kind": "layer", "init.kind": "normal"}
GATED = {"feedforward.kind": "gated", "norm.kind": "rms", "position.kind": "rotary", "init.kind": "normal"}
POST_NORM = {**PLAIN, "attention.bias": "all", "placement": "post", "init.depth_scaled": False}

TABLES: Tree = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
COMPUTED: dict[Any, Callable[[Flat], int]] = {
    "= 4 d_model": four_times,
    "= d_model / heads": even_heads,
    "= heads": lambda model: model["attention.heads"],
    "= encoder_layers": lambda model: model["encoder_layers"],
}


def sizes(name: str) -> tuple[Key, ...]:
    """Rows of a table of keys in tables.toml."""
    table: Tree = TABLES["keys"][name]
    pairs = {ours: (key[0], COMPUTED.get(key[1], key[1])) for ours, key in table.items() if isinstance(key, list)}
    return keys(**table | pairs)


FamilyNames = tuple[str, str, str]  # in config.json, in messages, and at the beginning of class names
# kind of head → end of the class name in transformers
CLASSES = {
    "lm": "ForCausalLM", "mlm+nsp": "ForPreTraining", "replaced": "ForPreTraining", "mlm": "ForMaskedLM",
    "nsp": "ForNextSentencePrediction", "sequence": "ForSequenceClassification", "token": "ForTokenClassification",
    "span": "ForQuestionAnswering", "embedding": "Model",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family(SettingsTable):
    """One `model_type` of config.json with the table of its settings.

    Tensor names are those of a model with a head; files of the base model omit `prefix`. A decoder whose config.json
    has `"is_causal": false` is an Encoder in weft, with the same blocks; an encoder with an LM head, whose config.json
    has `"is_decoder": true`, is a Decoder.
    """

    names: FamilyNames
    model: type[Transformer] = Decoder
    body: Rules | Callable[[Any], Rules]  # rules of the weights below the head, or a function of the model
    heads: Mapping[str, Rules]  # kind of head → rules of its weights
    classes: Mapping[str, str] = field(default_factory=dict)  # kind of head → class name that deviates from CLASSES
    base: str | None = "lm"  # the head given to the base model; None if the base model is not read
    prefix: str = "model."
    # settings that are not in config.json but follow from the names of the stored tensors
    by_weights: Mapping[str, Callable[[Collection[str]], bool]] = field(default_factory=dict)
    copied: Mapping[str, str] = field(default_factory=dict)  # tensors, besides a tied LM head, that repeat another one
    unused: tuple[str, ...] = ()  # patterns of tensors that weft does not use
    ids: Mapping[str, int] = field(default_factory=dict)  # role of a token → its id, if the class requires one
    fillers: Callable[[Any], LazyWeights] = lambda model: {}  # tensors that transformers warns about if missing
    # old suffix of a name, or prefix that ends in a dot → the current one
    renames: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Value of model_type in config.json."""
        return self.names[0]

    @property
    def title(self) -> str:
        """Name in messages."""
        return self.names[1]

    @cached_property
    def architectures(self) -> dict[str, str]:
        """Classes of transformers that weft reads → kind of head; the last is the base model."""
        name = self.names[2]
        classes = {self.classes.get(head, name + CLASSES[head]): head for head in self.heads}
        return classes if self.base is None else {**classes, f"{name}Model": self.base}

    def read(self, settings: Settings, architecture: str, known: Mapping[str, Any]) -> Transformer:
        """Read the model of a config.json; `known` are settings that the weights or other files determine."""
        kind, stack = self.architectures[architecture], self.stack(settings)
        kind = "embedding" if stack is not self.model and architecture == list(self.architectures)[-1] else kind
        if kind == "lm" and stack is self.model is Encoder:
            raise settings.error("is_decoder", f"{architecture} predicts the next token, which needs true")
        model = self.settings(settings, {"head.kind": kind, **known})
        if stack is not self.model is Decoder:
            model = widened(model, 1)
        try:
            return validate(stack, nested(model), settings.location)
        except WeftError as error:
            raise InteropError(self._with_their_keys(str(error))) from None

    def stack(self, settings: Settings) -> type[Transformer]:
        """Type of the model: an Encoder if every token of a decoder attends to all others, and a Decoder if a token of
        an encoder attends only to earlier ones."""
        if self.model is Encoder:
            return Decoder if "lm" in self.heads and settings.flag("is_decoder", False) else Encoder
        if settings.flag("is_causal", True):
            return self.model
        if self.model is EncoderDecoder:
            raise settings.error("is_causal", "weft has only True")
        return Encoder

    def _with_their_keys(self, message: str) -> str:
        """Replace settings in a message by the keys that they were read from."""
        keys = {row.ours: row.theirs for row in self.rows if isinstance(row, Key)}
        short = {name.rpartition(".")[2]: key for name, key in keys.items()}
        keys = {"fraction": "partial_rotary_factor", **short, **keys}
        message = re.sub(r"; set [a-z_.]+$", "", message)  # config.json may have no key for it
        return re.sub(r"(?<![\w.'])[a-z_.]+(?= = )", lambda match: keys.get(match[0], match[0]), message)

    def write(self, model: Transformer) -> Tree:
        """Content of config.json, as close as the family can come to the model."""
        classes = [name for name, head in self.architectures.items() if head == model.head.kind]
        if model.head.kind == "embedding" and self.model is Decoder:
            classes = list(self.architectures)[-1:]
        if not classes:
            raise InteropError(f"model.head.kind = '{model.head.kind}', which {self.title} does not have")
        tree = {"model_type": self.kind, "architectures": classes[:1]}
        if isinstance(model, self.model):
            return tree | self.keys(flat(model))
        if self.model is Encoder:
            return tree | self.keys(flat(model)) | {"is_decoder": True}
        return tree | self.keys(widened(flat(model), -1)) | {"is_causal": False}

    def known(self, model: Transformer) -> Flat:
        """Settings of a model that are read from its weights and other files instead of config.json."""
        pooling = ("head.kind", "head.pooling", "head.normalise") if model.head.kind == "embedding" else ()
        return {key: value for key, value in flat(model).items() if key in (*self.by_weights, *pooling)}

    def rules(self, model: Transformer) -> Rules:
        """Rules of all weights of a model."""
        return (*self._body(model), *self.heads.get(model.head.kind, ()))

    def copies(self, model: Transformer) -> dict[str, str]:
        """Tensors that may be stored although they repeat another one, such as a tied LM head → the original."""
        names = {rule.ours: rule.theirs[0] for rule in (*self._body(model), *self._lm_head)}
        tied = {names["output.weight"]: names["embedding.weight"]}
        return {**({} if model.head.kind == "embedding" and self.model is Decoder else tied), **self.copied}

    def is_unused(self, name: str) -> bool:
        """Return whether weft does not use a tensor that is not among those of the model."""
        patterns = (*self.unused, *(re.escape(part) for rule in self._lm_head for part in rule.theirs))
        return any(re.fullmatch(pattern, name) for pattern in patterns)

    @property
    def _lm_head(self) -> Rules:
        return self.heads.get("lm") or self.heads["mlm"]

    def _body(self, model: Transformer) -> Rules:
        rules = self.body(model) if callable(self.body) else self.body
        if isinstance(model, self.model):
            return rules
        return in_stack(model.kind, rules)


def in_stack(stack: str, rules: Rules) -> Rules:
    """Rules of an encoder or a decoder for the other kind of stack."""
    return tuple(replace(rule, ours=re.sub(r"^(de|en)coder\.", f"{stack}.", rule.ours)) for rule in rules)


def widened(model: Flat, by: int) -> Flat:
    """Settings with all windows larger by this: of a decoder that is not causal, transformers counts them without the
    token itself."""
    pattern = [{**kind, "window": kind["window"] and kind["window"] + by} for kind in model.get("pattern", ())]
    window = model.get("attention.window")
    return {**model, "attention.window": window and window + by, "pattern": pattern}


Heads = Mapping[str, Rules]  # kind of head → rules of its weights
Dropouts = Mapping[str, tuple[str, ...]]  # kind of head → keys of its dropout; the first one present counts
TIED, UNTIED = (keys(tied=("tie_word_embeddings", default))[0] for default in (True, False))
HEAD_BIAS = Special(read=lambda settings, model: {"head.bias": True})


def count_labels(settings: Settings) -> int:
    """Number of labels: that of `id2label`, else `num_labels`, else 2."""
    names = settings.get("id2label")
    return len(names) if isinstance(names, dict) and names else settings.integer("num_labels", 2)


def write_labels(model: Flat) -> Tree:
    """Keys of labels with the default names of transformers; {} for a model without labels."""
    return label_keys([f"LABEL_{n}" for n in range(model["head.labels"])]) if "head.labels" in model else {}


def label_keys(names: Sequence[str]) -> Tree:
    """Keys of labels with these names."""
    ids = {name: number for number, name in enumerate(names)}
    return {"id2label": {str(number): name for number, name in enumerate(names)}, "label2id": ids}


def on_decoder(lm: str = "lm_head", token: str = "classifier", without: tuple[str, ...] = ()) -> Heads:
    """Rules of all heads of a decoder except those that transformers lacks; `lm` and `token` are the names of the LM
    head and of the tagger."""
    names = {"sequence": "score", "token": token, "span": "qa_outputs"}
    labels = {kind: module("output.out", name) for kind, name in names.items() if kind not in without}
    return {"lm": module("output", lm), **labels}


def decoder_head(*lm: Row) -> Special:
    """Row of a decoder's head; `lm` are the rows of an LM head."""

    def read(settings: Settings, model: Flat) -> Flat:
        head: Flat = {}
        if model["head.kind"] == "lm":
            for row in lm:
                head |= row.read(settings, {**model, **head})
            return head
        if model["head.kind"] in ("span", "embedding"):
            return head
        head["head.labels"] = count_labels(settings)
        if model["head.kind"] == "token":
            return head | {"head.dropout": settings.number("classifier_dropout", 0.1)}
        return head | {"head.pooling": "last", "head.pooler": False, "head.bias": False, "head.dropout": 0.0}

    def write(model: Flat) -> Tree:
        tree = write_labels(model)
        for row in lm if model["head.kind"] == "lm" else ():
            tree |= row.write(model)
        return tree

    return Special(read, write)


def mlm_head(head: str, names: tuple[str, ...], transform: str = "") -> Rules:
    """Rules of a head for masked words; `names` are those of its dense layer, norm, matrix and bias. In an LM head, the
    first two are in a `transform`."""
    dense, norm, matrix, bias = names
    return (
        *module(f"{head}{transform}.dense", dense),
        *module(f"{head}{transform}.norm", norm),
        tensor(f"{head}.weight", f"{matrix}.weight"),
        tensor(f"{head}.bias", bias),
    )


def pooled_head(head: str, pooler: str, out: str) -> Rules:
    """Rules of a head that classifies texts."""
    return (*module(f"{head}.pooler.dense", pooler), *module(f"{head}.out", out))


def encoder_head(pooler: Activation, dropouts: Dropouts, mlm: Activation | None = None) -> Special:
    """Row of an encoder's head; `mlm` is the activation of the head for masked words, None for that of the blocks."""

    def read(settings: Settings, model: Flat) -> Flat:
        kind, tied = model["head.kind"], settings.flag("tie_word_embeddings", True)
        activation = mlm or model["feedforward.activation"]
        if kind == "lm":
            return {"head.tied": tied, "head.bias": True, "head.transform.activation": activation}
        if kind in ("mlm", "mlm+nsp"):
            return {"head.tied": tied, "head.activation": activation}
        if kind in ("nsp", "embedding"):
            return {}
        if kind == "replaced":
            return {"head.activation": model["feedforward.activation"]}
        dropout = 0.1 if kind in dropouts else 0.0
        for key in reversed(dropouts.get(kind, ())):
            dropout = settings.number(key, dropout)
        if kind == "span":
            return {"head.dropout": dropout}
        head = {"head.labels": count_labels(settings), "head.dropout": dropout}
        return head | {"head.activation": pooler} if kind == "sequence" else head

    def write(model: Flat) -> Tree:
        return {"tie_word_embeddings": model.get("head.tied", True), **write_labels(model)}

    return Special(read, write)
