"""What is learned: `objective(model, batch) → (loss sum, token count, extras)`.

The sum and the count stay apart because the trainer divides by the count of the whole step, over every part a batch
is cut into; so cutting never changes the gradient. Extras are sums too, worth logging and without a gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.train.config import NextToken
from weft.train.loss import chunk_loss, cross_entropy, linear_cross_entropy

Extras = dict[str, Tensor]
Readout = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]  # features, table and bias of the logits
Objective = Callable[[LanguageModel, Batch], tuple[Tensor, Tensor | int, Extras]]


def given(batch: Batch) -> dict[str, Any]:
    """What a batch says besides its tokens, as keyword arguments of `model.features`."""
    named = {"positions": batch.positions, "documents": batch.documents, "source": batch.source}
    return {key: value for key, value in named.items() if value is not None}


def next_token(settings: NextToken, compiled: bool = False) -> Objective:
    """The objective of every language model: −log p of each target, summed over the loss mask.

    The extra `nll` is the plain −log p without smoothing and z-loss, the number that perplexity is made of.
    `compiled` has a GPU go through the logits with a kernel of its own.
    """
    smoothing, z_loss = settings.smoothing, settings.z_loss
    fast_chunk = torch.compile(chunk_loss) if compiled else chunk_loss

    def objective(model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor | int, Extras]:
        targets = batch.targets.flatten()
        mask = batch.loss_mask.flatten() if batch.loss_mask is not None else None
        count = targets.numel() if mask is None else mask.sum()
        features = model.features(batch.tokens, **given(batch))
        readout: Readout | None = getattr(model, "readout", None)
        if readout is not None:
            features, weight, bias = readout(features)
            chunk = fast_chunk if features.is_cuda else chunk_loss
            loss, nll = linear_cross_entropy(
                features.flatten(0, 1), weight, bias, targets, mask, smoothing, z_loss, chunk=chunk
            )
            return loss, count, {"nll": nll}
        logits = model.head(features).flatten(0, 1)
        losses = cross_entropy(logits, targets, smoothing, z_loss)
        plain = cross_entropy(logits.detach(), targets) if smoothing or z_loss else losses.detach()
        if mask is not None:
            losses, plain = torch.where(mask, losses, 0.0), torch.where(mask, plain, 0.0)
        return losses.sum(), count, {"nll": plain.sum()}

    return objective
