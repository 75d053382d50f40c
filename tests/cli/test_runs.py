"""`weft runs`: the list of runs, and the differences of two recipes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command import Cli

from weft.runs.folder import RunFolder
from weft.storage.files import locked

EARLIER = Path(__file__).parents[1] / "api" / "runs-0.1"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("base", "gpt", "lstm"):
        shutil.copytree(EARLIER / name, tmp_path / name, symlinks=True)
    return tmp_path


def run_rows(runs: Path, cli: Cli) -> dict[str, dict[str, object]]:
    return {row["name"]: row for row in cli.json("runs", runs)}


def test_rows_show_state_progress_and_metric(runs: Path, cli: Cli) -> None:
    rows = run_rows(runs, cli)
    assert set(rows) == {"base", "gpt", "lstm"}
    assert (rows["base"]["state"], rows["base"]["steps_done"], rows["base"]["steps"]) == ("finished", 12, 12)
    assert (rows["gpt"]["state"], rows["gpt"]["steps_done"], rows["gpt"]["steps"]) == ("interrupted", 6, 12)
    assert (rows["lstm"]["model"], rows["lstm"]["objective"]) == ("lstm", "next-token")
    assert rows["base"]["metric"] == "bits_per_byte"
    assert rows["base"]["best"] == pytest.approx(5.76598, abs=1e-4)
    size = sum(file.stat().st_size for file in (runs / "gpt").rglob("*") if file.is_file() and not file.is_symlink())
    assert size * 0.5 < rows["gpt"]["bytes"] <= size  # type: ignore[operator]
    lines = cli("runs", runs).splitlines()
    assert lines[0].split() == ["run", "objective", "text", "model", "steps", "best", "size", "age", "state"]
    assert next(line for line in lines if line.startswith("base")).split()[-1] == "finished"


@pytest.mark.parametrize("kind", ["pipe", "endless file"])
def test_special_files_in_a_run_hide_no_other_run(kind: str, runs: Path, cli: Cli) -> None:
    others = run_rows(runs, cli).keys() - {"gpt"}
    for file in [path for path in (runs / "gpt").rglob("*") if path.is_file() and not path.is_symlink()]:
        file.unlink()
        os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
        assert others <= run_rows(runs, cli).keys(), file


def test_a_row_shows_the_metric_of_the_objective(tmp_path: Path, cli: Cli) -> None:
    """Of an unfinished run, that of the best evaluation, or the loss if no evaluation has it."""
    evaluations = [{"loss": 0.9, "accuracy": 0.8}, {"loss": 0.7, "accuracy": 0.7}]
    cases = {
        "classify": ("accuracy", 0.8, {"loss": 0.6, "accuracy": 0.75}),
        "pairs": ("loss", 0.7, {"loss": 0.6, "bleu": 31.0}),
        "score": ("loss", 0.7, {"loss": 0.6, "spearman": 0.5}),
    }
    for name, (metric, best, final) in cases.items():
        folder = RunFolder(shutil.copytree(EARLIER / name, tmp_path / name, symlinks=True))
        folder.events.write_text("")
        for values in evaluations:
            folder.event("evaluation", step=1, **values)
        row = run_rows(tmp_path, cli)[name]
        assert (row["state"], row["metric"], row["best"]) == ("interrupted", metric, best)
        folder.event("result", **final)
        folder.event("finish", step=folder.steps()[-1], seconds=1.0)
        row = run_rows(tmp_path, cli)[name]
        assert (row["state"], row["metric"], row["best"]) == ("finished", *list(final.items())[1])
    config = RunFolder(tmp_path / "pairs").config
    config.write_text(config.read_text().replace("targets = []", 'targets = ["/b/c.de"]'))
    assert run_rows(tmp_path, cli)["pairs"]["data"] == ["pairs.tsv", "/b/c.de"]
    assert " pairs.tsv, c.de " in (out := cli("runs", tmp_path / "pairs")) and "BLEU 31.0" in out


def test_damaged_and_running_runs_are_listed(runs: Path, cli: Cli) -> None:
    (runs / "gpt" / "config.toml").write_text("steps = ")
    shutil.rmtree(runs / "lstm" / "checkpoints")
    (runs / "photos").mkdir()
    with locked(runs / "base" / ".lock"):
        rows = run_rows(runs, cli)
    assert set(rows) == {"base", "gpt", "lstm"}
    assert rows["base"]["state"] == "running"
    assert rows["gpt"]["state"] == rows["lstm"]["state"] == "damaged"
    assert str(rows["gpt"]["problem"]).startswith("not valid TOML")
    assert rows["lstm"]["problem"] == "it has no checkpoint"
    (runs / "base" / ".lock").unlink(missing_ok=True)
    assert run_rows(runs, cli)["base"]["state"] == "finished"


def test_steps_saved_by_an_interruption_count(runs: Path, cli: Cli) -> None:
    checkpoints = runs / "gpt" / "checkpoints"
    newest = max(path for path in checkpoints.iterdir() if path.name.startswith("step-") and not path.is_symlink())
    newest.rename(checkpoints / "interrupted-00000007")
    for older in checkpoints.glob("step-*"):
        shutil.rmtree(older)
    row = run_rows(runs, cli)["gpt"]
    assert (row["state"], row["steps_done"]) == ("interrupted", 7)


def test_a_folder_without_runs(tmp_path: Path, cli: Cli) -> None:
    assert cli("runs", tmp_path) == f"no runs in {tmp_path}\n"
    assert "no such folder" in cli.refused("runs", tmp_path / "none")


def test_differences_of_two_recipes(runs: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "mine.toml").write_text('model = "gpt-tiny"\nsteps = 7\n[batch]\nsize = 3\n')
    rows = cli.json("runs", "diff", "gpt-tiny", tmp_path / "mine.toml")
    found = {row["key"]: (row["first"], row["second"]) for row in rows}
    assert found == {"name": ("gpt-tiny", "mine"), "steps": (None, 7), "batch.size": (None, 3)}
    assert "model.kind" in cli("runs", "diff", runs / "gpt", runs / "lstm")
    assert "the same settings" in cli("runs", "diff", runs / "gpt", runs / "gpt")
    assert "expected two runs" in cli.refused("runs", "diff", "gpt-tiny")


def test_listing_imports_no_torch(runs: Path) -> None:
    code = f"import sys; from weft.cli.main import run; run(['runs', {str(runs)!r}]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "finished" in done.stdout
