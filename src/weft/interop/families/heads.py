"""What stands on a model: words, labels for a text or for its tokens, or where an answer begins and ends.

On a decoder, transformers puts a matrix without bias on the last token to classify a text, and one with a bias on every
token to tag it or to find an answer.
"""

from collections.abc import Mapping, Sequence

from weft.config import Tree
from weft.interop.settings import Flat, Settings
from weft.interop.table import Row, Special, keys
from weft.interop.weight_map import Rules, module, tensor
from weft.nn.config import Activation

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
    if "head.labels" not in model:
        return {}
    return named_labels([f"LABEL_{number}" for number in range(model["head.labels"])])


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
