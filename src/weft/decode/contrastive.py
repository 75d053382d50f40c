"""Contrastive decoding: what a strong model finds likelier than a weak one does (Li et al. 2023).

The weak model has the strong one's bad habits – repetition, commonplaces – but little of its knowledge; so the
difference of their log-probabilities favours the knowledge. Two models in a row are a model again: everything that
decodes one decodes this.
"""

import math

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.models.base import EncoderInput, LanguageModel, State

NEVER = -100.0  # log p of what the weak model thinks impossible


class BothStates(State):
    """Both models' states after the same tokens."""

    def __init__(self, expert: State, amateur: State, batch: int):
        super().__init__(batch, expert.max_len, expert.lengths.device)
        self.expert, self.amateur = expert, amateur

    def truncate(self, lengths: int | Tensor) -> None:
        super().truncate(lengths)
        self.expert.truncate(lengths)
        self.amateur.truncate(lengths)

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self.expert.reorder(index)
        self.amateur.reorder(index)


class Contrasted(LanguageModel):
    """logits (1 + β) log p_expert − β log p_amateur, of tokens that the expert gives α times its best one or more.

    The form is O'Brien and Lewis's (2023); β = 0 is the expert without its unlikely tokens.
    """

    def __init__(self, expert: LanguageModel, amateur: LanguageModel, strength: float = 0.5, plausible: float = 0.1):
        super().__init__()
        sizes = [model.config.vocab_size for model in (expert, amateur)]  # type: ignore[attr-defined]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"a model of {sizes[0]} tokens can't be contrasted with one of {sizes[1]}")
        if not 0.0 <= strength <= 10.0:
            raise ConfigError(f"strength = {strength}: expected 0 … 10")
        if not 0.0 < plausible <= 1.0:
            raise ConfigError(f"plausible = {plausible}: expected above 0, and 1 at most")
        self.config, self.expert, self.amateur = expert.config, expert, amateur
        self.strength, self.plausible = strength, plausible
        # the width and type of the expert's features and the type of the amateur's, known once they have read something
        self.width, self.types = 0, (torch.float32, torch.float32)
        self.train(expert.training)

    def start(self, batch: int, max_len: int, source: EncoderInput | None = None) -> BothStates:
        return BothStates(self.expert.start(batch, max_len, source), self.amateur.start(batch, max_len, source), batch)

    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        """tokens (batch, time) read by both → the features of both, side by side."""
        assert isinstance(state, BothStates)
        strong = self.expert.advance(tokens, state.expert, lengths)
        weak = self.amateur.advance(tokens, state.amateur, lengths)
        state.advance(tokens.shape[1], lengths)
        self.width, self.types = strong.shape[-1], (strong.dtype, weak.dtype)
        # an n-gram's features are its last tokens: float32 holds such numbers exactly, and narrower features too
        both = strong.dtype if strong.dtype == weak.dtype else torch.float32
        return torch.cat([strong.to(both), weak.to(both)], dim=-1)

    def head(self, features: Tensor) -> Tensor:
        """(batch, time, both widths) → logits (batch, time, vocab_size), −inf for what the expert finds implausible."""
        strong = self.expert.head(features[..., : self.width].to(self.types[0])).float().log_softmax(dim=-1)
        weak = self.amateur.head(features[..., self.width :].to(self.types[1])).float().log_softmax(dim=-1)
        floor = strong.amax(dim=-1, keepdim=True) + math.log(self.plausible)
        weak = weak.clamp(min=NEVER)  # what counts never saw is no infinite merit
        return ((1.0 + self.strength) * strong - self.strength * weak).masked_fill(strong < floor, -torch.inf)
