"""Span corruption, the objective of T5: write the spans that were cut out of running text, one after the other."""

from collections.abc import Sequence
from functools import cached_property

from weft.data.batch import Batch
from weft.data.corrupt import SpanCorruption, spans_batch
from weft.objectives.text import CorruptedTextObjective
from weft.objectives.tokens import TranslationObjective
from weft.recipe import objective as config


class Spans(TranslationObjective[config.Spans], CorruptedTextObjective[config.Spans]):
    """Predict the spans and the sentinels between them from the remaining text."""

    usage = "weft train {run} --data pairs.tsv objective=pairs"
    added = 0
    metrics = CorruptedTextObjective.metrics  # without perplexity, which sentinels would distort

    @cached_property
    def corruption(self) -> SpanCorruption:
        return SpanCorruption.of(self.tokenizer, self.settings.rate, self.settings.mean)

    def corrupt(self, batch: Batch, numbers: Sequence[int], seed: int) -> Batch:
        return spans_batch(batch.tokens.numpy(), numbers, self.corruption, seed=seed)
