"""Objectives whose targets are tokens that a decoder writes."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.data.batch import Batch, Frame
from weft.decode.translate import LENGTH_RATIO, Direction, Translator
from weft.evaluate.perplexity import perplexity
from weft.models.base import LanguageModel
from weft.nn.config import LossTerms
from weft.nn.loss import cross_entropy, linear_cross_entropy
from weft.objectives.frame import ANY_LANGUAGES, LanguagePair, direction
from weft.recipe import objective as config
from weft.training.objective import Loss, Objective, mean_loss

W = TypeVar("W", bound=config.TokenObjective)


class TokenObjective(Objective[W]):
    """−log p of each target token."""

    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        return token_loss(model, features, batch, settings=self.settings)

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        loss = mean_loss(self, model, batches)
        return {"loss": loss, "perplexity": perplexity(loss)}


class TranslationObjective(TokenObjective[W]):
    """−log p of each target token, for a model that reads one text and writes another."""

    @cached_property
    def direction(self) -> Direction:
        """The frame of a source and the beginning of an answer, unless other languages are requested."""
        return direction(self)

    @property
    def frame(self) -> Frame:
        """The special tokens around a source."""
        return self.direction.frame

    def translator(
        self, model: LanguageModel, languages: LanguagePair = ANY_LANGUAGES, ratio: float | None = LENGTH_RATIO
    ) -> Translator:
        """Return a translator between the requested languages. An answer has at most `ratio` times its source's tokens
        and 50 more; None leaves the limit to the settings."""
        chosen = self.direction if languages == ANY_LANGUAGES else direction(self, languages)
        return Translator(model, self.tokenizers.source, self.tokenizers.target, chosen, self.length, ratio)


def token_loss(model: LanguageModel, features: Tensor, batch: Batch, *, settings: config.TokenObjective) -> Loss:
    """Return −log p of the targets, summed over the loss mask; the extra `nll` is without smoothing and z-loss."""
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
