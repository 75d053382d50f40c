"""Comparisons from the command line: mistakes are refused before any training, and one runs to its end."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.api.load import load
from weft.cli.main import run
from weft.compare.config import ComparisonRequest, contender, experiment
from weft.compare.contenders import ReadyContender, prepare_contenders
from weft.compare.experiment import _facts, _notes
from weft.compare.jobs import Job
from weft.compare.runner import JobResources
from weft.compare.sizes import multiplied, resize, resize_to
from weft.costs.count import count
from weft.errors import ConfigError
from weft.models.config import Decoder
from weft.models.presets import preset
from weft.nn.config import NormalInit
from weft.nn.position_config import Sinusoidal
from weft.recipe.optimizer import StepDecay

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


DATA = ["--data", "book.txt"]
BOTH = ["gpt-tiny", "lstm", *DATA]
FULL = [*BOTH, "--flops", "1e10"]
ONE = ["gpt-tiny", *DATA, "--flops", "1e10"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "compare what?"),
        (ONE, "gpt-tiny: compare it with what?"),
        (BOTH, "expected one of flops, tokens and minutes"),
        (["gpt-tiny", "lstm", "--flops", "1e9"], "there is no text to compare on"),
        (["gpt-tiny", "lstm", "--data", "none.txt", "--flops", "1e9"], "none.txt"),
        (["gpt-tiny", "lstm", "--data", "short.txt", "--flops", "1e9"], "bytes are held out, too few"),
        ([*BOTH, "--flops", "10"], "more than the budget of 10 FLOPs"),
        ([*BOTH, "--tokens", "9"], "tokens, more than the budget of 9 tokens"),
        (["bert-tiny", *ONE], "objective 'masked+next'"),
        (["gpt-tiny", *ONE], "gpt-tiny: named twice"),
        (["lstn", *ONE], "'lstn': no such recipe or preset"),
        ([*FULL, "steps=4"], "steps: the budget decides"),
        ([*ONE, "--vary", "model.width=1,2"], "model.width"),
        ([*ONE, "--vary", "model.layers"], "expected KEY=VALUE,VALUE"),
        ([*ONE, "--vary", "model.layers=1,2", "--vary", "model.layers=3,4"], "--vary model.layers: given twice"),
        (
            ["gpt-tiny", "word=gpt-tiny tokenizer=word", *DATA, "--tokens", "1e5"],
            "contenders with different tokenizers",
        ),
        (["lstm data.column=x", *ONE], "the comparison's data"),
        *(([*BOTH, "--tokens", given], f"budget.tokens = {given}: expected a finite") for given in ("nan", "inf")),
        ([*BOTH, "--tokens", "-5"], "budget.tokens = -5.0: expected a number greater than 0"),
        ([*BOTH, "--flops", "nan"], "budget.flops = nan: expected a finite number"),
        ([*BOTH, "--flops", "-1"], "budget.flops = -1.0: expected a number greater than 0"),
        ([*BOTH, "--flops", "1e300"], "budget.flops = 1e+300: expected a number less than or equal to"),
        ([*BOTH, "--minutes", "0"], "budget.minutes = 0.0: expected a number greater than 0"),
        ([*FULL, "--seeds", "0"], "seeds = 0: expected a number greater than or equal to 1"),
        ([*FULL, "--seeds", "99999999999"], "expected a number less than or equal to 100"),
        ([*FULL, "--rungs", "99"], "rungs = 99: expected a number less than or equal to 8"),
        ([*FULL, "--rates", "0"], "rates = 0: expected a number greater than or equal to 1"),
        ([*FULL, "--grid", "some"], "grid = 'some': available: full, one"),
        ([*FULL, "--sizes", "x"], "sizes = 'x': available: best, budget, fixed"),
        ([*FULL, "--baseline", "nobody"], "baseline = 'nobody': not one of gpt-tiny, lstm"),
        ([*FULL, "--jobs", "0"], "--jobs 0: expected a number of processes"),
        ([*FULL, "--out", "book.txt"], "book.txt: is a file; give a folder with --out"),
        ([*FULL, "--out", "."], "holds other files; give a new or an empty folder"),
        ([*FULL, "data=5"], "data = 5: expected a table; text is given with --data"),
        (["a/b=gpt-tiny", *FULL], "contenders: 'a/b' can't be a name: expected letters, digits"),
        (["", *FULL], "'': expected a preset, a recipe or a .toml file"),
        ([*ONE, "--tokenizers", "bpe:0"], "--tokenizers bpe:0: '0' is not a vocabulary size"),
        ([*ONE, "--tokenizers", "bpe:300,bpe:300"], "--tokenizers bpe:300: named twice"),
        (["--tokenizers", "bpe:0", *DATA], "--tokenizers bpe:0: '0' is not a vocabulary size"),
        (["--tokenizers", "char", *DATA, "--out", "book.txt"], "cannot be written: book.txt is not a"),
        (["--tokenizers", "char", *DATA, "model.layers=2"], "model: a model's setting, but no model"),
        (
            [*FULL, "--out", "new/folder", "tokenizer=byte", "schedule.warmup=1000"],
            "gpt-tiny: schedule.warmup = 1000 is longer than the 3 steps that the budget pays for",
        ),
    ],
)
def test_mistakes_are_one_line_and_leave_no_files(folder: Path, capsys: Capture, words: list[str], line: str) -> None:
    assert run(["compare", *words]) == 2
    errors = capsys.readouterr().err
    assert line in errors.splitlines()[-1] and "Traceback" not in errors
    assert sorted(path.name for path in folder.iterdir()) == ["book.txt", "short.txt"]


def test_an_empty_folder_stays_empty(folder: Path, capsys: Capture) -> None:
    (folder / "out").mkdir()
    assert run(["compare", *BOTH, "--flops", "1e7", "--out", "out"]) == 2
    assert "more than the budget of 1e7 FLOPs" in capsys.readouterr().err
    assert not any((folder / "out").iterdir())


@pytest.mark.parametrize("given", ["contenders = 5", "data = 5", "settings = 5", "budget = 5", "vary = 5"])
def test_wrong_types_in_a_file_are_refused(folder: Path, capsys: Capture, given: str) -> None:
    contenders = "" if "contenders" in given else 'contenders = {a = "gpt-tiny", b = "lstm"}\n'
    (folder / "own.toml").write_text(f"{contenders}{given}\n")
    assert run(["compare", "own.toml", "--data", "book.txt", "--seeds", "1"]) == 2
    assert f"{given}: expected a table" in capsys.readouterr().err


def test_tokenizers_as_json(folder: Path, capsys: Capture) -> None:
    assert run(["compare", "--tokenizers", "char,byte", "--data", "book.txt", "--json"]) == 0
    char, byte = json.loads(capsys.readouterr().out)["tokenizers"]
    assert (char["name"], byte["name"]) == ("char", "byte")
    assert byte["tokens"] == byte["bytes"] == char["bytes"] == char["tokens"]  # ASCII text
    assert (folder / "comparisons/tokenizers/tokenizers.html").is_file()


def ready(folder: Path, *words: str, **changes: object) -> list[ReadyContender]:
    """Prepare contenders on the book."""
    tree = {"data": {"sources": ["book.txt"]}, "budget": {"flops": 1e9}, **changes}
    settings = experiment({**tree, "contenders": dict(map(contender, words))})
    return prepare_contenders(settings, folder / "data", "cpu", log=print)


def test_contenders_share_the_text_and_the_budget(folder: Path) -> None:
    gpt, ngram, lstm = ready(folder, GPT, "ngram-3", "lstm model.d_model=16 model.layers=1")
    assert gpt.text.path == ngram.text.path == lstm.text.path
    for trained in (gpt, lstm):
        assert 0.9e9 < trained.flops_per_step * trained.full.steps <= 1e9
    recipe = gpt.recipe_for(Job("gpt", 1 / 3, 0.004, seed=2))
    assert (recipe.seed, recipe.optimizer.lr, recipe.steps) == (2, 0.004, round(gpt.full.steps / 3))
    assert recipe.data.prepared == str(gpt.text.path)
    assert ngram.recipe_for(Job("ngram-3", 1 / 3, None, seed=0)).data.tokens == round(len(ngram.text.shards.train) / 3)


def test_a_contender_may_train_on_the_beginning_of_the_text(folder: Path) -> None:
    few, full = ready(folder, f"few={GPT.partition('=')[2]} data.tokens=500", GPT)
    assert (few.training_tokens, full.training_tokens) == (500, len(few.text.shards.train))
    settings = experiment({"contenders": {"few": {"recipe": "gpt-tiny"}}, "data": {}, "budget": {"flops": 1e9}})
    resources = JobResources(jobs=1, threads=1)
    assert _facts(settings, [few], resources, held_out=10**6)["text"].endswith("first 500 tokens are read")
    assert "first" not in _facts(settings, [full], resources, held_out=10**6)["text"]
    times = few.full.steps * few.tokens_per_step / 500
    assert f"few reads the text {times:.0f} times with the whole budget." in _notes(settings, [few], [])


@pytest.mark.parametrize(
    ("settings", "data", "changes", "tokens"),
    [({}, {}, "", None), ({}, {"tokens": 700}, "", 700), ({"data": {"tokens": 600}}, {"tokens": 700}, "", 600),
     ({"data": {"tokens": 600}}, {"tokens": 700}, " data.tokens=500", 500)],
)  # fmt: skip
def test_the_amount_of_text_is_set_for_all_or_for_one(
    folder: Path, settings: dict[str, Any], data: dict[str, int], changes: str, tokens: int | None
) -> None:
    (gpt,) = ready(folder, GPT + changes, settings=settings, data={"sources": ["book.txt"], **data})
    assert gpt.recipe.data.tokens == gpt.full.data.tokens == tokens


def test_the_command_overrides_the_comparisons_settings() -> None:
    words = ["epochs", "data.tokens=500", "data.document_mask=true", "data.column=story"]
    settings = ComparisonRequest(words, ["book.txt"], budget={"flops": 1e9}).experiment()
    assert settings.settings["data"] == {"tokens": 500, "document_mask": True}
    assert (settings.data.sources, settings.data.column) == (("book.txt",), "story")


def test_contenders_without_an_optimizer_get_the_same_one(folder: Path) -> None:
    """A single run would train the first with Muon."""
    same = GPT.partition("=")[2]
    gpt, post, muon = ready(folder, GPT, f"post={same} model.placement=post", f"muon={same} optimizer=muon")
    assert [ready.full.optimizer.kind for ready in (gpt, post, muon)] == ["adamw", "adamw", "muon"]


def test_a_schedule_scales_with_the_steps(folder: Path) -> None:
    (folder / "own.toml").write_text(
        'steps = 1000\nmodel = "gpt-tiny"\n[schedule]\nkind = "wsd"\nwarmup = 200\n[evaluate]\nevery = 500\n'
    )
    own, _ = ready(folder, "own.toml", "ngram-3", budget={"tokens": 51200})
    assert (own.full.steps, own.full.schedule.warmup) == (100, 20)
    short = own.recipe_for(Job("own", 1 / 9, 0.001, seed=0))
    assert (short.steps, short.schedule.warmup) == (11, 2)
    assert short.evaluate.every <= 11
    assert own.recipe_for(Job("own", 1 / 81, 0.001, seed=0)).schedule.warmup == 1


def test_a_schedule_without_steps_is_relative_to_the_budget(folder: Path) -> None:
    """A single run would get 600 steps for this text, but a warm-up of 800 is not refused."""
    batch = {"batch": {"size": 16, "length": 64}}

    def one(schedule: str, **budget: int) -> ReadyContender:
        return ready(folder, f"gpt-tiny {schedule}", budget=budget, settings=batch)[0]

    steps = one("schedule=step schedule.warmup=100 schedule.hold=800 schedule.every=100", tokens=1_024_000)
    noam, timed = one("schedule=noam schedule.warmup=4000", tokens=1_024_000), one("schedule.warmup=800", minutes=1)
    for share, total, schedule in ((1.0, 1000, (100, 800, 100)), (1 / 3, 333, (33, 266, 33))):
        recipe = steps.recipe_for(Job("gpt-tiny", share, 0.001, seed=0))
        assert isinstance(recipe.schedule, StepDecay) and recipe.steps == total
        assert (recipe.schedule.warmup, recipe.schedule.hold, recipe.schedule.every) == schedule
    assert noam.recipe_for(Job("gpt-tiny", 1 / 27, 1.0, seed=0)).schedule.warmup == 148  # 4000 · 37 / 1000
    probe = Job("gpt-tiny", 0.0, 0.001, seed=0)  # measures the time per step
    assert timed.recipe_for(probe).schedule.warmup == 1
    assert timed.steps(probe) == timed.recipe_for(probe).steps > 1
    third = timed.with_steps(2000).recipe_for(Job("gpt-tiny", 1 / 3, 0.001, seed=0))
    assert third.schedule.warmup == round(800 / 2000 * 667)
    with pytest.raises(ConfigError, match=r"schedule\.warmup = 800 is longer than the 500 steps that the budget pays"):
        timed.with_steps(500)


def test_shares_of_less_than_a_step_are_skipped(folder: Path) -> None:
    def sweep_of(steps: int) -> tuple[tuple[float, ...], tuple[float, ...], int, list[str]]:
        (gpt,) = ready(folder, GPT, settings={"batch": {"size": 4, "length": 32}}, budget={"tokens": 128 * steps})
        settings = experiment({"contenders": {"gpt": {"recipe": "gpt-tiny"}}, "data": {}, "budget": {"tokens": 1}})
        sweep = gpt.sweep(settings)
        assert gpt.full.steps == steps
        lengths = [gpt.steps(Job("gpt", share, None, seed=0)) for share in sweep.shares]
        assert lengths == sorted(set(lengths))
        return sweep.shares, sweep.rounds, len(sweep.rates), gpt.skipped(settings)

    assert sweep_of(27) == ((1 / 27, 1 / 9, 1 / 3, 1.0), (1 / 27, 1 / 9, 1 / 3), 5, [])
    assert sweep_of(14)[0] == (1 / 27, 1 / 9, 1 / 3, 1.0)
    assert sweep_of(9)[3] == ["gpt: 1/27 of the budget is less than a step, and isn't run"]
    shares, rounds, _, lines = sweep_of(4)
    assert (shares, rounds) == ((1 / 3, 1.0), (1 / 3,))
    assert lines == [f"gpt: {part} of the budget is less than a step, and isn't run" for part in ("1/27", "1/9")]
    shares, rounds, rates, lines = sweep_of(1)
    assert (shares, rounds, rates) == ((1.0,), (), 1)
    assert "the whole budget is 1 step, too few to search for a learning rate" in lines[-1]


def test_the_flops_of_a_step_are_counted_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpt,) = ready(folder, GPT)
    assert gpt.flops_per_step > 0
    monkeypatch.setattr("weft.compare.sizes.count", None)
    assert gpt.flops_per_step * gpt.full.steps <= 1e9


@pytest.mark.parametrize("name", ["transformer", "transformer++", "gpt-tiny", "llama-tiny", "lstm", "gru", "elman"])
def test_a_family_is_resized(name: str) -> None:
    model = preset(name)
    assert resize(model, model.d_model) == model
    for wanted in (2e5, 1e6, 2e7):
        resized = resize_to(model.replace(vocab_size=512), wanted)
        assert 0.5 < multiplied(resized) / wanted < 2
        # two FLOPs per parameter that a token is multiplied by, and attention besides
        products = sum(part.flops for part in count(resized, 1).components if part.name != "attention")
        assert abs(products / (2 * multiplied(resized)) - 1) < 0.08


def test_initial_weights_and_sinusoids_keep_their_proportion_to_the_width() -> None:
    """A std of 0.02 at every width would start a narrow model near 0, where it learns slowly."""
    small = resize(preset("transformer"), 64)  # a quarter of the width
    assert isinstance(small, Decoder) and isinstance(small.init, NormalInit) and isinstance(small.position, Sinusoidal)
    assert small.init.std == pytest.approx(0.04) and small.position.amplitude == pytest.approx(0.125)


@pytest.mark.slow
def test_a_finished_comparison_is_not_run_again(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["compare", GPT, "ngram-3", "--data", "book.txt", "--flops", "2e9", "--seeds", "1", "--rungs", "1"]
    words += ["--rates", "1", "--jobs", "1", "--out", "out", "tokenizer=char", "batch.length=32"]
    assert run(words) == 0
    shown = capsys.readouterr().out
    assert "ngram-3" in shown and "gpt" in shown and max(map(len, shown.splitlines())) <= 80
    results = (folder / "out/results.jsonl").read_text()
    outcomes = [json.loads(line) for line in results.splitlines()]
    assert {outcome["contender"] for outcome in outcomes} == {"gpt", "ngram-3"}
    metrics = load(folder / "out/runs/gpt").evaluate()
    gpt = next(outcome for outcome in outcomes if outcome["contender"] == "gpt")
    assert sum(gpt["nats"]) == pytest.approx(metrics["loss"] * metrics["tokens"], rel=1e-4)
    assert gpt["flops"] == pytest.approx(2e9, rel=0.02)
    assert not any((folder / "out/jobs").iterdir())
    kinds = {"plan.json", "results.jsonl", "data", "jobs", "runs", "figures", "compare.html", "compare.json"}
    assert {path.name for path in (folder / "out").iterdir()} == kinds
    assert (folder / "out/figures/loss-flops.png").is_file()
    first = (folder / "out/compare.html").read_text()
    # drawing the figures takes seconds
    monkeypatch.setattr("weft.figures.charts.PanelsPage.save_figures", lambda page, folder: [])
    assert run(words) == 0
    assert (folder / "out/results.jsonl").read_text() == results
    assert (folder / "out/compare.html").read_text() == first
    assert run([*words[:-1], "batch.length=16"]) == 2
    assert "holds another comparison (differs in: settings)" in capsys.readouterr().err
