"""A text as the input of a run's model, and one of the run's own to show when the user gives none."""

import re
from contextlib import suppress
from typing import Any

from weft.api.settings import generation_defaults, translation_beam
from weft.data.shards import Side
from weft.decode.config import Beam
from weft.errors import ConfigError, WeftError
from weft.explain.reading import Reading
from weft.models.base import LanguageModel
from weft.models.hidden import context_of, frame_for
from weft.objectives.frame import text_frame
from weft.objectives.rows import RowObjective
from weft.objectives.tokens import TranslationObjective
from weft.recipe.config import Recipe
from weft.recipe.objective import Bidirectional
from weft.training.objective import Objective

SENTENCE = "The animal didn't cross the street because it was too tired."
ORIGINS: dict[Side, str] = {
    "validation": "from the held-out data",
    "train": "from the training data, as nothing was held out",
}
NO_DATA = "an example, as the run's data is not here"
MAX_FRAME_TOKENS = 4  # special tokens around a text
RULED_TITLE = re.compile(r"\A(?:.*\n){0,2}?[^\w\s]{4,}\s*\n\s*")  # of reStructuredText, at the beginning of a text


def read_text(
    recipe: Recipe, model: LanguageModel, objective: Objective[Any], *, text: str, target: str | None = None
) -> Reading:
    """Return a text as the model's input, with special tokens around it; `target` is as for `Explain.reading`."""
    tokenizer = objective.tokenizer
    if isinstance(objective, TranslationObjective):
        return _read_pair(model, objective, text, target=target)
    if target:
        kind = recipe.objective.makes
        raise ConfigError(f"target: {objective.folder.path} is {kind}, which reads only one text; leave it out")
    ids = tokenizer.encode(text)
    if recipe.objective.continues or isinstance(recipe.objective, Bidirectional):
        before: tuple[int, ...] = text_frame(recipe, tokenizer).begins
        return Reading(model, tokenizer, (*before, *ids), len(before))
    if isinstance(objective, RowObjective):
        before, after = objective.frame.before, objective.frame.after
        return Reading(model, tokenizer, (*before, *ids, *after), len(before))
    framed = frame_for(model)(tokenizer, ids, None)
    return Reading(model, tokenizer, tuple(framed.ids), framed.before)


def _read_pair(model: LanguageModel, objective: TranslationObjective[Any], text: str, *, target: str | None) -> Reading:
    ends = target is None or bool(target)  # a translation by the model ends; an empty target has yet to begin
    target = translation(model, objective, text) if target is None else target
    source, tokenizer = objective.tokenizers.source, objective.tokenizers.target
    frame, starts, first = objective.direction
    source_ids = (*frame.before, *source.encode(text), *frame.after)
    ids = (starts, *first, *tokenizer.encode(target), *((tokenizer.need("eos"),) if ends else ()))
    return Reading(model, tokenizer, ids, 1 + len(first), source_ids, source)


def translation(model: LanguageModel, objective: TranslationObjective[Any], text: str) -> str:
    """Return what the model writes for a text, as `weft translate` does."""
    return objective.translator(model).translate([text], default_beam(objective))[0]


def default_beam(objective: TranslationObjective[Any]) -> Beam:
    """Return the beam search that `weft translate` uses for this run."""
    return translation_beam(objective.length, generation_defaults(objective.folder, objective.tokenizer)[1])


def own_text(model: LanguageModel, objective: Objective[Any], tokens: int) -> tuple[str, str]:
    """Return at most `tokens` tokens of the run's held-out data, or else of its training data, and their origin.

    They end with a whole word. A title underlined with punctuation, such as those of reStructuredText, is left out.
    """
    text, origin = SENTENCE, NO_DATA
    with suppress(WeftError):  # the data may be gone, and an imported model has none
        excerpts = ((objective.excerpt(side, tokens + 1), origin) for side, origin in ORIGINS.items())
        text, origin = next(((words, origin) for words, origin in excerpts if words), (text, origin))
    text = RULED_TITLE.sub("", text) or text
    context, spans = context_of(model), objective.tokenizers.source.token_spans(text)
    ends = [span.end for span in spans[: tokens if context is None else min(tokens, context - MAX_FRAME_TOKENS)]]
    whole = [end for end in ends if not re.fullmatch(r"\w\w", text[end - 1 : end + 1])]
    return text[: (whole or ends or [0])[-1]], origin
