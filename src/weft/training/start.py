"""How training starts: a new run, one that is resumed, or a process that follows another one's.

An n-gram model takes no steps: it is counted.
"""

import math
import platform
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft import __version__
from weft.data.prepare import VERSION
from weft.errors import RunError
from weft.models.build import build
from weft.models.ngram import NGram
from weft.recipe.config import SettledRecipe
from weft.runs import checkpoint
from weft.runs.folder import FollowedRun, RunFolder, note_files, report_changes, writing
from weft.runs.journal import Journal, check_log
from weft.runs.snapshot import snapshot
from weft.storage.files import write_text
from weft.training.loop import Loop
from weft.training.objective import Objective
from weft.training.state import RunResult, TrainingState
from weft.training.weights import base_note, check_base
from weft.training.worker import Worker, device_name


def train(
    recipe: SettledRecipe,
    run: RunFolder,
    objective: Objective[Any],
    worker: Worker,
    notes: Mapping[str, Any] | None = None,
) -> RunResult:
    """Train the recipe's model in a run folder that was claimed.

    `notes` go into the report: how the run was started, and what was chosen. Of several processes the first one calls
    this, and the others `follow`. Ctrl-C finishes the step, saves, logs how to resume and raises KeyboardInterrupt.
    """
    check_log(recipe.log)
    made_with = {"weft": __version__, "torch": torch.__version__, "python": platform.python_version()}
    where = {"device": device_name(worker.device), "processes": worker.ranks.ranks}
    corpus = list(objective.fingerprints)
    run.event(
        "start", id=secrets.token_hex(8), **(notes or {}), corpus=corpus, data_version=VERSION, **made_with, **where
    )
    torch.manual_seed(recipe.seed)
    if recipe.model.kind == "ngram":
        _begin(run, recipe)
        return _count(recipe, run, objective, worker)
    loop = Loop(recipe, run, objective, worker)
    worker.ranks.share(lambda: "")  # no checkpoint: those who follow begin with fresh weights as well
    # config.toml is written once the pre-flight has passed: a start that fails leaves no run behind
    return loop.go(TrainingState(), begin=lambda: _begin(run, recipe))


def _begin(run: RunFolder, recipe: SettledRecipe) -> None:
    """Make the folder a run, and note which weights its adapter is learned for."""
    if recipe.adapter is not None and recipe.init is not None:
        write_text(run.base, base_note(recipe.init))
    run.write_config(recipe)
    note_files(run)


def _count(recipe: SettledRecipe, run: RunFolder, objective: Objective[Any], worker: Worker) -> RunResult:
    """Count the training text into the recipe's n-gram model, evaluate it and save it as step 1."""
    started = time.perf_counter()
    text, model = objective.training_text, build(recipe.model)
    assert isinstance(model, NGram)
    documents = text.documents(0, len(text))
    starts = np.concatenate([[0], np.flatnonzero(np.diff(documents)) + 1])
    model.fit(text.read(0, len(text)), starts, progress=not worker.quiet)
    model.eval()
    run.event("model", parameters=sum(model.entries))
    validation = objective.evaluate(model) if objective.holds_out else {}
    journal = Journal(run, recipe)
    journal.metrics(1, {"tokens": len(text), **{f"validation_{key}": value for key, value in validation.items()}})
    journal.close()
    notes = {"step": 1, "tokens": len(text), "validation": validation, "best_step": 1}
    checkpoint.write(run.checkpoints, snapshot(1, model, None, notes=notes), recipe.checkpoint.keep)
    seconds = time.perf_counter() - started
    run.event("finish", step=1, seconds=round(seconds, 3))
    return RunResult(run, model, 1, math.nan, validation, 1, seconds)


def resume(recipe: SettledRecipe, run: RunFolder, objective: Objective[Any], worker: Worker) -> RunResult:
    """Continue from a run's newest whole checkpoint, as if it had never stopped. A finished run stays as it is."""
    if run.checkpoints.exists() and not run.checkpoints.is_dir():
        raise RunError(f"{run.checkpoints}: expected a folder of checkpoints")
    if recipe.adapter is not None:
        check_base(run, recipe)
    check_log(recipe.log)
    report_changes(run, worker.log)
    torch.manual_seed(recipe.seed)
    if recipe.model.kind == "ngram":
        return _count(recipe, run, objective, worker)
    loop = Loop(recipe, run, objective, worker)
    state, origin = TrainingState(), ""
    if checkpoint.all_checkpoints(run.checkpoints):
        path, damage = checkpoint.newest_good(run.checkpoints)
        for line in damage:
            run.event("damage", line=line)
            worker.log(f"{line}; continuing from {path.name}")
        state = TrainingState.from_notes(loop.learner.load(path))
        origin = str(path)
    elif (lost := checkpoint.lost(run.checkpoints)) is not None:
        run.event("damage", line=lost)
        worker.log(f"{lost}; beginning anew")
    _put_right(run, recipe, state, worker)
    run.event("resume", step=state.step, device=device_name(worker.device), processes=worker.ranks.ranks)
    worker.ranks.share(lambda: origin)
    return loop.go(state)


def _put_right(run: RunFolder, recipe: SettledRecipe, state: TrainingState, worker: Worker) -> None:
    """Do what a process that was killed after its last checkpoint could not: links, and what is needed no longer. Where
    the best weights are gone, those of the next evaluation are the best."""
    if (lost := state.lose_best(run)) is not None:
        line = f"{run.checkpoints}: the best checkpoint, that of step {lost}, is gone or damaged"
        run.event("damage", line=line)
        worker.log(f"{line}; the next evaluation decides anew which is the best")
    with writing(run.checkpoints):
        changed = checkpoint.forget_after(run.checkpoints, state.step)
        changed += checkpoint.prune(run.checkpoints, recipe.checkpoint.keep)
    if changed:
        run.event("repaired", links=changed)
        worker.log(f"{run.checkpoints}: links put right: {', '.join(changed)}")


def follow(recipe: SettledRecipe, run: FollowedRun, objective: Objective[Any], worker: Worker) -> None:
    """Take part in a run that the first process trains or resumes: the same steps, on other rows of each batch.

    Every process holds all weights and makes every update; only the first one evaluates and writes. An n-gram model
    is counted by the first one alone.
    """
    if recipe.model.kind == "ngram":
        return
    torch.manual_seed(recipe.seed)
    loop = Loop(recipe, run, objective, worker)
    origin = worker.ranks.share(lambda: "")
    loop.go(TrainingState.from_notes(loop.learner.load(Path(origin))) if origin else TrainingState())
