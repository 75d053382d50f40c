"""Runs of weft 0.1: each was stopped after step 8 of 12, and resumes here as it did there.

`expected.jsonl` and `result.json` in each are the results of 0.1. Bits differ between processors, so values are
compared with a tolerance that no change of the computation would pass. Dropout draws other random numbers since then:
runs with dropout are compared exactly up to where they stopped, and roughly after it.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.spread import spread

import weft
from weft.data.config import TextSource
from weft.data.prepare import prepare
from weft.runs.folder import RunFolder
from weft.runs.lines import read_lines
from weft.text.tokenizer import Tokenizer

RUNS = Path(__file__).parent / "runs-0.1"
STOPPED = sorted(path.name for path in RUNS.iterdir() if (path / "expected.jsonl").exists())


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all runs, as the current folder: an adapter names its base relative to it."""
    shutil.copytree(RUNS, tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"


def test_there_is_a_run_of_each_kind() -> None:
    assert len(STOPPED) == 10
    kinds = {RunFolder(path).recipe().objective.kind for path in RUNS.iterdir()}
    assert kinds == {"next-token", "pairs", "masked+next", "classify", "regress", "contrastive", "chat"}


@pytest.mark.parametrize("name", spread(STOPPED, 5))
def test_a_stopped_run_resumes(name: str, runs: Path) -> None:
    weft.resume(name, log=lambda line: None)
    found = read_lines(runs / name / "metrics.jsonl")
    expected = [json.loads(line) for line in (runs / name / "expected.jsonl").read_text().splitlines()]
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    drops = re.search(r"dropout = 0\.0*[1-9]", (runs / name / "config.toml").read_text()) is not None
    for line, before in zip(found, expected, strict=True):
        same_draws = not drops or before["step"] < 8  # the last steps before the stop are logged after it
        for key, value in before.items():
            exact = same_draws or key in ("step", "lr", "tokens", "epoch")
            near = pytest.approx(value, rel=2e-4, abs=1e-5) if exact else pytest.approx(value, rel=1.0, abs=0.3)
            assert line[key] == near, f"step {before['step']}: {key}"
    result, before = RunFolder(name).results(), json.loads((runs / name / "result.json").read_text())
    for key, value in before.items():
        if isinstance(value, float):
            value = pytest.approx(value, rel=1.0 if drops else 2e-4, abs=0.3 if drops else 1e-5)
        assert result[key] == value or (drops and not isinstance(before[key], float)), key


@pytest.mark.parametrize("name", ["base", "ngram"])
def test_a_finished_run_is_evaluated_as_before(name: str, runs: Path) -> None:
    noted = RunFolder(name).results()
    found = weft.load(name).evaluate()
    assert {key: found[key] for key in ("loss", "perplexity", "bits_per_byte")} == pytest.approx(
        {key: noted[key] for key in ("loss", "perplexity", "bits_per_byte")}, rel=1e-4
    )


def test_runs_predict_and_generate(runs: Path) -> None:
    assert set(weft.load("classify").classify(["the red cat"])[0]) == {"cold", "warm"}
    assert len(weft.load("score").rate(["a good dog", "bad"])) == 2
    assert len(weft.load("pairs").translate(["the cat runs"])) == 1
    assert isinstance(weft.load("chat-lora").generate("the", max_tokens=4), str)


def test_renamed_kinds_are_accepted_with_a_message(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from weft.recipe.resolve import resolve

    assert resolve("score").objective.kind == "regress"
    assert "'score' is now called 'regress'" in capsys.readouterr().err
    assert resolve("bert-tiny", ["objective=twins"]).objective.kind == "contrastive"
    assert "'twins' is now called 'contrastive'" in capsys.readouterr().err


def test_removed_tokens_are_prepared_as_in_0_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weft 0.1 tokenized each section of a text separately, and did not note the version of the data."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"The frog {n} sat.\n\nIt's a river, {n % 7}.\n" for n in range(150)))
    with monkeypatch.context() as patched:
        patched.setattr("weft.objectives.text.began_early", lambda folder: True)
        changes = {"steps": 1, "tokenizer": "bpe", "model.layers": 1}
        weft.train("gpt-tiny", data=str(text), run=run, changes=changes, log=lambda line: None)
    events = read_lines(run / "events.jsonl")
    assert events[0].pop("data_version") == 2
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    tokens = (run / "data" / "train-00000.tokens").read_bytes()
    shutil.rmtree(run / "data")
    weft.resume(run, changes={"steps": 2}, log=lambda line: None)  # refuses other tokens than it began with
    assert (run / "data" / "train-00000.tokens").read_bytes() == tokens
    prepare(TextSource([str(text)]), tmp_path / "now", Tokenizer.load(run))
    assert (tmp_path / "now" / "train-00000.tokens").read_bytes() != tokens
