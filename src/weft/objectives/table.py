"""The table of objectives. To add one: its settings in `weft.recipe.objective`, its file here, and its line below."""

from typing import Any

from weft.objectives import (  # noqa: F401 (each declares an objective)
    answer,
    chat,
    classify,
    contrastive,
    masked,
    next_sentence,
    next_token,
    pairs,
    regress,
    spans,
    tag,
)
from weft.recipe.config import Recipe
from weft.runs.folder import RunFolder
from weft.training.objective import Objective, Tokenizers


def build(recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers | None = None) -> Objective[Any]:
    """The objective of a recipe, in the run of a folder."""
    return Objective.declared[type(recipe.objective)](recipe, folder, tokenizers)
