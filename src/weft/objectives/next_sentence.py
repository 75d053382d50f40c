"""Masked words and the next sentence, in pairs of passages: both tasks of BERT at once (Devlin et al. 2019, §3.1)."""

import shutil
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal

from weft.data.batch import Batch
from weft.data.corrupt import Masking
from weft.data.examples import Examples, write_examples
from weft.data.sentences import Sentences, pairs_masked_batch
from weft.data.shards import Side
from weft.data.split import Piece, split_pieces, train_texts
from weft.errors import DataError, RunError
from weft.evaluate.objective import mean_loss
from weft.models.base import LanguageModel
from weft.objectives.masked import masked_loss
from weft.objectives.objective import EVALUATED_TOKENS, Objective, Prepared, Results
from weft.progress import Log
from weft.recipe import objective as config
from weft.text.sentences import split_sentences
from weft.text.tokenizer import Tokenizer
from weft.training.loader import Loader, micro_rows
from weft.training.objective import Loss

CHUNK = 512  # sentences encoded at once


class MaskedNext(Objective[config.MaskedNext]):
    """Masked words in pairs of passages, and whether the second follows the first.

    Documents become sentences, of which pairs are drawn as they are read.
    """

    usage = "weft train bert-tiny --data rows.tsv objective=classify init={run}"

    def amount(self) -> int:
        """Bytes of the training text."""
        return sum(len(text.encode()) for text in self.texts())

    def texts(self, side: Literal["target", "source"] = "target") -> Iterator[str]:
        """The training text."""
        return train_texts(self._sources(), self.recipe.data.validation, column=self.recipe.data.column)

    def prepare(self, log: Log) -> Prepared:
        """Sentences of both sides in the run's folder, each with the number of its document."""
        shutil.rmtree(self.folder.data, ignore_errors=True)
        self.folder.data.mkdir(parents=True)
        notes, size = {"tokenizer": self.tokenizer.fingerprint}, 0
        sides: tuple[Side, ...] = ("train",) if self.recipe.data.validation.kind == "none" else ("train", "validation")
        for side in sides:
            write_examples(self.folder.data / f"{side}.safetensors", self._encoded(side), notes=notes)
        size = sum(len(text.encode()) for text in self.texts())
        return Prepared(size)

    def _encoded(self, side: Side) -> Iterator[dict[str, Any]]:
        """Every sentence of a side that has a token, with its document's number."""
        waiting: list[tuple[str, int]] = []
        for sentence in self._sentences(side):
            waiting.append(sentence)
            if len(waiting) == CHUNK:
                yield from _examples(waiting, self.tokenizer)
                waiting = []
        yield from _examples(waiting, self.tokenizer)

    def _sentences(self, side: Side) -> Iterator[tuple[str, int]]:
        """Sentences and their documents. A document comes in sections; its last sentence may go on in the next one."""
        last: Piece | None = None
        rest = ""
        data = self.recipe.data
        for piece in split_pieces(self._sources(), data.validation, column=data.column):
            if piece.split != side:
                continue
            if last is not None and (last.ends or last.document != piece.document):
                yield from ((sentence, last.document) for sentence in split_sentences(rest))
                rest = ""
            *whole, rest = split_sentences(rest + piece.text) or [""]
            yield from ((sentence, piece.document) for sentence in whole)
            last = piece
        if last is not None:
            yield from ((sentence, last.document) for sentence in split_sentences(rest))

    def _sources(self) -> tuple[str, ...]:
        data = self.recipe.data
        if data.prepared is not None or data.mixture:
            raise DataError("data: sentences are found in text; name the text in data.sources, not prepared tokens")
        return data.sources

    # ---- batches

    @cached_property
    def masking(self) -> Masking:
        return Masking.of(self.tokenizer, self.settings.rate, self.settings.whole_words)

    @cached_property
    def examples(self) -> Examples:
        """The sentences to train on."""
        found = self._open("train")
        self.check_tokenizer(found.notes)
        return found

    def _open(self, side: Side) -> Examples:
        try:
            return Examples.open(self.folder.data / f"{side}.safetensors")
        except DataError as error:
            raise RunError(f"{self.folder.path}: its sentences can't be read: {error}") from None

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return (self.examples.fingerprint,)

    @cached_property
    def loader(self) -> Loader:
        """Pairs of passages, drawn anew each time."""
        train, size = Sentences(self.examples), self.recipe.batch.size or 1

        def make(step: int, rank: int, ranks: int) -> Batch:
            # every process draws all rows of the step: the second task is weighed by the targets in all of them
            return pairs_masked_batch(
                train, self.masking, step - 1, size, rank, ranks, seed=self.recipe.seed, length=self.length
            )

        return Loader(
            make=make,
            epochs=lambda step: step * size / train.per_epoch(self.length),
            fewest=size,
            row=f"pair of {self.length} tokens",
            micro=micro_rows(self.recipe.batch, size),
            even=True,
        )

    # ---- evaluation

    @cached_property
    def _held_out(self) -> Sentences | None:
        """The held-out sentences, or None where there are too few for pairs."""
        if self.recipe.data.validation.kind == "none":
            return None
        try:
            return Sentences(self._open("validation"))
        except DataError:
            return None

    @property
    def holds_out(self) -> bool:
        return self._held_out is not None

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        return masked_loss(model, batch)

    def evaluate(self, model: LanguageModel) -> dict[str, float]:
        """The mean loss, and how often the next sentence is recognised, on a fixed set of held-out pairs."""
        assert self._held_out is not None
        return mean_loss(masked_loss, model, self._batches(self._held_out, self.recipe.evaluate.tokens))

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        sentences = Sentences(self.examples) if side == "train" else self._held_out
        return Results(dict(mean_loss(masked_loss, model, self._batches(sentences, None))) if sentences else {})

    def _batches(self, sentences: Sentences, most: int | None) -> Iterator[Batch]:
        length, few = self.length, max(1, EVALUATED_TOKENS // self.length)
        wanted = sentences.per_epoch(length) if most is None else min(sentences.per_epoch(length), most // length)
        for step in range(max(1, wanted // few)):
            yield pairs_masked_batch(sentences, self.masking, step, few, seed=self.recipe.seed + 1, length=length)


def _examples(sentences: list[tuple[str, int]], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    for ids, (_, document) in zip(tokenizer.encode_batch([text for text, _ in sentences]), sentences, strict=True):
        if ids:
            yield {"tokens": ids, "document": document}
