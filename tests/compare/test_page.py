"""The page of a comparison: its numbers are those of the outcomes, and every case has its sentence."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compare.page_sample import BASE, SHARES, VARIED, ablation, comparison, counted, measured, outcome

from weft.compare import page as drawing
from weft.compare.jobs import Comparison, Result, fraction
from weft.compare.multiplier import Multiplier
from weft.compare.page import AMOUNTS, FAINT, ComparisonPage, looks, multiplier_chart, ranking_chart, ranking_table
from weft.compare.ranking import Ranked, main_effects, method, ranking, result, warnings
from weft.figures.plot import Series
from weft.figures.tables import text_table


@pytest.fixture(scope="module")
def page() -> ComparisonPage:
    return ComparisonPage(comparison())


def by_hand(contender: Result, share: float) -> float:
    """Return the bits per byte of all seeds at a share, from the costs of the sections."""
    jobs = [job for job in contender.outcomes if job.share == share]
    return float(np.mean([np.sum(job.nats) / np.log(2) / np.sum(job.bytes) for job in jobs]))


# ---- ranking


def test_the_best_is_first_with_its_mean_over_seeds(page: ComparisonPage) -> None:
    assert [ranked.name for ranked in page.ranking] == ["transformer++", "transformer", "ngram-5", "lstm"]
    for ranked in page.ranking:
        assert ranked.bits == pytest.approx(by_hand(ranked.result, 1.0), rel=1e-12)
        assert ranked.bounds[0] < ranked.bits < ranked.bounds[1]
        assert ranked.baseline == (ranked.name == BASE) and ranked.is_ngram == (ranked.name == "ngram-5")
        assert (ranked.multiplier is None) == (ranked.name in (BASE, "ngram-5"))
    times = page.ranking[0].multiplier
    assert times and times.low < 2.1 < times.high


def test_failed_contenders_are_last_and_smaller_shares_are_noted() -> None:
    broken = Result("gru", "gru", (outcome("gru", 1.0, 0, (1, 1), nats=(), bytes=(), failed="the loss is NaN"),))
    short = measured("lstm", (0.75, 0.3))
    short = replace(short, outcomes=tuple(job for job in short.outcomes if job.share < 1))
    given = replace(comparison(), contenders=(*comparison().contenders[2:], broken, short))
    page = ComparisonPage(given)
    assert page.ranking[-1].name == "gru" and page.ranking[-1].failed == "the loss is NaN"
    notes = "\n".join(method(given, page.ranking))
    assert "lstm is shown at 1/3 of the budget, where others have 1" in notes
    assert all("gru finished nothing: the loss is NaN" in text for text in (notes, page.text()))
    assert next(line for line in page.text().splitlines() if line.startswith("gru")).endswith("failed")
    assert ">failed</td>" in drawing.html_ranking(page.ranking)
    early = measured("new", (0.75, 30))
    early = replace(early, outcomes=tuple(job for job in early.outcomes if job.share < 1))
    found = ranking(replace(comparison(), contenders=(comparison().contenders[2], early)))
    assert found[0].name == "new" and "new is shown at 1/3 of the budget" in "".join(warnings(found))


def test_a_rate_at_the_edge_of_the_sweep_is_noted(page: ComparisonPage) -> None:
    assert warnings(page.ranking) == []  # 0.003 of 0.0003 … 0.03
    best = page.ranking[0]
    jobs = tuple(job.replace(lr=0.03) for job in best.result.outcomes)
    changed = replace(best, result=replace(best.result, outcomes=jobs))
    assert warnings([changed, *page.ranking[1:]])[0].startswith("The learning rate of transformer++ is the largest")


def test_the_multiplier_is_a_distance_in_the_chart_of_flops_if_the_curves_meet(page: ComparisonPage) -> None:
    (chart,) = (panels.plots[0] for panels in page.panels() if panels.name == "loss-flops")
    times, (line, interval) = page.ranking[0].multiplier, chart.series[-2:]
    assert times is not None and line.name == "2.1× (2.0–2.2) for transformer++"
    (start, loss), (end, same) = line.points
    assert loss == same == times.loss and end / start == pytest.approx(times.value)
    assert [x / start for x, _ in interval.points] == pytest.approx([times.low, times.high])
    base = next(ranked for ranked in page.ranking if ranked.baseline)
    assert (end, loss) == pytest.approx((base.mean("flops"), base.bits))  # the baseline's best loss is the lower one
    other = measured("new", (0.75, 9e9))
    (first, *_) = ComparisonPage(replace(comparison(), contenders=(*comparison().contenders[2:3], other))).panels()
    assert not any("for new" in line.name for line in first.plots[0].series)


# ---- sentences


@pytest.mark.parametrize(
    ("interval", "beyond", "sentence"),
    [
        ((2.1, 1.8, 2.5), None, "needs 2.1 times less compute than transformer for the same loss (1.8–2.5)"),
        ((0.3, 0.25, 0.4), None, "needs 3.3 times the compute of transformer for the same loss (2.5–4.0)"),
        ((1.04, 0.9, 1.2), None, "interval, 0.90–1.2, includes 1"),
        ((2.1, 1.8, math.inf), None, "(at least 1.8)"),
        ((27, 20, math.inf), "above", "more than 27 times the compute for the same loss, which is beyond the measured"),
        ((1 / 27, 0, 0.05), "below", "it needs more than 27 times the compute of transformer"),
        ((2.1, math.nan, math.nan), None, "needs 2.1 times less compute than transformer for the same loss (one seed"),
        ((2.1, 0, math.inf), None, "beyond the measured range on both sides"),
    ],
)
def test_every_multiplier_has_its_sentence(interval: tuple[float, float, float], beyond: Any, sentence: str) -> None:
    contenders = (measured(BASE, (0.75, 1)), measured("new", (0.75, 2)))
    found = ranking(Comparison("", "", BASE, contenders=contenders, facts={}))
    times = Multiplier(*interval, loss=1.7, share=1.0, beyond=beyond)
    assert sentence in result([replace(each, multiplier=None if each.baseline else times) for each in found])


def test_results_without_a_multiplier_have_their_sentences() -> None:
    base, new, ngram = measured(BASE, (0.75, 1)), measured("new", (0.75, 2)), counted(bits=1.5)

    def summary(*contenders: Result, baseline: str = BASE) -> str:
        return result(ranking(Comparison("", "", baseline, contenders=contenders, facts={})))

    assert summary(base, ngram).startswith("ngram-5 (1.500 bits per byte) is counted instead of trained")
    assert "because the baseline ngram-5 is counted" in summary(new, counted(bits=2.5), baseline="ngram-5")
    assert summary(base, measured("old", (0.75, 0.5))).startswith("No contender beats the baseline, transformer (")
    assert "ngram-5, which is counted instead of trained, ends at" in summary(base, new, counted())
    assert summary(base) == f"transformer ({by_hand(base, 1.0):.3f} bits per byte) is the only contender that finished."
    nothing = replace(base, outcomes=())
    assert "The baseline transformer finished no job" in summary(nothing, new)
    assert summary(nothing) == "No contender finished a job, so there is nothing to compare."


def test_every_contender_that_wins_is_named() -> None:
    named = {"second": 1.7, "new": 2.0, "old": 0.5}
    contenders = (measured(BASE, (0.75, 1)), *(measured(name, (0.75, times)) for name, times in named.items()))
    text = result(found := ranking(Comparison("", "", BASE, contenders=contenders, facts={})))
    assert [ranked.name for ranked in found] == ["new", "second", BASE, "old"]
    assert text.startswith("new (") and f"Also better than {BASE}: second (" in text and "old" not in text


def test_a_difference_within_the_intervals_is_no_win() -> None:
    contenders = (measured(BASE, (0.75, 1)), measured("new", (0.75, 2)), measured("second", (0.75, 1.7)))
    found = ranking(Comparison("", "", BASE, contenders=contenders, facts={}))

    def summary(half: float) -> str:
        return result([replace(r, multiplier=None, bounds=(r.bits - half, r.bits + half)) for r in found])

    assert "overlap" not in summary(1e-6) and "Also better than transformer: second (" in summary(1e-6)
    assert f"better than {BASE}, but their intervals overlap;" in summary(1.0) and "Also better" not in summary(1.0)


def test_the_method_has_the_shares_and_the_seeds(page: ComparisonPage) -> None:
    notes, shares = "\n".join(method(page.comparison, page.ranking)), ", ".join(map(fraction, SHARES))
    assert shares == "1/27, 1/9, 1/3, 1" and shares in notes and "3 seeds" in notes
    assert notes.endswith("The last 10% is held out.")


# ---- tables


def test_the_text_has_every_number_and_name_in_80_columns(page: ComparisonPage) -> None:
    lines = text_table(ranking_table(page.ranking), 80).splitlines()
    assert lines[0].split() == ["contender", "parameters", "FLOPs", "bits", "per", "byte", "rate", "multiplier"]
    best = page.ranking[0]
    half = (best.bounds[1] - best.bounds[0]) / 2
    assert lines[1].split()[:6] == ["transformer++", "1.18M", "1e15", f"{best.bits:.3f}", f"±{half:.3f}", "0.003"]
    assert lines[2].endswith("baseline") and lines[3].split()[0] == "ngram-5" and lines[3].split()[2] == "0"
    assert lines[3].split()[-2:] == ["–", "–"]  # neither a rate nor a multiplier
    assert max(map(len, page.text().splitlines())) <= 80
    page = ComparisonPage(ablation())
    text = page.text()
    assert max(map(len, text.splitlines())) <= 80
    assert all(ranked.name in text for ranked in page.ranking)
    assert "placement: post → pre" in text and "negative change is better" in text


def test_the_page_has_the_table_and_escapes_its_inputs(tmp_path: Path) -> None:
    bad = measured("<b>new</b>", (0.75, 2))
    bad = replace(bad, changes={"model.norm": "<i>"}, recipe="transformer", sweep=())
    base = replace(comparison().contenders[2], sweep=())
    given = replace(comparison(), contenders=(base, bad), command="weft compare '<x>'")
    given = replace(given, title="<u>", facts={"Text": "<s>&</s>"}, notes=["<q>"])
    ComparisonPage(given).save(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text("utf-8")
    for tag in ("<b>new", "<i>", "<x>", "<u>", "<s>", "<q>", "<writes>"):
        assert tag not in html
    assert "&lt;b&gt;new&lt;/b&gt;" in html and "transformer model.norm=&lt;i&gt;" in html
    assert "weft compare &#39;&lt;x&gt;&#39;" in html and "ROMEO: what transformer &lt;writes&gt;" in html
    assert not re.search(r"(src|href)=\"https?:", html)
    row = html.split('<tr role="row" class="marked">')[1].split("</tr>")[0]
    cells = dict(re.findall(r'data-label="([^"]+)" class="n">([^<]*)<', row))
    assert cells["multiplier"] == "baseline" and cells["FLOPs"] == "1e15" and cells["tokens"] == "4M"
    assert cells["bits per byte"] == f"{by_hand(given.contenders[0], 1.0):.3f}"


def test_every_chart_on_the_page_has_a_label(page: ComparisonPage) -> None:
    html = "".join(section.title + section.about + section.html for section in page.sections())
    drawn = re.findall(r'<svg [^>]*aria-label="([^"]+)" class="chart"', html)
    assert drawn[:6] == [
        "Bits per byte against FLOPs",
        "Bits per byte against tokens",
        "Bits per byte against steps",
        "Bits per byte against seconds",
        "Bits per byte",
        "Compute multiplier against transformer",
    ]
    assert drawn[6:] == ["transformer++", "transformer", "lstm"] and html.count('role="img"') == len(drawn)


def test_an_ablation_has_its_effects_and_its_grid() -> None:
    given = ablation()
    cells = {each.name: each for each in given.contenders}
    found = ranking(replace(given, contenders=tuple(replace(each, sweep=()) for each in cells.values())))
    table = drawing.grid_table(found, VARIED)
    assert len(table.rows) == 16 and list(table.header[:4]) == list(VARIED)
    bits = [by_hand(cells[each.name], 1.0) for each in found]
    assert [row[4].split()[0] for row in table.rows] == [f"{value:.3f}" for value in sorted(bits)]
    panels = drawing.effects_chart(main_effects(given.contenders, VARIED))
    assert panels is not None and "negative number, is better" in panels.about
    dots = [series.points[0][0] for series in panels.plots[0].series if len(series.points) == 1]
    for setting, dot in zip(VARIED, dots, strict=True):  # every setting has one other value
        sides = [[by_hand(each, 1.0) for each in cells.values() if each.levels and each.levels[setting] == value]
                 for value in VARIED[setting]]  # fmt: skip
        assert dot == pytest.approx(np.mean(sides[1]) - np.mean(sides[0]), abs=1e-9)


# ---- charts


def series_of(found: tuple[Ranked, ...], amount: str) -> dict[str, Series]:
    """Return the named series of a loss chart."""
    panels = next(each for each in drawing.loss_charts(found) if each.name == f"loss-{amount}")
    return {series.name: series for series in panels.plots[0].series if series.name}


@pytest.mark.parametrize("amount", AMOUNTS)
def test_lines_pass_through_the_means_over_seeds(page: ComparisonPage, amount: str) -> None:
    drawn = series_of(page.ranking, amount)
    for ranked in page.ranking:
        jobs = [[job for job in ranked.result.outcomes if job.share == share] for share in SHARES]
        xs = [np.mean([getattr(job, amount) for job in rung]) for rung in jobs]
        ys = [by_hand(ranked.result, share) for share in SHARES]
        if ranked.is_ngram and amount in ("flops", "steps"):
            assert drawn[ranked.name].level == ranked.bits
        else:
            assert np.allclose(drawn[ranked.name].points, list(zip(xs, ys, strict=True)))


def test_the_band_spans_the_best_and_the_worst_seed(page: ComparisonPage) -> None:
    best = page.ranking[0].result
    seeds = np.array([[job.bits_per_byte for job in best.at(share)] for share in SHARES])
    band = series_of(page.ranking, "flops")[best.name].band
    assert np.allclose(band, list(zip(seeds.min(axis=1), seeds.max(axis=1), strict=True)))


def test_the_ranking_has_a_dot_and_an_interval_for_each_contender(page: ComparisonPage) -> None:
    panels = ranking_chart(page.ranking)
    assert panels is not None
    series, done = panels.plots[0].series[1:], [ranked for ranked in page.ranking if ranked.finished]
    for position, (ends, dot, ranked) in enumerate(zip(series[::2], series[1::2], done, strict=True)):
        assert dot.points == [(ranked.bits, -position)]
        assert [x for x, _ in ends.points] == pytest.approx(ranked.bounds)
    assert ranking_chart([replace(each, bits=float("inf")) for each in page.ranking]) is None


def test_only_the_baseline_and_the_best_four_are_in_colour() -> None:
    found = ranking(ablation())
    chosen = looks(found)
    best = [each.name for each in found if not each.baseline][:4]
    assert {name for name, look in chosen.items() if look is not FAINT} == {*best, ablation().baseline}
    assert len({look.colour for look in chosen.values()}) == 6
    grey = [name for name, look in chosen.items() if look is FAINT]
    assert f"{len(grey)} others" in series_of(found, "flops")
    first = [ranked for ranked in found if ranked.name not in grey[1:]]
    assert grey[0] in series_of(tuple(first), "flops")  # a single one is named


def test_multipliers_beyond_the_range_are_arrows(page: ComparisonPage) -> None:
    found = list(page.ranking)
    found[0] = replace(found[0], multiplier=Multiplier(27, 20, math.inf, loss=1.7, share=1.0, beyond="above"))
    panels = multiplier_chart(found)
    assert panels is not None
    (plot,) = panels.plots
    assert [series.points[0][0] for series in plot.series if series.look.marker == ">"] == [27]
    assert "more than 27×  transformer++" in (plot.y.ticks or {}).values()
    assert multiplier_chart([each for each in found if each.baseline]) is None


def test_the_sweep_marks_the_chosen_rate_and_failures(page: ComparisonPage) -> None:
    best = page.ranking[0]
    failed = outcome(best.name, SHARES[0], 0, (1, 1), lr=0.1, nats=(), bytes=(), failed="diverged")
    panels = drawing.sweep_charts([replace(best, result=replace(best.result, sweep=(*best.result.sweep, failed)))])
    assert panels is not None
    drawn = {series.look.marker: series.points for series in panels.plots[0].series}
    assert {rate for rate, _ in drawn["ring"]} == {0.003}
    assert [rate for rate, _ in drawn["x"]] == [0.1]


def test_figures_are_written_by_name(tmp_path: Path) -> None:
    laws = {BASE: (0.75, 1.0), "new": (0.75, 2.0)}
    contenders = [replace(measured(name, law, tokens=0, steps=0, seconds=0.0), sweep=()) for name, law in laws.items()]
    paths = ComparisonPage(replace(comparison(), contenders=tuple(contenders))).save_figures(tmp_path)
    names = ["loss-flops", "ranking", "multipliers"]  # no other amounts, and no sweep
    assert [path.name for path in paths] == [f"{name}{suffix}" for name in names for suffix in (".svg", ".png")]
    assert paths[0].read_text("utf-8").count("<svg") == 1 and paths[1].read_bytes()[:4] == b"\x89PNG"
