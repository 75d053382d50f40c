"""Masked words and the next sentence, in pairs of passages: both tasks of BERT at once (Devlin et al. 2019, §3.1)."""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property

from weft.data.batch import Batch
from weft.data.examples import write_sides
from weft.data.sampler import rank_samples
from weft.data.sentences import Sentences, next_sentence_batch, sentence_examples
from weft.data.shards import Side
from weft.errors import DataError
from weft.models.base import LanguageModel
from weft.objectives.masked import MaskedObjective
from weft.objectives.rows import ExampleObjective
from weft.progress import Log
from weft.recipe import objective as config
from weft.recipe.settle import Facts
from weft.training.loader import Loader, steps_of
from weft.training.objective import EVALUATED_TOKENS, Results


class MaskedNext(MaskedObjective[config.MaskedNext], ExampleObjective[config.MaskedNext]):
    """Masked words in pairs of passages, and whether the second follows the first.

    Documents become sentences, of which pairs are drawn as they are read.
    """

    read_as = "sentences"
    usage = "weft train {run} --data rows.tsv objective=classify"

    def prepare(self, log: Log) -> Facts:
        """Sentences of both sides in the run's folder, each with the number of its document."""
        shutil.rmtree(self.folder.data, ignore_errors=True)
        self.folder.data.mkdir(parents=True)
        read, data = Counter[Side](), self.recipe.data
        examples = sentence_examples(data.text(data.parts[0]), self.tokenizer, read)
        notes = {"tokenizer": self.tokenizer.fingerprint}
        write_sides({side: self._file(side) for side in self._sides}, examples, notes=notes)
        return self.facts(read["train"])

    @cached_property
    def loader(self) -> Loader:
        train, size = Sentences(self.examples["train"]), self.recipe.batch.size or 1

        def make(step: int, rank: int, ranks: int) -> Batch:
            # every process draws all rows of the step: the second task is weighed by the targets in all of them
            samples, seed = rank_samples(step - 1, size), self.recipe.seed
            whole = next_sentence_batch(train, self.masking, samples, seed=seed, length=self.length)
            return whole if ranks == 1 else whole.split(ranks)[rank]

        return steps_of(self.recipe.batch, make, lambda step: step * size / train.per_epoch(self.length), "pair")

    @cached_property
    def _held_out(self) -> Sentences | None:
        """The held-out sentences, or None where there are too few for pairs."""
        with suppress(DataError):
            if self.recipe.data.validation.kind != "none":
                return Sentences(self.examples["validation"])
        return None

    @property
    def holds_out(self) -> bool:
        return self._held_out is not None

    def evaluate(self, model: LanguageModel) -> dict[str, float]:
        assert self._held_out is not None
        return self.mean_loss(model, self._batches(self._held_out, self.recipe.evaluate.tokens))

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        sentences = Sentences(self.examples["train"]) if side == "train" else self._held_out
        return Results(dict(self.mean_loss(model, self._batches(sentences, None))) if sentences else {})

    def _batches(self, sentences: Sentences, most: int | None) -> Iterator[Batch]:
        length, few = self.length, max(1, EVALUATED_TOKENS // self.length)
        wanted = sentences.per_epoch(length) if most is None else min(sentences.per_epoch(length), most // length)
        for step in range(max(1, wanted // few)):
            samples, seed = rank_samples(step, few), self.recipe.seed + 1
            yield next_sentence_batch(sentences, self.masking, samples, seed=seed, length=length)
