"""One vector per word, whatever its context: a trained word2vec or GloVe model."""

from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.base import LanguageModel, check_tokens
from weft.models.config import StaticVectors


class WordTable(LanguageModel):
    """Table of vectors (vocab_size, d_model). Nothing is trained by back-propagation: `word2vec.py` and `glove.py` have
    the updates."""

    def __init__(self, config: StaticVectors):
        super().__init__()
        self.config: StaticVectors = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)

    def forward_features(self, tokens: Tensor, *, mask: object = None, rng: object = None) -> Tensor:
        """Vectors (batch, time, d_model) of tokens (batch, time). `mask` and `rng` are ignored."""
        check_tokens(tokens, self.config.vocab_size)
        features: Tensor = self.embedding(tokens)
        return features

    def head(self, features: Tensor) -> Tensor:
        raise ModelError("word vectors predict no tokens; use them with `weft neighbours`")
