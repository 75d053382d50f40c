"""Sequence to sequence: one text from another, as in translation, summaries and answers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from weft.data.batch import Batch, Source, filler, framed, framed_lengths, pad, text_length
from weft.data.examples import Examples
from weft.data.shards import Side
from weft.data.table import Kind, Row
from weft.decode.config import Sampling
from weft.evaluate.translation import translation_metrics
from weft.models.base import LanguageModel
from weft.objectives.rows import Numbers, RowObjective
from weft.objectives.tokens import TranslationObjective
from weft.recipe import objective as config
from weft.training.objective import Results

SHOWN_PAIRS = 8  # in the report


class Pairs(TranslationObjective[config.Pairs], RowObjective[config.Pairs]):
    """Write the target column from the source column."""

    usage = "weft translate {run} < lines.txt"

    def columns(self) -> Mapping[str, Kind]:
        return {self.settings.source: "text", self.settings.target: "text"}

    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        yield values[self.settings.source if side == "source" else self.settings.target]

    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        sources = self.tokenizers.source.encode_batch([row.values[self.settings.source] for row in rows])
        targets = self.tokenizers.target.encode_batch([row.values[self.settings.target] for row in rows])
        return [{"source": source, "target": target} for source, target in zip(sources, targets, strict=True)]

    def lengths(self, examples: Examples) -> Numbers:
        """Return (examples, 2): tokens of the source in its frame, and of the target with bos or eos."""
        source = framed_lengths(examples, ("source",), self.frame, length=self.length)
        target = examples.lengths("target") + 1 + len(self.direction.first)
        return np.stack([source, np.minimum(target, self.length)], axis=1)

    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Return sources (B, S), usually text and eos; tokens, bos and target; and targets, target and eos (B, T)."""
        target, (_, bos, first) = self.tokenizers.target, self.direction
        eos, max_length = target.need("eos"), text_length(self.length, 1 + len(first))
        texts = [[*first, *examples.ids("target", n)[:max_length].tolist()] for n in numbers]
        sources = [examples.ids("source", n).tolist() for n in numbers]
        source, real, _ = framed(sources, None, self.frame, length=self.length)
        tokens, _ = pad([[bos, *ids] for ids in texts], filler(target))
        targets, mask = pad([[*ids, eos] for ids in texts], filler(target))
        return Batch(tokens, targets, loss_mask=mask, source=Source(source, real))

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        """Return loss and perplexity, and how greedy translations compare with the targets."""
        examples = self.examples[side]
        sources = [self.tokenizers.source.decode(examples.ids("source", n).tolist()) for n in range(len(examples))]
        targets = [self.tokenizers.target.decode(examples.ids("target", n).tolist()) for n in range(len(examples))]
        greedy = Sampling(temperature=0.0, max_tokens=self.length)
        outputs = self.translator(model, ratio=None).translate(sources, greedy)
        compared = translation_metrics(outputs, targets)
        metrics = {**super().measure(model, side).metrics, **compared, "decoding": "greedy"}
        shown = [list(row) for row in zip(sources, targets, outputs, strict=True)][:SHOWN_PAIRS]
        return Results(metrics, table=[["source", "reference", "output"], *shown])
