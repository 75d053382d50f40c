"""Contrastive decoding: prefer tokens that a strong model finds likelier than a weak one does (Li et al. 2023).

The weak model shares the strong one's bad habits – repetition, commonplaces – but has little of its knowledge, so the
difference of their log-probabilities favours knowledge. The pair is a `LanguageModel`, so every decoding method works.
"""

import math

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.models.base import EncoderInput, LanguageModel, State

MIN_AMATEUR_LOGPROB = -100.0  # log p of tokens that the weak model excludes, such as n-grams it never saw


class ContrastiveState(State):
    """States of both models after the same tokens."""

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


class ContrastiveModel(LanguageModel):
    """Logits (1 + β) log p_expert − β log p_amateur (O'Brien and Lewis 2023); `plausible` bounds p against the best."""

    def __init__(self, expert: LanguageModel, amateur: LanguageModel, strength: float = 0.5, *, plausible: float = 0.1):
        super().__init__()
        sizes = [model.config.vocab_size for model in (expert, amateur)]  # type: ignore[attr-defined]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"a model of {sizes[0]} tokens can't be contrasted with one of {sizes[1]}")
        if not 0.0 <= strength <= 10.0:
            raise ConfigError(f"strength = {strength}: expected 0 … 10")
        if not 0.0 < plausible <= 1.0:
            raise ConfigError(f"plausible = {plausible}: expected a number above 0, at most 1")
        self.config, self.expert, self.amateur = expert.config, expert, amateur
        self.strength, self.plausible = strength, plausible
        # width of the expert's features and dtypes of both models' features, known after the first `advance`
        self.width, self.dtypes = 0, (torch.float32, torch.float32)
        self.train(expert.training)

    def start(self, batch: int, max_len: int, source: EncoderInput | None = None) -> ContrastiveState:
        expert, amateur = (model.start(batch, max_len, source) for model in (self.expert, self.amateur))
        return ContrastiveState(expert, amateur, batch)

    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        """Read tokens (batch, time) with both models; return their features, concatenated."""
        assert isinstance(state, ContrastiveState)
        strong = self.expert.advance(tokens, state.expert, lengths)
        weak = self.amateur.advance(tokens, state.amateur, lengths)
        state.advance(tokens.shape[1], lengths)
        self.width, self.dtypes = strong.shape[-1], (strong.dtype, weak.dtype)
        # an n-gram model's features are its last token ids, which float32 holds exactly
        common = strong.dtype if strong.dtype == weak.dtype else torch.float32
        return torch.cat([strong.to(common), weak.to(common)], dim=-1)

    def head(self, features: Tensor) -> Tensor:
        """Logits (batch, time, vocab_size) of features (batch, time, both widths); −inf for implausible tokens."""
        strong = self.expert.head(features[..., : self.width].to(self.dtypes[0])).float().log_softmax(dim=-1)
        weak = self.amateur.head(features[..., self.width :].to(self.dtypes[1])).float().log_softmax(dim=-1)
        threshold = strong.amax(dim=-1, keepdim=True) + math.log(self.plausible)
        weak = weak.clamp(min=MIN_AMATEUR_LOGPROB)
        return ((1.0 + self.strength) * strong - self.strength * weak).masked_fill(strong < threshold, -torch.inf)
