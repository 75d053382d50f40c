"""Builds models from settings."""

from typing import Any, overload

from weft.models import config
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.bengio import Bengio
from weft.models.elmo import ELMo
from weft.models.ngram import NGram
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer
from weft.models.word_table import WordTable


@overload
def build(settings: config.TransformerConfig) -> Transformer: ...
@overload
def build(settings: config.Bengio) -> Bengio: ...
@overload
def build(settings: config.Recurrent) -> Recurrent: ...
@overload
def build(settings: config.ELMo) -> ELMo: ...
@overload
def build(settings: config.Bahdanau) -> Bahdanau: ...
@overload
def build(settings: config.NGram) -> NGram: ...
@overload
def build(settings: config.StaticVectors) -> WordTable: ...
@overload
def build(settings: config.Model) -> LanguageModel: ...
def build(settings: config.Model | config.TransformerConfig | config.StaticVectors) -> LanguageModel:
    """Build the model that `settings` describe, with new weights; an n-gram model has no counts yet."""
    classes: dict[type, type[Any]] = {config.Recurrent: Recurrent, config.Bahdanau: Bahdanau, config.NGram: NGram}
    classes |= {config.Word2Vec: WordTable, config.GloVe: WordTable, config.ELMo: ELMo, config.Bengio: Bengio}
    model: LanguageModel = classes.get(type(settings), Transformer)(settings)
    return model
