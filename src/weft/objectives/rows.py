"""Lessons from rows with columns: pairs of texts, texts with labels, tagged words, twins, conversations.

What differs from goal to goal is a craft: which columns it reads, how a row becomes an example and examples a batch,
and how a model is judged. All else is the same and stands here.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weft.data.batch import Batch
from weft.data.bucket import Buckets
from weft.data.examples import Examples, write_examples
from weft.data.row_split import split_rows
from weft.data.shards import Side
from weft.data.table import Kind, Row, RowSource, Skipped
from weft.errors import DataError, RunError
from weft.models.base import LanguageModel
from weft.objectives.objective import Ending, Material, Tokenizers, check_cut
from weft.recipe.config import Recipe
from weft.recipe.settle import Choice, TextFacts
from weft.runs.folder import RunFolder
from weft.runs.journal import Say
from weft.training.loader import Feed, pieces

EVALUATED_TOKENS = 8192  # read at once when judging, padding counted


class Craft(Protocol):
    """What a goal knows about its rows."""

    def columns(self) -> Mapping[str, Kind]:
        """The columns that are read, and what each holds."""
        ...

    def texts(self, values: Mapping[str, Any], side: str) -> Iterator[str]:
        """What a row says, for a tokenizer to learn from; `side` is source or target."""
        ...

    def settle(self, recipe: Recipe, rows: Iterable[Row]) -> tuple[Recipe, list[Choice]]:
        """The recipe with what only the training rows can tell."""
        ...

    def examples(self, recipe: Recipe, rows: Iterable[Row], tokenizers: Tokenizers) -> Iterator[dict[str, Any]]:
        """Rows as ids and numbers."""
        ...

    def lengths(self, examples: Examples, recipe: Recipe, tokenizers: Tokenizers) -> npt.NDArray[np.int64]:
        """Tokens of each example as they are batched: (examples,) or (examples, sides)."""
        ...

    def batch(self, examples: Examples, rows: npt.NDArray[np.int64], recipe: Recipe, tokenizers: Tokenizers) -> Batch:
        """Some examples as one batch."""
        ...

    def figures(self, model: LanguageModel, batches: Iterable[Batch], recipe: Recipe) -> dict[str, float]:
        """How good a model is, quickly: what is asked again and again while it learns."""
        ...

    def conclude(
        self, model: LanguageModel, examples: Examples, batches: Iterable[Batch], recipe: Recipe, tokenizers: Tokenizers
    ) -> Ending:
        """How good it is in the end, and some of what it answers."""
        ...


def craft_for(recipe: Recipe) -> Craft:
    """The craft of the recipe's goal."""
    from weft.objectives.chat import ChatCraft
    from weft.objectives.classify import LabelCraft, ScoreCraft
    from weft.objectives.contrastive import TwinCraft
    from weft.objectives.pairs import PairCraft
    from weft.objectives.tag import TagCraft
    from weft.recipe import objective as goals

    match recipe.objective:
        case goals.Pairs():
            return PairCraft(recipe.objective)
        case goals.Chat():
            return ChatCraft(recipe.objective)
        case goals.Classify():
            return LabelCraft(recipe.objective)
        case goals.Score():
            return ScoreCraft(recipe.objective)
        case goals.Tag():
            return TagCraft(recipe.objective)
        case goals.Twins():
            return TwinCraft(recipe.objective)
    raise AssertionError(f"{recipe.objective.kind} reads no rows")


class RowLesson:
    """Rows become examples, batched with others of about the same length."""

    def texts(self, recipe: Recipe, side: str = "target") -> Iterator[str]:
        """What the training rows say."""
        craft = craft_for(recipe)
        for row in _train_rows(recipe, craft):
            yield from craft.texts(row.values, side)

    def measure(self, recipe: Recipe) -> TextFacts:
        """Rows to learn from, and the bytes of their texts."""
        craft, rows, size = craft_for(recipe), 0, 0
        for row in _train_rows(recipe, craft):
            rows += 1
            said = [*craft.texts(row.values, "target")]
            size += sum(len(text.encode("utf-8", "surrogatepass")) for text in said)
        return TextFacts(size, rows=rows)

    def prepare(
        self, recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers, say: Say
    ) -> tuple[Recipe, list[Choice]]:
        """Examples of both sides in the run's folder. Rows that couldn't be read are counted, and told."""
        craft = craft_for(recipe)
        recipe, choices = craft.settle(recipe, _train_rows(recipe, craft))
        skipped = Skipped()
        notes = {"tokenizer": tokenizers.target.fingerprint, "source_tokenizer": tokenizers.source.fingerprint}
        folder.data.mkdir(parents=True, exist_ok=True)
        for side in _sides(recipe):
            counted = skipped if side == "train" else Skipped()  # both sides come from one reading of all rows
            rows = (row for row in _rows(recipe, craft, counted) if row.side == side)
            write_examples(_file(folder, side), craft.examples(recipe, rows, tokenizers), notes=notes)
        if skipped.total:
            say(f"rows that could not be read: {skipped}")
            folder.event("skipped", rows=skipped.total, reasons=skipped.counts, first=skipped.first)
        return recipe, choices

    def open(self, recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers) -> Material:
        """The examples, batched, and what is measured on those held out."""
        craft, train = craft_for(recipe), _open(folder, "train")
        check_cut(folder, tokenizers, train.notes)
        size, tokens = recipe.batch.size, recipe.batch.tokens
        lengths = craft.lengths(train, recipe, tokenizers)
        buckets = Buckets(lengths, size=None if tokens is not None else size, tokens=tokens, seed=recipe.seed)
        batches = Feed(
            make=lambda step, rank, ranks: craft.batch(train, buckets.rows(step - 1, rank, ranks), recipe, tokenizers),
            epochs=buckets.epoch,
            fewest=buckets.smallest,
            row=f"row of up to {recipe.batch.length} tokens",
            micro=pieces(recipe, size or len(train)),
            fingerprints=(train.fingerprint,),
        )
        if "validation" not in _sides(recipe):
            return Material(batches, [], None, lambda model: Ending())
        held = _open(folder, "validation")

        def some(most: int | None) -> Iterator[Batch]:
            return judged(craft, held, recipe, tokenizers, most)

        return Material(
            corpus=batches,
            evaluators=[lambda model: craft.figures(model, some(recipe.evaluate.tokens), recipe)],
            writer=None,
            conclude=lambda model: craft.conclude(model, held, some(None), recipe, tokenizers),
        )


def judged(
    craft: Craft, examples: Examples, recipe: Recipe, tokenizers: Tokenizers, most: int | None = None
) -> Iterator[Batch]:
    """All examples, or about `most` tokens of them, the short ones first so that little is padded."""
    lengths = craft.lengths(examples, recipe, tokenizers).reshape(len(examples), -1)
    chosen = np.arange(len(examples))
    if most is not None:
        total = np.cumsum(lengths.sum(1))
        chosen = chosen[: max(1, int(np.searchsorted(total, most)))]
    order = chosen[np.argsort(lengths[chosen].max(1), kind="stable")]
    begin = 0
    while begin < len(order):
        end = begin + 1
        while end < len(order) and (end + 1 - begin) * lengths[order[begin : end + 1]].max(0).sum() <= EVALUATED_TOKENS:
            end += 1
        yield craft.batch(examples, order[begin:end], recipe, tokenizers)
        begin = end


def _rows(recipe: Recipe, craft: Craft, skipped: Skipped) -> Iterator[Row]:
    data = recipe.data
    if data.prepared is not None or data.mixture:
        raise DataError(f"data: the goal '{recipe.objective.kind}' reads rows; name their files in data.sources")
    source = RowSource(data.sources, craft.columns(), data.targets, data.on_error)
    return split_rows(source, data.validation, skipped)


def _train_rows(recipe: Recipe, craft: Craft) -> Iterator[Row]:
    return (row for row in _rows(recipe, craft, Skipped()) if row.side == "train")


def _sides(recipe: Recipe) -> tuple[Side, ...]:
    return ("train",) if recipe.data.validation.kind == "none" else ("train", "validation")


def _file(folder: RunFolder, side: Side) -> Path:
    return folder.data / f"{side}.safetensors"


def _open(folder: RunFolder, side: Side) -> Examples:
    try:
        return Examples.open(_file(folder, side))
    except DataError as error:
        raise RunError(f"{folder.path}: its rows can't be read: {error}") from None
