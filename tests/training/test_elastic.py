"""One run over several processes: the same rows, the same curve and the same end for any number of them."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parallel.test_ranks import in_processes, note, noted
from tests.training.small import (
    CPU,
    Change,
    Corpus,
    Evaluate,
    TextInMemory,
    changed_step,
    events,
    held_out_loss,
    overwrite_weights,
    resume,
    small,
    small_text,
    train,
)

from weft.data.batch import Batch
from weft.errors import LostError
from weft.models.base import LanguageModel
from weft.parallel.ranks import ALONE, Ranks
from weft.recipe.config import SettledRecipe
from weft.runs import checkpoint
from weft.runs.folder import FollowedRun, RunFolder, open_run
from weft.runs.lines import read_lines
from weft.training.start import follow
from weft.training.step import OptimisationStep
from weft.training.worker import TrainingWorker, interruptions

DROPOUT = ["model.dropout=0.1", "model.attention.dropout=0.1", "model.feedforward.dropout=0.1"]
SAME = [*DROPOUT, "batch.size=32", "steps=12", "log.every=2", "evaluate.every=6", "checkpoint.every=4"]


def text() -> Corpus:
    return small_text(3000, 250, 300)


def started(ranks: Ranks, folder: Path, *changes: str, evaluate: Evaluate | None = None) -> None:
    """Take this process's part in a new run."""
    recipe, evaluate = small(*changes), evaluate or held_out_loss(text())
    if ranks.leads:
        train(recipe, folder / "run", corpus=text(), evaluate=evaluate, quiet=True, ranks=ranks)
    else:
        followed(ranks, folder, recipe, evaluate)


def resumed(ranks: Ranks, folder: Path) -> None:
    """Take this process's part in a resumed run."""
    if ranks.leads:
        resume(folder / "run", corpus=text(), evaluate=held_out_loss(text()), quiet=True, ranks=ranks)
    else:
        followed(ranks, folder, open_run(folder / "run").settled_recipe(), held_out_loss(text()))


def followed(ranks: Ranks, folder: Path, recipe: SettledRecipe, evaluate: Evaluate) -> None:
    objective, worker = TextInMemory(recipe, [text()], evaluate), TrainingWorker(CPU, ranks, quiet=True)
    follow(recipe, FollowedRun(folder / "run"), objective, worker=worker)


def curve(run: Path) -> list[list[float]]:
    """Return step, loss, norm and held-out loss of every line of the metrics."""
    lines = read_lines(RunFolder(run).metrics)
    return [
        [line["step"], *(line.get(key, 0.0) for key in ("loss", "gradient_norm", "validation_loss"))] for line in lines
    ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that all others should equal: one process, whole batches, never stopped."""
    folder = tmp_path_factory.mktemp("straight")
    started(ALONE, folder, *SAME, "checkpoint.keep=5")
    return folder / "run"


def on_step(change: Change) -> None:
    """Let `change` interfere with every step of this process, which ends with the test."""
    OptimisationStep.__call__ = changed_step(change)  # type: ignore[method-assign]


# ---- the curve


def test_two_processes_and_four_micro_batches_give_the_curve_of_one(tmp_path: Path, straight: Path) -> None:
    (tmp_path / "two").mkdir()
    assert in_processes(started, tmp_path / "two", *SAME) == [0, 0]
    started(ALONE, tmp_path / "micro", *SAME, "batch.micro=8")
    expected = curve(straight)
    assert [line[0] for line in expected if line[1]] == list(range(2, 13, 2))
    for other in (tmp_path / "two/run", tmp_path / "micro/run"):
        assert np.allclose(curve(other), expected, rtol=1e-5, atol=1e-6)
        tokens = [line.get("tokens") for line in read_lines(RunFolder(other).metrics)]
        assert tokens == [line.get("tokens") for line in read_lines(RunFolder(straight).metrics)]
    assert [line["processes"] for line in events(tmp_path / "two/run", "start")] == [2]
    assert len(events(tmp_path / "two/run", "evaluation")) == 2  # by rank 0 alone


def _terminated(ranks: Ranks, folder: Path) -> None:
    def terminate(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if number == 5 and not ranks.leads:  # a signal to one of them is enough
            os.kill(os.getpid(), signal.SIGTERM)

    on_step(terminate)
    started(ranks, folder, *SAME)


def test_sigterm_ends_all_with_a_checkpoint_and_one_process_resumes(tmp_path: Path, straight: Path) -> None:
    assert in_processes(_terminated, tmp_path) == [143, 143]
    run = tmp_path / "run"
    assert checkpoint.checkpoints(run / "checkpoints")[-1].name == "step-00000006"  # the next logged step
    resumed(ALONE, tmp_path)
    assert np.allclose(curve(run), curve(straight), rtol=1e-5, atol=1e-6)


def test_two_processes_resume_where_one_stopped(tmp_path: Path, straight: Path) -> None:
    shutil.copytree(straight, tmp_path / "run", symlinks=True)
    run = RunFolder(tmp_path / "run")
    checkpoint.forget_after(run.checkpoints, 4)
    assert in_processes(resumed, tmp_path) == [0, 0]
    (again,) = events(run.path, "resume")
    assert (again["step"], again["processes"]) == (4, 2)
    assert np.allclose(curve(run.path), curve(straight), rtol=1e-5, atol=1e-6)


def test_a_relayed_signal_is_not_a_second_one() -> None:
    """A terminal sends Ctrl-C to every process, and torchrun relays it."""
    lines: list[str] = []
    with interruptions(lines.append, Ranks(0, 2)) as interruption:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert (interruption.received, bool(interruption)) == (signal.SIGINT, False)  # all must agree first
        assert len(lines) == 1
    with interruptions(lines.append, Ranks(0, 2), relay_seconds=0.0):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


# ---- divergence


def _diverging(ranks: Ranks, folder: Path) -> None:
    """One process meets a batch whose loss is NaN; later the weights of all are overwritten."""
    models: list[torch.nn.Module] = []

    def disturb(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> OptimisationStep | None:
        models[:] = [step.parallel.model]
        if number == 26:
            overwrite_weights(step.parallel.model)
        if number == 14 and not ranks.leads:
            return replace(step, loss=lambda *args: _nan(step.loss(*args)))
        return None

    on_step(disturb)
    guard = ["guard.window=32", "guard.patience=4", "optimizer.lr=0.01"]
    started(ranks, folder, "steps=40", "log.every=5", "checkpoint.every=10", "evaluate.every=20", *guard)
    weights = b"".join(p.detach().numpy().tobytes() for p in models[0].parameters())
    note(folder, ranks, weights=hashlib.sha256(weights).hexdigest())


def _nan(result: tuple[Any, ...]) -> Any:
    loss, count, extras = result
    return loss * torch.nan, count, extras


@pytest.mark.slow
def test_a_bad_batch_is_discarded_and_all_roll_back(tmp_path: Path) -> None:
    assert in_processes(_diverging, tmp_path) == [0, 0]
    run = tmp_path / "run"
    assert events(run, "discarded")[0]["steps"] == [14]
    (back,) = events(run, "rollback")
    assert (back["since"], back["to"]) == (26, 20)
    first, second = noted(tmp_path)
    assert first["weights"] == second["weights"]  # bit for bit, though their dropout differs
    lines = [line for line in curve(run) if line[1]]
    assert [line[0] for line in lines] == list(range(5, 41, 5))


def _short_of_memory(ranks: Ranks, folder: Path) -> None:
    def full(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if not ranks.leads and len(parts[0].tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    on_step(full)
    started(ranks, folder, "batch.size=16", "batch.micro=auto", "steps=2", "log.every=1")


@pytest.mark.slow
def test_micro_batches_fit_on_every_rank(tmp_path: Path) -> None:
    assert in_processes(_short_of_memory, tmp_path) == [0, 0]
    assert events(tmp_path / "run", "preflight")[0]["micro"] == 2
    state = json.loads((tmp_path / "run/checkpoints/latest/state/state.json").read_text())
    assert state["notes"]["micro"] == 2


def _failing(ranks: Ranks, folder: Path) -> None:
    def broken(model: LanguageModel) -> dict[str, float]:
        # after rank 0's pre-flight, which the other may still be in
        if ranks.leads and (folder / "run/metrics.jsonl").exists():
            raise SystemExit(5)
        return {"loss": 1.0}

    try:
        started(ranks, folder, "steps=6", "log.every=2", "evaluate.every=4", evaluate=broken)
    except LostError as error:
        note(folder, ranks, line=str(error))
        raise SystemExit(2) from None


def test_when_rank_0_fails_the_others_do_not_wait(tmp_path: Path) -> None:
    assert in_processes(_failing, tmp_path) == [5, 2]
    line = json.loads((tmp_path / "1.json").read_text())["line"]
    assert "process 0 of 2" in line and "has ended, noticed in the evaluation after step 4; stopping" in line
