"""Killed or interrupted between two operations on the disk, a run ends as the one that never was.

Few chosen places, in this process; `benchmarks/resume.py` tries them all.
"""

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.small import (
    Evaluate,
    held_out_loss,
    meddle_with_steps,
    overwrite_weights,
    resume,
    small,
    small_text,
    train,
)

from weft.data.batch import Batch
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, claim_run
from weft.runs.lines import read_lines
from weft.training.step import OptimisationStep
from weft.training.weights import load_model


class KilledError(Exception):
    """In the place of SIGKILL."""


def contents(run: RunFolder) -> dict[str, str]:
    """All that a recipe decides: what is in the checkpoints, where the links lead, and the metrics."""
    found = {"metrics": run.metrics.read_text()}
    for path in sorted(run.checkpoints.iterdir()):
        if path.is_symlink():
            found[path.name] = os.readlink(path)
        else:
            found[path.name] = str(checkpoint.verify(path)["files"])
    return found


def measured(*values: float) -> Evaluate:
    """An evaluation that gives these losses, one after the other; the first one is the pre-flight's."""
    left: Iterator[float] = iter((9.0, *values))
    return lambda model: {"loss": next(left)}


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C in the middle of a step."""

    def stop(number: int, step_taken: OptimisationStep, parts: Sequence[Batch]) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGINT)

    meddle_with_steps(monkeypatch, stop)


# ---- links


def killed_before_best(path: Path, recipe: Any, corpus: Any, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run killed at step 8, whose weights are the best, between the checkpoint's rename and the link to it."""
    link = checkpoint.link

    def killed(folder: Path, name: str, target: Path) -> None:
        if (name, target.name) == ("best", "step-00000008"):
            raise KilledError
        link(folder, name, target)

    monkeypatch.setattr(checkpoint, "link", killed)
    with pytest.raises(KilledError):
        train(recipe("checkpoint.keep=1"), path, corpus=corpus, evaluate=measured(3.0, 1.0), quiet=True)
    monkeypatch.undo()
    assert os.readlink(path / "checkpoints/best") == "step-00000004"
    return RunFolder(path)


def test_the_best_weights_survive_a_kill_before_their_link(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus, "quiet": True}
    straight = train(recipe("checkpoint.keep=1"), tmp_path / "straight", evaluate=measured(3.0, 1.0, 2.0), **given)
    assert os.readlink(straight.run.checkpoints / "best") == "step-00000008"
    run = killed_before_best(tmp_path / "run", recipe, corpus, monkeypatch)
    lines: list[str] = []
    resumed = resume(tmp_path / "run", evaluate=measured(2.0), log=lines.append, **given)
    assert "links put right: best → step-00000008" in lines[0]
    assert [line["links"] for line in read_lines(run.events) if line["event"] == "repaired"] == [
        ["best → step-00000008"]
    ]
    assert contents(resumed.run) == contents(straight.run)


def same_weights(run: RunFolder, which: Any, name: str) -> bool:
    found = load_model(run, which)[0].state_dict()
    saved = checkpoint.load_tensors(run.checkpoints / name / "model.safetensors")
    return all(torch.equal(found[key], tensor) for key, tensor in saved.items())


def test_who_reads_a_killed_run_finds_its_best_weights(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    run = killed_before_best(tmp_path / "run", recipe, corpus, monkeypatch)
    assert same_weights(run, "best", "step-00000008")
    assert not same_weights(run, "best", "step-00000004")


def test_a_broken_link_to_the_best_is_said(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus, "quiet": True}
    run = train(recipe(), tmp_path / "run", evaluate=measured(3.0, 1.0, 2.0), **given).run
    (run.checkpoints / "best").unlink()
    assert same_weights(run, "best", "step-00000008")
    assert "the link to the best checkpoint is broken; taking step-00000008" in load_model(run)[1][0]
    shutil.rmtree(run.checkpoints / "step-00000008")
    assert "the link to the best checkpoint is broken; taking step-00000012" in load_model(run)[1][0]


def test_best_weights_that_are_gone_are_said_and_found_anew(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus, "quiet": True}
    stop_at(monkeypatch, 9)
    with pytest.raises(KeyboardInterrupt):
        train(recipe(), tmp_path / "run", evaluate=measured(1.0, 2.0), **given)
    monkeypatch.undo()
    run = RunFolder(tmp_path / "run")
    shutil.rmtree(run.checkpoints / "step-00000004")
    lines: list[str] = []
    resume(run.path, evaluate=measured(3.0), log=lines.append, **given)
    assert "the best checkpoint, that of step 4, is gone or damaged; the next evaluation decides" in lines[0]
    assert os.readlink(run.checkpoints / "best") == "step-00000012"


# ---- patience


def test_a_run_that_lost_patience_is_finished(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus}
    run = train(recipe("evaluate.patience=1"), tmp_path / "run", evaluate=measured(1.0, 2.0), quiet=True, **given).run
    before, lines = contents(run), list[str]()
    assert before["latest"] == "step-00000008"
    for _ in range(2):
        again = resume(run.path, evaluate=measured(), log=lines.append, **given)
        assert again.steps == 8
        assert contents(run) == before
    assert any("finished after step 8; nothing is left to train" in line for line in lines)


# ---- interruptions


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a run leaves that nobody interrupts."""
    text = small_text()
    folder = tmp_path_factory.mktemp("straight") / "run"
    given = {"corpus": text, "evaluate": held_out_loss(text), "quiet": True}
    return contents(train(small("checkpoint.average=2"), folder, **given).run)


@pytest.mark.parametrize("stop", [7, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (3, 11))])
def test_an_interruption_leaves_no_trace(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, evaluate, monkeypatch, straight: dict[str, str], stop: int
) -> None:
    settings = recipe("checkpoint.average=2")
    given = {"corpus": corpus, "evaluate": evaluate, "quiet": True}
    stop_at(monkeypatch, stop)
    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "run", **given)
    monkeypatch.undo()
    run = RunFolder(tmp_path / "run")
    name = f"interrupted-{stop:08d}"
    assert os.readlink(run.checkpoints / "latest") == name
    assert same_weights(run, "latest", name)
    assert name not in [path.name for path in checkpoint.checkpoints(run.checkpoints)]
    resume(run.path, **given)
    assert contents(run) == straight


def test_no_rollback_leads_to_what_an_interruption_saved(tmp_path, recipe, corpus, evaluate, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("steps=40", "log.every=5", "checkpoint.every=10", "optimizer.lr=0.01", "guard.patience=3")
    given = {"corpus": corpus, "evaluate": evaluate, "quiet": True}

    def trouble(at: int, stop: int | None = None) -> None:
        def meddle(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
            if number == stop:
                os.kill(os.getpid(), signal.SIGINT)
            if number == at:
                overwrite_weights(step.parallel.model)

        meddle_with_steps(monkeypatch, meddle)

    trouble(at=27)
    straight = train(settings, tmp_path / "straight", **given)
    assert [line["to"] for line in read_lines(straight.run.events) if line["event"] == "rollback"] == [24]
    monkeypatch.undo()
    trouble(at=27, stop=26)
    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "run", **given)
    monkeypatch.undo()
    trouble(at=1)  # the first one after it was resumed
    run = resume(tmp_path / "run", **given).run
    assert [line["to"] for line in read_lines(run.events) if line["event"] == "rollback"] == [24]
    assert contents(run) == contents(straight.run)


# ---- rollbacks


@pytest.mark.parametrize("gone", [0, 1])
def test_killed_while_rolling_back_to_fresh_weights(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, evaluate, monkeypatch, gone: int
) -> None:
    """With none or one of the two checkpoints gone; the other one, or the first, is half taken apart."""
    settings = recipe("checkpoint.every=3", "log.every=6", "guard.patience=4")
    given = {"corpus": corpus, "evaluate": evaluate, "quiet": True}

    def trouble() -> None:
        def meddle(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
            if number == 2:
                overwrite_weights(step.parallel.model)

        meddle_with_steps(monkeypatch, meddle)

    trouble()
    straight = train(settings, tmp_path / "straight", **given)
    assert [line["to"] for line in read_lines(straight.run.events) if line["event"] == "rollback"] == [0]

    forget, rmtree, left = checkpoint.forget_after, shutil.rmtree, gone

    def taken_apart(path: Path, *rest: Any, **more: Any) -> None:
        nonlocal left
        if left == 0:
            for file in Path(path).glob("*.json"):
                file.unlink()
            raise KilledError
        left -= 1
        rmtree(path, *rest, **more)

    def killed(*given: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", taken_apart)
        forget(*given)

    monkeypatch.undo()
    trouble()
    monkeypatch.setattr(checkpoint, "forget_after", killed)
    with pytest.raises(KilledError):
        train(settings, tmp_path / "run", **given)
    monkeypatch.undo()
    if gone:  # from fresh weights: the same trouble comes again
        trouble()
    resumed = resume(tmp_path / "run", **given)
    assert contents(resumed.run) == contents(straight.run)


# ---- what was begun


def test_a_start_that_was_killed_and_then_interrupted_can_be_repeated(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    (place / ".lock").touch()
    (place / ".tokenizer.json.0123abcd").touch()  # what the killed one was writing

    def interrupted() -> None:
        with claim_run(place):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with claim_run(place):
        pass
