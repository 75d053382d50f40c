"""The recipe's `data` section: sources of text, the held-out split and mixture weights.

Imports neither torch nor numpy, so that a recipe is checked without delay.
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
    """Holds out the sections of text whose hash falls below `fraction`.

    The choice depends on a section's text alone: the order of files and text added later do not change it, and equal
    sections are always in the same split.
    """

    kind: Literal["hash"] = "hash"
    fraction: Fraction = Field(0.1, description="fraction of the text to hold out")


class TailSplit(Config):
    """Holds out the end of the text: its last `fraction`, or its last `bytes` if set."""

    kind: Literal["tail"] = "tail"
    fraction: Fraction = Field(0.1, description="fraction of the text to hold out")
    bytes: Annotated[int, Field(ge=1)] | None = Field(None, description="bytes of text to hold out, instead")


class FilesSplit(Config):
    """Validates on separate sources, with their `targets` as in training; everything else is trained on."""

    kind: Literal["files"] = "files"
    sources: Annotated[tuple[str, ...], Field(min_length=1)] = Field(description="files to validate on")
    targets: tuple[str, ...] = Field((), description="text files with the target lines of these sources")


class NoSplit(Config):
    """Holds out nothing: all text is for training."""

    kind: Literal["none"] = "none"


Split = Annotated[HashSplit | TailSplit | FilesSplit | NoSplit, Field(discriminator="kind")]


def held_out_files(split: Split) -> tuple[str, ...]:
    """Sources to validate on; they are never trained on, even if a training folder contains them."""
    return split.sources if isinstance(split, FilesSplit) else ()


@dataclass(frozen=True)
class NumberedPart:
    """One part of a text that several machines prepare: `number` 3 `of` 16."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True)
class TextSource:
    """Text to read: its sources, the held-out split, the column that holds it in tables, and its encoding."""

    sources: Sequence[str]
    validation: Split = field(default_factory=HashSplit)
    column: str = "text"
    encoding: str = "utf-8"
    part: NumberedPart | None = None  # one part of a text that several machines prepare
    frame: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # ids around each document; None: bos if used, and eos
    separate_sections: bool = False  # encode each section on its own, as weft 0.1 did; resuming its runs requires it


class MixturePart(Config):
    """One part of a mixture: its sources, or a folder that `weft prepare` wrote, and its weight.

    Weights are relative: 3 and 1 mean three quarters and one quarter of all windows.
    """

    sources: tuple[str, ...] = Field((), description="files, folders, patterns")
    prepared: str | None = Field(None, description="a folder that `weft prepare` wrote, instead")
    weight: Annotated[float, Field(gt=0)] = Field(1.0, description="share of all windows, relative to the other parts")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if bool(self.sources) == (self.prepared is not None):
            raise ValueError("a part of a mixture has either sources or prepared")
        return self


def check_encoding(name: str) -> str:
    """Return the name of a text encoding; ValueError for another name."""
    try:  # _is_text_encoding is False for codecs from bytes to bytes, such as base64
        if "\0" not in name and codecs.lookup(name)._is_text_encoding:
            return name
    except (LookupError, UnicodeError):
        pass
    near = get_close_matches(name.lower().replace("-", "_"), sorted(set(aliases.values())), n=1)
    hint = f"did you mean {near[0]}?" if near else "such as utf-8 or cp1252"
    raise ValueError(f"'{name}' is not a text encoding; {hint}")


class Data(Config):
    """The text of a run: `sources`, or a `prepared` folder, or a `mixture` of several of either.

    All three may be absent from a recipe that is meant for any text; the command line then names the sources.
    All files have one `encoding`, utf-8 by default.
    With `document_mask`, no token attends to another document in its window, and positions restart in each document.
    At most the first `tokens` tokens of each part are trained on, for example to measure the value of more text.

    For objectives that read rows, `targets` are text files with the target lines of `sources`, file by file, and
    `on_error` decides whether an unreadable row stops the run or is skipped and counted.
    """

    sources: tuple[str, ...] = Field((), description="files, folders, patterns, builtin:python, hub:owner/name")
    targets: tuple[str, ...] = Field((), description="text files with the target lines of `sources`")
    prepared: str | None = Field(None, description="a folder that `weft prepare` wrote")
    mixture: tuple[MixturePart, ...] = Field((), description="several sources or prepared folders, with weights")
    column: Annotated[str, Field(min_length=1)] = Field("text", description="the column of a table that holds the text")
    encoding: Annotated[str, AfterValidator(check_encoding)] = Field("utf-8", description="encoding of the files")
    validation: Split = Field(HashSplit(), description="the held-out split, never trained on")
    document_mask: bool = Field(False, description="no token attends to another document in its window")
    tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="train on at most this many tokens per part")
    on_error: Literal["stop", "skip"] = Field("stop", description="what to do with a row that can't be read")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        origins = [key for key in ("sources", "prepared", "mixture") if getattr(self, key)]
        if len(origins) > 1:
            raise ValueError(f"{' and '.join(origins)} are both set; text comes from one of them")
        return self

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        """All parts of the mixture; `sources` or `prepared` make a mixture of one part."""
        if self.sources or self.prepared is not None:
            return (MixturePart(sources=self.sources, prepared=self.prepared),)
        return self.mixture

    @property
    def training_share(self) -> float:
        """Fraction of the sources that is trained on."""
        return 1 - self.validation.fraction if isinstance(self.validation, HashSplit | TailSplit) else 1.0

    def text(self, part: MixturePart) -> TextSource:
        """Text source of one part."""
        return TextSource(part.sources, self.validation, self.column, self.encoding)
