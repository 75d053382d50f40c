"""Recurrent language model: embeddings, a recurrent stack, and a distribution over the next token.

    h_t = σ(W_ah h_{t−1} + W_ax x_t + b_a)        y_t = softmax(W_yh h_t + b_y)

(Elman 1990; Mikolov et al. 2010), or with LSTM or GRU cells instead of σ(…).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ModelError
from weft.models.base import EncoderInput, LanguageModel, State, check_tokens
from weft.models.config import Recurrent as RecurrentConfig
from weft.nn.dropout import Dropout, RowRng, number_dropouts
from weft.nn.init import reset_recurrent
from weft.nn.loss import Readout, VocabShard
from weft.nn.recurrent import CarriedState, InterLayerDropout, Weights, read, read_documents, recurrence, state_parts
from weft.progress import pause


class HiddenStates(State):
    """States of a stack after every token so far, so that truncation to any length is exact: `states` (batch,
    max_len + 1, parts, layers, d_model), where index n is the state after n tokens, zeros at index 0."""

    can_grow = True

    def __init__(self, batch: int, max_len: int, stack: nn.RNNBase):
        weight = stack.all_weights[0][0]
        super().__init__(batch, max_len, weight.device)
        shape = (batch, max_len + 1, state_parts(stack), stack.num_layers, stack.hidden_size)
        self.states = torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    def current(self) -> Tensor:
        """State (parts, layers, batch, d_model) after the tokens counted so far."""
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        return self.states[rows, self.lengths].permute(1, 2, 0, 3)

    def keep(self, state: Tensor, later: int) -> None:
        """Store the state (parts, layers, batch, d_model) that is `later` tokens after those counted so far."""
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        self.states[rows, self.lengths + later] = state.detach().permute(2, 0, 1, 3).to(self.states.dtype)

    def _append(self, positions: int) -> None:
        self.states = F.pad(self.states, (0, 0) * 3 + (0, positions))

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self.states = self.states[index]


class Recurrent(LanguageModel):
    """Elman, LSTM or GRU language model. Dropout is on the non-recurrent connections (Zaremba et al. 2014), and
    `weight_drop` on the recurrent ones (Merity et al. 2018)."""

    config: RecurrentConfig
    vocab_shard: VocabShard | None = None  # set if tensor parallelism divides the vocabulary

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.config = config
        d_embedding = config.d_embedding or config.d_model
        self.embedding = nn.Embedding(config.vocab_size, d_embedding)
        p_input = config.dropout if config.dropout_input is None else config.dropout_input
        p_output = config.dropout if config.dropout_output is None else config.dropout_output
        self.dropout = Dropout(p_input, config.variational)
        sizes, activation = (d_embedding, config.d_model), config.activation
        self.recurrence = recurrence(
            config.cell, *sizes, layers=config.layers, activation=activation, d_last=config.d_last
        )
        self.between = InterLayerDropout(config.layers, config.dropout, config.variational)
        self.output_dropout = Dropout(p_output, config.variational)
        self.word_dropout = Dropout(config.word_dropout)
        self.weight_drop = nn.ModuleList(Dropout(config.weight_drop) for _ in range(config.layers))
        # W_yh and b_y; if tied, W_yh is the embedding table
        self.output = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        number_dropouts(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_recurrent(self, self.config.init)

    def forward_features(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        source: EncoderInput | None = None,
        documents: Tensor | None = None,
        carried: CarriedState | None = None,
        rng: RowRng | None = None,
    ) -> Tensor:
        """Hidden states (batch, time, d_model) of tokens (batch, time).

        Rows start from zeros, or from the `carried` state, which is then set to the one after the last token. With
        document ids (batch, time), every document starts from zeros. Positions are ignored: tokens are read in order.
        """
        self._refuse(source)
        check_tokens(tokens, self.config.vocab_size)
        drop, step = self.between.drop(rng, tokens.is_cuda), None if rng is None else rng.of_step()
        vectors = self.embedding(tokens)
        if self.word_dropout.drops:
            vectors = vectors * self.word_dropout(vectors.new_ones(1, self.config.vocab_size, 1), step)[0, tokens]
        inputs = self.dropout(vectors, rng)
        if documents is not None:
            hidden = read_documents(self.recurrence, inputs, documents, drop=drop)
        else:
            state, weights = None if carried is None else carried.state, self._dropped_weights(step)
            hidden, last = read(self.recurrence, inputs, state, drop=drop, weights=weights)
            if carried is not None:
                carried.state = last.detach()
        return self.output_dropout(hidden, rng)

    def _dropped_weights(self, rng: RowRng | None) -> Weights | None:
        """The recurrent matrices of a pass with some weights dropped (Wan et al. 2013); None if it drops none."""
        if not (self.training and self.config.weight_drop):
            return None
        return lambda layer, W_ah: self.weight_drop[layer](W_ah[None], rng)[0]

    def readout(self, features: Tensor) -> Readout:
        table = self.embedding.weight if self.output is None else self.output
        return Readout(features, table, self.output_bias, shard=self.vocab_shard).local()

    def start(self, batch: int, max_len: int, source: EncoderInput | None = None) -> HiddenStates:
        self._refuse(source)
        return HiddenStates(batch, max_len, self.recurrence)

    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        assert isinstance(state, HiddenStates)
        check_tokens(tokens, self.config.vocab_size)
        T = tokens.shape[1]
        state.reserve(T)
        inputs, now, hidden = self.dropout(self.embedding(tokens)), state.current(), []
        for t in range(T):
            if t:  # a long text is read in steps
                pause()
            h, now = read(self.recurrence, inputs[:, t : t + 1], now, drop=self.between.drop(None, tokens.is_cuda))
            state.keep(now, t + 1)
            hidden.append(h)
        state.advance(T, lengths)
        return self.output_dropout(torch.cat(hidden, dim=1))

    def _refuse(self, source: EncoderInput | None) -> None:
        if source is not None:
            raise ModelError(f"{self._name()} continues a text and cannot read a source; 'bahdanau' can")
