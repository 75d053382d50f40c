"""From settings to a model with fresh weights."""

from typing import assert_never

from weft.models import config
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.ngram import NGram
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer


def build(settings: config.Model) -> LanguageModel:
    """The model that `settings` describe, with fresh weights; an n-gram model with empty counts."""
    match settings:
        case config.Decoder() | config.Encoder() | config.EncoderDecoder():
            return Transformer(settings)
        case config.Recurrent():
            return Recurrent(settings)
        case config.Bahdanau():
            return Bahdanau(settings)
        case config.NGram():
            return NGram(settings)
        case _:
            assert_never(settings)
