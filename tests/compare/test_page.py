"""The page of a comparison: its numbers are those of the outcomes, and every case is told in words."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.compare.page_sample import BASE, SHARES, VARIED, ablation, comparison, counted, measured, outcome

from weft.compare.charts import AXES, effects_chart, looks, loss_charts, multiplier_chart, sweep_charts
from weft.compare.drawing import log_ticks, save_figures, scientific, spread
from weft.compare.effects import main_effects
from weft.compare.multiplier import Multiplier
from weft.compare.page import ComparisonPage
from weft.compare.results import Comparison, Measured
from weft.compare.standings import Standing, fraction, standings
from weft.compare.table import grid_table, html_standings, text_standings
from weft.compare.wording import method, result, warnings


@pytest.fixture(scope="module")
def page() -> ComparisonPage:
    return ComparisonPage(comparison())


def by_hand(contender: Measured, share: float) -> float:
    """Bits per byte of all seeds at a share, from the sections' costs."""
    jobs = [job for job in contender.outcomes if job.share == share]
    return float(np.mean([np.sum(job.nats) / np.log(2) / np.sum(job.bytes) for job in jobs]))


# ---- standings


def test_the_best_is_first_with_its_mean_over_seeds(page: ComparisonPage) -> None:
    assert [each.name for each in page.standings] == ["transformer++", "transformer", "ngram-5", "lstm"]
    for standing in page.standings:
        assert standing.bits == pytest.approx(by_hand(standing.contender, 1.0), rel=1e-12)
        assert standing.bounds[0] < standing.bits < standing.bounds[1]
        assert standing.baseline == (standing.name == BASE) and standing.counted == (standing.name == "ngram-5")
        assert (standing.multiplier is None) == (standing.name in (BASE, "ngram-5"))
    times = page.standings[0].multiplier
    assert times and times.low < 2.1 < times.high


def test_what_failed_is_last_and_says_why() -> None:
    broken = Measured("gru", "gru", (outcome("gru", 1.0, 0, (1, 1), nats=(), bytes=(), failed="the loss is NaN"),))
    short = measured("lstm", (0.75, 0.3))
    short = replace(short, outcomes=tuple(job for job in short.outcomes if job.share < 1))
    given = replace(comparison(), contenders=(*comparison().contenders[2:], broken, short))
    page = ComparisonPage(given)
    assert page.standings[-1].name == "gru" and page.standings[-1].failed == "the loss is NaN"
    notes = "\n".join(method(given, page.standings))
    assert (
        "gru finished nothing: the loss is NaN" in notes
        and "lstm is shown at 1/3 of the budget, where others have 1" in notes
    )
    assert "gru finished nothing: the loss is NaN" in page.text()
    line = next(line for line in page.text().splitlines() if line.startswith("gru"))
    assert line.endswith("failed")
    assert ">failed</td>" in html_standings(page.standings)


def test_a_contender_with_less_of_the_budget_is_told_even_where_it_is_best() -> None:
    early = measured("new", (0.75, 30))
    early = replace(early, outcomes=tuple(job for job in early.outcomes if job.share < 1))
    found = standings(replace(comparison(), contenders=(comparison().contenders[2], early)))
    assert found[0].name == "new" and "new is shown at 1/3 of the budget" in "".join(warnings(found))


def test_a_rate_at_the_edge_of_the_sweep_is_told(page: ComparisonPage) -> None:
    assert warnings(page.standings) == []  # 0.003 of 0.0003 … 0.03
    best = page.standings[0]
    jobs = tuple(job.replace(lr=0.03) for job in best.contender.outcomes)
    changed = replace(best, contender=replace(best.contender, outcomes=jobs))
    assert warnings([changed, *page.standings[1:]])[0].startswith("The rate of transformer++ is the largest")


def test_shares_are_written_as_fractions() -> None:
    assert [fraction(share) for share in SHARES] == ["1/27", "1/9", "1/3", "1"]


# ---- words


def told(value: float, low: float, high: float, beyond: str | None = None) -> str:
    """The result where the better one has this multiplier."""
    found = list(standings(Comparison("", "", BASE, (measured(BASE, (0.75, 1)), measured("new", (0.75, 2))), {})))
    times = Multiplier(value, low, high, loss=1.7, share=1.0, beyond=beyond)  # type: ignore[arg-type]
    return result([replace(each, multiplier=None if each.baseline else times) for each in found])


def test_every_multiplier_has_its_sentence() -> None:
    assert "needs 2.1 times fewer operations than transformer for the same loss (1.8–2.5)" in told(2.1, 1.8, 2.5)
    assert "needs 3.3 times as many operations as transformer for the same loss (2.5–4.0)" in told(0.3, 0.25, 0.4)
    assert "interval, 0.90–1.2, includes 1" in told(1.04, 0.9, 1.2)
    assert "(at least 1.8)" in told(2.1, 1.8, math.inf)
    assert "more than 27 times" in told(27, 20, math.inf, "above")
    assert "beyond the measured range" in told(27, 20, math.inf, "above")
    assert "it needs more than 27 times the operations of transformer" in told(1 / 27, 0, 0.05, "below")
    assert "beyond the measured range on both sides" in told(2.1, 0, math.inf)


def test_results_without_a_multiplier_have_theirs() -> None:
    base, new, ngram = measured(BASE, (0.75, 1)), measured("new", (0.75, 2)), counted(bits=1.5)

    def said(*contenders: Measured, baseline: str = BASE) -> str:
        return result(standings(Comparison("", "", baseline, contenders, {})))

    assert said(base, ngram).startswith("ngram-5 (1.500 bits per byte) is counted, not trained")
    assert "because the baseline ngram-5 is counted" in said(new, counted(bits=2.5), baseline="ngram-5")
    assert said(base, measured("old", (0.75, 0.5))).startswith("No contender beats the baseline, transformer (")
    assert "ngram-5, which is counted and multiplies nothing, ends at" in said(base, new, counted())
    assert said(base) == f"transformer ({by_hand(base, 1.0):.3f} bits per byte) is the only contender that finished."
    nothing = replace(base, outcomes=())
    assert "The baseline transformer finished no job" in said(nothing, new)
    assert said(nothing) == "No contender finished a job, so there is nothing to compare."


def test_the_method_says_what_was_done(page: ComparisonPage) -> None:
    notes = "\n".join(method(page.comparison, page.standings))
    assert "1/27, 1/9, 1/3, 1" in notes and "3 seeds" in notes
    assert notes.endswith("The last 10% is held out.")


# ---- tables


def test_the_terminal_has_every_number_in_80_columns(page: ComparisonPage) -> None:
    lines = text_standings(page.standings).splitlines()
    assert lines[0].split() == ["contender", "parameters", "FLOPs", "bits", "per", "byte", "rate", "multiplier"]
    best = page.standings[0]
    half = (best.bounds[1] - best.bounds[0]) / 2
    assert lines[1].split()[:6] == ["transformer++", "1.18M", "1e15", f"{best.bits:.3f}", f"±{half:.3f}", "0.003"]
    assert lines[2].endswith("baseline") and lines[3].split()[0] == "ngram-5" and lines[3].split()[2] == "0"
    assert lines[3].split()[-2:] == ["–", "–"]  # neither a rate nor a multiplier
    assert max(map(len, page.text().splitlines())) <= 80


def test_long_names_keep_to_80_columns_and_stay_whole() -> None:
    page = ComparisonPage(ablation())
    text = page.text()
    assert max(map(len, text.splitlines())) <= 80
    assert all(standing.name in text for standing in page.standings)
    assert "placement: post → pre" in text and "negative change is better" in text


def whole(page: ComparisonPage) -> str:
    return "".join(section.title + section.about + section.html for section in page.sections())


def test_the_page_holds_the_table_and_escapes_what_it_is_given(tmp_path: Path) -> None:
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
    row = html.split('<tr role="row" class="cmp-base">')[1].split("</tr>")[0]
    cells = dict(re.findall(r'data-label="([^"]+)" class="cost-n">([^<]*)<', row))
    assert cells["multiplier"] == "baseline" and cells["FLOPs"] == "1e15" and cells["tokens"] == "4M"
    assert cells["bits per byte"] == f"{by_hand(given.contenders[0], 1.0):.3f}"


def test_every_chart_on_the_page_has_a_label(page: ComparisonPage) -> None:
    html = whole(page)
    drawn = re.findall(r'<svg class="figure" role="img" aria-label="([^"]+)"', html)
    assert drawn[:4] == [
        "Bits per byte against FLOPs",
        "Bits per byte against tokens",
        "Bits per byte against seconds",
        "Compute multiplier against transformer",
    ]
    assert drawn[4:] == ["transformer++", "transformer", "lstm"] and html.count("<svg ") == len(drawn)


def test_an_ablation_has_its_effects_and_its_grid() -> None:
    given = ablation()
    cells = {each.name: each for each in given.contenders}
    found = standings(replace(given, contenders=tuple(replace(each, sweep=()) for each in cells.values())))
    table = grid_table(found, VARIED)
    assert len(table.rows) == 16 and list(table.header[:4]) == list(VARIED)
    bits = [by_hand(cells[each.name], 1.0) for each in found]
    assert [row[4].split()[0] for row in table.rows] == [f"{value:.3f}" for value in sorted(bits)]
    effects = main_effects(given.contenders, VARIED)
    drawing = effects_chart(effects)
    assert drawing is not None and "negative number, is better" in drawing.about
    axes = drawing.figure().axes[0]
    dots = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1]  # type: ignore[arg-type, index]
    for setting, dot in zip(VARIED, dots, strict=True):  # every setting has one other value
        sides = [[by_hand(each, 1.0) for each in cells.values() if each.levels and each.levels[setting] == value]
                 for value in VARIED[setting]]  # fmt: skip
        assert dot == pytest.approx(np.mean(sides[1]) - np.mean(sides[0]), abs=1e-9)


# ---- charts


def lines_of(standings_: tuple[Standing, ...], axis: str) -> list[tuple[list[float], list[float], str]]:
    drawing = next(each for each in loss_charts(standings_) if each.name == f"loss-{axis}")
    axes = drawing.figure().axes[0]
    return [(list(line.get_xdata()), list(line.get_ydata()), str(line.get_color())) for line in axes.lines]  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", AXES)
def test_lines_go_through_the_means_of_the_seeds(page: ComparisonPage, axis: str) -> None:
    drawn = lines_of(page.standings, axis)
    for standing in page.standings:
        jobs = [[job for job in standing.contender.outcomes if job.share == share] for share in SHARES]
        xs = [np.mean([getattr(job, axis) for job in rung]) for rung in jobs]
        ys = [by_hand(standing.contender, share) for share in SHARES]
        if standing.counted and axis == "flops":  # from edge to edge
            assert any(y == [standing.bits] * 2 and x == [0, 1] for x, y, _ in drawn)
        else:
            assert any(len(x) == 4 and np.allclose(x, xs) and np.allclose(y, ys) for x, y, _ in drawn)


def test_the_band_goes_from_the_best_seed_to_the_worst(page: ComparisonPage) -> None:
    axes = loss_charts(page.standings)[0].figure().axes[0]
    best = page.standings[0].contender
    seeds = np.array([[job.bits_per_byte for job in best.at(share)] for share in SHARES])
    bands = [collection.get_paths()[0].vertices[:, 1] for collection in axes.collections]
    assert any(np.isclose(band.min(), seeds.min()) and np.isclose(band.max(), seeds.max()) for band in bands)


def test_many_contenders_leave_the_baseline_and_the_best_four_in_colour() -> None:
    found = standings(ablation())
    chosen = looks(found)
    best = [each.name for each in found if not each.baseline][:4]
    assert {name for name, look in chosen.items() if not look.faint} == {*best, ablation().baseline}
    assert len({look.colour for look in chosen.values()}) == 6


def test_names_never_overlap() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        heights = list(rng.random(rng.integers(1, 9)) * 0.2 + rng.choice([0.0, 0.4, 0.8]))
        moved = spread(heights, 0.08)
        assert list(np.argsort(moved)) == list(np.argsort(heights))
        assert all(gap >= 0.08 - 1e-9 for gap in np.diff(sorted(moved)))
        assert min(moved) >= 0 and max(moved) <= 1
    assert spread([0.5, 0.2], 0.1) == pytest.approx([0.5, 0.2])
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])


def test_multipliers_beyond_the_range_are_arrows(page: ComparisonPage) -> None:
    found = list(page.standings)
    times = Multiplier(27, 20, math.inf, loss=1.7, share=1.0, beyond="above")
    found[0] = replace(found[0], multiplier=times)
    drawing = multiplier_chart(found)
    assert drawing is not None
    axes = drawing.figure().axes[0]
    assert ">" in [line.get_marker() for line in axes.lines]
    assert "more than 27×" in [text.get_text() for text in axes.texts]
    assert "1×" in [text.get_text() for text in axes.get_xticklabels()]
    assert multiplier_chart([each for each in found if each.baseline]) is None


def test_the_sweep_marks_the_chosen_rate_and_what_failed(page: ComparisonPage) -> None:
    best = page.standings[0]
    failed = outcome(best.name, SHARES[0], 0, (1, 1), lr=0.1, nats=(), bytes=(), failed="diverged")
    changed = replace(best, contender=replace(best.contender, sweep=(*best.contender.sweep, failed)))
    panels = sweep_charts([changed])
    assert panels is not None
    lines = panels.figure().axes[0].lines
    rings = [line for line in lines if line.get_marker() == "o" and line.get_fillstyle() == "none"]
    assert {tuple(line.get_xdata()) for line in rings} == {(0.003,)}  # type: ignore[arg-type]
    assert [list(line.get_xdata()) for line in lines if line.get_marker() == "x"] == [[0.1]]  # type: ignore[arg-type]


def test_ticks_are_round_and_inside() -> None:
    assert log_ticks(4e13, 2.1e15) == pytest.approx([5e13, 1e14, 2e14, 5e14, 1e15, 2e15])
    for low, high in ((4e13, 2e15), (1.3, 1.38), (1.7, 3.6), (2e-4, 5e-2), (0.02, 3000), (1e12, 3e21)):
        ticks = log_ticks(low, high)
        assert 3 <= len(ticks) <= 8 and all(low <= tick <= high for tick in ticks)
    assert scientific(1e15) == "10¹⁵" and scientific(2e-4) == "2·10⁻⁴"


def test_figures_are_written_by_name(tmp_path: Path) -> None:
    laws = {BASE: (0.75, 1.0), "new": (0.75, 2.0)}
    contenders = [replace(measured(name, law, tokens=0, seconds=0.0), sweep=()) for name, law in laws.items()]
    paths = save_figures(ComparisonPage(replace(comparison(), contenders=tuple(contenders))).drawings(), tmp_path)
    names = ["loss-flops", "multipliers"]  # no other amounts, and no sweep
    assert [path.name for path in paths] == [f"{name}{suffix}" for name in names for suffix in (".svg", ".png")]
    assert paths[0].read_text("utf-8").count("<svg") == 1 and paths[1].read_bytes()[:4] == b"\x89PNG"
