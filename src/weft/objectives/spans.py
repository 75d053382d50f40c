"""Spans cut out of running text, written one after the other: what T5 learns."""

from collections.abc import Sequence
from functools import cached_property

from weft.data.batch import Batch
from weft.data.corrupt import SpanCorruption, spans_batch
from weft.objectives.text import CorruptedTextObjective
from weft.objectives.tokens import TranslationObjective
from weft.recipe import objective as config


class Spans(TranslationObjective[config.Spans], CorruptedTextObjective[config.Spans]):
    """What was cut out, and the marks between, from what was left."""

    usage = "weft train {run} --data pairs.tsv objective=pairs"
    added = 0

    @cached_property
    def corruption(self) -> SpanCorruption:
        return SpanCorruption.of(self.tokenizer, self.settings.rate, self.settings.mean)

    def corrupt(self, batch: Batch, numbers: Sequence[int], seed: int) -> Batch:
        return spans_batch(batch.tokens.numpy(), numbers, self.corruption, seed=seed)
