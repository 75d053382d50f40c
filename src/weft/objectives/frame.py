"""What stands around the texts that a run's model reads, and what the answer to a source begins with.

A model of several languages is told by tokens which ones it reads and writes (Liu et al. 2020; Fan et al. 2021).
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
    """Ids around every text: `before` it and `after` it; and those that `precede` the first, the end of another text.

    What is before a text, or precedes it, is given and not predicted; what its own tokenizer puts after it is predicted
    as the text is.
    """

    before: Ids = ()
    after: Ids = ()
    precede: Ids = ()

    @property
    def begins(self) -> Ids:
        """All that a text is read after."""
        return self.precede + self.before


def text_frame(recipe: Recipe, tokenizer: Tokenizer) -> TextFrame:
    """How a run's model reads a text.

    An imported model reads what its own tokenizer makes of one, as its makers have it: LLaMA's begins with bos, GPT-2's
    with the text itself, whose first token then nothing predicts. A model that was trained here has seen bos where its
    tokenizer puts it before a text, or else the end of the text before, unless documents don't see each other.
    """
    before, after = tokenizer.frame
    if not trained_here(recipe):
        return TextFrame(before, after)
    if tokenizer.adds_bos:
        return TextFrame(before)
    eos = None if recipe.data.document_mask else tokenizer.eos_id
    return TextFrame(precede=() if eos is None else (eos,))


def sentence_frame(recipe: Recipe, folder: RunFolder, tokenizer: Tokenizer) -> Frame:
    """How a run's model reads a text, or two, of which it predicts something.

    As the model's own tokenizer frames them, also where another model's weights were trained further here. Where that
    says nothing, [CLS] and [SEP] do it, or eos, from which a decoder can tell that all has been read.
    """
    if tokenizer.has_frame and not began_early(folder) and (any(tokenizer.frame) or not trained_here(recipe)):
        return Frame.of(tokenizer)
    return Frame.usual(tokenizer)


def source_frame(recipe: Recipe, folder: RunFolder, tokenizer: Tokenizer) -> Frame:
    """How an encoder–decoder reads its source: the text and eos, unless its tokenizer has it otherwise. What is trained
    here can tell by eos where the source ends, whatever its tokenizer was made for."""
    before, after = tokenizer.frame
    ends = tokenizer.eos_id in after and not began_early(folder)
    if tokenizer.has_frame and (ends if trained_here(recipe) else True):
        return Frame(before, (), after, filler(tokenizer))
    return Frame((), (), (tokenizer.need("eos"),), filler(tokenizer))


def trained_here(recipe: Recipe) -> bool:
    """Whether a run's model learned here, rather than being imported."""
    return recipe.steps is not None or bool(recipe.data.parts)


def began_early(folder: RunFolder) -> bool:
    """Whether a run began with weft 0.1, which cut and framed texts in its own way, and noted none."""
    starts = [event for event in read_lines(folder.events) if event["event"] == "start"]
    return bool(starts) and starts[0].get("data_version", 1) < VERSION


CODE = re.compile(r"[A-Za-z]{2,8}([_-][A-Za-z0-9]{2,8})*")  # of a language: de, en_XX, zho_Hans, pt-BR


class Asked(NamedTuple):
    """The languages to read and to write, by their codes; None leaves one to the run's settings."""

    reads: str | None = None
    writes: str | None = None


ANY = Asked()


def direction(objective: Objective[Any], asked: Asked = ANY) -> Direction:
    """How a run's model is to write one text from another; a ConfigError where it has to know the languages."""
    source, target = objective.tokenizers.source, objective.tokenizers.target
    frame = source_frame(objective.recipe, objective.folder, source)
    languages: Languages | None = getattr(objective.settings, "languages", None)
    if languages is None:
        for option, code in zip(("from", "to"), asked, strict=True):
            if code is not None:
                lack = f"{objective.folder.path} has no tokens for languages; leave it out"
                raise ConfigError(f"--{option} {code}: {lack}")
        return Direction(frame, target.need("bos"))
    if languages.source == "none" and asked.reads is not None:
        raise ConfigError(f"--from {asked.reads}: this model isn't told which language it reads; leave it out")
    eos = source.need("eos")
    if languages.source == "before":
        frame = frame._replace(before=(_named(languages, source, "from", asked.reads),), after=(eos,))
    elif languages.source == "after":
        frame = frame._replace(before=(), after=(eos, _named(languages, source, "from", asked.reads)))
    if languages.target == "source":
        wanted = _named(languages, source, "to", asked.writes)
        return Direction(frame._replace(before=(wanted, *frame.before)), target.need("bos"))
    wanted = _named(languages, target, "to", asked.writes)
    return Direction(frame, wanted) if languages.target == "start" else Direction(frame, target.need("bos"), (wanted,))


def _named(languages: Languages, tokenizer: Tokenizer, option: str, asked: str | None) -> int:
    does, usual = ("reads", languages.reads) if option == "from" else ("writes", languages.writes)
    known, code = language_codes(languages, tokenizer), asked or usual
    if code is None:
        some = suggestion("", known, what=f"{len(known)} languages")
        raise ConfigError(f"this model has to know which language it {does}; name it with --{option} ({some})")
    if code not in known:
        raise ConfigError(f"--{option} {code}: no language of this model; {suggestion(code, known)}")
    return known[code]


def language_codes(languages: Languages, tokenizer: Tokenizer) -> Mapping[str, int]:
    """The codes of the languages that a vocabulary has tokens for, with their ids."""
    begin, end = languages.token.split("{}")
    named = {
        token[len(begin) : len(token) - len(end)]: id
        for token, id in tokenizer.special_tokens.items()
        if token.startswith(begin) and token.endswith(end)
    }
    return {code: id for code, id in named.items() if CODE.fullmatch(code)}
