"""The table of objectives. To add one: its settings in `weft.recipe.objective`, its file here, and its line below."""

from typing import Any

from weft.objectives.answer import Answer
from weft.objectives.bidirectional import Bidirectional
from weft.objectives.chat import Chat
from weft.objectives.classify import Classify
from weft.objectives.contrastive import Contrastive
from weft.objectives.masked import Masked
from weft.objectives.next_sentence import MaskedNext
from weft.objectives.next_token import NextToken
from weft.objectives.pairs import Pairs
from weft.objectives.regress import Regress
from weft.objectives.spans import Spans
from weft.objectives.tag import Tag
from weft.objectives.word_vectors import WordVectors
from weft.recipe import objective as config
from weft.recipe.config import Recipe
from weft.runs.folder import RunFolder
from weft.training.objective import Objective
from weft.training.run_data import Tokenizers

OBJECTIVES: dict[type[config.ObjectiveConfig], type[Objective[Any]]] = {
    config.Answer: Answer,
    config.Bidirectional: Bidirectional,
    config.Chat: Chat,
    config.Classify: Classify,
    config.Contrastive: Contrastive,
    config.Masked: Masked,
    config.MaskedNext: MaskedNext,
    config.NextToken: NextToken,
    config.Pairs: Pairs,
    config.Regress: Regress,
    config.Spans: Spans,
    config.Tag: Tag,
    config.WordVectors: WordVectors,
}


def build(recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers | None = None) -> Objective[Any]:
    """Return the objective of a recipe, for the run in a folder."""
    return OBJECTIVES[type(recipe.objective)](recipe, folder, tokenizers)
