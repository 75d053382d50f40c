"""Text with shaded tokens, set in lines for print; web/shaded_text.js draws it on a page."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from weft.figures.picture import SHADES, new_figure

DARKEST = 0.55  # of SHADES on which black letters are still legible
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Hiragino Sans", "Microsoft YaHei")
MISSING = "▯"
WHITE = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "␣"}  # symbols for invisible characters
TEXT_WIDTH, FONT_SIZE, LINE_HEIGHT, MARGIN, PAGE_HEIGHT = 468.0, 9.5, 17.0, 10.0, 640.0  # points
FRAGMENT_LETTERS = 10  # letters drawn by one call


class Token(NamedTuple):
    """`text` is what the token adds to a text: nothing if it is special or only part of a character."""

    text: str
    piece: str


@dataclass(frozen=True)
class Measure:
    """Number for each token, or None. Values of `top` or more have the darkest shade; negative ones are underlined."""

    name: str
    values: Sequence[float | None]
    top: float

    def shade(self, value: float | None) -> float:
        """Return the shade of a value, from 0 to 1."""
        return 0.0 if value is None or self.top <= 0 else min(1.0, abs(value) / self.top)

    @property
    def shades(self) -> list[float]:
        """Shades of all tokens, with the sign of the value."""
        return [round(self.shade(value) * (-1 if (value or 0.0) < 0 else 1), 3) for value in self.values]

    @property
    def legend(self) -> list[tuple[float, str]]:
        """Five shades, with the values that they stand for."""
        steps = [step / 4 for step in range(5)]
        exceeded = any(abs(value) > self.top * 1.001 for value in self.values if value is not None)
        return [(step, f"{step * self.top:.2g}{'+' if exceeded and step == 1 else ''}") for step in steps]


def percent(probability: float) -> str:
    """Format a probability: 43%, 1.2%, 0.05%, <0.0001%."""
    if probability == 0:
        return "0"
    if probability < 1e-6:
        return "<0.0001%"
    digits = 0 if probability >= 0.1 else 1 if probability >= 0.01 else 2 if probability >= 0.001 else 4
    return f"{100 * probability:.{digits}f}%"


@cache
def _fonts() -> tuple[Any, ...]:
    installed = {entry.name for entry in font_manager.fontManager.ttflist}
    paths = [font_manager.findfont(name) for name in FONTS if name in installed or name == FONTS[0]]
    return tuple(map(font_manager.get_font, paths))


@cache
def families() -> list[str]:
    """Return the fonts of a figure's text, each for the characters that the ones before it lack."""
    return [font.family_name for font in _fonts()]


@cache
def _advance(char: str) -> float | None:
    """Return the width of a character in ems; None if no font has it."""
    for font in _fonts():
        if font.get_char_index(ord(char)):
            font.set_size(100, 72)
            return font.load_char(ord(char)).linearHoriAdvance / 65536 / 100
    return 0.0 if unicodedata.combining(char) else None


def width_of(text: str, size: float) -> float:
    """Return the width of a text in points; a character that no font has is a square, as on a page."""
    return size * sum(1.0 if (advance := _advance(char)) is None else advance for char in text)


def drawable(text: str) -> str:
    """Return the text with an empty box for every character that no font has."""
    return "".join(MISSING if _advance(char) is None else char for char in text)


def lines_figure(title: str, tokens: Sequence[Token], measure: Measure) -> Figure:
    """Draw the text in lines, each token on its shade, as far as it fits on a page."""
    fragments = [fragment for fragment in _fragments(tokens) if fragment[0] < PAGE_HEIGHT // LINE_HEIGHT]
    lines, shown = fragments[-1][0] + 1, fragments[-1][-1] + 1
    note = f"; the first {shown:,} of {len(tokens):,} tokens" if shown < len(tokens) else ""
    height = (lines + 2.1) * LINE_HEIGHT + 2 * MARGIN
    figure = new_figure((TEXT_WIDTH + 2 * MARGIN) / 72, height / 72)
    figure.set_layout_engine("none")  # positions are fixed
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-MARGIN, TEXT_WIDTH + MARGIN), ylim=(height - MARGIN, -MARGIN))
    axes.axis("off")
    font = {"fontsize": FONT_SIZE, "family": families(), "parse_math": False, "va": "baseline"}
    shades = measure.shades
    for line, x, width, text, token in fragments:
        top, shade = line * LINE_HEIGHT, shades[token]
        # the space before a word is not shaded
        lead = width_of(" ", FONT_SIZE) if text[:1] == " " and text[1:2].strip() else 0.0
        colour = SHADES(DARKEST * abs(shade))
        axes.add_patch(Rectangle((x + lead, top), width - lead, LINE_HEIGHT - 2, facecolor=colour, lw=0))
        soft = {"color": "#55524d"} if not tokens[token].text else {}
        axes.text(x, top + 0.7 * LINE_HEIGHT, text, **font, **soft)
        if shade < 0:
            axes.plot([x + lead, x + width], [top + LINE_HEIGHT - 3.5] * 2, color="black", lw=0.7, ls=":")
    _draw_legend(axes, (lines + 0.9) * LINE_HEIGHT, measure, note=note, font=font)
    figure.set_label(title)
    return figure


def _draw_legend(axes: Any, top: float, measure: Measure, *, note: str, font: dict[str, Any]) -> None:
    small, x, y = {**font, "fontsize": FONT_SIZE - 1.5}, 0.0, top + 0.64 * LINE_HEIGHT
    for shade, label in measure.legend:
        width, colour = max(26.0, width_of(label, FONT_SIZE) + 8), SHADES(DARKEST * shade)
        axes.add_patch(Rectangle((x, top), width, LINE_HEIGHT - 3, facecolor=colour, ec="#999999", lw=0.4))
        axes.text(x + width / 2, y, label, ha="center", **small)
        x += width
    negative = "; below 0 underlined" if any(shade < 0 for shade in measure.shades) else ""
    axes.text(x + 6, y, measure.name + negative + note, **small)


def _fragments(tokens: Sequence[Token]) -> Iterator[tuple[int, float, float, str, int]]:
    """Break a text into lines of TEXT_WIDTH; yield line, x, width, text and token number of each fragment."""
    line, x = 0, 0.0
    for number, token in enumerate(tokens):
        parts = (token.text or token.piece).replace("\r", "").replace("\t", "    ").split("\n")
        for index, part in enumerate(parts):
            ends_line = index < len(parts) - 1
            text = drawable(part + WHITE["\n"] if ends_line else part)
            # matplotlib rounds the width of every letter to pixels; in short fragments the error stays small
            for start in range(0, len(text), FRAGMENT_LETTERS):
                fragment = text[start : start + FRAGMENT_LETTERS]
                if x + width_of(fragment, FONT_SIZE) > TEXT_WIDTH and x > 0:
                    line, x = line + 1, 0.0
                    fragment = fragment.lstrip(" ") or fragment
                width = width_of(fragment, FONT_SIZE)
                yield line, x, width, fragment, number
                x += width
            line, x = (line + 1, 0.0) if ends_line else (line, x)
