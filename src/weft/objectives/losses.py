"""What is learned: `objective(model, batch) → (loss sum, token count, extras)`.

The sum and the count stay apart because the trainer divides by the count of the whole step, over every part a batch
is cut into; so cutting never changes the gradient. Extras are sums too, worth logging and without a gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.nn.config import LossTerms
from weft.nn.loss import Readout, cross_entropy, linear_cross_entropy
from weft.recipe.objective import Words

Extras = dict[str, Tensor]
Objective = Callable[[LanguageModel, Batch], tuple[Tensor, Tensor | int, Extras]]


def given(batch: Batch) -> dict[str, Any]:
    """What a batch says besides its tokens, as keyword arguments of `model.features`."""
    named = {
        "positions": batch.positions,
        "documents": batch.documents,
        "mask": batch.mask,
        "segments": batch.segments,
        "source": batch.source,
    }
    return {key: value for key, value in named.items() if value is not None}


# ---- words


def next_token(settings: Words) -> Objective:
    """The objective of every model that writes: −log p of each target, summed over the loss mask.

    The extra `nll` is the plain −log p without smoothing and z-loss, the number that perplexity is made of.
    """
    terms = LossTerms(settings.smoothing, settings.z_loss)

    def objective(model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor | int, Extras]:
        targets = batch.targets.flatten()
        mask = batch.loss_mask.flatten() if batch.loss_mask is not None else None
        count = targets.numel() if mask is None else mask.sum()
        features = model.features(batch.tokens, **given(batch))
        readout: Callable[[Tensor], Readout] | None = getattr(model, "readout", None)
        if readout is not None:
            loss, nll = linear_cross_entropy(readout(features), targets, mask, terms)
            return loss, count, {"nll": nll}
        logits = model.head(features).flatten(0, 1)
        losses = cross_entropy(logits, targets, terms)
        plain = cross_entropy(logits.detach(), targets) if terms else losses.detach()
        if mask is not None:
            losses, plain = torch.where(mask, losses, 0.0), torch.where(mask, plain, 0.0)
        return losses.sum(), count, {"nll": plain.sum()}

    return objective


def masked_words() -> Objective:
    """−log p of the words that were masked and, where a batch asks, of whether its second sentences follow.

    Only the masked places go through the head: the other five sixths of the logits would count for nothing.
    """

    def objective(model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor | int, Extras]:
        assert batch.loss_mask is not None, "nothing was masked"
        features = model.features(batch.tokens, **given(batch))
        count = batch.count  # known on the host, so that the device isn't asked
        places = torch.nonzero_static(batch.loss_mask.flatten(), size=count)[:, 0]
        chosen = features.flatten(0, 1)[places][None]
        loss, nll = linear_cross_entropy(model.readout(chosen), batch.targets.flatten()[places])  # type: ignore[operator]
        extras = {"nll": nll}
        if batch.next_sentence is not None and batch.next_sentence_weight is not None:
            logits = model.output.next_sentence(features, None)  # type: ignore[union-attr,operator]
            losses = F.cross_entropy(logits.float(), batch.next_sentence, reduction="none")
            next_loss = (losses * batch.next_sentence_weight).sum()
            loss, extras["nll"] = loss + next_loss, nll + next_loss.detach()
            extras["next_correct"] = (logits.argmax(-1) == batch.next_sentence).sum()
        return loss, count, extras

    return objective


# ---- answers about a text


def classify(model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor | int, Extras]:
    """−log p of each row's class; targets (B,) int64."""
    logits = model.forward(batch.tokens, **given(batch)).float()
    loss = F.cross_entropy(logits, batch.targets, reduction="sum")
    return loss, batch.count, {"nll": loss.detach()}


def score(model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor | int, Extras]:
    """The squared error of each row's number; targets (B,) float32."""
    found = model.forward(batch.tokens, **given(batch)).float()[:, 0]
    loss = F.mse_loss(found, batch.targets.float(), reduction="sum")
    return loss, batch.count, {"nll": loss.detach()}


def tag(model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor | int, Extras]:
    """−log p of the label of each place that the loss mask keeps; targets (B, T) int64."""
    logits = model.forward(batch.tokens, **given(batch)).float()
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    if batch.loss_mask is not None:
        losses = torch.where(batch.loss_mask.flatten(), losses, 0.0)
    loss = losses.sum()
    return loss, batch.count, {"nll": loss.detach()}


def twins(temperature: float) -> Objective:
    """Which text of the batch belongs to this one, asked both ways: the mean of two −log p (Radford et al. 2021, §2.3).

    Vectors have length 1, so their products are cosines.
    """

    def objective(model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor | int, Extras]:
        assert batch.source is not None, "a twin has a twin"
        ones = model.forward(batch.tokens, mask=batch.mask).float()
        others = model.forward(batch.source.tokens, mask=batch.source.mask).float()
        likeness = F.normalize(ones, dim=-1) @ F.normalize(others, dim=-1).mT / temperature
        own = torch.arange(len(likeness), device=likeness.device)
        there = F.cross_entropy(likeness, own, reduction="sum")
        back = F.cross_entropy(likeness.mT, own, reduction="sum")
        loss = (there + back) / 2
        return loss, batch.count, {"nll": loss.detach()}

    return objective
