"""Pictures: shown in a notebook, and saved as a page or as a figure for print."""

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

from weft.errors import ConfigError, os_errors
from weft.figures.page import Section, as_json, mount_point, page, part
from weft.storage.files import check_writable, write_bytes

FIGURES = (".svg", ".png", ".pdf")  # suffixes
PAGE = ".html"
# For probabilities and other shares: one hue whose lightness falls evenly, so that the order survives black-and-white
# print and colour blindness. A page mixes the same two colours (web/page.css).
SHADES = LinearSegmentedColormap.from_list("weft", ["#ffffff", "#0b3a63"])
# For lines and bars, distinct in lightness as well; equal to c0 … c3 of web/page.css.
COLOURS = ("#2f6f9f", "#c4562a", "#4f8a4b", "#7a5aa6")
# Replaces the colours of print by those of the page, light or dark; a shade becomes a mix of two of them.
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
    """Base of all pictures. Subclasses define `figure`, for print, and `html` or `module` if a page can show more."""

    title: str
    about: str  # what is shown and how to read it, in a sentence or two
    note: str = ""  # remark on this picture alone, such as where its text is from
    module: ClassVar[str] = ""  # file of web/ that draws its data on a page
    scripts: ClassVar[tuple[str, ...]] = ()  # other files of web/ that its section needs
    suffixes: ClassVar[tuple[str, ...]] = (PAGE, *FIGURES)

    @abstractmethod
    def figure(self) -> Figure:
        """Return the picture for print, on white."""

    def html(self) -> str:
        """Return the picture for a page: drawn by its module, or as text if no script runs; else the figure."""
        if self.module:
            return mount_point(self.module, self.data(), part("texts", [self.text()]))
        return inline_svg(self.figure(), self.title)

    def data(self) -> dict[str, Any]:
        """Return the values as JSON data."""
        return as_json(self)

    def text(self) -> str | None:
        """Return the picture as text for a terminal; None if it has no such form."""
        return None

    def sections(self) -> list[Section]:
        """Return the picture as sections of a page."""
        scripts = (*self.scripts, *filter(None, [self.module]))
        return [Section(self.title, " ".join(filter(None, (self.about, self.note))), self.html(), scripts)]

    def save(self, path: Path | str) -> Path:
        """Write a page (.html) or a figure (.svg, .png, .pdf), atomically."""
        path = check_picture(path, self.suffixes)
        if path.suffix.lower() == PAGE:
            sections = self.sections()
            in_sections = len(sections) == 1 or any(section.about.startswith(self.about) for section in sections)
            content = page(self.title, sections, summary="" if in_sections else self.about).encode()
        else:
            content = render(self.figure(), path.suffix[1:].lower())
        with os_errors(path, verb="written"):
            write_bytes(path, content)
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
        raise ConfigError(f"{self.title}: several pictures can only be saved as a page, .html; save one as a figure")

    def sections(self) -> list[Section]:
        return [section for picture in self.pictures for section in picture.sections()]


def with_note(picture: P, note: str) -> P:
    """Return a copy of the picture with a note."""
    copied = copy(picture)
    vars(copied)["note"] = note  # pictures are frozen; nobody else has the copy yet
    return copied


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, with constrained layout."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_picture(path: Path | str, suffixes: tuple[str, ...] = (PAGE, *FIGURES)) -> Path:
    """Return the path, or raise if no picture with one of these suffixes can be written there."""
    if not isinstance(path, str | PathLike):
        raise ConfigError(f"{path!r:.60}: expected a file's path, such as figure{suffixes[-1]}")
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        expected = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
        raise ConfigError(f"{path}: expected a file name ending in {expected}")
    check_writable(path)
    return path


def render(figure: Figure, kind: str) -> bytes:
    """Return a figure as svg, png or pdf. Equal figures give equal bytes."""
    return _savefig(figure, kind, {"pdf.fonttype": 42}, dpi=150)


def inline_svg(figure: Figure, label: str) -> Markup:
    """Return a figure as an <svg> element for a page: its text stays text, and its colours are those of the page."""
    text = _savefig(figure, "svg", {"svg.fonttype": "none"}, transparent=True).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"#[0-9a-f]{6}", lambda colour: THEME.get(colour[0], colour[0]), text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return Markup(text.replace("<svg", Markup('<svg class="figure" role="img" aria-label="{}"').format(label), 1))


def _savefig(figure: Figure, kind: str, settings: Any, **options: Any) -> bytes:
    undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "weft", **settings}), warnings.catch_warnings():
        # a character that no font has is drawn as a box, which needs no warning on a terminal
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(out, format=kind, metadata=undated, **options)
    return out.getvalue()
