"""How training starts: a new run, one that is resumed, or a process that follows another one's."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from weft import __version__
from weft.errors import RunError
from weft.files import write_text
from weft.models.config import NGram
from weft.recipe.config import SettledRecipe
from weft.recipe.settle import Choice
from weft.runs import checkpoint
from weft.runs.folder import FollowedRun, RunFolder
from weft.runs.journal import check_log
from weft.training.counting import CountedObjective, count
from weft.training.loop import Loop
from weft.training.objective import Objective
from weft.training.state import RunResult, TrainingState
from weft.training.throughput import device_name
from weft.training.weights import base_note, check_base
from weft.training.worker import Worker


def train(
    recipe: SettledRecipe,
    run: RunFolder,
    objective: Objective,
    worker: Worker,
    *,
    choices: Sequence[Choice] = (),
    command: str | None = None,
) -> RunResult:
    """Train the recipe's model in a run folder that was claimed.

    `choices` and `command` are noted for the report. Of several processes the first one calls this, and the others
    `follow`. Ctrl-C finishes the step, saves, says how to resume and raises KeyboardInterrupt.
    """
    check_log(recipe.log)
    counted = isinstance(recipe.model, NGram)
    run.event(
        "start",
        command=command,
        choices=[[c.key, str(c.value), c.why] for c in choices],
        corpus=list(objective.fingerprints),
        weft=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        device=device_name(worker.device),
        processes=worker.ranks.ranks,
    )
    torch.manual_seed(recipe.seed)
    if counted:
        _begin(run, recipe)
        return count(recipe, run, cast(CountedObjective, objective), worker)
    loop = Loop(recipe, run, objective, worker)
    worker.ranks.share(lambda: "")  # no checkpoint: those who follow begin with fresh weights as well
    # config.toml is written once the pre-flight has passed: a start that fails leaves no run behind
    return loop.go(TrainingState(), begin=lambda: _begin(run, recipe))


def _begin(run: RunFolder, recipe: SettledRecipe) -> None:
    """Make the folder a run, and note which weights its adapter is learned for."""
    if recipe.adapter is not None and recipe.init is not None:
        write_text(run.base, base_note(recipe.init))
    run.write_config(recipe)


def resume(recipe: SettledRecipe, run: RunFolder, objective: Objective, worker: Worker) -> RunResult:
    """Continue from a run's newest whole checkpoint, as if it had never stopped. A finished run stays as it is."""
    if run.checkpoints.exists() and not run.checkpoints.is_dir():
        raise RunError(f"{run.checkpoints}: expected a folder of checkpoints")
    if recipe.adapter is not None:
        check_base(run, recipe)
    check_log(recipe.log)
    torch.manual_seed(recipe.seed)
    if isinstance(recipe.model, NGram):
        return count(recipe, run, cast(CountedObjective, objective), worker)
    loop = Loop(recipe, run, objective, worker)
    state, origin = TrainingState(), ""
    if checkpoint.checkpoints(run.checkpoints):
        path, damage = checkpoint.newest_good(run.checkpoints)
        for line in damage:
            run.event("damage", line=line)
            worker.log(f"{line}; continuing from {path.name}")
        state = TrainingState.from_notes(loop.learner.load(path))
        checkpoint.forget_after(run.checkpoints, state.step)
        origin = str(path)
    run.event("resume", step=state.step, device=device_name(worker.device), processes=worker.ranks.ranks)
    worker.ranks.share(lambda: origin)
    return loop.go(state)


def follow(recipe: SettledRecipe, run: FollowedRun, objective: Objective, worker: Worker) -> None:
    """Take part in a run that the first process trains or resumes: the same steps, on other rows of each batch.

    Every process holds all weights and makes every update; only the first one evaluates and writes. An n-gram model
    is counted by the first one alone.
    """
    if isinstance(recipe.model, NGram):
        return
    torch.manual_seed(recipe.seed)
    loop = Loop(recipe, run, objective, worker)
    state = TrainingState()
    origin = worker.ranks.share(lambda: "")
    if origin:
        state = TrainingState.from_notes(loop.learner.load(Path(origin)))
    loop.go(state)
