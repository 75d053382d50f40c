"""Texts that belong together: vectors that lie close."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional as F

from weft.data.batch import Batch, Source, framed, framed_lengths
from weft.data.examples import Examples
from weft.data.table import Kind, Row
from weft.evaluate.loss import mean_loss
from weft.models.base import LanguageModel
from weft.objectives.rows import Numbers, RowObjective
from weft.recipe import objective as config
from weft.training.objective import Loss

SIDES = ("first", "second")


class Contrastive(RowObjective[config.Contrastive]):
    """Two columns of text: which text of the batch belongs to this one."""

    usage = "weft embed {run} < lines.txt"

    def columns(self) -> Mapping[str, Kind]:
        return {self.settings.first: "text", self.settings.second: "text"}

    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        if side == "target":
            yield values[self.settings.first]
            yield values[self.settings.second]

    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        return self.ids(rows, {"first": self.settings.first, "second": self.settings.second})

    def lengths(self, examples: Examples) -> Numbers:
        return np.stack([framed_lengths(examples, (side,), self.tokenizer, self.length) for side in SIDES], axis=1)

    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Two texts that belong together, each in a frame of its own; the other one is the source.

        The target of row i is i: its partner among all others (B,).
        """
        one, other = (
            framed([examples.ids(side, n).tolist() for n in numbers], None, self.tokenizer, length=self.length)
            for side in SIDES
        )
        source = Source(other.tokens, other.mask)
        return Batch(one.tokens, torch.arange(len(one.tokens)), mask=one.mask, source=source)

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """Asked both ways: the mean of two −log p (Radford et al. 2021, §2.3). Vectors of length 1: cosines."""
        assert batch.source is not None, "each text has a partner"
        ones = model.forward(batch.tokens, mask=batch.mask).float()
        others = model.forward(batch.source.tokens, mask=batch.source.mask).float()
        cosines = F.normalize(ones, dim=-1) @ F.normalize(others, dim=-1).mT / self.settings.temperature
        own = torch.arange(len(cosines), device=cosines.device)
        there = F.cross_entropy(cosines, own, reduction="sum")
        back = F.cross_entropy(cosines.mT, own, reduction="sum")
        loss = (there + back) / 2
        return loss, batch.count, {"nll": loss.detach()}

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        """The loss: the mean −log p of the right partner among those of its batch."""
        return dict(mean_loss(self.loss, model, batches))
