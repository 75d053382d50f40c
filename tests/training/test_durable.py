"""Killed or interrupted between two operations on the disk, a run ends like one that never was.

A few chosen points, in this process; `benchmarks/resume.py` tries them all.
"""

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.training.small import Evaluate, Runs, change_steps, events, overwrite_weights

from weft.data.batch import Batch
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.training.step import OptimisationStep
from weft.training.weights import load_model


class KilledError(Exception):
    """Stands for SIGKILL."""


def contents(run: RunFolder) -> dict[str, str]:
    """Return everything that a recipe decides: the contents of checkpoints, the targets of links, and the metrics."""
    found = {"metrics": run.metrics.read_text()}
    for path in sorted(run.checkpoints.iterdir()):
        found[path.name] = (
            os.readlink(path) if path.is_symlink() else str(checkpoint.manifest_of(checkpoint.verify(path))["files"])
        )
    return found


def measured(*values: float) -> Evaluate:
    """Return an evaluation that gives these losses in turn, after one for the pre-flight."""
    left: Iterator[float] = iter((9.0, *values))
    return lambda model: {"loss": next(left)}


def interfere(monkeypatch: pytest.MonkeyPatch, *, stop: int | None = None, overwrite: int | None = None) -> None:
    """Send Ctrl-C in step `stop`, and overwrite the weights before step `overwrite`."""

    def change(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if number == stop:
            os.kill(os.getpid(), signal.SIGINT)
        if number == overwrite:
            overwrite_weights(step.parallel.model)

    change_steps(monkeypatch, change)


# ---- links


def killed_before_best(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return a run killed at step 8, whose weights are the best, between the checkpoint's rename and the link to it."""
    link = checkpoint.link

    def killed(folder: Path, name: str, target: Path) -> None:
        if (name, target.name) == ("best", "step-00000008"):
            raise KilledError
        link(folder, name, target)

    monkeypatch.setattr(checkpoint, "link", killed)
    with pytest.raises(KilledError):
        runs.train("checkpoint.keep=1", evaluate=measured(3.0, 1.0))
    monkeypatch.undo()
    run = RunFolder(runs.folder / "run")
    assert os.readlink(run.checkpoints / "best") == "step-00000004"
    return run


def has_weights(run: RunFolder, which: Literal["best", "latest"], name: str) -> bool:
    """Return whether the loaded weights are those of the checkpoint with this name."""
    loaded = load_model(run, which)[0].state_dict()
    saved = checkpoint.load_tensors(run.checkpoints / name / "model.safetensors")
    return all(torch.equal(loaded[key], tensor) for key, tensor in saved.items())


def test_the_best_weights_survive_a_kill_before_their_link(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = runs.train("checkpoint.keep=1", name="straight", evaluate=measured(3.0, 1.0, 2.0))
    assert os.readlink(straight.run.checkpoints / "best") == "step-00000008"
    run = killed_before_best(runs, monkeypatch)
    assert has_weights(run, "best", "step-00000008") and not has_weights(run, "best", "step-00000004")
    lines: list[str] = []
    resumed = runs.resume(evaluate=measured(2.0), log=lines.append)
    assert "links repaired: best → step-00000008" in lines[0]
    assert [line["links"] for line in events(run, "repaired")] == [["best → step-00000008"]]
    assert contents(resumed.run) == contents(straight.run)


def test_a_broken_link_to_the_best_is_reported(runs: Runs) -> None:
    run = runs.train(evaluate=measured(3.0, 1.0, 2.0)).run
    (run.checkpoints / "best").unlink()
    assert has_weights(run, "best", "step-00000008")
    assert "the link to the best checkpoint is broken; taking step-00000008" in load_model(run)[1][0]
    shutil.rmtree(run.checkpoints / "step-00000008")
    assert "the link to the best checkpoint is broken; taking step-00000012" in load_model(run)[1][0]


def test_best_weights_that_are_gone_are_reported_and_replaced(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    interfere(monkeypatch, stop=9)
    with pytest.raises(KeyboardInterrupt):
        runs.train(evaluate=measured(1.0, 2.0))
    monkeypatch.undo()
    run = RunFolder(runs.folder / "run")
    shutil.rmtree(run.checkpoints / "step-00000004")
    lines: list[str] = []
    runs.resume(evaluate=measured(3.0), log=lines.append)
    assert "the best checkpoint, that of step 4, is gone or damaged; the next evaluation becomes" in lines[0]
    assert os.readlink(run.checkpoints / "best") == "step-00000012"


# ---- patience


def test_a_run_that_lost_patience_is_finished(runs: Runs) -> None:
    run = runs.train("evaluate.patience=1", evaluate=measured(1.0, 2.0)).run
    before, lines = contents(run), list[str]()
    assert before["latest"] == "step-00000008"
    for _ in range(2):
        again = runs.resume(evaluate=measured(), log=lines.append, quiet=False)
        assert again.steps == 8
        assert contents(run) == before
    assert any("finished after step 8; nothing is left to train" in line for line in lines)


# ---- interruptions


@pytest.mark.slow
def test_no_rollback_leads_to_the_checkpoint_of_an_interruption(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["steps=40", "log.every=5", "checkpoint.every=10", "optimizer.lr=0.01", "guard.patience=3"]
    interfere(monkeypatch, overwrite=27)
    straight = runs.train(*settings, name="straight", evaluate=runs.evaluate)
    assert [line["to"] for line in events(straight.run, "rollback")] == [24]
    monkeypatch.undo()
    interfere(monkeypatch, stop=26, overwrite=27)
    with pytest.raises(KeyboardInterrupt):
        runs.train(*settings, evaluate=runs.evaluate)
    monkeypatch.undo()
    interfere(monkeypatch, overwrite=1)  # the first step after resuming
    run = runs.resume(evaluate=runs.evaluate).run
    assert [line["to"] for line in events(run, "rollback")] == [24]
    assert contents(run) == contents(straight.run)


# ---- rollbacks


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 1])
def test_killed_while_rolling_back_to_fresh_weights(runs: Runs, monkeypatch: pytest.MonkeyPatch, gone: int) -> None:
    """`gone` of the two checkpoints are removed, and the next one partly."""
    settings = ["checkpoint.every=3", "log.every=6", "guard.patience=4"]
    interfere(monkeypatch, overwrite=2)
    straight = runs.train(*settings, name="straight", evaluate=runs.evaluate)
    assert [line["to"] for line in events(straight.run, "rollback")] == [0]
    forget, rmtree, left = checkpoint.forget_after, shutil.rmtree, gone

    def remove_partly(path: Path, *args: Any, **kwargs: Any) -> None:
        nonlocal left
        if left == 0:
            for file in Path(path).glob("*.json"):
                file.unlink()
            raise KilledError
        left -= 1
        rmtree(path, *args, **kwargs)

    def killed(*args: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", remove_partly)
        forget(*args)

    monkeypatch.undo()
    interfere(monkeypatch, overwrite=2)
    monkeypatch.setattr(checkpoint, "forget_after", killed)
    with pytest.raises(KilledError):
        runs.train(*settings, evaluate=runs.evaluate)
    monkeypatch.undo()
    if gone:  # resumed from fresh weights, the run diverges again
        interfere(monkeypatch, overwrite=2)
    resumed = runs.resume(evaluate=runs.evaluate)
    assert contents(resumed.run) == contents(straight.run)
