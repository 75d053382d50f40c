"""Runs that weft 0.1 made: each was stopped after step 8 of 12 and goes on here as it did there.

`expected.jsonl` and `result.json` beside each are what 0.1 itself ended with. Bits differ between processors, so
numbers are compared with a tolerance that no change of the computation would pass. Dropout has drawn its numbers
differently since then: runs that have some are compared exactly up to where they stopped, and roughly after it.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

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
    """A copy of all of them, in the current folder: an adapter's base is named relative to it."""
    shutil.copytree(RUNS, tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"


def test_there_is_one_of_each_kind() -> None:
    assert len(STOPPED) == 10
    kinds = {RunFolder(path).recipe().objective.kind for path in RUNS.iterdir()}
    assert kinds == {"next-token", "pairs", "masked+next", "classify", "regress", "contrastive", "chat"}


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_run_goes_on(name: str, runs: Path) -> None:
    weft.resume(name, log=lambda line: None)
    found = read_lines(runs / name / "metrics.jsonl")
    expected = [json.loads(line) for line in (runs / name / "expected.jsonl").read_text().splitlines()]
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    drops = re.search(r"dropout = 0\.0*[1-9]", (runs / name / "config.toml").read_text()) is not None
    for line, wanted in zip(found, expected, strict=True):
        exact = not drops or wanted["step"] < 8  # the last steps before the stop are logged after it
        for key, value in wanted.items():
            sure = exact or key in ("step", "lr", "tokens", "epoch")
            near = pytest.approx(value, rel=2e-4, abs=1e-5) if sure else pytest.approx(value, rel=1.0, abs=0.3)
            assert line[key] == near, f"step {wanted['step']}: {key}"
    result, wanted = RunFolder(name).results(), json.loads((runs / name / "result.json").read_text())
    for key, value in wanted.items():
        if isinstance(value, float):
            value = pytest.approx(value, rel=1.0 if drops else 2e-4, abs=0.3 if drops else 1e-5)
        assert result[key] == value or (drops and not isinstance(wanted[key], float)), key


@pytest.mark.parametrize("name", ["base", "ngram"])
def test_a_finished_run_is_evaluated_as_before(name: str, runs: Path) -> None:
    noted = RunFolder(name).results()
    found = weft.load(name).evaluate()
    assert {key: found[key] for key in ("loss", "perplexity", "bits_per_byte")} == pytest.approx(
        {key: noted[key] for key in ("loss", "perplexity", "bits_per_byte")}, rel=1e-4
    )


def test_they_are_used_as_before(runs: Path) -> None:
    assert set(weft.load("classify").classify(["the red cat"])[0]) == {"cold", "warm"}
    assert len(weft.load("score").rate(["a good dog", "bad"])) == 2
    assert len(weft.load("pairs").translate(["the cat runs"])) == 1
    assert isinstance(weft.load("chat-lora").generate("the", max_tokens=4), str)


def test_renamed_kinds_are_taken_with_a_note(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from weft.recipe.resolve import resolve

    assert resolve("score").objective.kind == "regress"
    assert "'score' is now called 'regress'" in capsys.readouterr().err
    assert resolve("bert-tiny", ["objective=twins"]).objective.kind == "contrastive"
    assert "'twins' is now called 'contrastive'" in capsys.readouterr().err


def test_a_run_whose_tokens_are_gone_makes_them_as_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weft 0.1 encoded each section of a text by itself, and noted nothing of it when a run started."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"The frog {n} sat.\n\nIt's a river, {n % 7}.\n" for n in range(150)))
    with monkeypatch.context() as patched:
        patched.setattr("weft.objectives.text.began_early", lambda folder: True)
        changes = {"steps": 1, "tokenizer": "bpe", "model.layers": 1}
        weft.train("gpt-tiny", data=str(text), run=run, changes=changes, log=lambda line: None)
    events = read_lines(run / "events.jsonl")
    assert events[0].pop("data_version") == 2
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    began = (run / "data" / "train-00000.tokens").read_bytes()
    shutil.rmtree(run / "data")
    weft.resume(run, changes={"steps": 2}, log=lambda line: None)  # which refuses other tokens than it began with
    assert (run / "data" / "train-00000.tokens").read_bytes() == began
    prepare(TextSource([str(text)]), tmp_path / "now", Tokenizer.load(run))
    assert (tmp_path / "now" / "train-00000.tokens").read_bytes() != began
