"""ELMo: a bidirectional language model, whose layers' states are vectors of words in context (Peters et al. 2018).

    →h_t has read x_1 … x_t and predicts x_{t+1};   ←h_t has read x_T … x_t and predicts x_{t−1}

The directions share the embeddings and the softmax, and nothing else: a layer of one direction reads only the layer
below it in the same direction, because →h_t would otherwise see the token that it predicts.
"""

import torch
from torch import Tensor, nn

from weft.models.base import LanguageModel, check_tokens
from weft.models.config import ELMo as ELMoConfig
from weft.nn.dropout import Dropout, RowRng, number_dropouts
from weft.nn.init import reset_recurrent
from weft.nn.loss import Readout, VocabShard
from weft.nn.recurrent import InterLayerDropout, read_documents, recurrence


class ELMo(LanguageModel):
    """Forward and backward LSTM language model over the same tokens."""

    config: ELMoConfig
    vocab_shard: VocabShard | None = None  # set if tensor parallelism divides the vocabulary

    def __init__(self, config: ELMoConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = Dropout(config.dropout)
        sizes, d_projection = (config.d_model, config.d_cell or config.d_model), config.d_model if config.d_cell else 0
        # one module per layer, because every layer's states are used
        self.ahead, self.back = (
            nn.ModuleList(recurrence("lstm", *sizes, d_projection=d_projection) for _ in range(config.layers))
            for _ in range(2)
        )
        self.between = nn.ModuleList(InterLayerDropout(config.layers, config.dropout) for _ in range(2))
        self.output_dropout = Dropout(config.dropout)
        self.output = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
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
        documents: Tensor | None = None,
        mask: Tensor | None = None,
        rng: RowRng | None = None,
    ) -> Tensor:
        """States (batch, time, 2 · d_model) of the top layer, forward before backward, of tokens (batch, time).

        Rows are whole texts, padded on the right where `mask` (batch, time) is False, or with document ids (batch,
        time) several of them, each read separately. Positions are ignored: tokens are read in order.
        """
        return self.output_dropout(self._read(tokens, documents, mask, rng=rng)[-1], rng)

    def layer_states(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """States (layers + 1, batch, time, 2 · d_model) of all layers; layer 0 is the embedding, twice."""
        return torch.stack(self._read(tokens, None, mask, rng=None))

    def directions(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Split features (batch, time, 2 · d_model) into the forward and the backward state, for `readout`."""
        ahead, back = features.chunk(2, dim=-1)
        return ahead, back

    def readout(self, features: Tensor) -> Readout:
        return Readout(features, self.output, self.output_bias, shard=self.vocab_shard).local()

    def head(self, features: Tensor) -> Tensor:
        """Logits (batch, time, vocab_size) of the token after each position, by the forward direction."""
        return self.readout(self.directions(features)[0]).logits()

    def _read(
        self, tokens: Tensor, documents: Tensor | None, mask: Tensor | None, *, rng: RowRng | None
    ) -> list[Tensor]:
        check_tokens(tokens, self.config.vocab_size)
        inputs = self.dropout(self.embedding(tokens), rng)
        turn = _reversal(tokens, documents if documents is not None or mask is None else ~mask)[..., None]
        states = []
        for layers, between, x in (
            (self.ahead, self.between[0], inputs),
            (self.back, self.between[1], inputs.take_along_dim(turn, 1)),
        ):
            outputs = [x]
            for number, layer in enumerate(layers):
                below = between[number - 1](x, rng) if number else x  # type: ignore[index]
                assert isinstance(layer, nn.RNNBase)
                h = layer(below)[0] if documents is None else read_documents(layer, below, documents, drop=None)
                x = x + h if number else h
                outputs.append(x)
            states.append(outputs)
        pairs = zip(*states, strict=True)
        return [torch.cat([ahead, back.take_along_dim(turn, 1)], dim=-1) for ahead, back in pairs]


def _reversal(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Indices (batch, time) that reverse the tokens of each document within its part of a row; a document ends where
    the id changes. Applied twice, they restore the order."""
    T = tokens.shape[1]
    time = torch.arange(T, device=tokens.device).expand_as(tokens)
    if documents is None:
        return T - 1 - time
    changes = documents[:, 1:] != documents[:, :-1]
    starts = time[:, 1:].where(changes, 0).cummax(dim=1).values
    first = torch.cat([torch.zeros_like(time[:, :1]), starts], dim=1)
    ends = time[:, :-1].where(changes, T - 1).flip(1).cummin(dim=1).values.flip(1)
    last = torch.cat([ends, torch.full_like(time[:, :1], T - 1)], dim=1)
    return first + last - time
