"""Neural n-gram: embeddings of the last order − 1 words, a tanh layer, and a distribution over the next word.

    x = (C[w_{t−n+1}], …, C[w_{t−1}])        y = b + W x + U tanh(d + H x)        p = softmax(y)

W, the direct connections, may be absent (Bengio et al. 2003, §2). Words before the beginning of a text are zeros.
"""

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.base import EncoderInput, LanguageModel, State, check_tokens
from weft.models.config import Bengio as BengioConfig
from weft.models.ngram import Recent, contexts
from weft.nn.dropout import Dropout, RowRng, number_dropouts
from weft.nn.init import reset_recurrent
from weft.nn.loss import Readout, VocabShard


class Bengio(LanguageModel):
    """Feed-forward language model. `output` is (vocab_size, features): U, or U and W side by side."""

    config: BengioConfig
    vocab_shard: VocabShard | None = None  # set if tensor parallelism divides the vocabulary

    def __init__(self, config: BengioConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_embedding or config.d_model)
        self.dropout, self.output_dropout = Dropout(config.dropout), Dropout(config.dropout)
        self.hidden = nn.Linear(config.d_input, config.d_model)
        features = config.d_model + (config.d_input if config.direct else 0)
        self.output = nn.Parameter(torch.empty(config.vocab_size, features))
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
        source: EncoderInput | None = None,
        positions: object = None,
        rng: RowRng | None = None,
    ) -> Tensor:
        """Hidden layer (batch, time, d_model) of tokens (batch, time), followed by the embeddings if they are connected
        directly. With document ids (batch, time), a context has only words of its document. `positions` are ignored."""
        self._refuse(source)
        check_tokens(tokens, self.config.vocab_size)
        width = self.config.order - 1
        embedded = nn.functional.pad(self.embedding(tokens), (0, 0, width - 1, 0)).unfold(1, width, 1)
        words = contexts(tokens, self.config, documents)
        return self._hidden(embedded.transpose(2, 3), words, rng)

    def _hidden(self, embedded: Tensor, words: Tensor, rng: RowRng | None = None) -> Tensor:
        """Features (batch, time, …) of embedded contexts (batch, time, order − 1, d_embedding); `words` (batch, time,
        order − 1) tell which are missing, and are zeros."""
        known = words < self.config.vocab_size
        x = self.dropout((embedded * known[..., None]).flatten(2), rng)
        h = self.output_dropout(torch.tanh(self.hidden(x)), rng)
        return torch.cat([h, x], dim=-1) if self.config.direct else h

    def readout(self, features: Tensor) -> Readout:
        return Readout(features, self.output, self.output_bias, shard=self.vocab_shard).local()

    def start(self, batch: int, max_len: int, source: EncoderInput | None = None) -> Recent:
        self._refuse(source)
        return Recent(batch, max_len, self.config, device=self.output.device)

    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        assert isinstance(state, Recent)
        check_tokens(tokens, self.config.vocab_size)
        words = state.read(tokens, lengths)
        return self._hidden(self.embedding(words.clamp(max=self.config.vocab_size - 1)), words)

    def _refuse(self, source: EncoderInput | None) -> None:
        if source is not None:
            raise ModelError(f"{self._name()} continues a text and cannot read a source; 'bahdanau' can")
