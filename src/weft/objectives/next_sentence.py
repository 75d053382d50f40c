"""Masked words and the next sentence, in pairs of passages: both tasks of BERT at once (Devlin et al. 2019, §3.1)."""

import shutil
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from weft.data.batch import Batch
from weft.data.corrupt import Masking
from weft.data.examples import Examples, write_sides
from weft.data.sentences import Sentences, pairs_masked_batch
from weft.data.shards import Side
from weft.data.split import Piece, split_pieces, train_texts
from weft.errors import DataError, RunError
from weft.evaluate.loss import mean_loss
from weft.models.base import LanguageModel
from weft.objectives.masked import masked_loss
from weft.objectives.objective import EVALUATED_TOKENS, Objective, Prepared, Results
from weft.progress import Log
from weft.recipe import objective as config
from weft.text.sentences import split_sentences
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

    def texts(self, side: Literal["target", "source"] | None = None) -> Iterator[str]:
        """The training text."""
        return train_texts(self._sources(), self.recipe.data.validation, column=self.recipe.data.column)

    def prepare(self, log: Log) -> Prepared:
        """Sentences of both sides in the run's folder, each with the number of its document."""
        shutil.rmtree(self.folder.data, ignore_errors=True)
        self.folder.data.mkdir(parents=True)
        sides: tuple[Side, ...] = ("train", "validation") if self.recipe.data.validation.kind != "none" else ("train",)
        amount = Counter[Side]()
        paths = {side: self._file(side) for side in sides}
        write_sides(paths, self._examples(amount), notes={"tokenizer": self.tokenizer.fingerprint})
        return Prepared(amount["train"])

    def _examples(self, amount: Counter[Side]) -> Iterator[tuple[Side, dict[str, Any]]]:
        """Every sentence that has a token, with its side and its document's number."""
        sentences = self._sentences(amount)
        while some := list(islice(sentences, CHUNK)):
            encoded = self.tokenizer.encode_batch([sentence for _, sentence, _ in some])
            for ids, (side, _, document) in zip(encoded, some, strict=True):
                if ids:
                    yield side, {"tokens": ids, "document": document}

    def _sentences(self, amount: Counter[Side]) -> Iterator[tuple[Side, str, int]]:
        """Side, sentence and document. A document comes in sections; its last sentence may go on in the next one."""
        data = self.recipe.data
        last: dict[Side, Piece] = {}
        rest: dict[Side, str] = {"train": "", "validation": ""}

        def cut(side: Side, text: str) -> Iterator[tuple[Side, str, int]]:
            return ((side, sentence, last[side].document) for sentence in split_sentences(text))

        for piece in split_pieces(self._sources(), data.validation, column=data.column):
            side = piece.split
            amount[side] += piece.size
            before = last.get(side)
            if before is not None and (before.ends or before.document != piece.document):
                yield from cut(side, rest[side])
                rest[side] = ""
            last[side] = piece
            *whole, rest[side] = split_sentences(rest[side] + piece.text) or [""]
            yield from ((side, sentence, piece.document) for sentence in whole)
        for side in last:
            yield from cut(side, rest[side])

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

    def _file(self, side: Side) -> Path:
        return self.folder.data / f"{side}.safetensors"

    def _open(self, side: Side) -> Examples:
        try:
            return Examples.open(self._file(side))
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
