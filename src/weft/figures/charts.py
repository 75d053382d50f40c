"""Pictures made of several charts: side by side in print, and stacked on a narrow page."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from weft.figures.page import html_charts, html_tables
from weft.figures.picture import COLOURS, FIGURES, SHADES, Picture, inline_svg, new_figure
from weft.figures.plot import Plot
from weft.figures.shapes import AREAS, TEXTS, html_plot, lay_out, plot_data
from weft.figures.tables import Table, text_tables

UNITS_PER_INCH = 104  # of a plot's plane
INK = {"ink": "#000000", "soft": "#808080", "": "#000000", **{f"c{n}": colour for n, colour in enumerate(COLOURS)}}
DEFAULT_COLOURS = {"grid": "soft", "axis": "soft", "mark": "c1"}  # of shapes that belong to no series
ALPHAS = {"grid": 0.4, "faint": 0.4, "band": 0.18}
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # labels, which lines would cross
ALIGNMENTS = {"start": "left", "middle": "center", "end": "right"}


class Chart(NamedTuple):
    """Chart that a function draws on matplotlib axes."""

    title: str
    draw: Callable[[Any], None]


class Charts(Picture):
    """Charts, and tables of the same values."""

    scripts: ClassVar[tuple[str, ...]] = ("chart.js",)
    columns: ClassVar[int] = 2
    size: ClassVar[tuple[float, float]] = (4.6, 3.1)  # inches of a `Chart`

    @abstractmethod
    def charts(self) -> Sequence[Chart | Plot]:
        """Return the charts in reading order."""

    def tables(self) -> Sequence[Table]:
        """Return the values as tables, which a terminal shows."""
        return ()

    def figure(self) -> Figure:
        return self._figure(self.charts())

    def data(self) -> dict[str, Any]:
        """Return the data of web/chart.js for every `Plot`."""
        return {"plots": [plot_data(chart) for chart in self.charts() if isinstance(chart, Plot)]}

    def html(self) -> str:
        """Return every chart as a separate element, so that a narrow page shows it in full size, and the tables."""
        drawn = [html_plot(c) if isinstance(c, Plot) else inline_svg(self._figure([c]), c.title) for c in self.charts()]
        return html_charts(drawn) + html_tables(self.tables())

    def text(self) -> str | None:
        return text_tables(self.tables()) or None

    def _figure(self, charts: Sequence[Chart | Plot]) -> Figure:
        columns = min(self.columns, len(charts))
        rows = -(-len(charts) // columns)
        sizes = [[side / UNITS_PER_INCH for side in c.size] if isinstance(c, Plot) else self.size for c in charts]
        width, height = map(max, zip(*sizes, strict=True))
        figure = new_figure(columns * width, rows * height)
        for number, chart in enumerate(charts, 1):
            axes = figure.add_subplot(rows, columns, number)
            if isinstance(chart, Plot):
                _draw_plot(axes, chart)
                continue
            axes.set_title(chart.title, fontsize=10, parse_math=False)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=9)
            chart.draw(axes)
        return figure


@dataclass(frozen=True)
class Panels(Charts):
    """Plots of one kind, saved as a file called `name`."""

    name: str
    about: str
    plots: Sequence[Plot]
    columns: ClassVar[int] = 4
    suffixes: ClassVar[tuple[str, ...]] = FIGURES

    def charts(self) -> Sequence[Plot]:
        return self.plots


class PanelsPage(Picture):
    """Page with plots that are also saved as figures."""

    @abstractmethod
    def panels(self) -> Sequence[Panels]:
        """Return all panels in reading order."""

    def figure(self) -> Figure:
        return self.panels()[0].figure()

    def save_figures(self, folder: Path) -> list[Path]:
        """Write every panel as .svg and .png under its name: loss-flops.svg, multipliers.png, …"""
        return [panel.save(folder / f"{panel.name}{suffix}") for panel in self.panels() for suffix in (".svg", ".png")]


def _draw_plot(axes: Any, plot: Plot) -> None:
    axes.set(xlim=(0, plot.size[0]), ylim=(plot.size[1], 0))
    axes.axis("off")
    layout = lay_out(plot)
    for shape in layout.shapes if layout else ():
        look, (xs, ys) = shape.look, zip(*shape.points, strict=True)
        name = look.colour or DEFAULT_COLOURS.get(shape.kind, "ink")
        colour = to_hex(SHADES(float(name[:-1]) / 100)) if name.endswith("%") else INK[name]
        ink = {"color": colour, "alpha": ALPHAS.get(shape.kind)}
        if shape.kind in TEXTS:
            size, baseline = 9.5 if shape.kind == "title" else 9, "center" if shape.angle == -90 else "baseline"
            aligned = {"ha": ALIGNMENTS[shape.anchor], "va": baseline}
            rotated = {"rotation": -shape.angle, "rotation_mode": "anchor"}
            behind = {"bbox": BEHIND} if shape.kind == "name" or look.colour else {}
            axes.text(xs[0], ys[0], shape.text, fontsize=size, parse_math=False, **ink, **aligned, **rotated, **behind)
            continue
        if shape.kind in AREAS:
            (artist,) = axes.fill(xs, ys, linewidth=0, **ink)
        elif shape.kind == "dot":
            ring = look.marker == "ring"
            style = {"markersize": 8, "fillstyle": "none"} if ring else {"markersize": 4.5}
            (artist,) = axes.plot(xs, ys, marker="o" if ring else look.marker, **style, **ink)
        else:
            dash = (0, [float(length) for length in look.dash.split()]) if look.dash else "-"
            width = 0.4 if shape.kind == "faint" else 0.8 * look.width
            (artist,) = axes.plot(xs, ys, linewidth=width, linestyle=dash, **ink)
        if shape.clipped and layout:
            x, y, width, height = layout.box
            artist.set_clip_path(Rectangle((x, y), width, height, transform=axes.transData))
