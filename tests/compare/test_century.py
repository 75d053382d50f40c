"""A comparison in the order of time: its sizes and budgets, the best of them, and its page."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.command import Cli

from weft.compare.century import CenturyPage, Knowledge
from weft.compare.config import ComparisonRequest, Experiment
from weft.compare.jobs import Comparison, Outcome, Result, best_sizes
from weft.evaluate.abilities.result import Abilities, AbilityCurve, curve
from weft.evaluate.abilities.tasks import TASKS
from weft.evaluate.minimal_pairs import Accuracy
from weft.models.presets import preset


def requested(*words: str, flops: float | None = None) -> Experiment:
    return ComparisonRequest(["century", *words], ["book.txt"], budget={"flops": flops}).comparison()


def test_every_budget_has_a_size_which_is_also_trained_with_the_budgets_beside_it() -> None:
    experiment = requested("1e10", "1e11", "1e12", flops=1e9)
    assert experiment.shares == pytest.approx([1e-3, 1e-2, 0.1, 1.0]) and experiment.budget.flops == 1e12
    sizes = [each for each in experiment.contenders.values() if each.family == "lstm"]
    assert [each.parameters for each in sizes] == pytest.approx(
        [math.sqrt(flops / 120) for flops in (1e9, 1e10, 1e11, 1e12)]
    )
    assert [each.shares for each in sizes[::3]] == [pytest.approx((1e-3, 1e-2)), pytest.approx((0.1, 1.0))]
    assert experiment.contenders["bigram"].shares == (1.0,)
    years = {each.family: each.year for each in experiment.contenders.values()}
    assert list(years.values()) == sorted(years.values(), key=lambda year: year or 0) and len(years) == 10


def test_the_default_budgets_are_those_of_the_file() -> None:
    experiment = requested()
    assert experiment.budget.flops == max(experiment.budgets) and len(experiment.budgets) == 4
    assert experiment == experiment.expanded()


@pytest.mark.parametrize("name", ["bengio", "elman", "lstm", "gru", "transformer", "gpt-2", "llama"])
def test_contenders_have_the_recipes_of_their_year(name: str) -> None:
    contender = next(each for each in requested().contenders.values() if each.family == name)
    assert preset(contender.recipe).kind != "ngram" and contender.about


def test_grammar_is_compared_at_equal_minutes_in_the_order_of_time() -> None:
    experiment = ComparisonRequest(["grammar"], ["enwik8.gz"], budget={"minutes": 10}).comparison()
    years = {name: each.year for name, each in experiment.contenders.items()}
    assert years == {"kneser-ney-5": 1998, "lstm": 2012, "transformer": 2019}
    assert experiment.budget.minutes == 10 and experiment.shares == [1.0]


def outcome(name: str, share: float, seed: int, *, bits: float) -> Outcome:
    nats = tuple(math.log(2) * bits * (1 + 0.01 * section + 0.002 * seed) for section in range(20))
    fields = {"steps": 100, "tokens": 1000, "flops": 1e12 * share, "seconds": 1.0, "parameters": 5000}
    return Outcome(
        contender=name, share=share, lr=0.01, seed=seed, **fields, nats=nats, bytes=(1.0,) * 20, sample="The"
    )


def result(name: str, year: int, bits: dict[float, float]) -> Result:
    rungs = [outcome(name, share, seed, bits=value) for share, value in bits.items() for seed in (0, 1, 2)]
    return Result(name, name, tuple(rungs), year=year, about=f"What {name} is.")


def test_the_best_size_is_taken_at_every_budget() -> None:
    small, large = result("a-1k", 2000, {0.1: 3.0, 1.0: 2.9}), result("a-9k", 2000, {0.1: 3.5, 1.0: 2.0})
    best = best_sizes("a", [small, large])
    assert best.name == "a" and {(each.contender, each.share) for each in best.outcomes} == {
        ("a-1k", 0.1),
        ("a-9k", 1.0),
    }
    failed = Result(
        "a-20k", "a", (outcome("a-20k", 1.0, 0, bits=1.0).model_copy(update={"nats": (), "failed": "NaN"}),)
    )
    assert best_sizes("a", [failed]).shares == [] and best_sizes("a", [failed, large]).shares == [0.1, 1.0]


@pytest.fixture
def page() -> CenturyPage:
    shares = (0.01, 0.1, 1.0)
    counted = replace(result("counts", 1948, {1.0: 2.5}), outcomes=(outcome("counts", 1.0, 0, bits=2.5),))
    counted = replace(
        counted, outcomes=tuple(each.model_copy(update={"flops": 0.0, "lr": None}) for each in counted.outcomes)
    )
    # the second needs a third of the compute of the first: its curve is shifted
    first = result("old", 2003, {share: 2 + 0.3 * share**-0.2 for share in shares})
    second = result("new", 2019, {share: 2 + 0.3 * (3 * share) ** -0.2 for share in shares})
    facts = {"text": "book.txt"}
    comparison = Comparison("", "weft compare century", "old", (second, counted, first), facts, flops=1e12)
    asked = [curve(TASKS["copying"], {4: [1.0, 0.0, 1.0]}), AbilityCurve(TASKS["sums"], skipped="no tokens for +")]
    grammar = Accuracy(100, 0.75, 0.66, 0.82)
    return CenturyPage(comparison, knowledge={"new": Knowledge(Abilities("new", asked), grammar)})


def test_neighbours_in_time_are_compared(page: CenturyPage) -> None:
    assert [each.name for each in page.timeline] == ["counts", "old", "new"]
    step = page.steps[2]
    assert page.steps[:2] == [None, None] and step is not None
    assert step.value == pytest.approx(3, rel=0.05) and step.low < step.value < step.high
    assert "old needs 3.0 times the compute" in page.result.replace("2.9", "3.0")
    text = page.text()
    assert "better than counts from" in text and "1e10 FLOPs" in text and "not trained" in text
    assert "75.0%, 66.0%–82.0%" in text


def test_the_axis_of_grammar_reaches_from_chance_to_the_intervals(page: CenturyPage) -> None:
    ticks = page.grammar_plot().x.ticks
    assert ticks and [*ticks.values()] == ["50%", "60%", "70%", "80%", "90%"]
    below = replace(page, knowledge={"new": Knowledge(Abilities("new", []), Accuracy(9, 0.2, 0.05, 1.0))})
    ticks = below.grammar_plot().x.ticks
    assert ticks and [*ticks.values()][:: len(ticks) - 1] == ["0%", "100%"]


def test_a_step_back_is_said(page: CenturyPage) -> None:
    """The later model is now the one that needs three times the compute."""
    later = tuple(replace(each, year={"old": 2023}.get(each.name, each.year)) for each in page.comparison.contenders)
    back = replace(page, comparison=replace(page.comparison, contenders=later)).result
    assert "old needs 3.0 times the compute for the same loss" in back.replace("2.9", "3.0")
    assert "old (2023) needs 3.0 times the compute of new" in back.replace("2.9", "3.0") and "largest step" not in back


def test_of_many_judgements_the_summary_has_the_lowest_and_the_highest(page: CenturyPage) -> None:
    assert page.result.endswith("Share of minimal pairs judged right: 75.0% for new.")
    models = tuple(replace(page.comparison.contenders[0], name=name) for name in "abcde")
    known = {
        name: Knowledge(Abilities(name, []), Accuracy(9, 0.5 + n / 10, 0.4, 0.9)) for n, name in enumerate("bacde")
    }
    many = CenturyPage(replace(page.comparison, contenders=models, baseline="a"), knowledge=known).result
    assert many.endswith("judged right: 50.0% for b, the fewest; 90.0% for e, the most.")


def test_a_budget_of_minutes_is_named_by_its_shares(page: CenturyPage) -> None:
    timed = replace(page, comparison=replace(page.comparison, flops=None))
    assert timed.result.startswith("The same budget buys ")
    assert [series.name for series in timed.century_plot().series][:3] == [
        "1/100 of the budget",
        "1/10 of the budget",
        "the whole budget",
    ]


def test_the_page_begins_with_the_picture_and_can_be_stepped_through(page: CenturyPage, tmp_path: Path) -> None:
    html = page.save(tmp_path / "century.html").read_text()
    assert html.index('data-module="century.js"') < html.index("<nav") and "counted, not trained" in html
    (counts, old, new), plot = page.cards(), page.century_plot()
    assert counts["rows"][0][0] == "whole text"
    assert len(old["rows"]) == 4 and new["sample"] == "The" and new["about"] == "What new is."
    assert [series.name for series in plot.series] == ["1e10 FLOPs", "1e11 FLOPs", "1e12 FLOPs", "counted, not trained"]
    assert all(np.isfinite(point).all() for series in plot.series for point in series.points)
    data = json.loads(json.dumps(page.data(), allow_nan=False))
    assert data["kind"] == "compare" and data["panels"][0]["name"] == "century"
    assert page.record()["contenders"][2]["abilities"][0]["name"] == "copying"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["century", "1e10", "--data", "book.txt"], "--flops 1e10 1e11"),
        (["century", "--data", "book.txt", "--flops", "1e10"], "give several budgets"),
        (
            ["lstm", "gru", "--data", "book.txt", "--flops", "1e10", "--pairs", "p.tsv"],
            "only for a comparison in the order",
        ),
        (["century", "--flops", "1e9", "1e10"], "no text to compare on"),
        (["century", "--data", "book.txt", "--flops", "1e9", "1e9"], "give several budgets"),
        (["century", "--data", "book.txt", "--flops", "10", "100"], "no budget is large enough"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], line: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("\n".join(f"{n} times {n + 1} is {n * (n + 1)}." for n in range(4000)))
    assert line in cli.refused("compare", *words).replace("\n", " ")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_century_runs_from_start_to_end(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("time.toml").write_text(
        'data = "builtin:stories"\nbudgets = [2e7, 1e8]\nsizes = "best"\nrates = 1\nseeds = 2\n[settings]\n'
        'tokenizer = {kind = "char", fallback = "unk"}\nbatch = {size = 4, length = 32}\n'
        "compile = false\n[contenders]\n"
        'bigram = {recipe = "ngram-3", model.order = 2, year = 1948}\nelman = {recipe = "elman", year = 1990}\n'
        'bengio = {recipe = "bengio-tiny", year = 2003}\n'
        'deep = {recipe = "lstm", model.layers = 60, year = 2012}\n'
    )
    Path("pairs.tsv").write_text("good\tbad\nthe cat sits\tthe cat sit\n")
    found = cli.json("compare", "time.toml", "--out", "out", "--pairs", "pairs.tsv")
    assert [each["contender"] for each in found["contenders"]] == ["bigram", "elman", "bengio"]
    assert all("grammar" in each and each["abilities"] for each in found["contenders"])
    # sizes that don't exist with this vocabulary are named on the page
    assert "could not be trained: no model of that family" in Path("out/compare.html").read_text("utf-8")
    assert Path("out/compare.html").is_file() and Path("out/figures/century.svg").is_file()
