"""What `weft explain` draws: pictures that show themselves in a notebook, and save themselves for a page or a paper."""

import io
import re
import warnings
from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure

from weft.errors import ConfigError, DataError
from weft.figures.page import Section, as_json, mounted, page, part
from weft.storage.files import check_writable, write_bytes

FIGURES = (".svg", ".png", ".pdf")
PAGE = ".html"
# Shares and probabilities: one hue whose lightness falls evenly, so that print in black and white and readers who see
# few colours get the same order. The page mixes the same two colours (web/page.css).
SHADES = LinearSegmentedColormap.from_list("weft", ["#ffffff", "#0b3a63"])
# Lines and bars, told apart by lightness as well; the first ones of the page's (web/page.css).
COLOURS = ("#2f6f9f", "#c4562a", "#4f8a4b", "#7a5aa6")
# The page's own colours in the place of those for print; shades become mixes of the two that a page has.
THEME = {
    "#000000": "currentColor",
    **{colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)},
    **{
        to_hex(SHADES(step / 255)): f"color-mix(in srgb, var(--deep) {100 * step / 255:.0f}%, var(--card))"
        for step in range(64, 256)
    },
}


P = TypeVar("P", bound="Picture")


class Picture(ABC):
    """Something that can be looked at.

    A kind of picture gives `figure`, for print, and where a page can show more than that, `html`.
    """

    title: str
    about: str  # what it shows and how to read it, in a sentence or two
    note: str = ""  # what else must be said of this one, such as where its text is from
    module: ClassVar[str] = ""  # the file of web/ that draws its data on a page
    scripts: ClassVar[tuple[str, ...]] = ()  # other files that its part of a page needs
    suffixes: ClassVar[tuple[str, ...]] = (PAGE, *FIGURES)

    @abstractmethod
    def figure(self) -> Figure:
        """The picture for print, on white."""

    def html(self) -> str:
        """Its part of a page: what its module draws, or its text where no script runs; else the figure."""
        if self.module:
            return mounted(self.module, self.data(), part("texts", [self.text()]))
        return svg(self.figure(), self.title)

    def data(self) -> dict[str, Any]:
        """Its values, as JSON."""
        return as_json(self)

    def text(self) -> str | None:
        """What a terminal shows in its place; None where only a picture tells."""
        return None

    def sections(self) -> list[Section]:
        """The picture as parts of a page."""
        scripts = (*self.scripts, *filter(None, [self.module]))
        return [Section(self.title, " ".join(filter(None, (self.about, self.note))), self.html(), scripts)]

    def save(self, path: Path | str) -> Path:
        """Write it as a page (.html) or a figure (.svg, .png, .pdf), whole or not at all."""
        path = check_picture(path, self.suffixes)
        if path.suffix.lower() == PAGE:
            sections = self.sections()
            told = len(sections) == 1 or any(each.about.startswith(self.about) for each in sections)
            content = page(self.title, sections, summary="" if told else self.about).encode()
        else:
            content = drawn(self.figure(), path.suffix[1:].lower())
        try:
            write_bytes(path, content)
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror}") from None
        return path

    def _repr_html_(self) -> str:
        return page(self.title, self.sections(), frame=True)


@dataclass(frozen=True)
class Album(Picture):
    """Several pictures on one page."""

    title: str
    about: str
    pictures: tuple[Picture, ...]
    suffixes: ClassVar[tuple[str, ...]] = (PAGE,)

    def figure(self) -> Figure:
        raise ConfigError(f"{self.title}: several pictures make a page, .html; one of them makes a figure")

    def sections(self) -> list[Section]:
        return [section for picture in self.pictures for section in picture.sections()]


def noted(picture: P, note: str) -> P:
    """The same picture with a note."""
    same = copy(picture)
    vars(same)["note"] = note  # pictures are frozen; the copy is nobody else's yet
    return same


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches whose parts make way for each other."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_picture(path: Path | str, suffixes: tuple[str, ...] = (PAGE, *FIGURES)) -> Path:
    """The path, unless no picture of these kinds can be written there."""
    if not isinstance(path, str | PathLike):
        raise ConfigError(f"{path!r:.60}: expected a file's path, such as figure{suffixes[-1]}")
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        wanted = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
        raise ConfigError(f"{path}: it is written as {wanted}")
    check_writable(path)
    return path


def drawn(figure: Figure, kind: str) -> bytes:
    """A figure as svg, png or pdf. The same figure gives the same bytes."""
    return _saved(figure, kind, {"pdf.fonttype": 42}, dpi=150)


def svg(figure: Figure, label: str) -> Markup:
    """A figure as an <svg> element of a page: its text is text, and its colours are the page's own, light or dark."""
    text = _saved(figure, "svg", {"svg.fonttype": "none"}, transparent=True).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"#[0-9a-f]{6}", lambda colour: THEME.get(colour[0], colour[0]), text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return Markup(text.replace("<svg", Markup('<svg class="figure" role="img" aria-label="{}"').format(label), 1))


def _saved(figure: Figure, kind: str, settings: Any, **options: Any) -> bytes:
    undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "weft", **settings}), warnings.catch_warnings():
        # a sign that no font has is drawn as a box, and needs no warning on a terminal
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(out, format=kind, metadata=undated, **options)
    return out.getvalue()
