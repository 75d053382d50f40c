"""Sequence to sequence: one text from another, as in translation, summaries and answers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from weft.data.batch import Batch, Source, filler, framed, framed_lengths, pad, text_length
from weft.data.examples import Examples
from weft.data.shards import Side
from weft.data.table import Kind, Row
from weft.decode.config import Sampling
from weft.evaluate.alignment import Link, alignment_metrics, attended_words, parse_links, word_numbers
from weft.evaluate.translation import translation_metrics
from weft.models.base import LanguageModel, evaluating, inputs
from weft.objectives.rows import Numbers, RowObjective, naming_row
from weft.objectives.tokens import TranslationObjective
from weft.recipe import objective as config
from weft.training.objective import Loss, Results

SHOWN_PAIRS = 8  # in the report
ALIGNED_ROWS = 64  # read in one call while attention is measured


class Pairs(TranslationObjective[config.Pairs], RowObjective[config.Pairs]):
    """Write the target column from the source column."""

    usage = "weft translate {run} < lines.txt"

    def columns(self) -> Mapping[str, Kind]:
        columns: dict[str, Kind] = {self.settings.source: "text", self.settings.target: "text"}
        return columns if self.settings.alignment is None else {**columns, self.settings.alignment: "label"}

    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        yield values[self.settings.source if side == "source" else self.settings.target]

    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        sources = self.tokenizers.source.encode_batch([row.values[self.settings.source] for row in rows])
        targets = self.tokenizers.target.encode_batch([row.values[self.settings.target] for row in rows])
        examples = [{"source": source, "target": target} for source, target in zip(sources, targets, strict=True)]
        if self.settings.alignment is not None:
            for row, example in zip(rows, examples, strict=True):
                with naming_row(row):
                    example |= self._links(row.values, self.settings.alignment)
        return examples

    def _links(self, values: Mapping[str, Any], column: str) -> dict[str, list[int]]:
        """Return the word that each token of either text is part of, and the links as triples in one list."""
        source, target = values[self.settings.source], values[self.settings.target]
        return {
            "source_words": word_numbers(source, self.tokenizers.source.token_spans(source)),
            "target_words": word_numbers(target, self.tokenizers.target.token_spans(target)),
            "links": [number for link in parse_links(values[column], source, target) for number in link],
        }

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

    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        """Return −log p of the targets; in training with `r_drop` α (Liang et al. 2021), the mean over two passes with
        other dropout, plus α/4 times the divergences of their distributions p and q in both directions,
        D(p‖q) + D(q‖p) = Σ (p − q)(log p − log q)."""
        loss, count, extras = super().loss(model, features, batch)
        if not self.settings.r_drop or not model.training or batch.keys is None:
            return loss, count, extras
        other = replace(batch, keys=~batch.keys)
        features_again = model.read(other)
        second = super().loss(model, features_again, other)[0]
        p, q = (model.head(each).float().log_softmax(-1) for each in (features, features_again))
        divergence = ((p.exp() - q.exp()) * (p - q)).sum(-1)
        if batch.loss_mask is not None:
            divergence = divergence.masked_fill(~batch.loss_mask, 0.0)
        return (loss + second) / 2 + self.settings.r_drop / 4 * divergence.sum(), count, extras

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        """Return loss and perplexity, and how greedy translations compare with the targets."""
        examples = self.examples[side]
        sources = [self.tokenizers.source.decode(examples.ids("source", n).tolist()) for n in range(len(examples))]
        targets = [self.tokenizers.target.decode(examples.ids("target", n).tolist()) for n in range(len(examples))]
        greedy = Sampling(temperature=0.0, max_tokens=self.length)
        outputs = self.translator(model, ratio=None).translate(sources, greedy)
        metrics = {
            **super().measure(model, side).metrics,
            **translation_metrics(outputs, targets),
            "decoding": "greedy",
        }
        if self.settings.alignment is not None and model.alignment is not None:
            alignment = self._alignment(model, examples)
            metrics |= {**alignment, "intervals": metrics["intervals"] | alignment["intervals"]}
        shown = [list(row) for row in zip(sources, targets, outputs, strict=True)][:SHOWN_PAIRS]
        return Results(metrics, table=[["source", "reference", "output"], *shown])

    @torch.no_grad()
    def _alignment(self, model: LanguageModel, examples: Examples) -> dict[str, Any]:
        """Compare the true links with the attention of the last layer, mean of its heads, while the model reads the
        targets: the attention that a token is predicted with is the token's."""
        tap, captured, compared = model.alignment, list[Tensor](), []
        assert tap is not None
        before, first = len(self.frame.before), len(self.direction.first)
        max_source, max_target = self.frame.text_length(self.length, 1), text_length(self.length, 1 + first)
        stop = tap.watch(captured.append)
        try:
            with evaluating(model) as device:
                for begin in range(0, len(examples), ALIGNED_ROWS):
                    numbers = np.arange(begin, min(begin + ALIGNED_ROWS, len(examples)))
                    batch = self.batch(examples, numbers).to(device)
                    model.forward_features(batch.tokens, **inputs(batch))
                    attention = captured.pop().float().cpu()  # (rows, [heads,] time, source time)
                    attention = attention.mean(1) if attention.dim() == 4 else attention
                    for n, rows in zip(numbers.tolist(), attention[:, first:, before:].numpy(), strict=True):
                        source = examples.ids("source_words", n)[:max_source]  # long texts are truncated
                        target = examples.ids("target_words", n)[:max_target]
                        predicted = attended_words(rows[: len(target), : len(source)], source, target)
                        links = examples.ids("links", n).reshape(-1, 3).tolist()
                        compared.append((predicted, [Link(*link) for link in links]))
        finally:
            stop()
        return alignment_metrics(compared)
