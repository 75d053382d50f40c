"""Pictures made of a few charts: side by side in print, and one below another on a narrow page."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from markupsafe import Markup
from matplotlib.figure import Figure

from weft.figures.picture import COLOURS, Picture, new_figure, svg
from weft.figures.tables import Table, html_tables, text_tables

DASHES = ("-", "--", "-.", ":")  # lines differ in these as well as in colour


class Chart(NamedTuple):
    """A chart: what it is called, and what draws it on matplotlib's axes."""

    title: str
    draw: Callable[[Any], None]


class Charts(Picture):
    """Charts, and tables that say the same in numbers."""

    columns: ClassVar[int] = 2
    size: ClassVar[tuple[float, float]] = (4.6, 3.1)  # inches of a chart

    @abstractmethod
    def charts(self) -> Sequence[Chart]:
        """What is drawn, in reading order."""

    def tables(self) -> Sequence[Table]:
        """The same in numbers; they are what a terminal shows."""
        return ()

    def figure(self) -> Figure:
        """All charts together, for print."""
        charts = self.charts()
        columns = min(self.columns, len(charts))
        rows = -(-len(charts) // columns)
        figure = new_figure(columns * self.size[0], rows * self.size[1])
        for number, chart in enumerate(charts, 1):
            _draw(figure.add_subplot(rows, columns, number), chart)
        return figure

    def html(self) -> str:
        """Every chart by itself, so that a narrow page shows them in full size, and the tables."""
        drawn = [Markup(svg(self._alone(chart), chart.title)) for chart in self.charts()]
        charts = Markup('<div class="charts cost-charts">{}</div>').format(Markup("").join(drawn))
        return charts + html_tables(self.tables())

    def text(self) -> str | None:
        """The tables."""
        return text_tables(self.tables()) or None

    def _alone(self, chart: Chart) -> Figure:
        figure = new_figure(*self.size)
        _draw(figure.add_subplot(), chart)
        return figure


def _draw(axes: Any, chart: Chart) -> None:
    axes.set_title(chart.title, fontsize=10, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5)
    chart.draw(axes)


def grid(axes: Any) -> None:
    """Faint lines at the ticks, which suit a light page and a dark one."""
    axes.grid(True, color="#808080", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def line(axes: Any, xs: Any, ys: Any, number: int, label: str | None = None, **style: Any) -> None:
    """The numbered line of a chart: each has a colour and a dash of its own."""
    chosen = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.6}
    axes.plot(xs, ys, label=label, **chosen | style)


def legend(axes: Any, **options: Any) -> None:
    """The names of the lines, without a box."""
    axes.legend(frameon=False, fontsize=8.5, handlelength=2.4, **options)


def legend_below(axes: Any) -> None:
    """The same under the chart, where lines are everywhere in it."""
    legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, columnspacing=1.0)
