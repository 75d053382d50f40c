"""What objectives share whose targets are tokens that a decoder writes."""

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.data.batch import Batch, Frame
from weft.decode.translate import LENGTH_RATIO, Direction, Translator
from weft.models.base import LanguageModel
from weft.nn.config import LossTerms
from weft.nn.loss import cross_entropy, linear_cross_entropy
from weft.objectives.frame import ANY, Asked, direction
from weft.recipe import objective as config
from weft.training.objective import Loss, Objective

W = TypeVar("W", bound=config.TokenObjective)


class TokenObjective(Objective[W]):
    """−log p of each target."""

    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        return token_loss(self.settings, model, features, batch)

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        found = self.mean_loss(model, batches)
        return found | {"perplexity": math.exp(min(700.0, found["loss"]))}


class TranslationObjective(TokenObjective[W]):
    """The same for a model that reads one text and writes another."""

    @cached_property
    def direction(self) -> Direction:
        """How a source is read and an answer begins, unless other languages are asked for."""
        return direction(self)

    @property
    def frame(self) -> Frame:
        """The special tokens around a source."""
        return self.direction.frame

    def translator(self, model: LanguageModel, asked: Asked = ANY, ratio: float | None = LENGTH_RATIO) -> Translator:
        """What translates with a model, between the languages that are asked for. An answer has at most `ratio` times
        its source's tokens and 50 more; None leaves that to the settings."""
        found = self.direction if asked == ANY else direction(self, asked)
        return Translator(model, self.tokenizers.source, self.tokenizers.target, found, self.length, ratio)


def token_loss(settings: config.TokenObjective, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
    """−log p of each target, summed over the loss mask. The extra `nll` is the plain −log p without smoothing and
    z-loss, of which perplexity is made."""
    terms = LossTerms(settings.smoothing, settings.z_loss)
    targets = batch.targets.flatten()
    mask = batch.loss_mask.flatten() if batch.loss_mask is not None else None
    count = targets.numel() if mask is None else mask.sum()
    readout = model.readout(features)
    if readout is not None:
        loss, nll = linear_cross_entropy(readout, targets, mask, terms=terms)
        return loss, count, {"nll": nll}
    logits = model.head(features).flatten(0, 1)
    losses = cross_entropy(logits, targets, terms)
    plain = cross_entropy(logits.detach(), targets) if terms else losses.detach()
    if mask is not None:
        losses, plain = torch.where(mask, losses, 0.0), torch.where(mask, plain, 0.0)
    return losses.sum(), count, {"nll": plain.sum()}
