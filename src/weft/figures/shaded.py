"""A running text whose tokens are shaded, set in lines for print; web/shaded.js has it on a page."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from weft.figures.picture import SHADES, new_figure

DARKEST = 0.55  # of SHADES: black letters can still be read on it
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Hiragino Sans", "Microsoft YaHei")
MISSING = "▯"
WHITE = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "␣"}  # signs for characters that can't be seen
WIDTH, SIZE, LINE, EDGE, PAGE = 468.0, 9.5, 17.0, 10.0, 640.0  # points
PART = 10  # letters that are drawn at a time


class Token(NamedTuple):
    """`text` is what it adds to a running text: nothing where it is special or only a part of a character."""

    text: str
    piece: str


@dataclass(frozen=True)
class Measure:
    """A number for each token, or None. Those of `top` and more are the darkest; those below 0 are underlined."""

    name: str
    values: Sequence[float | None]
    top: float

    def shade(self, value: float | None) -> float:
        """0 … 1."""
        return 0.0 if value is None or self.top <= 0 else min(1.0, abs(value) / self.top)

    @property
    def shades(self) -> list[float]:
        """Of all tokens, below 0 where the number is."""
        return [round(self.shade(each) * (-1 if (each or 0.0) < 0 else 1), 3) for each in self.values]

    @property
    def legend(self) -> list[tuple[float, str]]:
        """Shades, with the numbers that they stand for."""
        steps = [step / 4 for step in range(5)]
        beyond = any(abs(each) > self.top * 1.001 for each in self.values if each is not None)
        return [(step, f"{step * self.top:.2g}{'+' if beyond and step == 1 else ''}") for step in steps]


def percent(probability: float) -> str:
    """As a person reads it."""
    if probability == 0:
        return "0"
    if probability < 1e-6:
        return "<0.0001%"
    digits = 0 if probability >= 0.1 else 1 if probability >= 0.01 else 2 if probability >= 0.001 else 4
    return f"{100 * probability:.{digits}f}%"


@cache
def _fonts() -> tuple[Any, ...]:
    there = {entry.name for entry in font_manager.fontManager.ttflist}
    paths = [font_manager.findfont(name) for name in FONTS if name in there or name == FONTS[0]]
    return tuple(map(font_manager.get_font, paths))


@cache
def families() -> list[str]:
    """The fonts that text in a figure is set in, each for what those before it don't have."""
    return [font.family_name for font in _fonts()]


@cache
def _advance(sign: str) -> float | None:
    for font in _fonts():
        if font.get_char_index(ord(sign)):
            font.set_size(100, 72)
            return font.load_char(ord(sign)).linearHoriAdvance / 65536 / 100
    return 0.0 if unicodedata.combining(sign) else None


def width_of(text: str, size: float) -> float:
    """How wide a text is, in points; what no font here has is a square, as it would be on a page."""
    return size * sum(1.0 if (wide := _advance(sign)) is None else wide for sign in text)


def drawable(text: str) -> str:
    """A text as fonts can set it: an empty box for every character that none has."""
    return "".join(MISSING if _advance(sign) is None else sign for sign in text)


class _Piece(NamedTuple):
    """A token, or the part of one that stands in a line; x and width in points."""

    line: int
    x: float
    width: float
    text: str
    token: int


def lines_figure(title: str, tokens: Sequence[Token], measure: Measure) -> Figure:
    """The text set in lines, each token on its shade; as much of it as fills a page."""
    shown = [piece for piece in _set(tokens) if piece.line < PAGE // LINE]
    lines, read = shown[-1].line + 1, shown[-1].token + 1
    notes = f"; the first {read:,} of {len(tokens):,} tokens" if read < len(tokens) else ""
    height = (lines + 2.1) * LINE + 2 * EDGE
    figure = new_figure((WIDTH + 2 * EDGE) / 72, height / 72)
    figure.set_layout_engine("none")  # there is nothing to make way for
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-EDGE, WIDTH + EDGE), ylim=(height - EDGE, -EDGE))
    axes.axis("off")
    font = {"fontsize": SIZE, "family": families(), "parse_math": False, "va": "baseline"}
    shades = measure.shades
    for piece in shown:
        top, shade = piece.line * LINE, shades[piece.token]
        # the space before a word stays white
        lead = width_of(" ", SIZE) if piece.text[:1] == " " and piece.text[1:2].strip() else 0.0
        box = (piece.x + lead, top), piece.width - lead, LINE - 2
        axes.add_patch(Rectangle(*box, facecolor=SHADES(DARKEST * abs(shade)), lw=0))
        soft = {"color": "#55524d"} if not tokens[piece.token].text else {}
        axes.text(piece.x, top + 0.7 * LINE, piece.text, **font, **soft)
        if shade < 0:
            axes.plot([piece.x + lead, piece.x + piece.width], [top + LINE - 3.5] * 2, color="black", lw=0.7, ls=":")
    _legend(axes, (lines + 0.9) * LINE, measure, notes, font)
    figure.set_label(title)
    return figure


def _legend(axes: Any, top: float, measure: Measure, notes: str, font: dict[str, Any]) -> None:
    small, x = {**font, "fontsize": SIZE - 1.5}, 0.0
    for shade, label in measure.legend:
        width = max(26.0, width_of(label, SIZE) + 8)
        axes.add_patch(Rectangle((x, top), width, LINE - 3, facecolor=SHADES(DARKEST * shade), ec="#999999", lw=0.4))
        axes.text(x + width / 2, top + 0.64 * LINE, label, ha="center", **small)
        x += width
    below = "; below 0 underlined" if any(shade < 0 for shade in measure.shades) else ""
    axes.text(x + 6, top + 0.64 * LINE, measure.name + below + notes, **small)


def _set(tokens: Sequence[Token]) -> Iterator[_Piece]:
    """Break a text into lines of WIDTH, at tokens, and at its own line ends."""
    line, x = 0, 0.0
    for number, token in enumerate(tokens):
        parts = (token.text or token.piece).replace("\r", "").replace("\t", "    ").split("\n")
        for last, part in zip([False] * (len(parts) - 1) + [True], parts, strict=True):
            text = drawable(part if last else part + WHITE["\n"])
            # in short parts: pixels round the width of every letter, and the parts begin where they should
            for each in (text[at : at + PART] for at in range(0, len(text), PART)):
                if x + width_of(each, SIZE) > WIDTH and x > 0:
                    line, x = line + 1, 0.0
                    each = each.lstrip(" ") or each
                width = width_of(each, SIZE)
                yield _Piece(line, x, width, each, number)
                x += width
            line, x = (line, x) if last else (line + 1, 0.0)
