"""Masked language modelling, the first of BERT's two pretraining tasks."""

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.batch import Batch
from weft.data.corrupt import Masking, masked_batch
from weft.models.base import LanguageModel, row_rng
from weft.nn.loss import linear_cross_entropy
from weft.objectives.text import CorruptedTextObjective
from weft.recipe import objective as config
from weft.training.objective import Loss, Objective

M = TypeVar("M", bound=config.MaskedObjective)


def masked_loss(model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
    """Return −log p of the masked tokens and, if the batch has it, of the next-sentence label. Only masked positions go
    through the head: the logits of the other five sixths would count for nothing."""
    assert batch.loss_mask is not None, "nothing was masked"
    count = batch.count  # known on the host, so the device need not be waited for
    positions = torch.nonzero_static(batch.loss_mask.flatten(), size=count)[:, 0]
    readout = model.readout(features.flatten(0, 1)[positions][None])
    assert readout is not None, "an encoder's logits are a product"
    loss, nll = linear_cross_entropy(readout, batch.targets.flatten()[positions])
    extras = {"nll": nll}
    if batch.next_sentence is not None and batch.next_sentence_weight is not None:
        logits = model.output.next_sentence(features, None, rng=row_rng(batch))  # type: ignore[union-attr,operator]
        losses = F.cross_entropy(logits.float(), batch.next_sentence, reduction="none")
        next_loss = (losses * batch.next_sentence_weight).sum()
        loss, extras["nll"] = loss + next_loss, nll + next_loss.detach()
        extras["next_correct"] = (logits.argmax(-1) == batch.next_sentence).sum()
    return loss, count, extras


class MaskedObjective(Objective[M]):
    """Masked tokens, with or without the next-sentence task."""

    one_shape = False  # as many rows of logits as tokens are masked

    @cached_property
    def masking(self) -> Masking:
        return Masking.of(self.tokenizer, self.settings.rate, self.settings.whole_words)

    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        return masked_loss(model, features, batch)


class Masked(MaskedObjective[config.Masked], CorruptedTextObjective[config.Masked]):
    """Masked tokens in windows of text."""

    usage = "weft embed {run} < lines.txt"

    @property
    def added(self) -> int:
        return self.masking.frame

    def corrupt(self, batch: Batch, numbers: Sequence[int], seed: int) -> Batch:
        return masked_batch(batch, numbers, self.masking, seed=seed)
