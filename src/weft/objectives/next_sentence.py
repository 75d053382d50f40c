"""BERT's pretraining on pairs of passages: masked tokens and next-sentence prediction (Devlin et al. 2019, §3.1)."""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

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
from weft.training.loader import Loader, even_loader
from weft.training.objective import EVALUATION_BATCH_TOKENS, loss_extras


class MaskedNext(MaskedObjective[config.MaskedNext], ExampleObjective[config.MaskedNext]):
    """Predict masked tokens in a pair of passages of sentences, and whether the second follows the first."""

    read_as = "sentences"
    usage = "weft train {run} --data rows.tsv objective=classify"

    def prepare(self, log: Log) -> Facts:
        """Write the sentences of both splits into the run's folder, each with the number of its document."""
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
            # every rank draws all rows of the step: the second task is weighted by the targets in all of them
            samples, seed = rank_samples(step - 1, size), self.recipe.seed
            batch = next_sentence_batch(train, self.masking, samples, seed=seed, length=self.length)
            return batch if ranks == 1 else batch.split(ranks)[rank]

        per_epoch = train.per_epoch(self.length)
        return even_loader(self.recipe.batch, make, lambda step: step * size / per_epoch, row="pair")

    @cached_property
    def _held_out(self) -> Sentences | None:
        """The held-out sentences, or None if there are too few for pairs."""
        with suppress(DataError):
            if self.recipe.data.validation.kind != "none":
                return Sentences(self.examples["validation"])
        return None

    @property
    def holds_out(self) -> bool:
        return self._held_out is not None

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        """Return the mean loss of both tasks, and the accuracy of next-sentence prediction."""
        total, targets, correct, pairs = 0.0, 0, 0, 0
        for batch, extras in loss_extras(self, model, batches):
            total += float(extras["nll"])
            targets += batch.count
            correct += int(extras["next_correct"])
            pairs += len(batch.tokens)
        return {"loss": total / max(1, targets), "next_accuracy": correct / pairs} if pairs else {}

    def batches(self, side: Side, max_tokens: int | None = None) -> Iterator[Batch]:
        sentences = Sentences(self.examples["train"]) if side == "train" else self._held_out
        if sentences is None:
            return
        length, pairs = self.length, sentences.per_epoch(self.length)
        size = max(1, EVALUATION_BATCH_TOKENS // length)
        if max_tokens is not None:
            pairs = min(pairs, max_tokens // length)
        for step in range(max(1, pairs // size)):
            samples, seed = rank_samples(step, size), self.recipe.seed + 1
            yield next_sentence_batch(sentences, self.masking, samples, seed=seed, length=length)
