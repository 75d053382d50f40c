"""Builds models from settings."""

from typing import overload

from weft.models import config
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.ngram import NGram
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer


@overload
def build(settings: config.TransformerConfig) -> Transformer: ...
@overload
def build(settings: config.Recurrent) -> Recurrent: ...
@overload
def build(settings: config.Bahdanau) -> Bahdanau: ...
@overload
def build(settings: config.NGram) -> NGram: ...
@overload
def build(settings: config.Model) -> LanguageModel: ...
def build(settings: config.Model | config.TransformerConfig) -> LanguageModel:
    """Build the model that `settings` describe, with new weights; an n-gram model has no counts yet."""
    if isinstance(settings, config.Recurrent):
        return Recurrent(settings)
    if isinstance(settings, config.Bahdanau):
        return Bahdanau(settings)
    if isinstance(settings, config.NGram):
        return NGram(settings)
    assert isinstance(settings, config.Decoder | config.Encoder | config.EncoderDecoder)
    return Transformer(settings)
