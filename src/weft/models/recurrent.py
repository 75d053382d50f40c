"""The recurrent language model: embeddings, a recurrent stack, and a distribution over the next token.

    h_t = σ(W_ah h_{t−1} + W_ax x_t + b_a)        y_t = softmax(W_yh h_t + b_y)

(Elman 1990; Mikolov et al. 2010), or LSTM or GRU cells in the place of σ(…).
"""

from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ModelError
from weft.models.base import LanguageModel, Source, State, check_tokens
from weft.models.config import Recurrent as RecurrentConfig
from weft.nn.dropout import Dropout, RowRng, number_dropouts
from weft.nn.init import reset_recurrent
from weft.nn.loss import Across, Readout
from weft.nn.recurrent import Between, Carried, Layers, parts, read, read_documents, recurrence


class HiddenStates(State):
    """A stack's states after every token so far, so that going back to any length is exact.

    `states` (batch, max_len + 1, parts, layers, d_model): place n is the state after n tokens, zeros at place 0.
    """

    can_grow = True

    def __init__(self, batch: int, max_len: int, stack: nn.RNNBase):
        weight = stack.all_weights[0][0]
        super().__init__(batch, max_len, weight.device)
        shape = (batch, max_len + 1, parts(stack), stack.num_layers, stack.hidden_size)
        self.states = torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    def current(self) -> Tensor:
        """The state (parts, layers, batch, d_model) after the tokens counted so far, row by row."""
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        return self.states[rows, self.lengths].permute(1, 2, 0, 3)

    def keep(self, state: Tensor, later: int) -> None:
        """Keep the state (parts, layers, batch, d_model) that comes `later` tokens after those counted so far."""
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        self.states[rows, self.lengths + later] = state.detach().permute(2, 0, 1, 3).to(self.states.dtype)

    def _append(self, positions: int) -> None:
        self.states = F.pad(self.states, (0, 0) * 3 + (0, positions))

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self.states = self.states[index]


class Other(TypedDict, total=False):
    """What other models read: positions are ignored, for this one reads in order, and a source is refused."""

    positions: Tensor | None
    source: Source | None


class Recurrent(LanguageModel):
    """An Elman, LSTM or GRU language model. Dropout falls on the non-recurrent edges (Zaremba et al. 2014)."""

    config: RecurrentConfig
    across: Across | None = None  # where processes divide the words among them

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.config = config
        d_embedding = config.d_embedding or config.d_model
        self.embedding = nn.Embedding(config.vocab_size, d_embedding)
        self.dropout = Dropout(config.dropout, config.variational)
        sizes = Layers(d_embedding, config.d_model, config.layers)
        self.recurrence = recurrence(config.cell, sizes, config.activation)
        self.between = Between(config.layers, config.dropout, config.variational)
        self.output_dropout = Dropout(config.dropout, config.variational)
        # W_yh and b_y. Tied, W_yh is the embedding table and is stored once.
        self.output = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        number_dropouts(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_recurrent(self, self.config.init)

    def forward_features(
        self,
        tokens: Tensor,
        *,
        documents: Tensor | None = None,
        carried: Carried | None = None,
        rng: RowRng | None = None,
        **other: Unpack[Other],
    ) -> Tensor:
        """Hidden states (batch, time, d_model) of tokens (batch, time).

        Each row is read from zeros, or on from the `carried` state, which then is the one after the last token; with
        documents (batch, time), their numbers, each of them from zeros.
        """
        self._refuse(other.get("source"))
        check_tokens(tokens, self.config.vocab_size)
        inputs = self.dropout(self.embedding(tokens), rng)
        if documents is not None:
            hidden = read_documents(self.recurrence, inputs, documents, self.between.drop(rng, tokens.is_cuda))
        else:
            state = None if carried is None else carried.state
            hidden, last = read(self.recurrence, inputs, state, self.between.drop(rng, tokens.is_cuda))
            if carried is not None:
                carried.state = last.detach()
        return self.output_dropout(hidden, rng)

    def readout(self, features: Tensor) -> Readout:
        table = self.embedding.weight if self.output is None else self.output
        return Readout.of(features, table, self.output_bias, self.across)

    def start(self, batch: int, max_len: int, source: Source | None = None) -> HiddenStates:
        self._refuse(source)
        return HiddenStates(batch, max_len, self.recurrence)

    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        assert isinstance(state, HiddenStates)
        check_tokens(tokens, self.config.vocab_size)
        T = tokens.shape[1]
        state.reserve(T)
        inputs = self.dropout(self.embedding(tokens))
        now = state.current()
        hidden = []
        for t in range(T):
            h, now = read(self.recurrence, inputs[:, t : t + 1], now, self.between.drop(None, tokens.is_cuda))
            state.keep(now, t + 1)
            hidden.append(h)
        state.advance(T, lengths)
        return self.output_dropout(torch.cat(hidden, dim=1))

    def _refuse(self, source: Source | None) -> None:
        if source is not None:
            raise ModelError(f"{self._name()} continues a text and cannot read a source; 'bahdanau' can")
