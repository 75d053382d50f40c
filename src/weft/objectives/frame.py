"""Special tokens around the texts that a run's model reads, and at the beginning of an answer to a source.

Tokens tell a multilingual model which languages to read and write (Liu et al. 2020; Fan et al. 2021).
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from weft.data.batch import Frame, filler
from weft.data.prepare import VERSION
from weft.decode.translate import Direction
from weft.errors import ConfigError, suggestion
from weft.recipe.config import Recipe
from weft.recipe.objective import Languages
from weft.runs.folder import RunFolder
from weft.runs.lines import read_lines
from weft.text.tokenizer import Tokenizer
from weft.training.objective import Objective

Ids = tuple[int, ...]


class TextFrame(NamedTuple):
    """Ids `before` and `after` every text, and those that `precede` the first one, the end of another text. Ids before
    a text, or preceding it, are not predicted; those that its tokenizer puts after it are predicted like the text."""

    before: Ids = ()
    after: Ids = ()
    precede: Ids = ()

    @property
    def begins(self) -> Ids:
        """All ids that a text is read after."""
        return self.precede + self.before


def text_frame(recipe: Recipe, tokenizer: Tokenizer) -> TextFrame:
    """Return the frame in which a run's model reads a text.

    An imported model reads texts as its tokenizer frames them: LLaMA's begin with bos, GPT-2's with the text itself,
    whose first token is then not predicted. A model trained here has seen bos if its tokenizer puts it before a text,
    or else the end of the previous text, unless documents do not attend to each other.
    """
    before, after = tokenizer.frame
    if not trained_here(recipe):
        return TextFrame(before, after)
    if tokenizer.adds_bos:
        return TextFrame(before)
    eos = None if recipe.data.document_mask else tokenizer.eos_id
    return TextFrame(precede=() if eos is None else (eos,))


def sentence_frame(recipe: Recipe, folder: RunFolder, tokenizer: Tokenizer) -> Frame:
    """Return the frame in which a run's model reads a text, or a pair of texts, to predict something about it.

    The tokenizer's frame, also if another model's weights were trained further here. If the tokenizer has none, [CLS]
    and [SEP], or eos, which marks the end of the text for a decoder.
    """
    if tokenizer.has_frame and not began_early(folder) and (any(tokenizer.frame) or not trained_here(recipe)):
        return Frame.of(tokenizer)
    return Frame.usual(tokenizer)


def source_frame(recipe: Recipe, folder: RunFolder, tokenizer: Tokenizer) -> Frame:
    """Return the frame in which an encoder–decoder reads its source: the text and eos, unless its tokenizer says
    otherwise. A model trained here always sees eos at the end of a source."""
    before, after = tokenizer.frame
    ends = tokenizer.eos_id in after and not began_early(folder)
    if tokenizer.has_frame and (ends if trained_here(recipe) else True):
        return Frame(before, (), after, filler(tokenizer))
    return Frame((), (), (tokenizer.need("eos"),), filler(tokenizer))


def trained_here(recipe: Recipe) -> bool:
    """Return whether a run's model was trained here, rather than imported."""
    return recipe.steps is not None or bool(recipe.data.parts)


def began_early(folder: RunFolder) -> bool:
    """Return whether a run began with weft 0.1, which split and framed texts differently and recorded no version."""
    starts = [event for event in read_lines(folder.events) if event["event"] == "start"]
    return bool(starts) and starts[0].get("data_version", 1) < VERSION


LANGUAGE_CODE = re.compile(r"[A-Za-z]{2,8}([_-][A-Za-z0-9]{2,8})*")  # de, en_XX, zho_Hans, pt-BR


class LanguagePair(NamedTuple):
    """The languages to read and to write, by their codes; None leaves one to the run's settings."""

    reads: str | None = None
    writes: str | None = None


ANY_LANGUAGES = LanguagePair()


def direction(objective: Objective[Any], pair: LanguagePair = ANY_LANGUAGES) -> Direction:
    """Return how a run's model reads a source and begins an answer; raise ConfigError if a language is missing."""
    source, target = objective.tokenizers.source, objective.tokenizers.target
    frame = source_frame(objective.recipe, objective.folder, source)
    languages: Languages | None = getattr(objective.settings, "languages", None)
    if languages is None:
        for option, code in zip(("from", "to"), pair, strict=True):
            if code is not None:
                lack = f"{objective.folder.path} has no tokens for languages; leave it out"
                raise ConfigError(f"--{option} {code}: {lack}")
        return Direction(frame, target.need("bos"))
    if languages.source == "none" and pair.reads is not None:
        raise ConfigError(f"--from {pair.reads}: this model takes no source language; leave it out")
    eos = source.need("eos")
    if languages.source == "before":
        frame = frame._replace(before=(_language_id(languages, source, "from", code=pair.reads),), after=(eos,))
    elif languages.source == "after":
        frame = frame._replace(before=(), after=(eos, _language_id(languages, source, "from", code=pair.reads)))
    if languages.target == "source":
        written = _language_id(languages, source, "to", code=pair.writes)
        return Direction(frame._replace(before=(written, *frame.before)), target.need("bos"))
    written = _language_id(languages, target, "to", code=pair.writes)
    if languages.target == "start":
        return Direction(frame, written)
    return Direction(frame, target.need("bos"), (written,))


def _language_id(languages: Languages, tokenizer: Tokenizer, option: str, *, code: str | None) -> int:
    verb, default = ("reads", languages.reads) if option == "from" else ("writes", languages.writes)
    known, code = language_codes(languages, tokenizer), code or default
    if code is None:
        examples = suggestion("", known, what=f"{len(known)} languages")
        raise ConfigError(f"this model has to know which language it {verb}; name it with --{option} ({examples})")
    if code not in known:
        raise ConfigError(f"--{option} {code}: not a language of this model; {suggestion(code, known)}")
    return known[code]


def language_codes(languages: Languages, tokenizer: Tokenizer) -> Mapping[str, int]:
    """Return the codes of the languages that a vocabulary has tokens for, with their ids."""
    begin, end = languages.token.split("{}")
    named = {
        token[len(begin) : len(token) - len(end)]: id
        for token, id in tokenizer.special_tokens.items()
        if token.startswith(begin) and token.endswith(end)
    }
    return {code: id for code, id in named.items() if LANGUAGE_CODE.fullmatch(code)}
