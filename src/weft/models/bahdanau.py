"""Attention before Transformers: an RNN encoder, an RNN decoder, and a soft alignment between them.

Bahdanau, Cho and Bengio 2015, §3 and appendix A. The encoder reads the source in both directions. Before each target
token the decoder attends to the source, and reads the weighted mean of its annotations.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.base import EncoderInput, LanguageModel, State, check_tokens
from weft.models.config import Bahdanau as BahdanauConfig
from weft.models.recurrent import HiddenStates
from weft.nn.dropout import Dropout, RowRng, number_dropouts
from weft.nn.init import reset_recurrent
from weft.nn.loss import Readout, VocabShard
from weft.nn.recurrent import InterLayerDropout, read, read_masked, recurrence, state_parts
from weft.nn.scaled_dot_product import Probabilities
from weft.progress import pause


class Encoded(NamedTuple):
    """Encoded source."""

    annotations: Tensor  # h_j (batch, source time, 2 d_model)
    keys: Tensor  # W_k h_j (batch, source time, d_attention), computed once for all target steps
    mask: Tensor  # (batch, source time), True where a token is real
    state: Tensor  # first state of the decoder (parts, layers, batch, d_model)


class AdditiveAttention(nn.Module):
    """e_j = v · tanh(W_q s + W_k h_j), a = softmax(e): a small network scores how well each source token matches.
    Probabilities (batch, target time, source time) of a whole sequence pass through the tap in one call."""

    def __init__(self, d_query: int, d_key: int, d_attention: int):
        super().__init__()
        self.queries = nn.Linear(d_query, d_attention, bias=False)
        self.keys = nn.Linear(d_key, d_attention, bias=False)
        self.scores = nn.Linear(d_attention, 1, bias=False)
        self.probabilities = Probabilities()

    def forward(self, query: Tensor, source: Encoded) -> tuple[Tensor, Tensor]:
        """query s (batch, d_query) → context Σ a_j h_j (batch, 2 d_model), and a (batch, source time), 0 at padding."""
        scores = self.scores(torch.tanh(self.queries(query)[:, None] + source.keys)).squeeze(-1)
        a = scores.masked_fill(~source.mask, float("-inf")).softmax(-1)
        return torch.einsum("bs,bsd->bd", a, source.annotations), a


class AlignedStates(HiddenStates):
    """Hidden states of a decoder, and the encoded sources of its rows."""

    def __init__(self, batch: int, max_len: int, stack: nn.RNNBase, *, source: Encoded):
        super().__init__(batch, max_len, stack)
        self.source = source
        self.keep(source.state, 0)

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        annotations, keys, mask, state = self.source
        self.source = Encoded(annotations[index], keys[index], mask[index], state[:, :, index])


class Bahdanau(LanguageModel):
    """Sequence-to-sequence model with additive attention.

    For each token, the previous state of the top layer queries the context; the decoder reads embedding and context;
    and a maxout over pairs combines new state, context and embedding into the readout (appendix A.2.2).
    """

    config: BahdanauConfig
    vocab_shard: VocabShard | None = None  # set if tensor parallelism divides the vocabulary

    def __init__(self, config: BahdanauConfig):
        super().__init__()
        self.config = config
        D = config.d_model
        d_embedding = config.d_embedding or D
        self.embedding = nn.Embedding(config.vocab_size, d_embedding)
        # without its own vocabulary, the source shares the target's embeddings
        size = config.source_vocab_size
        self.source_embedding = None if size is None else nn.Embedding(size, d_embedding)
        self.source_dropout = Dropout(config.dropout)
        self.encoder = recurrence(config.cell, d_embedding, D, layers=config.layers, bidirectional=True)
        self.between_encoder = InterLayerDropout(config.layers, config.dropout)
        self.dropout = Dropout(config.dropout)
        self.decoder = recurrence(config.cell, d_embedding + 2 * D, D, layers=config.layers)
        self.between_decoder = InterLayerDropout(config.layers, config.dropout)
        self.output_dropout = Dropout(config.dropout)
        self.bridge = nn.Linear(D, state_parts(self.decoder) * config.layers * D)
        self.attention = AdditiveAttention(D, 2 * D, config.d_attention or D)
        self.maxout = nn.Linear(D + 2 * D + d_embedding, 2 * D)
        self.output = nn.Linear(D, config.vocab_size)
        number_dropouts(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_recurrent(self, self.config.init)

    @property
    def alignment(self) -> Probabilities:
        return self.attention.probabilities

    def encode(self, source: EncoderInput, rng: RowRng | None = None) -> Encoded:
        """Read source.tokens (batch, source time) in both directions; padding on either side is skipped. The decoder
        starts from tanh(W ←h_1): the backward state at the first token has read all others."""
        tokens = source.tokens
        check_tokens(tokens, self.config.source_vocab_size or self.config.vocab_size)
        mask = torch.ones_like(tokens, dtype=torch.bool) if source.mask is None else source.mask.bool()
        training = self.training and tokens.is_cuda  # don't wait: sources of training have a token
        if not training and (empty := (~mask.any(1)).nonzero().flatten().tolist()):
            raise ModelError(f"the source of row {empty[0]} is empty; a source needs at least one token")
        table = self.source_embedding if self.source_embedding is not None else self.embedding
        inputs, drop = self.source_dropout(table(tokens), rng), self.between_encoder.drop(rng, tokens.is_cuda)
        if source.mask is None and not tokens.is_cuda:
            annotations, _ = read(self.encoder, inputs, drop=drop)
        else:
            annotations = read_masked(self.encoder, inputs, mask, drop=drop)
        rows = torch.arange(len(tokens), device=tokens.device)
        backward = annotations[rows, mask.int().argmax(1), self.config.d_model :]
        state = torch.tanh(self.bridge(backward)).unflatten(-1, (state_parts(self.decoder), -1, self.config.d_model))
        return Encoded(annotations, self.attention.keys(annotations), mask, state.permute(1, 2, 0, 3))

    def forward_features(
        self,
        tokens: Tensor,
        *,
        source: EncoderInput | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        rng: RowRng | None = None,
    ) -> Tensor:
        """Readouts (batch, time, d_model) of target tokens (batch, time). Positions are ignored."""
        if documents is not None:
            raise ModelError(f"{self._name()} has one source per row; packed documents have none")
        encoded = self._encode_for(len(tokens), source, rng)
        return self._decode(tokens, encoded, encoded.state, stored=None, rng=rng)

    def readout(self, features: Tensor) -> Readout:
        return Readout(features, self.output.weight, self.output.bias, shard=self.vocab_shard).local()

    def start(self, batch: int, max_len: int, source: EncoderInput | None = None) -> AlignedStates:
        return AlignedStates(batch, max_len, self.decoder, source=self._encode_for(batch, source))

    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        assert isinstance(state, AlignedStates)
        state.reserve(tokens.shape[1])
        features = self._decode(tokens, state.source, state.current(), stored=state, rng=None)
        state.advance(tokens.shape[1], lengths)
        return features

    def _encode_for(self, batch: int, source: EncoderInput | None, rng: RowRng | None = None) -> Encoded:
        if source is None:
            raise ModelError(f"{self._name()} needs a source; it cannot read a target alone")
        if len(source.tokens) != batch:
            raise ModelError(f"{len(source.tokens)} sources for {batch} targets; expected one source per target")
        return self.encode(source, rng)

    def _decode(
        self, tokens: Tensor, source: Encoded, state: Tensor, *, stored: HiddenStates | None, rng: RowRng | None
    ) -> Tensor:
        """Readouts (batch, time, d_model) of tokens (batch, time) read from `state`; new states go into `stored`."""
        check_tokens(tokens, self.config.vocab_size)
        inputs = self.dropout(self.embedding(tokens), rng)
        states, contexts, probabilities = [], [], []
        for t in range(tokens.shape[1]):
            if t and not self.training:
                pause()
            context, a = self.attention(state[0, -1], source)
            x = torch.cat([inputs[:, t], context], dim=-1)
            drop = self.between_decoder.drop(rng, tokens.is_cuda, begin=t)
            s, state = read(self.decoder, x[:, None], state, drop=drop)
            if stored is not None:
                stored.keep(state, t + 1)
            states.append(s.squeeze(1))
            contexts.append(context)
            probabilities.append(a)
        # each query depends on the previous context, so the whole alignment is known only now
        self.attention.probabilities(torch.stack(probabilities, dim=1))
        combined = torch.cat([torch.stack(states, dim=1), torch.stack(contexts, dim=1), inputs], dim=-1)
        return self.output_dropout(self.maxout(combined).unflatten(-1, (-1, 2)).amax(-1), rng)
