"""Texts that belong together: vectors that lie close."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.batch import Batch
from weft.data.collate import contrastive_batch, contrastive_lengths
from weft.data.examples import Examples, encoded
from weft.data.table import Kind, Row
from weft.evaluate.objective import mean_loss
from weft.models.base import LanguageModel
from weft.objectives.objective import Ending, Tokenizers
from weft.recipe.config import Recipe
from weft.recipe.objective import Twins
from weft.recipe.settle import Choice


class TwinCraft:
    """Two columns of text."""

    def __init__(self, goal: Twins):
        self.goal = goal

    def columns(self) -> Mapping[str, Kind]:
        return {self.goal.first: "text", self.goal.second: "text"}

    def texts(self, values: Mapping[str, Any], side: str) -> Iterator[str]:
        if side == "target":
            yield values[self.goal.first]
            yield values[self.goal.second]

    def settle(self, recipe: Recipe, rows: Iterable[Row]) -> tuple[Recipe, list[Choice]]:
        return recipe, []

    def examples(self, recipe: Recipe, rows: Iterable[Row], tokenizers: Tokenizers) -> Iterator[dict[str, Any]]:
        return encoded(rows, tokenizers.target, texts={"first": self.goal.first, "second": self.goal.second})

    def lengths(self, examples: Examples, recipe: Recipe, tokenizers: Tokenizers) -> npt.NDArray[np.int64]:
        return contrastive_lengths(examples, tokenizers.target, recipe.batch.length)

    def batch(self, examples: Examples, rows: npt.NDArray[np.int64], recipe: Recipe, tokenizers: Tokenizers) -> Batch:
        return contrastive_batch(examples, rows, tokenizers.target, length=recipe.batch.length)

    def figures(self, model: LanguageModel, batches: Iterable[Batch], recipe: Recipe) -> dict[str, float]:
        """The loss: the mean −log p of the right twin among those of its batch."""
        return mean_loss(recipe.objective.build(), model, batches)

    def conclude(
        self, model: LanguageModel, examples: Examples, batches: Iterable[Batch], recipe: Recipe, tokenizers: Tokenizers
    ) -> Ending:
        return Ending(dict(self.figures(model, batches, recipe)))
