"""A comparison from the command line: what is refused before anything is trained, and one that runs to its end."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.api.load import load
from weft.cli.main import run
from weft.compare.config import Asked, contender, experiment
from weft.compare.contenders import ReadyContender, make_ready
from weft.compare.experiment import _facts, _notes
from weft.compare.jobs import Job
from weft.compare.runner import Machine
from weft.compare.sizes import multiplied, resized, sized
from weft.costs.count import count
from weft.errors import ConfigError
from weft.models.presets import preset

Capture = pytest.CaptureFixture[str]
SMALL = ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=32"]
GPT = " ".join(["gpt=gpt-tiny", *SMALL])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = (f"frog {n} sat by the river {n * n % 97} and the dog ran over hill {n % 13}\n" for n in range(1200))
    (tmp_path / "book.txt").write_text("".join(lines))
    (tmp_path / "short.txt").write_text("A frog sat by the river.\n" * 20)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "compare what?"),
        (["gpt-tiny", "--data", "book.txt", "--flops", "1e9"], "gpt-tiny: compared with what?"),
        (["gpt-tiny", "lstm", "--data", "book.txt"], "expected one of flops, tokens and minutes"),
        (["gpt-tiny", "lstm", "--flops", "1e9"], "there is no text to compare on"),
        (["gpt-tiny", "lstm", "--data", "none.txt", "--flops", "1e9"], "none.txt"),
        (["gpt-tiny", "lstm", "--data", "short.txt", "--flops", "1e9"], "bytes are held out to measure on, too few"),
        (["gpt-tiny", "lstm", "--data", "book.txt", "--flops", "10"], "more than the budget of 10 FLOPs"),
        (["gpt-tiny", "lstm", "--data", "book.txt", "--tokens", "9"], "tokens, more than the budget of 9 tokens"),
        (["gpt-tiny", "bert-tiny", "--data", "book.txt", "--flops", "1e9"], "objective 'masked+next'"),
        (["gpt-tiny", "gpt-tiny", "--data", "book.txt", "--flops", "1e9"], "gpt-tiny: named twice"),
        (["gpt-tiny", "lstn", "--data", "book.txt", "--flops", "1e9"], "'lstn': no such recipe or preset"),
        (["gpt-tiny", "lstm", "steps=4", "--data", "book.txt", "--flops", "1e9"], "steps: the budget decides"),
        (["gpt-tiny", "--vary", "model.width=1,2", "--data", "book.txt", "--flops", "1e9"], "model.width"),
        (["gpt-tiny", "--vary", "model.layers", "--data", "book.txt", "--flops", "1e9"], "expected KEY=VALUE,VALUE"),
        (
            ["gpt-tiny", "word=gpt-tiny tokenizer=word", "--data", "book.txt", "--tokens", "1e5"],
            "a token is not the same to contenders with different tokenizers",
        ),
        (["gpt-tiny", "lstm data.column=x", "--data", "book.txt", "--flops", "1e9"], "the comparison's own data"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(folder: Path, capsys: Capture, words: list[str], line: str) -> None:
    assert run(["compare", *words]) == 2
    errors = capsys.readouterr().err
    assert line in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert sorted(path.name for path in folder.iterdir()) == ["book.txt", "short.txt"]


BOTH = ["gpt-tiny", "lstm", "--data", "book.txt"]
ONE = ["gpt-tiny", "--data", "book.txt", "--flops", "1e10"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        *(([*BOTH, "--tokens", given], f"budget.tokens = {given}: expected a finite") for given in ("nan", "inf")),
        ([*BOTH, "--tokens", "-5"], "budget.tokens = -5.0: expected a number greater than 0"),
        ([*BOTH, "--flops", "nan"], "budget.flops = nan: expected a finite number"),
        ([*BOTH, "--flops", "-1"], "budget.flops = -1.0: expected a number greater than 0"),
        ([*BOTH, "--flops", "1e300"], "budget.flops = 1e+300: expected a number less than or equal to"),
        ([*BOTH, "--minutes", "0"], "budget.minutes = 0.0: expected a number greater than 0"),
        ([*BOTH, "--flops", "1e10", "--seeds", "0"], "seeds = 0: expected a number greater than or equal to 1"),
        ([*BOTH, "--flops", "1e10", "--seeds", "99999999999"], "expected a number less than or equal to 100"),
        ([*BOTH, "--flops", "1e10", "--rungs", "99"], "rungs = 99: expected a number less than or equal to 8"),
        ([*BOTH, "--flops", "1e10", "--rates", "0"], "rates = 0: expected a number greater than or equal to 1"),
        ([*BOTH, "--flops", "1e10", "--grid", "some"], "grid = 'some': available: full, one"),
        ([*BOTH, "--flops", "1e10", "--sizes", "x"], "sizes = 'x': available: budget, fixed"),
        ([*BOTH, "--flops", "1e10", "--baseline", "nobody"], "baseline = 'nobody': not one of gpt-tiny, lstm"),
        ([*BOTH, "--flops", "1e10", "--jobs", "0"], "--jobs 0: expected a number of processes"),
        ([*BOTH, "--flops", "1e10", "--out", "book.txt"], "book.txt: is a file; give a folder with --out"),
        ([*BOTH, "--flops", "1e10", "--out", "."], "holds other files already; give a new or an empty folder"),
        ([*BOTH, "--flops", "1e10", "data=5"], "data = 5: expected a table; text is given with --data"),
        (["a/b=gpt-tiny", *BOTH, "--flops", "1e10"], "contenders: 'a/b' can't be a name: expected letters, digits"),
        (["", *BOTH, "--flops", "1e10"], "'': expected a preset, a recipe or a .toml file"),
        ([*ONE, "--vary", "model.layers=1,2", "--vary", "model.layers=3,4"], "--vary model.layers: given twice"),
        ([*ONE, "--tokenizers", "bpe:0"], "--tokenizers bpe:0: '0' is no vocabulary size"),
        ([*ONE, "--tokenizers", "bpe:300,bpe:300"], "--tokenizers bpe:300: it is named twice"),
        (["--tokenizers", "bpe:0", "--data", "book.txt"], "--tokenizers bpe:0: '0' is no vocabulary size"),
        (["--tokenizers", "char", "--data", "book.txt", "--out", "book.txt"], "cannot be written: book.txt is not a"),
        (["--tokenizers", "char", "--data", "book.txt", "model.layers=2"], "model: a model's setting, and no model"),
        (
            [*BOTH, "--flops", "1e10", "--out", "new/folder", "tokenizer=byte", "schedule.warmup=1000"],
            "gpt-tiny: schedule.warmup = 1000 is longer than the 3 steps that the budget pays for",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(folder: Path, capsys: Capture, words: list[str], line: str) -> None:
    test_mistakes_are_one_line_and_leave_nothing(folder, capsys, words, line)


def test_a_folder_that_was_empty_is_empty_again(folder: Path, capsys: Capture) -> None:
    (folder / "out").mkdir()
    assert run(["compare", *BOTH, "--flops", "1e7", "--out", "out"]) == 2
    assert "more than the budget of 1e7 FLOPs" in capsys.readouterr().err
    assert not any((folder / "out").iterdir())


@pytest.mark.parametrize("given", ["contenders = 5", "data = 5", "settings = 5", "budget = 5", "vary = 5"])
def test_a_file_of_other_types_is_refused(folder: Path, capsys: Capture, given: str) -> None:
    contenders = "" if "contenders" in given else 'contenders = {a = "gpt-tiny", b = "lstm"}\n'
    (folder / "own.toml").write_text(f"{contenders}{given}\n")
    assert run(["compare", "own.toml", "--data", "book.txt", "--seeds", "1"]) == 2
    assert f"{given}: expected a table" in capsys.readouterr().err


def test_json_of_tokenizers(folder: Path, capsys: Capture) -> None:
    assert run(["compare", "--tokenizers", "char,byte", "--data", "book.txt", "--json"]) == 0
    char, byte = json.loads(capsys.readouterr().out)["tokenizers"]
    assert (char["name"], byte["name"]) == ("char", "byte")
    assert byte["tokens"] == byte["bytes"] == char["bytes"] == char["tokens"]  # all of it is ASCII
    assert (folder / "comparisons/tokenizers/tokenizers.html").is_file()


def ready(folder: Path, *words: str, **more: object) -> list[ReadyContender]:
    """Contenders on the book."""
    tree = {"data": {"sources": ["book.txt"]}, "budget": {"flops": 1e9}, **more}
    return make_ready(experiment({**tree, "contenders": dict(map(contender, words))}), folder / "data", "cpu", print)


def test_contenders_share_the_text_and_the_budget(folder: Path) -> None:
    gpt, counts, lstm = ready(folder, GPT, "ngram-3", "lstm model.d_model=16 model.layers=1")
    assert gpt.corpus.path == counts.corpus.path == lstm.corpus.path
    for each in (gpt, lstm):
        assert 0.9e9 < each.flops_per_step * each.whole.steps <= 1e9
    recipe = gpt.settled(Job("gpt", 1 / 3, 0.004, 2))
    assert (recipe.seed, recipe.optimizer.lr, recipe.steps) == (2, 0.004, round(gpt.whole.steps / 3))
    assert recipe.data.prepared == str(gpt.corpus.path)
    third = counts.settled(Job("ngram-3", 1 / 3, None, 0))
    assert third.data.tokens == round(len(counts.corpus.shards.train) / 3)


def test_a_contender_may_learn_from_the_beginning_of_the_text_alone(folder: Path) -> None:
    few, all_of_it = ready(folder, f"few={GPT.partition('=')[2]} data.tokens=500", GPT)
    assert (few.learns_from, all_of_it.learns_from) == (500, len(few.corpus.shards.train))
    wanted = experiment({"contenders": {"few": {"recipe": "gpt-tiny"}}, "data": {}, "budget": {"flops": 1e9}})
    machine = Machine(jobs=1, threads=1)
    assert _facts(wanted, [few], machine, 10**6)["text"].endswith("of which the first 500 tokens are read")
    assert "first" not in _facts(wanted, [all_of_it], machine, 10**6)["text"]
    times = few.whole.steps * few.tokens_per_step / 500
    assert f"few reads the text {times:.0f} times with the whole budget." in _notes(wanted, [few], [])


@pytest.mark.parametrize(
    ("settings", "data", "changes", "tokens"),
    [({}, {}, "", None), ({}, {"tokens": 700}, "", 700), ({"data": {"tokens": 600}}, {"tokens": 700}, "", 600),
     ({"data": {"tokens": 600}}, {"tokens": 700}, " data.tokens=500", 500)],
)  # fmt: skip
def test_how_much_is_read_is_said_for_all_or_for_one(
    folder: Path, settings: dict[str, Any], data: dict[str, int], changes: str, tokens: int | None
) -> None:
    (gpt,) = ready(folder, GPT + changes, settings=settings, data={"sources": ["book.txt"], **data})
    assert gpt.recipe.data.tokens == gpt.whole.data.tokens == tokens


def test_a_commands_words_come_before_a_comparisons_own() -> None:
    words = ["epochs", "data.tokens=500", "data.document_mask=true", "data.column=story"]
    asked = Asked(words, ["book.txt"], budget={"flops": 1e9}).experiment()
    assert asked.settings["data"] == {"tokens": 500, "document_mask": True}
    assert (asked.data.sources, asked.data.column) == (("book.txt",), "story")


def test_contenders_that_name_no_optimizer_have_the_same(folder: Path) -> None:
    """Of these a run alone would train the first with Muon."""
    same = GPT.partition("=")[2]
    gpt, post, muon = ready(folder, GPT, f"post={same} model.placement=post", f"muon={same} optimizer=muon")
    assert [each.whole.optimizer.kind for each in (gpt, post, muon)] == ["adamw", "adamw", "muon"]


def test_lengths_of_a_schedule_follow_the_length_of_the_run(folder: Path) -> None:
    (folder / "own.toml").write_text(
        'steps = 1000\nmodel = "gpt-tiny"\n[schedule]\nkind = "wsd"\nwarmup = 200\n[evaluate]\nevery = 500\n'
    )
    own, _ = ready(folder, "own.toml", "ngram-3", budget={"tokens": 51200})
    assert own.whole.steps == 100
    assert own.whole.schedule.warmup == 20
    short = own.settled(Job("own", 1 / 9, 0.001, 0))
    assert (short.steps, short.schedule.warmup) == (11, 2)
    assert short.evaluate.every <= 11
    assert own.settled(Job("own", 1 / 81, 0.001, 0)).schedule.warmup == 1


def test_lengths_without_a_length_are_shares_of_the_budget(folder: Path) -> None:
    """The text alone would have 600 steps chosen for it, which is no reason to refuse a warm-up of 800."""
    batch = {"batch": {"size": 16, "length": 64}}
    steps, noam, timed = (
        ready(folder, f"gpt-tiny {words}", budget=budget, settings=batch)[0]
        for words, budget in (
            ("schedule=step schedule.warmup=100 schedule.hold=800 schedule.every=100", {"tokens": 1_024_000}),
            ("schedule=noam schedule.warmup=4000", {"tokens": 1_024_000}),
            ("schedule.warmup=800", {"minutes": 1}),
        )
    )
    whole = steps.settled(Job("gpt-tiny", 1.0, 0.001, 0))
    assert (whole.steps, whole.schedule.warmup, whole.schedule.hold, whole.schedule.every) == (1000, 100, 800, 100)
    third = steps.settled(Job("gpt-tiny", 1 / 3, 0.001, 0))
    assert (third.steps, third.schedule.warmup, third.schedule.hold, third.schedule.every) == (333, 33, 266, 33)
    assert noam.settled(Job("gpt-tiny", 1 / 27, 1.0, 0)).schedule.warmup == 148  # 4000 · 37 / 1000
    probe = Job("gpt-tiny", 0.0, 0.001, 0)  # a few steps to see how long they take
    assert timed.settled(probe).schedule.warmup == 1
    assert timed.steps(probe) == timed.settled(probe).steps > 1
    assert timed.lasting(2000).settled(Job("gpt-tiny", 1 / 3, 0.001, 0)).schedule.warmup == round(800 / 2000 * 667)
    with pytest.raises(ConfigError, match=r"schedule\.warmup = 800 is longer than the 500 steps that the budget pays"):
        timed.lasting(500)


def test_shares_of_less_than_a_step_are_not_run(folder: Path) -> None:
    def left(steps: int) -> tuple[tuple[float, ...], tuple[float, ...], int, list[str]]:
        (gpt,) = ready(folder, GPT, settings={"batch": {"size": 4, "length": 32}}, budget={"tokens": 128 * steps})
        wanted = experiment({"contenders": {"gpt": {"recipe": "gpt-tiny"}}, "data": {}, "budget": {"tokens": 1}})
        sweep = gpt.sweep(wanted)
        assert gpt.whole.steps == steps
        lengths = [gpt.steps(Job("gpt", share, None, 0)) for share in sweep.shares]
        assert lengths == sorted(set(lengths))
        return sweep.shares, sweep.rounds, len(sweep.rates), gpt.left_out(wanted)

    assert left(27) == ((1 / 27, 1 / 9, 1 / 3, 1.0), (1 / 27, 1 / 9, 1 / 3), 5, [])
    assert left(14)[0] == (1 / 27, 1 / 9, 1 / 3, 1.0)
    assert left(9)[3] == ["gpt: 1/27 of the budget is less than a step, and isn't run"]
    shares, rounds, _, lines = left(4)
    assert (shares, rounds) == ((1 / 3, 1.0), (1 / 3,))
    assert lines == [f"gpt: {part} of the budget is less than a step, and isn't run" for part in ("1/27", "1/9")]
    shares, rounds, rates, lines = left(1)
    assert (shares, rounds, rates) == ((1.0,), (), 1)
    assert "the whole budget is 1 step, too few to search for a learning rate" in lines[-1]


def test_what_a_step_costs_is_counted_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpt,) = ready(folder, GPT)
    assert gpt.flops_per_step > 0
    monkeypatch.setattr("weft.compare.sizes.count", None)
    assert gpt.flops_per_step * gpt.whole.steps <= 1e9


@pytest.mark.parametrize("name", ["transformer", "transformer++", "gpt-tiny", "llama-tiny", "lstm", "gru", "elman"])
def test_a_family_in_other_sizes(name: str) -> None:
    model = preset(name)
    assert resized(model, model.d_model) == model
    for wanted in (2e5, 1e6, 2e7):
        found = sized(model.replace(vocab_size=512), wanted)
        assert 0.5 < multiplied(found) / wanted < 2
        # what a token is multiplied by, and that twice, is what a forward pass costs besides attention
        products = sum(part.flops for part in count(found, 1).components if part.name != "attention")
        assert abs(products / (2 * multiplied(found)) - 1) < 0.08


@pytest.mark.slow
def test_a_comparison_that_ends_is_not_run_again(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["compare", GPT, "ngram-3", "--data", "book.txt", "--flops", "2e9", "--seeds", "1", "--rungs", "1"]
    words += ["--rates", "1", "--jobs", "1", "--out", "out", "tokenizer=char", "batch.length=32"]
    assert run(words) == 0
    shown = capsys.readouterr().out
    assert "ngram-3" in shown and "gpt" in shown and max(map(len, shown.splitlines())) <= 80
    results = (folder / "out/results.jsonl").read_text()
    outcomes = [json.loads(line) for line in results.splitlines()]
    assert {outcome["contender"] for outcome in outcomes} == {"gpt", "ngram-3"}
    measured = load(folder / "out/runs/gpt").evaluate()
    gpt = next(outcome for outcome in outcomes if outcome["contender"] == "gpt")
    assert sum(gpt["nats"]) == pytest.approx(measured["loss"] * measured["tokens"], rel=1e-4)
    assert gpt["flops"] == pytest.approx(2e9, rel=0.02)
    assert not any((folder / "out/jobs").iterdir())
    kinds = {"plan.json", "results.jsonl", "data", "jobs", "runs", "figures", "compare.html", "compare.json"}
    assert {path.name for path in (folder / "out").iterdir()} == kinds
    assert (folder / "out/figures/loss-flops.png").is_file()
    first = (folder / "out/compare.html").read_text()
    monkeypatch.setattr("weft.figures.charts.PanelsPage.save_figures", lambda page, folder: [])  # which take seconds
    assert run(words) == 0
    assert (folder / "out/results.jsonl").read_text() == results
    assert (folder / "out/compare.html").read_text() == first
    assert run([*words[:-1], "batch.length=16"]) == 2
    assert "holds another comparison (differs in: settings)" in capsys.readouterr().err
