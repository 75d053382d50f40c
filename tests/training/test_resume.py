"""A run that was stopped and resumed is the run that never stopped, bit for bit."""

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
from tests.training.small import held_out_loss, meddle_with_steps, resume, small, small_text, train

from weft.config import validate
from weft.data.batch import Batch
from weft.errors import DamageError, RunError
from weft.recipe.config import SettledRecipe
from weft.recipe.resolve import resolve
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
    """A signal in the middle of a step."""

    def stop(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if number == steps:
            os.kill(os.getpid(), sent)

    meddle_with_steps(monkeypatch, stop)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The run that never stopped."""
    text = small_text()
    folder = tmp_path_factory.mktemp("straight") / "run"
    return train(small(), folder, corpus=text, evaluate=held_out_loss(text), quiet=True)


@pytest.mark.parametrize("stop", [4, 11, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 7))])
def test_stopped_and_resumed_equals_straight(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, evaluate, monkeypatch, straight: RunResult, stop
) -> None:
    given = {"corpus": corpus, "evaluate": evaluate, "quiet": True}
    lines: list[str] = []
    stop_after(monkeypatch, stop)
    with pytest.raises(KeyboardInterrupt):
        train(recipe(), tmp_path / "cut", log=lines.append, **given)
    monkeypatch.undo()
    assert any(f"weft train --resume {tmp_path / 'cut'}" in line for line in lines)
    torch.manual_seed(12345)  # whatever happened in between
    resumed = resume(tmp_path / "cut", **given)

    assert resumed.run.metrics.read_text() == straight.run.metrics.read_text()
    assert weights_hash(resumed.run) == weights_hash(straight.run)
    assert (resumed.loss, resumed.validation, resumed.best_step) == (
        straight.loss,
        straight.validation,
        straight.best_step,
    )
    assert straight.steps == 12


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_hashed_ngrams_are_resumed_and_loaded_as_they_were(tmp_path, corpus, monkeypatch, optimizer) -> None:  # type: ignore[no-untyped-def]
    ngrams = "model.ngrams={ orders = [2, 3], rows = 50, width = 6 }"
    recipe, given = small(ngrams, f"optimizer.kind={optimizer}"), {"corpus": corpus, "quiet": True}
    whole = train(recipe, tmp_path / "whole", **given)
    assert whole.model.ngrams.weight.count_nonzero() > 0
    stop_after(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "cut", **given)
    monkeypatch.undo()
    resumed = resume(tmp_path / "cut", **given)
    assert resumed.run.metrics.read_text() == whole.run.metrics.read_text()
    assert weights_hash(resumed.run) == weights_hash(whole.run)
    loaded, _ = load_model(resumed.run, "latest")
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_a_crash_between_checkpoints_repeats_from_the_last_one(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, evaluate, monkeypatch, straight: RunResult
) -> None:
    """Steps after the last checkpoint run again, and their metrics lines are written once."""
    given = {"corpus": corpus, "evaluate": evaluate, "quiet": True}

    def crash(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if number == 8:
            raise RuntimeError("power cut")

    meddle_with_steps(monkeypatch, crash)
    with pytest.raises(RuntimeError, match="power cut"):
        train(recipe("evaluate.every=100"), tmp_path / "cut", **given)
    monkeypatch.undo()
    cut = open_run(tmp_path / "cut")
    assert checkpoint.checkpoints(cut.checkpoints)[-1].name == "step-00000005"
    with open(cut.metrics, "a") as file:
        file.write('{"step": 7, "lo')  # a line cut short
    resumed = resume(tmp_path / "cut", **given)
    kept = [line for line in read_lines(straight.run.metrics) if "loss" in line]
    assert [line for line in read_lines(resumed.run.metrics) if "loss" in line] == kept
    assert weights_hash(resumed.run) == weights_hash(straight.run)


def test_a_damaged_newest_checkpoint_is_passed_over_and_logged(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, evaluate
) -> None:
    given = {"corpus": corpus, "evaluate": evaluate, "quiet": True}
    straight = train(recipe("checkpoint.keep=3"), tmp_path / "run", **given)
    expected, metrics = weights_hash(straight.run), straight.run.metrics.read_text()
    newest = (straight.run.checkpoints / "latest").resolve()
    (newest / "model.safetensors").write_bytes(b"torn")
    lines: list[str] = []
    model, damage = load_model(straight.run, "latest")
    assert damage
    assert any(p.abs().sum() > 0 for p in model.parameters())
    again = resume(tmp_path / "run", log=lines.append, **given)
    assert "damaged" in lines[0]
    assert weights_hash(again.run) == expected
    assert again.run.metrics.read_text() == metrics


def test_each_checkpoint_is_tried_once(tmp_path, recipe, corpus, evaluate, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus, "evaluate": evaluate, "quiet": True}
    run = train(recipe("checkpoint.keep=3"), tmp_path / "run", **given).run
    newest = (run.checkpoints / "latest").resolve()
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    hashed: list[str] = []
    checksums = files.checksums
    monkeypatch.setattr(files, "checksums", lambda path: (hashed.append(path.parent.name), checksums(path))[1])
    _, damage = load_model(run, "latest")
    assert len(damage) == 1
    assert hashed.count(newest.name) == 1


def test_too_little_memory_is_no_damage(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """An older checkpoint would not fit either, and must not be taken in silence."""
    run = train(recipe("checkpoint.keep=3"), tmp_path / "run", corpus=corpus, quiet=True).run

    def full(path: Path, framework: str) -> None:
        raise RuntimeError("unable to mmap 99 bytes from file: Cannot allocate memory (12)")

    monkeypatch.setattr(tensors, "safe_open", full)
    with pytest.raises(RunError, match=r"model\.safetensors: cannot be read: unable to mmap") as caught:
        load_model(run, "latest")
    assert not isinstance(caught.value, DamageError)


def test_a_finished_run_resumes_to_itself(tmp_path, recipe, corpus, evaluate) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus, "evaluate": evaluate, "quiet": True}
    first = train(recipe(), tmp_path / "run", **given)
    before = first.run.metrics.read_text()
    again = resume(tmp_path / "run", **given)
    assert (again.steps, again.validation) == (first.steps, first.validation)
    assert first.run.metrics.read_text() == before


def test_the_saved_config_repeats_the_run(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    first = train(recipe(), tmp_path / "one", corpus=corpus, quiet=True)
    saved = resolve(str(first.run.config))
    assert saved == first.run.recipe()
    second = train(
        validate(SettledRecipe, saved.model_dump(mode="json", exclude_none=True)),
        tmp_path / "two",
        corpus=corpus,
        quiet=True,
    )
    assert second.run.metrics.read_text() == first.run.metrics.read_text()
    assert weights_hash(second.run) == weights_hash(first.run)


def test_micro_batches_change_nothing_but_rounding(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    settings = "model.dropout=0.0"
    whole = train(recipe(settings), tmp_path / "a", corpus=corpus, quiet=True)
    cut = train(recipe(settings, "batch.micro=1"), tmp_path / "b", corpus=corpus, quiet=True)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-4)


def test_training_learns(tmp_path, recipe, corpus, evaluate) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("steps=60", "optimizer.lr=0.01", "model.dropout=0.0", "evaluate.every=60")
    result = train(settings, tmp_path / "r", corpus=corpus, evaluate=evaluate, quiet=True)
    assert result.validation["loss"] < 2.2  # chance is ln 23 = 3.14
    events = [json.loads(line)["event"] for line in result.run.events.read_text().splitlines()]
    assert events[0] == "start"
    assert events[-1] == "finish"


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    """By SIGKILL and Ctrl-C, at instants and before operations on the disk; `make test-resume` is the long version."""
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


def test_sigterm_saves_and_exits_with_its_code(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    stop_after(monkeypatch, 3, signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        train(recipe(), tmp_path / "run", corpus=corpus, quiet=True)
    assert caught.value.code == 143
    assert checkpoint.newest_good(tmp_path / "run/checkpoints")[0].name == "interrupted-00000003"


def test_a_second_interrupt_stops_at_once(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def twice(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second interrupt comes first")

    meddle_with_steps(monkeypatch, twice)
    with pytest.raises(KeyboardInterrupt):
        train(recipe(), tmp_path / "run", corpus=corpus, quiet=True)
    assert not checkpoint.checkpoints(tmp_path / "run/checkpoints")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- the folder


def claim(path: Path) -> None:
    with claim_run(path):
        pass


def test_an_existing_run_is_refused(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    train(recipe("steps=1"), tmp_path / "run", corpus=corpus, quiet=True)
    with pytest.raises(RunError, match=r"already here.*weft train --resume .*run.*--run"):
        claim(tmp_path / "run")
    assert not (tmp_path / "run/.lock").exists()


@pytest.mark.parametrize("name", ["thesis.tex", "data/book.txt", "tokenizer.json", "events.jsonl"])
def test_a_folder_with_other_things_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    with pytest.raises(RunError, match="other files"):
        claim(tmp_path)
    assert (tmp_path / name).read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_start_that_was_killed_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "run/data").mkdir(parents=True)
    (tmp_path / "run/source").mkdir()
    for name in (".lock", "tokenizer.json", "base.json", ".config.toml.77"):
        (tmp_path / "run" / name).touch()
    with claim_run(tmp_path / "run") as run:
        assert run.path == tmp_path / "run"


@pytest.mark.parametrize("there", [False, True])
def test_a_start_that_fails_leaves_nothing_of_its_own(tmp_path: Path, there: bool) -> None:
    place = tmp_path / "run"
    if there:
        place.mkdir()

    def fail() -> None:
        with claim_run(place):
            (place / "data").mkdir()
            (place / "tokenizer.json").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert place.exists() == there
    assert not there or not list(place.iterdir())


def test_one_process_at_a_time(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus, "quiet": True}
    busy = "another process is training there"
    with claim_run(tmp_path / "new"), pytest.raises(RunError, match=busy):
        train(recipe("steps=1"), tmp_path / "new", **given)
    first = train(recipe("steps=1"), tmp_path / "old", **given)
    with lock_run(first.run), pytest.raises(RunError, match=busy):
        resume(tmp_path / "old", **given)
    resume(tmp_path / "old", **given)


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written: Not a directory"):
        claim(tmp_path / "file/run")


# ---- an edited config.toml, and other people's lines


def replace_line(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("steps = 2\n", "", "steps: missing; the recipe of a started run must be complete"),
        ("lr = 0.01\n", "", r"optimizer\.lr: missing"),
        ('precision = "fp32"\n', "", "precision: missing"),
    ],
)
def test_a_recipe_that_lost_a_setting_is_not_resumed(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, old: str, new: str, line: str
) -> None:
    given = {"corpus": corpus, "quiet": True}
    run = train(recipe("steps=2", "optimizer.lr=0.01"), tmp_path / "run", **given).run
    replace_line(run.config, old, new)
    with pytest.raises(RunError, match=line):
        resume(tmp_path / "run", **given)


@pytest.mark.parametrize(("kind", "name"), [("adam", "Adam"), ("sgd", "SGD"), ("muon", "Muon")])
def test_another_optimizer_cannot_resume(tmp_path, recipe, corpus, kind: str, name: str) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus, "quiet": True}
    run = train(recipe("steps=2", "optimizer=adamw"), tmp_path / "run", **given).run
    text = run.config.read_text()
    begin = text.index("[optimizer]")
    end = text.index("[", begin + 1)
    while text[end - 1] != "\n":  # a list inside the table
        end = text.index("[", end + 1)
    run.config.write_text(f'{text[:begin]}[optimizer]\nkind = "{kind}"\nlr = 0.01\n\n{text[end:]}')
    with pytest.raises(RunError, match=f"saved by AdamW, whose state {name} can't use; change optimizer.kind back"):
        resume(tmp_path / "run", **given)


def test_strange_lines_among_the_metrics_are_passed_over(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus, "quiet": True}
    run = train(recipe(), tmp_path / "run", **given).run
    before = run.metrics.read_text()
    run.metrics.write_text(before + '{"a": 1}\n{"step": "x"}\n{"step": null}\n{"step": 1.5}\n')
    resume(tmp_path / "run", **given)
    assert run.metrics.read_text() == before


def test_checkpoints_that_are_no_folder_are_noticed_at_once(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus, "quiet": True}
    run = train(recipe(), tmp_path / "run", **given).run
    shutil.rmtree(run.checkpoints)
    run.checkpoints.write_text("hi")
    with pytest.raises(RunError, match="expected a folder of checkpoints"):
        resume(tmp_path / "run", **given)


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run: no such folder"):
        open_run(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"not a run: there is no config\.toml"):
        open_run(tmp_path)
