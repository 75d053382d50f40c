"""The page of a scaling law shows the numbers of the law behind the simulated ladder."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.compare import page_sample
from tests.compare.page_sample import ladder, law

from weft.compare.scale import CURVE_POINTS, ISOFLOP_BUDGETS
from weft.figures.plot import Plot, Series

page = cache(page_sample.scaling)


def test_the_summary_has_the_prediction_and_the_measurement() -> None:
    summary = page().result
    share = page().fit.beta / (page().fit.alpha + page().fit.beta)
    assert f"as C^{share:.2f}, and the tokens as C^{1 - share:.2f}" in summary
    assert f"measurement {law(2e7, 4e8):.3f}" in summary and "inside the interval" in summary
    best = min(np.geomspace(1e5, 1e10, 20001), key=lambda n: page().fit.predict(float(n), 1e18 / 6 / float(n)))
    size = re.search(r"For 1e18 FLOPs it is ([\d.]+)M parameters", summary)
    assert size and float(size[1]) == pytest.approx(best / 1e6, rel=2e-3)
    check = page().check
    assert check is not None
    off = replace(page(), check=check._replace(measured=check.measured._replace(loss=2.0)))
    assert "outside the interval" in off.result
    assert "next rung" not in replace(page(), check=None).result


def test_the_text_has_the_constants_and_every_run_in_80_columns() -> None:
    lines = page().text().splitlines()
    assert max(map(len, lines)) <= 80
    low, high = page().fit.intervals["alpha"]
    row = next(line for line in lines if line.startswith("α"))
    assert row.split()[-2:] == [f"{page().fit.alpha:.4g}", f"{low:.4g}–{high:.4g}"]
    first = next(line for line in lines if line.split()[:2] == ["200k", "1M"]).split()
    point = ladder()[0]
    by_hand = page().fit.E + page().fit.A / 2e5 ** page().fit.alpha + page().fit.B / 1e6 ** page().fit.beta
    assert first[2:] == ["1.2e12", f"{point.loss:.4f}", f"{by_hand:.4f}", f"{point.loss / by_hand - 1:+.2%}"]


def plots() -> dict[str, Plot]:
    return {panels.name: panels.plots[0] for panels in page().panels()}


def marked(plot: Plot, marker: str) -> list[Series]:
    return [series for series in plot.series if series.look.marker == marker]


def test_charts_show_the_runs_the_fit_and_the_next_rung() -> None:
    loss, optimum, residuals = (plots()[f"scaling-{name}"] for name in ("loss", "optimum", "residuals"))
    points = page().fit.points
    assert {point for series in marked(loss, "o") for point in series.points} == {(p.flops, p.loss) for p in points}
    (star,), check = marked(loss, "*"), page().check
    assert check is not None and star.points == [(check.measured.flops, check.measured.loss)]
    assert {"200k", "8M", "20M"} <= {label for series in loss.series for label in series.labels}
    curve = next(series.points for series in loss.series if len(series.points) == CURVE_POINTS)
    assert curve[-1][1] == pytest.approx(page().fit.predict(2e5, curve[-1][0] / 6 / 2e5))
    assert np.allclose(np.log1p(np.array([y for _, y in marked(residuals, "o")[0].points]) / 100), page().fit.residuals)
    best = np.log(optimum.series[0].points)
    slope = np.polyfit(best[:, 0], best[:, 1], 1)[0]
    assert slope == pytest.approx(page().fit.beta / (page().fit.alpha + page().fit.beta))


def test_all_charts_show_the_same_runs_and_fit() -> None:
    tokens, isoflops = (plots()[f"scaling-{name}"] for name in ("loss-tokens", "isoflops"))
    points, fit = page().fit.points, page().fit
    assert {each for series in marked(tokens, "o") for each in series.points} == {(p.tokens, p.loss) for p in points}
    near = [each for series in marked(isoflops, "o") for each in series.points]
    assert sorted(near) == sorted((p.parameters, p.loss) for p in points)
    lines = [series.points for series in isoflops.series if len(series.points) == CURVE_POINTS]
    assert len(lines) == ISOFLOP_BUDGETS
    for line, budget in ((lines[0], min(p.flops for p in points)), (lines[-1], max(p.flops for p in points))):
        size, loss = line[3]
        assert loss == pytest.approx(fit.predict(size, budget / 6 / size))
    for diamond in marked(isoflops, "D"):
        ((size, loss),) = diamond.points
        assert min(abs(loss - min(y for _, y in line)) for line in lines) < 0.01 and size > 0


def test_the_data_is_json_and_has_all_charts() -> None:
    data = json.loads(json.dumps(page().data(), allow_nan=False))
    assert data["kind"] == "scale" and data["result"] == page().result
    assert [panel["name"] for panel in data["panels"]] == list(plots())
    assert [table["title"] for table in data["tables"]] == ["Fitted constants", "Training runs used in the fit"]


def test_the_page_is_escaped_and_its_charts_are_labelled(tmp_path: Path) -> None:
    page().save(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text("utf-8")
    for tag in ("<b>", "<x>", "<s>", "<q>"):
        assert tag not in html.split("</style>")[1].replace('<b id="', "")
    labels = re.findall(r'<svg [^>]*aria-label="([^"]+)" class="chart"', html)
    assert len(labels) == len(plots()) and html.count('role="img"') == len(plots())
    names = ("loss", "loss-tokens", "isoflops", "optimum", "runs", "residuals")
    assert list(plots()) == [f"scaling-{name}" for name in names]
