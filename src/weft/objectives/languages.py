"""How one text becomes another: what stands around the source, and what the answer begins with.

A model of several languages is told by tokens which ones it reads and writes (Liu et al. 2020; Fan et al. 2021).
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from weft.decode.translate import Direction
from weft.errors import ConfigError, suggestion
from weft.objectives.frame import source_frame
from weft.recipe.objective import Languages
from weft.text.tokenizer import Tokenizer
from weft.training.objective import Objective

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
                raise ConfigError(
                    f"--{option} {code}: {objective.folder.path} has no tokens for languages; leave it out"
                )
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
    """The token of a language."""
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
