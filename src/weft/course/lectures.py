"""Lectures as data: their figures, tables and claims in the order of the slides, each with the command that shows it.

There is one file per lecture, `lectures/1.toml` and so on; `lectures/setup.toml` lists the texts and models that their
commands use.
"""

import re
import shlex
import tomllib
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from weft.config import Config
from weft.errors import ConfigError, counted
from weft.figures.formats import scientific, table_number

KINDS = ("figure", "table", "claim")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Verdict(NamedTuple):
    """Comparison of a value in an output with the one expected."""

    about: str
    expected: str
    found: str
    holds: bool


class EntryCheck(Config):
    """Value that an output must contain: the first group of the regular expression `find`, within these bounds.

    Without bounds it is enough that the expression matches.
    """

    about: str
    find: str
    equals: float | None = None
    within: float = 0.0
    above: float | None = None
    below: float | None = None

    def verdict(self, output: str) -> Verdict:
        """Compare an output with what is expected."""
        match = re.search(self.find, output, re.MULTILINE)
        if match is None:
            return Verdict(self.about, self.expected, "not in the output", False)
        if self.expected == "yes":
            return Verdict(self.about, "yes", "yes", True)
        text = match[1].replace(",", "").replace("−", "-")
        number = NUMBER.match(text)
        if number is None:
            return Verdict(self.about, self.expected, match[1], False)
        value = float(number[0])
        holds = self.equals is None or abs(value - self.equals) <= self.within + 1e-12
        holds &= self.above is None or value > self.above
        holds &= self.below is None or value < self.below
        found = match[1] if len(text) == len(number[0]) else number[0]
        return Verdict(self.about, self.expected, table_number(value) if "e" in found else found, holds)

    @property
    def expected(self) -> str:
        """Bounds in words; `yes` if there are none."""
        within = f" ± {_written(self.within)}" if self.within else ""
        bounds = {"{}" + within: self.equals, "above {}": self.above, "below {}": self.below}
        return ", ".join(form.format(_written(bound)) for form, bound in bounds.items() if bound is not None) or "yes"


def _written(bound: float) -> str:
    """Write a bound with all its digits, or as a power of ten if it is far from 1."""
    digits = f"{bound:,.10g}"
    return scientific(bound) if "e" in digits else digits


class EntrySource(Config):
    """Commands or a Python script, run in the folder of the lectures. Each line of `run` is one command of weft."""

    run: str = ""
    python: str = ""

    @property
    def lines(self) -> list[str]:
        """Commands, one each; a line that ends in a backslash continues on the next."""
        return [" ".join(line.split()) for line in self.run.replace("\\\n", " ").splitlines() if line.strip()]

    @property
    def commands(self) -> list[list[str]]:
        """Words of each command, without `weft`."""
        return [shlex.split(line)[1:] for line in self.lines]

    @property
    def text(self) -> str:
        return (self.python or self.run).strip()


class Setup(EntrySource):
    """Text file, folder or run that entries use: a file with this `content`, or what a source makes."""

    makes: str
    content: str = ""


class LectureEntry(EntrySource):
    """Figure, table or claim of a lecture.

    `draws` are figures besides those of --out and --map; `status` is the exit code, 2 if the command shows a refusal.
    """

    title: str
    kind: Literal["figure", "table", "claim"]
    about: str
    checks: tuple[EntryCheck, ...] = ()
    draws: tuple[str, ...] = ()
    status: int = 0

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.run) == bool(self.python):
            raise ValueError(f"{self.title}: expected either run or python")
        return self

    @property
    def shown(self) -> str:
        """Commands in one line, for a list."""
        if self.python:
            return f"Python, {counted(len(self.text.splitlines()), 'line')}"
        return self.lines[0] + (" …" if len(self.lines) > 1 else "")

    @property
    def figures(self) -> list[str]:
        """Names of the figures that the commands write."""
        pairs = [pair for words in self.commands for pair in pairwise(words)]
        named = [name for option, name in pairs if option in ("--out", "--map") and name.endswith(".svg")]
        return [*named, *self.draws]


class Lecture(Config):
    """One lecture; `page` is its page of the documentation."""

    title: str
    about: str
    page: str
    entries: tuple[LectureEntry, ...] = Field(min_length=1)

    def counts(self) -> dict[str, int]:
        """Number of entries of each kind."""
        return {kind: sum(entry.kind == kind for entry in self.entries) for kind in KINDS}


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files("weft") / "lectures" / f"{name}.toml").read_text("utf-8"))


@cache
def lectures() -> dict[int, Lecture]:
    """Return all lectures by number."""
    return {number: Lecture.model_validate(_read(str(number))) for number in range(1, 6)}


@cache
def setups() -> tuple[Setup, ...]:
    """Return the texts and runs that entries use; one that another is made from comes first."""
    return tuple(map(Setup.model_validate, _read("setup")["setup"]))


def lecture(number: int) -> Lecture:
    """Return a lecture; raise ConfigError if there is none with this number."""
    if number not in lectures():
        raise ConfigError(f"lecture {number}: expected a number from 1 to {len(lectures())}; weft lecture lists them")
    return lectures()[number]
