"""From settings to a model with fresh weights."""

from weft.models import config
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.ngram import NGram
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer


def build(settings: config.Model) -> LanguageModel:
    """The model that `settings` describe, with fresh weights; an n-gram model with empty counts."""
    if isinstance(settings, config.Recurrent):
        return Recurrent(settings)
    if isinstance(settings, config.Bahdanau):
        return Bahdanau(settings)
    return NGram(settings) if isinstance(settings, config.NGram) else Transformer(settings)
