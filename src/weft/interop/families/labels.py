"""The labels of a classifier in config.json: how many there are, and their names."""

from weft.config import Tree
from weft.interop.settings import Flat, Settings


def count_labels(settings: Settings) -> int:
    """As many as have names, else as config.json says, else two."""
    named = settings.get("id2label")
    return len(named) if isinstance(named, dict) and named else settings.whole("num_labels", 2)


def write_labels(model: Flat) -> Tree:
    """The names that transformers gives to labels without names of their own; none for a model without labels."""
    if "head.labels" not in model:
        return {}
    names = [f"LABEL_{number}" for number in range(model["head.labels"])]
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
