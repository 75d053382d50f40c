"""Lessons from sentences in their documents: BERT's masked words with the next sentence."""

import shutil
from collections.abc import Iterator
from typing import Any

from weft.data.batch import Batch
from weft.data.config import TextSource
from weft.data.corrupt import Masking
from weft.data.examples import Examples, write_examples
from weft.data.sampler import rows
from weft.data.sentences import Sentences, next_sentence_batch
from weft.data.shards import Side
from weft.data.split import Section, split_sections, train_texts
from weft.errors import DataError, RunError
from weft.evaluate.objective import mean_loss
from weft.models.base import LanguageModel
from weft.objectives.objective import Ending, Material, Tokenizers, check_cut
from weft.recipe.config import Recipe
from weft.recipe.objective import MaskedAndNext
from weft.recipe.settle import Choice, TextFacts, measure
from weft.runs.folder import RunFolder
from weft.runs.journal import Say
from weft.text.sentences import split_sentences
from weft.text.tokenizer import Tokenizer
from weft.training.loader import Feed, pieces

EVALUATED_TOKENS = 8192  # read at once when measuring
CHUNK = 512  # sentences encoded at once


class SentenceLesson:
    """Documents become sentences, of which pairs are drawn as they are read."""

    def texts(self, recipe: Recipe, side: str = "target") -> Iterator[str]:
        """The training text."""
        return train_texts(_text(recipe))

    def measure(self, recipe: Recipe) -> TextFacts:
        """Bytes of text."""
        return measure(self.texts(recipe))

    def prepare(
        self, recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers, say: Say
    ) -> tuple[Recipe, list[Choice]]:
        """Sentences of both sides in the run's folder, each with the number of its document."""
        shutil.rmtree(folder.data, ignore_errors=True)
        folder.data.mkdir(parents=True)
        sides: tuple[Side, ...] = ("train",) if recipe.data.validation.kind == "none" else ("train", "validation")
        for side in sides:
            rows = _sentences(recipe, side, tokenizers.target)
            write_examples(
                folder.data / f"{side}.safetensors", rows, notes={"tokenizer": tokenizers.target.fingerprint}
            )
        return recipe, []

    def open(self, recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers) -> Material:
        """Pairs of sentences, drawn anew each time, and a fixed set of held-out ones."""
        goal, size, length = recipe.objective, recipe.batch.size, recipe.batch.length
        assert isinstance(goal, MaskedAndNext) and size is not None and length is not None
        masking = Masking.of(tokenizers.target, goal.rate, goal.whole_words)
        examples = _open(folder, "train")
        check_cut(folder, tokenizers, examples.notes)
        train = Sentences(examples)

        def make(step: int, rank: int, ranks: int) -> Batch:
            # every process draws all rows of the step: the second task is weighed by the targets in all of them
            drawn = next_sentence_batch(train, masking, rows(step - 1, size), seed=recipe.seed, length=length)
            return drawn if ranks == 1 else drawn.split(ranks)[rank]

        batches = Feed(
            make=make,
            epochs=lambda step: step * size / train.per_epoch(length),
            fewest=size,
            row=f"pair of {length} tokens",
            micro=pieces(recipe, size),
            fingerprints=(examples.fingerprint,),
            even=True,
        )
        if recipe.data.validation.kind == "none":
            return Material(batches, [], None, lambda model: Ending())
        held, few = _held(folder), max(1, EVALUATED_TOKENS // length)
        objective = goal.build()

        def some(most: int | None) -> Iterator[Batch]:
            if held is None:
                return
            wanted = held.per_epoch(length) if most is None else min(held.per_epoch(length), most // length)
            for step in range(max(1, wanted // few)):
                yield next_sentence_batch(held, masking, rows(step, few), seed=recipe.seed + 1, length=length)

        def figures(model: LanguageModel, most: int | None) -> dict[str, float]:
            return mean_loss(objective, model, some(most))

        return Material(
            corpus=batches,
            evaluators=[lambda model: figures(model, recipe.evaluate.tokens)] if held is not None else [],
            writer=None,
            conclude=lambda model: Ending(dict(figures(model, None)) if held is not None else {}),
        )


def _text(recipe: Recipe) -> TextSource:
    if recipe.data.prepared is not None or recipe.data.mixture:
        raise DataError("data: sentences are found in text; name the text in data.sources, not prepared tokens")
    return recipe.data.text(recipe.data.parts[0])


def _sentences(recipe: Recipe, side: Side, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Every sentence of a side that has a token, with its document's number."""
    waiting: list[tuple[str, int]] = []
    for sentence in _told_apart(recipe, side):
        waiting.append(sentence)
        if len(waiting) == CHUNK:
            yield from _encoded(waiting, tokenizer)
            waiting = []
    yield from _encoded(waiting, tokenizer)


def _encoded(sentences: list[tuple[str, int]], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    for ids, (_, document) in zip(tokenizer.encode_batch([text for text, _ in sentences]), sentences, strict=True):
        if ids:
            yield {"tokens": ids, "document": document}


def _told_apart(recipe: Recipe, side: Side) -> Iterator[tuple[str, int]]:
    """Sentences and their documents. A document comes in sections; its last sentence so far may go on in the next."""
    last: Section | None = None
    rest = ""
    for section in split_sections(_text(recipe)):
        if section.side != side:
            continue
        if last is not None and (last.ends or last.document != section.document):
            yield from ((sentence, last.document) for sentence in split_sentences(rest))
            rest = ""
        *whole, rest = split_sentences(rest + section.text) or [""]
        yield from ((sentence, section.document) for sentence in whole)
        last = section
    if last is not None:
        yield from ((sentence, last.document) for sentence in split_sentences(rest))


def _held(folder: RunFolder) -> Sentences | None:
    """The held-out sentences, or None where there are too few for pairs."""
    try:
        return Sentences(_open(folder, "validation"))
    except DataError:
        return None


def _open(folder: RunFolder, side: Side) -> Examples:
    try:
        return Examples.open(folder.data / f"{side}.safetensors")
    except DataError as error:
        raise RunError(f"{folder.path}: its sentences can't be read: {error}") from None
