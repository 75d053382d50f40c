"""What stands on a decoder: the next word, labels for a text or for its tokens, or where an answer begins and ends.

transformers puts a matrix without bias on the last token to classify a text, and one with a bias on every token to tag
it or to find an answer.
"""

from collections.abc import Callable
from typing import Any

from weft.config import Tree
from weft.interop.families.labels import count_labels, write_labels
from weft.interop.settings import Flat, Settings
from weft.interop.table import Row, Special, number
from weft.interop.weight_map import Rule, module

CLASSES = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "span",
}


def architectures(name: str, words: str | None = None, without: tuple[str, ...] = ()) -> dict[str, str]:
    """The classes of a family by the kind of head that they have, less those that transformers does not have; `words`
    is the one that predicts words, if it is not called `name` ForCausalLM."""
    others = {name + ending: kind for ending, kind in CLASSES.items() if ending not in without}
    return {words or f"{name}ForCausalLM": "lm", **others, f"{name}Model": "lm"}


def head_rules(body: tuple[Rule, ...], tags: str = "classifier") -> Callable[[Any], tuple[Rule, ...]]:
    """A family's names, `body`, with those of the labels' heads; `tags` is what taggers call theirs."""
    names = {"sequence": "score", "token": tags, "span": "qa_outputs"}
    classes = {kind: module("output.out", name) for kind, name in names.items()}
    return lambda model: (*body, *classes.get(model.head.kind, ()))


def head(*words: Row, dropout: str = "classifier_dropout") -> Special:
    """The rows of a head: `words` are those of the one that predicts words."""

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
            return found | {"head.dropout": number("head.dropout", dropout, 0.1).read(settings, model)["head.dropout"]}
        return found | {"head.pooling": "last", "head.pooler": False, "head.bias": False, "head.dropout": 0.0}

    def write(model: Flat) -> Tree:
        tree = write_labels(model)
        for row in words if model["head.kind"] == "lm" else ():
            tree |= row.write(model)
        return tree

    return Special(read, write)


def fixed_head(ours: str, value: Any) -> Special:
    """A setting of the head that predicts words, the same in all models of a family."""
    return Special(read=lambda settings, model: {ours: value})
