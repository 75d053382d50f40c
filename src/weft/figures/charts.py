"""Pictures made of a few charts: side by side in print, and one below another on a narrow page."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from weft.figures.page import html_charts, html_tables
from weft.figures.picture import COLOURS, FIGURES, SHADES, Picture, new_figure, svg
from weft.figures.plot import Plot
from weft.figures.shapes import AREAS, TEXTS, html_plot, laid_out, plot_data
from weft.figures.tables import Table, text_tables

UNITS = 104  # of a plot's plane to the inch
INK = {"ink": "#000000", "soft": "#808080", "": "#000000", **{f"c{n}": colour for n, colour in enumerate(COLOURS)}}
INKS = {"grid": "soft", "axis": "soft", "mark": "c1"}  # of what is no series
ALPHAS = {"grid": 0.4, "faint": 0.4, "band": 0.18}
AT = {"start": "left", "middle": "center", "end": "right"}


class Chart(NamedTuple):
    """A chart that is drawn by hand: what it is called, and what draws it on matplotlib's axes."""

    title: str
    draw: Callable[[Any], None]


class Charts(Picture):
    """Charts, and tables that say the same in numbers."""

    scripts: ClassVar[tuple[str, ...]] = ("chart.js",)
    columns: ClassVar[int] = 2
    size: ClassVar[tuple[float, float]] = (4.6, 3.1)  # inches of a chart that is drawn by hand

    @abstractmethod
    def charts(self) -> Sequence[Chart | Plot]:
        """What is drawn, in reading order."""

    def tables(self) -> Sequence[Table]:
        """The same in numbers; they are what a terminal shows."""
        return ()

    def figure(self) -> Figure:
        return self._figure(self.charts())

    def data(self) -> dict[str, Any]:
        """Its described charts, as web/chart.js draws them."""
        return {"plots": [plot_data(each) for each in self.charts() if isinstance(each, Plot)]}

    def html(self) -> str:
        """Every chart by itself, so that a narrow page shows them in full size, and the tables."""
        charts = self.charts()
        drawn = [
            html_plot(each) if isinstance(each, Plot) else svg(self._figure([each]), each.title) for each in charts
        ]
        return html_charts(drawn) + html_tables(self.tables())

    def text(self) -> str | None:
        return text_tables(self.tables()) or None

    def _figure(self, charts: Sequence[Chart | Plot]) -> Figure:
        columns = min(self.columns, len(charts))
        rows = -(-len(charts) // columns)
        inches = [[side / UNITS for side in each.size] if isinstance(each, Plot) else self.size for each in charts]
        width, height = map(max, zip(*inches, strict=True))
        figure = new_figure(columns * width, rows * height)
        for number, chart in enumerate(charts, 1):
            axes = figure.add_subplot(rows, columns, number)
            if isinstance(chart, Plot):
                _draw_plot(axes, chart)
                continue
            axes.set_title(chart.title, fontsize=10, parse_math=False)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8.5)
            chart.draw(axes)
        return figure


@dataclass(frozen=True)
class Panels(Charts):
    """Described charts of one kind, with the `name` of the file that they are saved as."""

    name: str
    about: str
    plots: Sequence[Plot]
    columns: ClassVar[int] = 4
    suffixes: ClassVar[tuple[str, ...]] = FIGURES

    def charts(self) -> Sequence[Plot]:
        return self.plots


class PanelsPage(Picture):
    """A page with described charts in it, which are saved as figures beside it."""

    @abstractmethod
    def panels(self) -> Sequence[Panels]:
        """All charts, in reading order."""

    def figure(self) -> Figure:
        return self.panels()[0].figure()

    def save_figures(self, folder: Path) -> list[Path]:
        """Write each as .svg and .png under its name: loss-flops.svg, multipliers.png, …"""
        return [each.save(folder / f"{each.name}{suffix}") for each in self.panels() for suffix in (".svg", ".png")]


def _draw_plot(axes: Any, plot: Plot) -> None:
    axes.set(xlim=(0, plot.size[0]), ylim=(plot.size[1], 0))
    axes.axis("off")
    layout = laid_out(plot)
    for shape in layout.shapes if layout else ():
        look, (xs, ys) = shape.look, zip(*shape.places, strict=True)
        colour = look.colour or INKS.get(shape.kind, "ink")
        shade = to_hex(SHADES(float(colour[:-1]) / 100)) if colour.endswith("%") else INK[colour]
        ink = {"color": shade, "alpha": ALPHAS.get(shape.kind)}
        if shape.kind in TEXTS:
            size, level = 9.5 if shape.kind == "title" else 8.5, "center" if shape.angle == -90 else "baseline"
            where = {"ha": AT[shape.anchor], "va": level, "rotation": -shape.angle, "rotation_mode": "anchor"}
            behind = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}} if shape.kind == "name" else {}
            axes.text(xs[0], ys[0], shape.text, fontsize=size, parse_math=False, **ink, **where, **behind)
            continue
        if shape.kind in AREAS:
            (drawn,) = axes.fill(xs, ys, linewidth=0, **ink)
        elif shape.kind == "dot":
            ring = look.marker == "ring"
            style = {"markersize": 8, "fillstyle": "none"} if ring else {"markersize": 4.5}
            (drawn,) = axes.plot(xs, ys, marker="o" if ring else look.marker, **style, **ink)
        else:
            dash = (0, [float(length) for length in look.dash.split()]) if look.dash else "-"
            width = 0.4 if shape.kind == "faint" else 0.8 * look.width
            (drawn,) = axes.plot(xs, ys, linewidth=width, linestyle=dash, **ink)
        if shape.cut and layout:
            x, y, width, height = layout.box
            drawn.set_clip_path(Rectangle((x, y), width, height, transform=axes.transData))
