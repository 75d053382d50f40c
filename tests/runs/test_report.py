"""The report: one page that needs nothing from elsewhere, whatever the run went through."""

import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import torch
from tests.training.small import meddle_with_steps, train

from weft.data.batch import Batch
from weft.runs.curves import Series, chart
from weft.runs.lines import read_lines
from weft.runs.report import write_report
from weft.training.step import OptimisationStep


def test_a_finished_run_has_a_page_with_its_curves(tmp_path, recipe, corpus, evaluate) -> None:  # type: ignore[no-untyped-def]
    result = train(
        recipe(), tmp_path / "run", corpus=corpus, evaluate=evaluate, quiet=True,
        command="weft train x --data <&>.txt",
    )  # fmt: skip
    result.run.event("result", bits_per_byte=1.25, baseline_bits_per_byte=4.5, samples=["<b>not bold</b> & so on"])
    html = write_report(result.run).read_text()
    HTMLParser().feed(html)
    assert html.count("<svg") == 5  # two of the loss, rate, norm, speed
    assert "1.250" in html
    assert "characters alone: 4.500" in html
    assert "&lt;b&gt;not bold&lt;/b&gt; &amp; so on" in html
    assert "weft train x --data &lt;&amp;&gt;.txt" in html
    assert "[model.attention]" in html
    assert not re.search(r"<script|<link|https?://", html)
    drawn = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(drawn) == 5
    for svg in drawn:
        ElementTree.fromstring(svg)


def test_what_went_wrong_and_what_it_cost_are_on_the_page(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("optimizer.lr=3.0", "steps=30", "log.every=1", "schedule.warmup=1", "guard.patience=3")
    result = train(settings, tmp_path / "run", corpus=corpus, quiet=True)
    result.run.event("samples", step=10, texts=["a <b>"])
    (rollback, *_) = [line for line in read_lines(result.run.events) if line["event"] == "rollback"]
    assert rollback["abandoned"][-1] == [rollback["step"], rollback["loss"]]
    html = write_report(result.run).read_text()
    assert 'class="mark"><title>rolled back to here from step ' in html
    assert ">abandoned<" in html
    assert "When training went wrong" in html
    assert "continued with 0.5 of the learning rate" in html
    parameters = sum(p.numel() for p in result.model.parameters())
    assert f"<td>parameters</td><td>{parameters:,}</td><td>{parameters:,}</td>" in html  # predicted, measured
    assert "step 10</td><td>a &lt;b&gt;" in html


def test_memory_is_predicted_for_the_rows_that_were_found_to_fit(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, monkeypatch
) -> None:
    def little_memory(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if len(parts[0].tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    many = recipe("steps=3", "batch.size=64", "batch.micro=2")
    expected = write_report(train(many, tmp_path / "two", corpus=corpus, quiet=True).run).read_text()
    meddle_with_steps(monkeypatch, little_memory)
    auto = recipe("steps=3", "batch.size=64", "batch.micro=auto")
    found = write_report(train(auto, tmp_path / "auto", corpus=corpus, quiet=True).run).read_text()
    row = re.compile(r"<tr><td>memory</td><td>(.*?)</td>")
    assert row.search(found)[1] == row.search(expected)[1]  # type: ignore[index]


def test_both_axes_may_be_logarithmic() -> None:
    """A power law is a straight line."""
    svg = ElementTree.fromstring(chart("x", [Series("a", [(10.0**i, 10.0**-i) for i in range(5)])], logarithmic=True))
    line = next(e for e in svg.iter() if e.tag == "polyline")
    places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(places)]
    assert all(abs(x - steps[0][0]) < 0.2 and abs(y - steps[0][1]) < 0.2 for x, y in steps)


def test_a_run_that_never_logged_has_a_page_too(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    result = train(recipe("steps=1"), tmp_path / "run", corpus=corpus, quiet=True)
    for file in (result.run.metrics, result.run.timings, result.run.events):
        file.unlink()
    assert "not finished" in write_report(result.run).read_text()


def test_a_chart_of_nothing_is_nothing() -> None:
    assert chart("x", [Series("a", [])]) == ""
    assert chart("x", [Series("a", [(1, math.nan)])]) == ""


def test_a_spike_does_not_flatten_the_curve() -> None:
    """The line between 1 and 2 uses a good part of the height although one value is a million."""
    points = [(float(i), 1.0 + i % 2) for i in range(100)]
    points[50] = (50.0, 1e6)
    svg = ElementTree.fromstring(chart("x", [Series("a", points)]))
    line = next(e for e in svg.iter() if e.tag == "polyline")
    heights = [float(place.split(",")[1]) for place in line.attrib["points"].split()]
    assert max(heights) - sorted(heights)[1] > 50


def test_many_points_are_thinned() -> None:
    svg = chart("x", [Series("a", [(float(i), math.sin(i)) for i in range(20_000)])])
    assert len(svg) < 20_000


def test_a_single_value_is_drawn() -> None:
    assert "<circle" in chart("x", [Series("a", [(5.0, 2.0)])], logarithmic=True)


def test_whatever_a_run_from_elsewhere_says_is_text(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    result = train(recipe(), tmp_path / "run", corpus=corpus, quiet=True)
    evil = "<img src=x onerror=alert(1)>\"'&"
    run = result.run
    run.event("start", time=evil, device=evil, command=evil, corpus=[evil], weft=evil, choices=[[evil, evil]])
    run.event("rollback", step=3, to=1, since=evil, rate=0.5, tries=1, abandoned=[])
    run.event("discarded", steps=[evil])
    run.event("samples", step=evil, texts=[evil, evil])
    run.event("result", samples=[evil], labels=[evil], matrix=[[1]])
    html = write_report(run).read_text()
    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;&#34;&#39;&amp;") >= 10
