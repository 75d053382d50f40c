"""Language modelling in both directions on running text: the objective of ELMo."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.batch import Batch, evaluation_batches
from weft.data.shards import Side
from weft.errors import DataError
from weft.evaluate.perplexity import perplexity
from weft.models.base import LanguageModel
from weft.models.elmo import ELMo
from weft.nn.config import LossTerms
from weft.nn.loss import linear_cross_entropy
from weft.objectives.text import TextObjective
from weft.recipe import objective as config
from weft.training.loader import Loader
from weft.training.objective import EVALUATION_BATCH_TOKENS, BatchObjective, Loss, loss_extras

DIRECTIONS = ("forward", "backward")


class Bidirectional(TextObjective[config.Bidirectional], BatchObjective[config.Bidirectional]):
    """Predict each token of a window from those before it, and from those after it."""

    usage = "weft embed {run} --word WORD < lines.txt"

    @cached_property
    def loader(self) -> Loader:
        plain = self.windows(self.length - 1)
        return replace(plain, make=lambda step, rank, ranks: whole_windows(plain.make(step, rank, ranks)))

    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        """Return half the sum of −log p in both directions, for every pair of adjacent tokens."""
        assert isinstance(model, ELMo) and batch.loss_mask is not None
        terms, inside = LossTerms(self.settings.smoothing, self.settings.z_loss), batch.loss_mask[:, :-1].flatten()
        ahead, back = model.directions(features)
        pairs = ((ahead[:, :-1], batch.tokens[:, 1:]), (back[:, 1:], batch.tokens[:, :-1]))
        both = [linear_cross_entropy(model.readout(x), y.flatten(), inside, terms=terms) for x, y in pairs]
        extras = {name: nll for name, (_, nll) in zip(DIRECTIONS, both, strict=True)}
        extras["nll"] = (extras["forward"] + extras["backward"]) / 2
        return (both[0][0] + both[1][0]) / 2, batch.count, extras

    def batches(self, side: Side, max_tokens: int | None = None) -> Iterator[Batch]:
        size, read, apart = max(1, EVALUATION_BATCH_TOKENS // self.length), 0, self.recipe.data.document_mask
        for text in self.tokens(side):
            for batch in evaluation_batches(text, self.length - 1, size, document_mask=apart):
                if max_tokens is not None and read >= max_tokens:
                    break
                read += batch.tokens.numel()
                yield whole_windows(batch)

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        totals, pairs = dict.fromkeys(DIRECTIONS, 0.0), 0
        for batch, extras in loss_extras(self, model, batches):
            pairs += batch.count
            for name in DIRECTIONS:
                totals[name] += float(extras[name])
        if not pairs:
            raise DataError("nothing to evaluate: no document of the text has two tokens")
        means = {name: total / pairs for name, total in totals.items()}
        loss = sum(means.values()) / 2
        named = {f"{name}_perplexity": perplexity(mean) for name, mean in means.items()}
        return {"loss": loss, "perplexity": perplexity(loss), **named}


def whole_windows(batch: Batch) -> Batch:
    """Join the inputs and targets (B, T) of windows of running text to windows (B, T + 1). The loss mask (B, T + 1) is
    True where the next token is in the same document."""
    inside = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.loss_mask is None else batch.loss_mask
    documents = batch.documents
    if documents is not None:
        documents = torch.cat([documents, documents[:, -1:] + (~inside[:, -1:]).long()], dim=1)
    tokens = torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1)
    mask, targets = F.pad(inside, (0, 1)), F.pad(batch.targets, (0, 1))
    return Batch(tokens, targets, loss_mask=mask, documents=documents)
