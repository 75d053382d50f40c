"""A scaling law from a ladder of runs: the ladder, the law, and the next rung."""

import math
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.compare.config import Experiment, experiment
from weft.compare.fit import fit
from weft.compare.jobs import Comparison, Outcome, Result
from weft.compare.scale import ScalingPage, check_budget, check_of, cost_per_token, ladder, points_of
from weft.errors import ConfigError

Capture = pytest.CaptureFixture[str]
DATA = ["--data", "book.txt"]
ONE = ["llama-tiny", *DATA, "--budget", "1e12"]


def request(**changes: object) -> Experiment:
    tree = {"contenders": {"llama": {"recipe": "llama-tiny"}}, "data": {"sources": ["b"]}, "budget": {"flops": 6e12}}
    return experiment({**tree, **changes})


def test_sizes_double_and_read_the_same_number_of_tokens() -> None:
    found = ladder(request(), 4)
    sizes = [each.parameters or 0 for each in found.contenders.values()]
    assert [size / sizes[0] for size in sizes] == pytest.approx([1, 2, 4, 8])
    assert found.budget.tokens is not None
    assert 6 * sizes[-1] * found.budget.tokens == pytest.approx(6e12, rel=1e-4)


def law(parameters: float, tokens: float) -> float:
    return 0.9 + 60 / parameters**0.35 + 90 / tokens**0.4


def measured(parameters: int, tokens: list[int]) -> Result:
    """Return runs that follow the law exactly; a token costs 6.6 FLOPs per parameter."""
    outcomes = [
        Outcome(
            contender=str(parameters), share=number / len(tokens), lr=0.01, seed=0, steps=1, tokens=read,
            flops=6.6 * parameters * read, seconds=1.0, parameters=2 * parameters, multiplied=parameters,
            nats=(law(parameters, read) * math.log(2) * 1000,), bytes=(1000,),
        )
        for number, read in enumerate(tokens, 1)
    ]  # fmt: skip
    return Result(str(parameters), "llama-tiny", tuple(outcomes))


def comparison(*contenders: Result) -> Comparison:
    return Comparison("a ladder", "weft scale", contenders[0].name, contenders, {})


def test_the_law_is_recovered_and_predicts_the_next_rung() -> None:
    sizes, tokens = [10_000 * 2**n for n in range(5)], [30_000 * 3**n for n in range(4)]
    points = points_of(comparison(*(measured(size, tokens) for size in sizes)))
    fitted = fit(points, draws=20)
    assert fitted.predict(400_000, 3e6) == pytest.approx(law(400_000, 3e6), rel=0.01)
    cost = cost_per_token(points)
    assert cost(20_000) == pytest.approx(6.6 * 20_000)
    assert cost(1e6) == pytest.approx(6.6e6, rel=1e-6)
    assert cost(1000) == pytest.approx(6600, rel=1e-6)
    check = check_of(fitted, points_of(comparison(measured(400_000, [3_000_000]))))
    page = ScalingPage(fitted, check, 1e13, optimum=(4e5, 4e6))
    assert page.check is not None
    assert page.check.error == pytest.approx(0, abs=0.01)
    assert page.record()["next"]["loss"] == pytest.approx(law(400_000, 3e6))
    assert max(map(len, (page.text() or "").splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["llama-tiny", *DATA], "--budget is required"),
        *((["llama-tiny", *DATA, "--budget", n], f"budget.flops = {float(n)}: expected") for n in ("nan", "-1", "0")),
        (["llama-tiny", *DATA, "--budget", "1e300"], "budget.flops = 1e+300: expected a"),
        *(([*ONE, "--sizes", given], "needs 3 to 16 sizes") for given in ("2", "5000")),
        ([*ONE, "--sizes", "x"], "invalid value for '--sizes'"),
        ([*ONE, "--rungs", "99"], "rungs = 99: expected"),
        ([*ONE, "--rungs", "2"], "needs 3 lengths of training or more"),
        ([*ONE, "--rates", "0"], "rates = 0: expected"),
        ([*ONE, "--out", "book.txt"], "book.txt: is a file"),
        ([*ONE, "--out", "."], "holds other files"),
        ([*ONE, "lstm"], "a scaling law is of one family"),
        ([*ONE, "steps=9"], "steps: the budget decides"),
        ([*ONE, "schedule.warmup=9000"], "that the budget pays for"),
        (["llama-tiny", "--budget", "1e12"], "there is no text to compare on"),
        (["ngram-3", *DATA, "--budget", "1e12"], "a 'ngram' model has no width to vary"),
        (["llama-tiny", *DATA, "--budget", "1e8"], "--budget 1e+08: too small for 5 sizes of"),
        (["llama-tinny", *DATA, "--budget", "1e12"], "'llama-tinny': no such recipe or preset"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("".join(f"frog {n} sat by the river {n * n % 97}\n" for n in range(3000)))
    assert run(["scale", *words]) == 2
    errors = capsys.readouterr().err
    assert line in errors.splitlines()[-1] and "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


def test_the_suggested_budget_is_sufficient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").write_text("".join(f"frog {n} sat by the river {n * n % 97}\n" for n in range(3000)))
    small = {"budget": {"flops": 1e7}, "settings": {"tokenizer": {"kind": "byte"}}}
    with pytest.raises(ConfigError, match=r"give --budget \S+ or more") as error:
        check_budget(request(**small), 3, tmp_path / "data")
    needed = float(str(error.value).split("give --budget ")[1].split()[0])
    check_budget(request(**small | {"budget": {"flops": needed}}), 3, tmp_path / "data")
    with pytest.raises(ConfigError, match="too small"):
        check_budget(request(**small | {"budget": {"flops": needed / 2}}), 3, tmp_path / "data")
