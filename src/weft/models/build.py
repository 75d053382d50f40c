"""Builds models from settings."""

from weft.models import config
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.ngram import NGram
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer


def build(settings: config.Model) -> LanguageModel:
    """Build the model that `settings` describe, with new weights; an n-gram model has no counts yet."""
    if isinstance(settings, config.Recurrent):
        return Recurrent(settings)
    if isinstance(settings, config.Bahdanau):
        return Bahdanau(settings)
    return NGram(settings) if isinstance(settings, config.NGram) else Transformer(settings)
