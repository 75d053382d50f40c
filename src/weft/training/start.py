"""The ways into training: a new run, a resumed one, and following rank 0's run on the other ranks.

An n-gram model takes no steps: it is counted. The steps of word2vec and GloVe are epochs (`word_vectors.py`).
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
from weft.progress import Log
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
from weft.training.word_vectors import train_word_vectors
from weft.training.worker import TrainingWorker, device_name


def train(
    recipe: SettledRecipe,
    run: RunFolder,
    objective: Objective[Any],
    *,
    worker: TrainingWorker,
    notes: Mapping[str, Any] | None = None,
) -> RunResult:
    """Train the recipe's model in a claimed run folder.

    `notes` go into the report: how the run was started, and what was chosen. Rank 0 calls this, and the other ranks
    `follow`. Ctrl-C finishes the step, saves, logs how to resume and raises KeyboardInterrupt.
    """
    check_log(recipe.log)
    versions = {"weft": __version__, "torch": torch.__version__, "python": platform.python_version()}
    where = {"device": device_name(worker.device), "processes": worker.ranks.ranks}
    data: dict[str, Any] = {"corpus": list(objective.fingerprints), "data_version": VERSION}
    data |= {"sources": objective.sources} if objective.sources else {}
    run.event("start", id=secrets.token_hex(8), **(notes or {}), **data, **versions, **where)
    torch.manual_seed(recipe.seed)
    if recipe.model.kind == "ngram":
        _begin(run, recipe)
        return _count(recipe, run, objective, worker=worker)
    if recipe.model.kind in ("word2vec", "glove"):
        return train_word_vectors(recipe, run, objective, worker=worker, begin=lambda: _begin(run, recipe))
    loop = Loop(recipe, run, objective, worker=worker)
    worker.ranks.share(lambda: "")  # no checkpoint: the other ranks begin with fresh weights as well
    # config.toml is written once the pre-flight has passed: a start that fails leaves no run behind
    return loop.train(TrainingState(), begin=lambda: _begin(run, recipe))


def _begin(run: RunFolder, recipe: SettledRecipe) -> None:
    """Turn the folder into a run, and record the weights that its adapter is trained for."""
    if recipe.adapter is not None and recipe.init is not None:
        write_text(run.base, base_note(recipe.init))
    run.write_config(recipe)
    note_files(run)


def _count(recipe: SettledRecipe, run: RunFolder, objective: Any, *, worker: TrainingWorker) -> RunResult:
    """Count the training text of a next-token objective into an n-gram model, evaluate it, and save it as step 1."""
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
    return RunResult(run, model, 1, loss=math.nan, validation=validation, best_step=1, seconds=seconds)


def resume(recipe: SettledRecipe, run: RunFolder, objective: Objective[Any], *, worker: TrainingWorker) -> RunResult:
    """Continue from a run's newest whole checkpoint, as if it had never stopped. A finished run is unchanged."""
    if run.checkpoints.exists() and not run.checkpoints.is_dir():
        raise RunError(f"{run.checkpoints}: expected a folder of checkpoints")
    if recipe.adapter is not None:
        check_base(run, recipe)
    check_log(recipe.log)
    report_changes(run, worker.log)
    torch.manual_seed(recipe.seed)
    if recipe.model.kind == "ngram":
        return _count(recipe, run, objective, worker=worker)
    if recipe.model.kind in ("word2vec", "glove"):
        return train_word_vectors(recipe, run, objective, worker=worker)
    loop = Loop(recipe, run, objective, worker=worker)
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
        worker.log(f"{lost}; starting again from the first step")
    _repair(run, recipe, state, log=worker.log)
    run.event("resume", step=state.step, device=device_name(worker.device), processes=worker.ranks.ranks)
    worker.ranks.share(lambda: origin)
    return loop.train(state)


def _repair(run: RunFolder, recipe: SettledRecipe, state: TrainingState, *, log: Log) -> None:
    """Finish what a process killed after its last checkpoint could not: links, and removing old checkpoints. If the
    best weights are gone, those of the next evaluation are the best."""
    if (lost := state.lose_best(run)) is not None:
        line = f"{run.checkpoints}: the best checkpoint, that of step {lost}, is gone or damaged"
        run.event("damage", line=line)
        log(f"{line}; the next evaluation becomes the best so far")
    with writing(run.checkpoints):
        changed = checkpoint.forget_after(run.checkpoints, state.step)
        changed += checkpoint.prune(run.checkpoints, recipe.checkpoint.keep)
    if changed:
        run.event("repaired", links=changed)
        log(f"{run.checkpoints}: links repaired: {', '.join(changed)}")


def follow(recipe: SettledRecipe, run: FollowedRun, objective: Objective[Any], *, worker: TrainingWorker) -> None:
    """Take part in a run that rank 0 trains or resumes: the same steps, on other rows of each batch.

    Every process makes every update; only rank 0 evaluates and writes, unless the model is sharded. N-gram models and
    word vectors are trained by rank 0 alone.
    """
    if recipe.model.kind in ("ngram", "word2vec", "glove"):
        return
    torch.manual_seed(recipe.seed)
    loop = Loop(recipe, run, objective, worker=worker)
    origin = worker.ranks.share(lambda: "")
    loop.train(TrainingState.from_notes(loop.learner.load(Path(origin))) if origin else TrainingState())
