"""A run that was stopped and resumed equals one that never stopped, bit for bit."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.spread import slow
from tests.training.small import Runs, change_steps

from weft.data.batch import Batch
from weft.errors import DamageError, RunError
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, claim_run, lock_run, open_run
from weft.runs.lines import read_lines
from weft.storage import files, tensors
from weft.training.state import RunResult
from weft.training.step import OptimisationStep
from weft.training.weights import load_model


def weights_hash(run: RunFolder) -> str:
    latest = (run.checkpoints / "latest").resolve()
    return hashlib.sha256((latest / "model.safetensors").read_bytes()).hexdigest()


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int, sent: int = signal.SIGINT) -> None:
    """Send a signal in the middle of a step."""

    def stop(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if number == steps:
            os.kill(os.getpid(), sent)

    change_steps(monkeypatch, stop)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The run that never stopped."""
    runs = Runs(tmp_path_factory.mktemp("straight"))
    return runs.train(evaluate=runs.evaluate)


@pytest.mark.parametrize("stop", [4, 11, slow(1), slow(7)])
def test_resumed_equals_straight(runs: Runs, monkeypatch: pytest.MonkeyPatch, straight: RunResult, stop: int) -> None:
    lines: list[str] = []
    stop_after(monkeypatch, stop)
    with pytest.raises(KeyboardInterrupt):
        runs.train(name="cut", log=lines.append, evaluate=runs.evaluate)
    monkeypatch.undo()
    assert any(f"weft train --resume {runs.folder / 'cut'}" in line for line in lines)
    torch.manual_seed(12345)  # the seed in between does not matter
    resumed = runs.resume("cut", evaluate=runs.evaluate)

    assert resumed.run.metrics.read_text() == straight.run.metrics.read_text()
    assert weights_hash(resumed.run) == weights_hash(straight.run)
    for field in ("loss", "validation", "best_step", "steps"):
        assert getattr(resumed, field) == getattr(straight, field)


@pytest.mark.parametrize("optimizer", [slow("adamw"), "muon"])
def test_hashed_ngrams_are_resumed_and_loaded(runs: Runs, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    ngrams = "model.ngrams={ orders = [2, 3], rows = 50, width = 6 }"
    changes = [ngrams, f"optimizer.kind={optimizer}"]
    whole = runs.train(*changes, name="whole")
    assert whole.model.state_dict()["ngrams.weight"].count_nonzero() > 0
    stop_after(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        runs.train(*changes, name="cut")
    monkeypatch.undo()
    resumed = runs.resume("cut")
    assert resumed.run.metrics.read_text() == whole.run.metrics.read_text()
    assert weights_hash(resumed.run) == weights_hash(whole.run)
    loaded, _ = load_model(resumed.run, "latest")
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_a_crash_repeats_from_the_checkpoint(runs: Runs, monkeypatch: pytest.MonkeyPatch, straight: RunResult) -> None:
    """Steps after the last checkpoint are repeated, and their lines in the metrics are written once."""

    def crash(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if number == 8:
            raise RuntimeError("power cut")

    change_steps(monkeypatch, crash)
    with pytest.raises(RuntimeError, match="power cut"):
        runs.train("evaluate.every=100", name="cut", evaluate=runs.evaluate)
    monkeypatch.undo()
    cut = open_run(runs.folder / "cut")
    assert checkpoint.checkpoints(cut.checkpoints)[-1].name == "step-00000005"
    with open(cut.metrics, "a") as file:
        file.write('{"step": 7, "lo')  # an incomplete line
    resumed = runs.resume("cut", evaluate=runs.evaluate)
    kept = [line for line in read_lines(straight.run.metrics) if "loss" in line]
    assert [line for line in read_lines(resumed.run.metrics) if "loss" in line] == kept
    assert weights_hash(resumed.run) == weights_hash(straight.run)


def test_a_damaged_newest_checkpoint_is_skipped_and_logged(runs: Runs) -> None:
    straight = runs.train("checkpoint.keep=3", evaluate=runs.evaluate)
    expected, metrics = weights_hash(straight.run), straight.run.metrics.read_text()
    newest = (straight.run.checkpoints / "latest").resolve()
    (newest / "model.safetensors").write_bytes(b"torn")
    lines: list[str] = []
    model, damage = load_model(straight.run, "latest")
    assert damage
    assert any(p.abs().sum() > 0 for p in model.parameters())
    again = runs.resume(log=lines.append, evaluate=runs.evaluate)
    assert "damaged" in lines[0]
    assert weights_hash(again.run) == expected
    assert again.run.metrics.read_text() == metrics


def test_each_checkpoint_is_tried_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.train("checkpoint.keep=3", evaluate=runs.evaluate).run
    newest = (run.checkpoints / "latest").resolve()
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    hashed: list[str] = []
    checksums = files.checksums

    def record(path: Path) -> Any:
        hashed.append(path.parent.name)
        return checksums(path)

    monkeypatch.setattr(files, "checksums", record)
    _, damage = load_model(run, "latest")
    assert len(damage) == 1
    assert hashed.count(newest.name) == 1


def test_too_little_memory_is_no_damage(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older checkpoint would not fit either, and must not be loaded silently."""
    run = runs.train("checkpoint.keep=3").run

    def fail(path: Path, framework: str) -> None:
        raise RuntimeError("unable to mmap 99 bytes from file: Cannot allocate memory (12)")

    monkeypatch.setattr(tensors, "safe_open", fail)
    with pytest.raises(RunError, match=r"model\.safetensors: cannot be read: unable to mmap") as caught:
        load_model(run, "latest")
    assert not isinstance(caught.value, DamageError)


def test_a_finished_run_resumes_to_itself(runs: Runs) -> None:
    first = runs.train(evaluate=runs.evaluate)
    before = first.run.metrics.read_text()
    again = runs.resume(evaluate=runs.evaluate)
    assert (again.steps, again.validation) == (first.steps, first.validation)
    assert first.run.metrics.read_text() == before


def test_training_learns(runs: Runs) -> None:
    settings = ["steps=40", "optimizer.lr=0.02", "model.dropout=0.0", "evaluate.every=40"]
    result = runs.train(*settings, name="r", evaluate=runs.evaluate)
    assert result.validation["loss"] < 2.2  # chance is ln 23 = 3.14
    events = [json.loads(line)["event"] for line in result.run.events.read_text().splitlines()]
    assert events[0] == "start"
    assert events[-1] == "finish"


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    """By SIGKILL and Ctrl-C, at random times and before disk operations; `make test-resume` is the long version."""
    script = Path(__file__).parents[2] / "benchmarks/resume.py"
    done = subprocess.run(
        [sys.executable, script, "--kills", "3", "--interrupts", "1", "--kinds", "patience"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 runs ended differently" in done.stdout


def test_sigterm_saves_and_exits_with_its_code(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(monkeypatch, 3, signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        runs.train(quiet=True)
    assert caught.value.code == 143
    assert checkpoint.newest_good(runs.folder / "run/checkpoints")[0].name == "interrupted-00000003"


def test_a_second_interrupt_stops_immediately(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second interrupt comes first")

    change_steps(monkeypatch, twice)
    with pytest.raises(KeyboardInterrupt):
        runs.train(quiet=True)
    assert not checkpoint.checkpoints(runs.folder / "run/checkpoints")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- the folder


def test_an_existing_run_is_refused(runs: Runs) -> None:
    runs.train("steps=1")
    here = r"already here.*weft train --resume .*run.*--run"
    with pytest.raises(RunError, match=here), claim_run(runs.folder / "run"):
        pass
    assert not (runs.folder / "run/.lock").exists()


@pytest.mark.parametrize("name", ["thesis.tex", "data/book.txt", "tokenizer.json", "events.jsonl"])
def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    with pytest.raises(RunError, match="other files"), claim_run(tmp_path):
        pass
    assert (tmp_path / name).read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_start_that_was_killed_can_be_repeated(tmp_path: Path, interrupted: bool) -> None:
    (tmp_path / "run/data").mkdir(parents=True)
    (tmp_path / "run/source").mkdir()
    partial = ".tokenizer.json.0123abcd" if interrupted else ".config.toml.77"  # a file that was being written
    for name in (".lock", "tokenizer.json", "base.json", partial):
        (tmp_path / "run" / name).touch()
    if interrupted:
        with pytest.raises(KeyboardInterrupt), claim_run(tmp_path / "run"):
            raise KeyboardInterrupt
    with claim_run(tmp_path / "run") as run:
        assert run.path == tmp_path / "run"


@pytest.mark.parametrize("there", [False, True])
def test_a_start_that_fails_removes_its_files(tmp_path: Path, there: bool) -> None:
    run = tmp_path / "run"
    if there:
        run.mkdir()

    def fail() -> None:
        with claim_run(run):
            (run / "data").mkdir()
            (run / "tokenizer.json").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert run.exists() == there
    assert not there or not list(run.iterdir())


def test_one_process_at_a_time(runs: Runs) -> None:
    busy = "another process is training there"
    with claim_run(runs.folder / "new"), pytest.raises(RunError, match=busy):
        runs.train("steps=1", name="new")
    first = runs.train("steps=1", name="old")
    with lock_run(first.run), pytest.raises(RunError, match=busy):
        runs.resume("old")
    runs.resume("old")


def test_an_unwritable_path_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written: Not a directory"), claim_run(tmp_path / "file/run"):
        pass


# ---- edited files


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("steps = 2\n", "steps: missing; the recipe of a started run must be complete"),
        ("lr = 0.01\n", r"optimizer\.lr: missing"),
        ('precision = "fp32"\n', "precision: missing"),
    ],
)
def test_a_recipe_that_lost_a_setting_is_not_resumed(runs: Runs, setting: str, line: str) -> None:
    run = runs.train("steps=2", "optimizer.lr=0.01").run
    text = run.config.read_text()
    assert setting in text
    run.config.write_text(text.replace(setting, "", 1))
    with pytest.raises(RunError, match=line):
        runs.resume()


@pytest.mark.parametrize(("kind", "name"), [slow(("adam", "Adam")), slow(("sgd", "SGD")), ("muon", "Muon")])
def test_another_optimizer_cannot_resume(runs: Runs, kind: str, name: str) -> None:
    run = runs.train("steps=2", "optimizer=adamw").run
    run.write_config(run.settled_recipe().replace(optimizer={"kind": kind, "lr": 0.01}))
    with pytest.raises(RunError, match=f"saved by AdamW, whose state {name} can't use; change optimizer.kind back"):
        runs.resume()


def test_invalid_lines_in_the_metrics_are_skipped(runs: Runs) -> None:
    run = runs.train().run
    before = run.metrics.read_text()
    run.metrics.write_text(before + '{"a": 1}\n{"step": "x"}\n{"step": null}\n{"step": 1.5}\n')
    runs.resume()
    assert run.metrics.read_text() == before


def test_checkpoints_that_are_not_a_folder_are_refused(runs: Runs) -> None:
    run = runs.train().run
    shutil.rmtree(run.checkpoints)
    run.checkpoints.write_text("hi")
    with pytest.raises(RunError, match="expected a folder of checkpoints"):
        runs.resume()


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run: no such folder"):
        open_run(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"not a run: there is no config\.toml"):
        open_run(tmp_path)
