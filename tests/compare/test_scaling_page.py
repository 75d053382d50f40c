"""The page of a scaling law: its numbers are those of the law that made the simulated ladder."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.compare.page_sample import ladder, law, scaling

from weft.compare.scaling_charts import loss_chart, optimum_chart, residual_chart

PAGE = scaling()


def test_the_result_says_what_was_predicted_and_measured() -> None:
    told = PAGE.result
    share = PAGE.fit.beta / (PAGE.fit.alpha + PAGE.fit.beta)
    assert f"grows with C^{share:.2f} and the tokens with C^{1 - share:.2f}" in told
    assert f"measured at {law(2e7, 4e8):.3f}" in told and "inside the interval" in told
    best = min(np.geomspace(1e5, 1e10, 20001), key=lambda n: PAGE.fit.predict(float(n), 1e18 / 6 / float(n)))
    told_size = re.search(r"For 1e18 FLOPs it is ([\d.]+)M parameters", told)
    assert told_size and float(told_size[1]) == pytest.approx(best / 1e6, rel=2e-3)
    assert PAGE.check is not None
    off = replace(PAGE, check=PAGE.check._replace(measured=PAGE.check.measured._replace(loss=2.0)))
    assert "outside the interval" in off.result
    assert "next rung" not in replace(PAGE, check=None, budget=None).result


def test_the_terminal_has_the_constants_and_every_run_in_80_columns() -> None:
    lines = PAGE.text().splitlines()
    assert max(map(len, lines)) <= 80
    low, high = PAGE.fit.intervals["alpha"]
    row = next(line for line in lines if line.startswith("α"))
    assert row.split()[-2:] == [f"{PAGE.fit.alpha:.4g}", f"{low:.4g}–{high:.4g}"]
    first = next(line for line in lines if line.split()[:2] == ["200k", "1M"]).split()
    point = ladder()[0]
    by_hand = PAGE.fit.E + PAGE.fit.A / 2e5**PAGE.fit.alpha + PAGE.fit.B / 1e6**PAGE.fit.beta
    assert first[2:] == ["1.2e12", f"{point.loss:.4f}", f"{by_hand:.4f}", f"{point.loss / by_hand - 1:+.2%}"]


def test_charts_show_runs_fit_and_the_next_rung() -> None:
    axes = loss_chart(PAGE.fit, PAGE.points, PAGE.check, "bits per byte").figure().axes[0]
    marks = {(float(x), float(y)) for line in axes.lines if line.get_marker() == "o" for x, y in line.get_xydata()}  # type: ignore[union-attr]
    assert marks == {(point.flops, point.loss) for point in PAGE.points}
    assert PAGE.check is not None
    stars = [line.get_xydata() for line in axes.lines if line.get_marker() == "*"]
    assert np.allclose(stars[0], [[PAGE.check.measured.flops, PAGE.check.measured.loss]])  # type: ignore[arg-type]
    assert {"200k", "8M", "20M"} <= {text.get_text() for text in axes.texts}
    curve = next(line for line in axes.lines if len(line.get_xdata()) == 40)  # type: ignore[arg-type]
    flops, loss = (float(values[-1]) for values in curve.get_data())  # type: ignore[index]
    assert loss == pytest.approx(PAGE.fit.predict(2e5, flops / 6 / 2e5))

    left = residual_chart(PAGE.fit, PAGE.points, "bits per byte").figure().axes[0].lines[1].get_ydata()
    assert np.allclose(np.log1p(np.array(left) / 100), PAGE.fit.residuals)

    axes = optimum_chart(PAGE.fit, PAGE.points, 1e18).figure().axes[0]
    best = next(line for line in axes.lines if len(line.get_xdata()) == 40)  # type: ignore[arg-type]
    slope = np.polyfit(np.log(best.get_xdata()), np.log(best.get_ydata()), 1)[0]  # type: ignore[arg-type]
    assert slope == pytest.approx(PAGE.fit.beta / (PAGE.fit.alpha + PAGE.fit.beta))


def test_the_page_is_escaped_and_labelled_and_figures_have_names(tmp_path: Path) -> None:
    PAGE.save(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text("utf-8")
    for tag in ("<b>", "<x>", "<s>", "<q>"):
        assert tag not in html.split("</style>")[1].replace('<b id="', "")
    labels = re.findall(r'<svg class="figure" role="img" aria-label="([^"]+)"', html)
    assert len(labels) == 4 and html.count("<svg ") == 4
    assert [each.name for each in PAGE.drawings()] == [
        "scaling-loss",
        "scaling-optimum",
        "scaling-runs",
        "scaling-residuals",
    ]
