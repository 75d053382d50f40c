"""Layout of charts: everything is at the position of its value, on a page and in print."""

import math
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from weft.figures.charts import Panels
from weft.figures.picture import render
from weft.figures.plot import LOOKS, Axis, Look, Plot, Series, Whisker, bars, log_ticks, whiskers
from weft.figures.shapes import TEXTS, Shape, lay_out, plot_svg

Point = tuple[float, float]
FALLING = [(1.0, 3.0), (9.0, 1.0)]


def shapes(plot: Plot, *kinds: str) -> list[Shape]:
    """Return the shapes of these kinds, or all shapes."""
    layout = lay_out(plot)
    assert layout is not None
    return [shape for shape in layout.shapes if shape.kind in kinds or not kinds]


def lines(plot: Plot) -> list[list[Point]]:
    """Return the points of every line of a series on a page."""
    svg = ElementTree.fromstring(plot_svg(plot))
    kinds = ("line", "faint")
    found = [each.attrib["points"] for each in svg.iter() if each.attrib.get("class", "").split(" ")[0] in kinds]
    pairs = [[point.split(",") for point in points.split()] for points in found]
    return [[(float(x), float(y)) for x, y in points] for points in pairs]


def row_ticks(plot: Plot) -> dict[str, float]:
    """Return the heights of the numbers beside the vertical axis."""
    return {each.text: each.points[0][1] - 4 for each in shapes(plot, "tick") if each.anchor == "end" and each.text}


def test_both_axes_may_be_logarithmic() -> None:
    """A power law is a straight line."""
    log = Axis(log=True)
    (line,) = lines(Plot("x", [Series("a", [(10.0**i, 10.0**-i) for i in range(5)])], log, log))
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(line)]
    assert all(abs(x - steps[0][0]) < 0.2 and abs(y - steps[0][1]) < 0.2 for x, y in steps)


def test_a_chart_without_points_is_empty() -> None:
    for points in ([], [(1.0, math.nan)], [(math.inf, 1.0)]):
        assert plot_svg(Plot("x", [Series("a", points)])) == ""
    assert plot_svg(Plot("x", [Series("a", [(1, 0.0), (2, -1.0)])], y=Axis(log=True))) == ""
    assert plot_svg(Plot("x", [Series("base", level=2.0)])) == ""


def test_a_spike_does_not_flatten_the_curve_and_shows_its_value() -> None:
    points = [(float(i), 1.0 + i % 2) for i in range(100)]
    points[50] = (50.0, 85.0)
    plot = Plot("x", [Series("a", points)], y=Axis(clips=True))
    layout = lay_out(plot)
    assert layout is not None
    _, top, _, height = layout.box
    heights = sorted(y for line in lines(plot) for _, y in line)
    assert heights[0] < top < heights[1] and heights[-1] - heights[1] > 0.8 * height  # all but one use the height
    assert all(shape.clipped for shape in layout.shapes if shape.kind == "line")
    (arrow,), (label,) = shapes(plot, "dot"), (shape for shape in shapes(plot, "tick") if shape.text == "85")
    assert arrow.look.marker == "^" and arrow.points[0][1] < top and arrow.text == "50: 85"
    assert abs(label.points[0][0] - arrow.points[0][0]) < 10
    assert 'class="dot c1"><title>50: 85</title>' in plot_svg(plot)
    assert "80" in row_ticks(Plot("x", [Series("a", points)]))  # an axis that doesn't clip fits the data


def test_of_neighbouring_spikes_only_the_highest_has_an_arrow() -> None:
    points = [(float(i), 1.0 + i % 2) for i in range(5000)]
    points[2000:2003] = [(2000.0, 60.0), (2001.0, 75.0), (2002.0, 50.0)]
    points[4000] = (4000.0, 40.0)
    arrows = shapes(Plot("x", [Series("a", points)], y=Axis(clips=True)), "dot")
    assert [arrow.text for arrow in arrows] == ["2001: 75", "4000: 40"]
    # Independently of order and series; a value below a baseline is not a spike.
    calm = [(float(i), 1.0 + i % 2) for i in range(200)]
    one, other = [(0.0, 40.0), *calm[1:3], (3.0, 80.0), *calm[4:]], [*calm[:6], (6.0, 120.0), *calm[7:]]
    plot = Plot("x", [Series("a", one), Series("b", other)], y=Axis(clips=True))
    assert [arrow.text for arrow in shapes(plot, "dot")] == ["6: 120"]
    assert [each.text for each in shapes(plot, "tick") if each.look.colour == "c1"] == ["120"]
    assert not shapes(Plot("x", [Series("a", calm), Series("base", level=2.9)], y=Axis(clips=True)), "dot")


@pytest.mark.parametrize(("level", "marker"), [(90.0, "^"), (-40.0, "v")])
def test_a_baseline_far_away_leaves_the_curve_its_room(level: float, marker: str) -> None:
    points = [(float(i), 3.0 + i / 50) for i in range(50)]
    plot = Plot("x", [Series("a", points), Series("base", level=level)], y=Axis(clips=True))
    layout = lay_out(plot)
    assert layout is not None
    heights = [y for line in lines(plot) if len(line) > 2 for _, y in line]
    assert max(heights) - min(heights) > 0.8 * layout.box[3]
    (arrow,) = shapes(plot, "dot")
    assert arrow.look.marker == marker and f"{level:g}" in [shape.text for shape in shapes(plot, "tick")]


def test_a_baseline_is_at_its_value() -> None:
    """A baseline above all points, but not far above, is on the axis, and it is not a spike."""
    points = [(float(i), 3.0 + 0.5 * (i % 5)) for i in range(50)]
    plot = Plot("x", [Series("a", points), Series("base 4.7", level=4.7)], y=Axis(clips=True))
    ticks = row_ticks(plot)
    (one, low), (other, high) = ((float(text), y) for text, y in list(ticks.items())[:2])
    level = next(line for line in lines(plot) if len(line) == 2 and line[0][1] == line[1][1] and line[1][0] > 400)
    per_unit = (high - low) / (other - one)
    assert level[0][1] == pytest.approx(low + per_unit * (4.7 - one), abs=0.3)
    assert not shapes(plot, "dot")


def test_a_level_goes_from_edge_to_edge() -> None:
    *_, line, level = lines(Plot("x", [Series("a", FALLING), Series("base", level=2.0)], Axis(pad=0)))
    assert [x for x, _ in level] == [x for x, _ in line]
    assert level[0][1] == level[1][1] == pytest.approx((line[0][1] + line[1][1]) / 2, abs=0.2)


def test_many_points_are_thinned() -> None:
    assert len(plot_svg(Plot("x", [Series("a", [(float(i), math.sin(i)) for i in range(5_000)])]))) < 20_000


def test_background_series_do_not_widen_axes_and_are_clipped() -> None:
    behind = Series(points=[(0.1, 90.0), (5.0, 2.0), (80.0, 1.5)], background=True)
    alone, both = Plot("x", [Series("a", FALLING)]), Plot("x", [Series("a", FALLING), behind])
    assert row_ticks(alone) == row_ticks(both)
    (line,), (faint, same) = lines(alone), lines(both)
    assert same == line and faint[0][1] < 0
    (nested,) = [svg for svg in ElementTree.fromstring(plot_svg(both)) if svg.tag == "svg"]
    assert [each.attrib["class"] for each in nested] == ["faint c0", "line c0"]  # an inner <svg> clips its content


def test_bands_marks_and_labels() -> None:
    series = Series("a", FALLING, LOOKS[1], band=[(2.5, 3.5), (0.5, 1.5)], labels=["", "one <1>"])
    plot = Plot("<b>", [series], marks=[(4, "here")])
    (band,), dots = shapes(plot, "band"), [shape.points[0] for shape in shapes(plot, "dot")]
    assert len(band.points) == 4 and band.points[0][0] == dots[0][0] and band.points[1][0] == dots[1][0]
    assert band.points[0][1] > dots[0][1] > band.points[3][1]
    assert [shape.text for shape in shapes(plot, "mark")] == ["here"]
    assert "one &lt;1&gt;</text>" in plot_svg(plot) and "<b>" not in plot_svg(plot)


def test_whiskers_have_rows_and_arrows_beyond_the_measured_range() -> None:
    rows = [Whisker("new 2.1×", 2.1, 1.8, 2.5, LOOKS[0]), Whisker("far", 27.0, 20.0, math.inf, LOOKS[1], "above")]
    rows.append(Whisker("wide", 1.5, 0.0, math.inf, LOOKS[2]))
    plot = whiskers("x", rows, Axis("times", log=True, format="multiple"), neutral=1.0)
    names = {shape.text: shape.points[0][1] for shape in shapes(plot, "name")}
    assert list(names) == ["new 2.1×", "far", "wide"] and list(names.values()) == sorted(names.values())
    assert "1×" in [shape.text for shape in shapes(plot, "tick")]
    markers = [shape.look.marker for shape in shapes(plot, "dot")]
    assert markers.count(">") == 1 and markers.count("|") == 4
    widest = max((line for line in lines(plot) if line[0][1] == line[1][1]), key=lambda line: line[1][0] - line[0][0])
    assert widest[1][0] - widest[0][0] > 380  # the whole width beside the names
    longer = replace(plot, y=replace(plot.y, ticks={row: 4 * name for row, name in (plot.y.ticks or {}).items()}))
    beside, above = ({shape.points[0] for shape in shapes(each, "name")} for each in (plot, longer))
    assert {x for x, _ in beside} == {x for x, _ in above} and {y - 13 for _, y in beside} == {y for _, y in above}


def test_bars_are_proportional_to_their_values() -> None:
    plot = bars("x", {"1": 2.0, "2–3": 1.0, "a name that is long": 4.0}, "seen", y_label="nats")
    heights = [shape.points[0][1] - shape.points[1][1] for shape in shapes(plot, "bar")]
    assert heights == pytest.approx([heights[1] * 2, heights[1], heights[1] * 4], abs=0.4)
    assert {"1", "2–3", "a name that is long", "seen", "nats"} <= {shape.text for shape in shapes(plot, *TEXTS)}


def test_ticks_are_round_and_inside() -> None:
    assert log_ticks(4e13, 2.1e15, 7) == pytest.approx([5e13, 1e14, 2e14, 5e14, 1e15, 2e15])
    for low, high in ((4e13, 2e15), (1.3, 1.38), (1.7, 3.6), (2e-4, 5e-2), (0.02, 3000), (1e12, 3e21)):
        ticks = log_ticks(low, high, 7)
        assert 3 <= len(ticks) <= 8 and all(low <= tick <= high for tick in ticks)


def test_print_has_the_same_shapes() -> None:
    series = [Series("$a", FALLING, LOOKS[0], labels=["x_1$"]), Series("b", FALLING, Look("70%", "ring"))]
    panels = Panels("name", "about", [Plot("One_$", series, marks=[(2, "")]), bars("Two", {"a": 1.0}, "", y_label="")])
    figure = panels.figure()
    assert [axes.axison for axes in figure.axes] == [False, False]
    svg = render(figure, "svg")
    assert svg.count(b"<svg") == 1 and render(panels.figure(), "svg") == svg
    assert {"One_$", "x_1$", "$a"} <= {text.get_text() for text in figure.axes[0].texts}
    assert panels.html().count('role="img"') == 2
