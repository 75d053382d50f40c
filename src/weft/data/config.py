"""The recipe's `data` key: what is read, what is held out for validation, and in which proportions.

Nothing here imports torch or numpy: a recipe is read and checked at once.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from encodings.aliases import aliases
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from weft.config import Config

Fraction = Annotated[float, Field(gt=0, lt=1)]


class HashSplit(Config):
    """Holds out the pieces of text whose hash falls below `fraction`.

    The choice depends on a piece's own text alone: neither the order of files nor what is added later moves it,
    and two equal pieces are never on different sides.
    """

    kind: Literal["hash"] = "hash"
    fraction: Fraction = Field(0.1, description="the part of the text that is held out")


class TailSplit(Config):
    """Holds out the end of the text: its last `fraction`, or its last `bytes` when given."""

    kind: Literal["tail"] = "tail"
    fraction: Fraction = Field(0.1, description="the part of the text that is held out")
    bytes: Annotated[int, Field(ge=1)] | None = Field(None, description="how much is held out, instead")


class FilesSplit(Config):
    """Holds out nothing: validation text comes from sources of its own, and their `targets` as in training."""

    kind: Literal["files"] = "files"
    sources: Annotated[tuple[str, ...], Field(min_length=1)] = Field(description="files that are validated on")
    targets: tuple[str, ...] = Field((), description="text files whose lines answer theirs")


class NoSplit(Config):
    """All text is for training."""

    kind: Literal["none"] = "none"


Split = Annotated[HashSplit | TailSplit | FilesSplit | NoSplit, Field(discriminator="kind")]


def held_out_files(split: Split) -> tuple[str, ...]:
    """The sources that are validated on and so never trained on, even where a training folder holds them too."""
    return split.sources if isinstance(split, FilesSplit) else ()


@dataclass(frozen=True)
class NumberedPart:
    """One of several parts of a text, which as many machines prepare: the third `of` sixteen has `number` 3."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True)
class TextSource:
    """Text to read: where it is, what of it is held out, the column that holds it where it is a table, its encoding.

    Of a text that several machines prepare, each reads a `part`. Around each document stands a `frame`: ids before it,
    and ids after it; by default what the tokenizer's file puts before a text if that is bos, and eos. Sections of a
    document that are encoded `apart`, as weft 0.1 had it, are what a run that began so needs again.
    """

    sources: Sequence[str]
    validation: Split = field(default_factory=HashSplit)
    column: str = "text"
    encoding: str = "utf-8"
    part: NumberedPart | None = None
    frame: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    apart: bool = False


class Part(Config):
    """One part of a mixture: its sources, or a folder that `weft prepare` wrote, and its weight.

    Weights are relative: 3 and 1 mean three quarters and one quarter of all windows.
    """

    sources: tuple[str, ...] = Field((), description="files, folders, patterns")
    prepared: str | None = Field(None, description="a folder that `weft prepare` wrote, instead")
    weight: Annotated[float, Field(gt=0)] = Field(
        1.0, description="how much of all windows, relative to the other parts"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if bool(self.sources) == (self.prepared is not None):
            raise ValueError("a part of a mixture has either sources or prepared")
        return self


def _known_encoding(name: str) -> str:
    """An encoding that Python can decode text from; base64 and the like are none."""
    try:
        if "\0" not in name and codecs.lookup(name)._is_text_encoding:
            return name
    except (LookupError, UnicodeError):
        pass
    near = get_close_matches(name.lower().replace("-", "_"), sorted(set(aliases.values())), n=1)
    raise ValueError(f"'{name}' is no encoding; {f'did you mean {near[0]}?' if near else 'such as utf-8 or cp1252'}")


class Data(Config):
    """Where text comes from: `sources`, or a `prepared` folder, or a `mixture` of several of either.

    All three may be absent in a recipe that is meant for any text; the command line then names the sources.
    Files are read in one `encoding`, utf-8 unless it is named.
    With `document_mask` no token attends to another document in its window, and positions restart in each. Of each part
    at most the first `tokens` tokens are trained on, for instance to see what more text is worth.

    Where rows are read, `targets` are text files whose lines answer those of `sources`, file by file; and rows that
    can't be read are an error, or skipped and counted (`on_error`).
    """

    sources: tuple[str, ...] = Field((), description="files, folders, patterns, builtin:python, hub:owner/name")
    targets: tuple[str, ...] = Field((), description="text files whose lines answer those of `sources`")
    prepared: str | None = Field(None, description="a folder that `weft prepare` wrote")
    mixture: tuple[Part, ...] = Field((), description="several origins with weights")
    column: Annotated[str, Field(min_length=1)] = Field("text", description="the column of a table that holds the text")
    encoding: Annotated[str, AfterValidator(_known_encoding)] = Field("utf-8", description="of the files")
    validation: Split = Field(HashSplit(), description="what is held out and never trained on")
    document_mask: bool = Field(False, description="no token attends to another document in its window")
    tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="at most so many of each part are trained on")
    on_error: Literal["stop", "skip"] = Field("stop", description="what to do with a row that can't be read")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        given = [key for key in ("sources", "prepared", "mixture") if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; text comes from one of them")
        return self

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every origin of text with its weight: the mixture, or the one part that `sources` or `prepared` makes."""
        if self.sources or self.prepared is not None:
            return (Part(sources=self.sources, prepared=self.prepared),)
        return self.mixture

    @property
    def training_share(self) -> float:
        """The share of the sources that is trained on."""
        return 1 - self.validation.fraction if isinstance(self.validation, HashSplit | TailSplit) else 1.0

    def text(self, part: Part) -> TextSource:
        """What is read of one part."""
        return TextSource(part.sources, self.validation, self.column, self.encoding)
