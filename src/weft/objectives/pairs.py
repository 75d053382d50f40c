"""One text from another: translation, summaries, answers."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.batch import Batch
from weft.data.collate import pairs_batch, pairs_lengths
from weft.data.examples import Examples, in_chunks
from weft.data.table import Kind, Row
from weft.decode.config import Sampling
from weft.decode.translate import Translator
from weft.evaluate.objective import mean_loss
from weft.evaluate.translation import translated
from weft.models.base import LanguageModel
from weft.objectives.objective import Ending, Tokenizers
from weft.recipe.config import Recipe
from weft.recipe.objective import Pairs
from weft.recipe.settle import Choice

SHOWN = 5


class PairCraft:
    """Columns of text, a source and a target."""

    def __init__(self, goal: Pairs):
        self.goal = goal

    def columns(self) -> Mapping[str, Kind]:
        return {self.goal.source: "text", self.goal.target: "text"}

    def texts(self, values: Mapping[str, Any], side: str) -> Iterator[str]:
        yield values[self.goal.source if side == "source" else self.goal.target]

    def settle(self, recipe: Recipe, rows: Iterable[Row]) -> tuple[Recipe, list[Choice]]:
        return recipe, []

    def examples(self, recipe: Recipe, rows: Iterable[Row], tokenizers: Tokenizers) -> Iterator[dict[str, Any]]:
        for chunk in in_chunks(rows):
            sources = tokenizers.source.encode_batch([row.values[self.goal.source] for row in chunk])
            targets = tokenizers.target.encode_batch([row.values[self.goal.target] for row in chunk])
            for source, target in zip(sources, targets, strict=True):
                yield {"source": source, "target": target}

    def lengths(self, examples: Examples, recipe: Recipe, tokenizers: Tokenizers) -> npt.NDArray[np.int64]:
        return pairs_lengths(examples, recipe.batch.length)

    def batch(self, examples: Examples, rows: npt.NDArray[np.int64], recipe: Recipe, tokenizers: Tokenizers) -> Batch:
        return pairs_batch(
            examples, rows, tokenizers.target, source_tokenizer=tokenizers.source, length=recipe.batch.length
        )

    def figures(self, model: LanguageModel, batches: Iterable[Batch], recipe: Recipe) -> dict[str, float]:
        """Loss and perplexity of the targets' tokens."""
        found = mean_loss(recipe.objective.build(), model, batches)
        return found | {"perplexity": math.exp(min(700.0, found["loss"]))}

    def conclude(
        self, model: LanguageModel, examples: Examples, batches: Iterable[Batch], recipe: Recipe, tokenizers: Tokenizers
    ) -> Ending:
        """The loss over all that was held out, what greedy decoding makes of it, and how that compares."""
        figures: dict[str, Any] = dict(self.figures(model, batches, recipe))
        sources = [tokenizers.source.decode(examples.ids("source", n).tolist()) for n in range(len(examples))]
        wanted = [tokenizers.target.decode(examples.ids("target", n).tolist()) for n in range(len(examples))]
        length = recipe.batch.length
        assert length is not None
        translator = Translator(model, tokenizers.source, tokenizers.target, length)
        told = translator.translate(sources, Sampling(temperature=0.0, max_tokens=length))
        measured = translated(told, wanted)
        figures |= measured.numbers() | {"bleu_signature": measured.bleu.signature, "decoding": "greedy"}
        shown = [f"{sources[n]}\n→ {told[n]}" for n in range(min(SHOWN, len(told)))]
        return Ending(figures, shown)
