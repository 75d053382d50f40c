"""Spans cut out of running text, written one after the other: what T5 learns."""

from collections.abc import Sequence
from functools import cached_property

from weft.data.batch import Batch
from weft.data.corrupt import SpanCorruption, spans_batch
from weft.decode.config import Beam, Sampling
from weft.models.base import LanguageModel
from weft.objectives.text import CorruptedTextObjective
from weft.objectives.words import translate_texts, word_loss
from weft.progress import Advance
from weft.recipe import objective as config
from weft.training.objective import Loss


class Spans(CorruptedTextObjective[config.Spans]):
    """What was cut out, from what was left."""

    usage = "weft train … init={run}"
    added = 0

    @cached_property
    def corruption(self) -> SpanCorruption:
        return SpanCorruption.of(self.tokenizer, self.settings.rate, self.settings.mean)

    def corrupt(self, batch: Batch, numbers: Sequence[int], seed: int) -> Batch:
        return spans_batch(batch.tokens.numpy(), numbers, self.corruption, seed)

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """−log p of the tokens that were cut out, and of the marks between them."""
        return word_loss(self.settings, model, batch)

    def translate(
        self,
        model: LanguageModel,
        texts: Sequence[str],
        settings: Beam | Sampling | None = None,
        progress: Advance | None = None,
    ) -> list[str]:
        """What the model writes for each text, marks included, in their order. Beam search by default."""
        return translate_texts(self, model, texts, settings, progress)
