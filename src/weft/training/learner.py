"""A model and its optimizer, which start, are saved and are put back together; also when training has gone wrong."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import optim

from weft.errors import DivergedError, LostError, RunError
from weft.models.base import LanguageModel
from weft.models.stack import Stack
from weft.parallel.mesh import Mesh
from weft.parallel.passes import Parallel, Replicas
from weft.recipe.config import SettledRecipe
from weft.runs import checkpoint, snapshot
from weft.runs.folder import RunFolder, writing
from weft.storage import tensors
from weft.training import optimizer
from weft.training.precision import check_precision, use_eight_bits
from weft.training.state import TrainingState
from weft.training.weights import first_model

Copy = Any  # a Snapshot: everything resumable, in the host's memory; or this process's part of it


@dataclass
class Learner:
    """A model in training that this process holds whole."""

    parallel: Parallel
    optimizer: optim.Optimizer

    @property
    def model(self) -> LanguageModel:
        """The model, or this process's part of it."""
        return self.parallel.model

    def restart(self, recipe: SettledRecipe) -> None:
        """Back to the weights before the first step, with an optimizer that has seen no gradient."""
        torch.manual_seed(recipe.seed)
        self.model.load_state_dict(first_model(recipe).state_dict())
        self.optimizer = optimizer.build(recipe.optimizer, self.model)

    def copy(self, step: int, notes: Mapping[str, Any]) -> Copy:
        return snapshot.snapshot(step, self.model, self.optimizer, notes=notes)

    def write(self, folder: Path, copy: Copy, keep: int, interrupted: bool = False) -> Path:
        return checkpoint.write(folder, copy, keep, interrupted=interrupted)

    def load(self, path: Path) -> dict[str, Any]:
        """Put back a checkpoint; its notes."""
        return checkpoint.load(path, self.model, self.optimizer)

    def load_weights(self, path: Path) -> None:
        checkpoint.load_weights(path, self.model)

    def size(self) -> int:
        """About how many bytes a checkpoint takes on the disk."""
        return snapshot.size(self.model, self.optimizer)

    def try_moments(self, folder: Path) -> None:
        """Write the moments as a checkpoint would: they are most of one, and exist after the first update only."""
        file = folder / "moments.safetensors"
        with writing(file):
            tensors.save(file, snapshot.copies(snapshot.optimizer_state(self.optimizer, self.model)))
            file.unlink()

    @contextmanager
    def holding(self, path: Path) -> Iterator[None]:
        """Inside, the model has the weights of another checkpoint."""
        own = {name: local.detach().clone() for name, local in self.parallel.local.items()}
        self.load_weights(path)
        yield
        with torch.no_grad():
            for name, local in self.parallel.local.items():
                local.copy_(own[name])


def start(recipe: SettledRecipe, mesh: Mesh, device: torch.device) -> Learner:
    """The recipe's model before its first step; a precision that the device doesn't have is refused."""
    check_precision(recipe.precision, device)
    model = fitted(first_model(recipe).to(device), recipe)
    parallel = Parallel(model, mesh) if mesh.world.alone else Replicas(model, mesh)
    return Learner(parallel, optimizer.build(recipe.optimizer, model))


def fitted(model: LanguageModel, recipe: SettledRecipe) -> LanguageModel:
    """With products in eight bits, and blocks that run again in the backward pass, if the recipe says so."""
    if recipe.precision == "fp8":
        use_eight_bits(model)
    for module in model.modules():
        if isinstance(module, Stack):
            module.recompute = recipe.batch.recompute
    return model


def roll_back(
    run: RunFolder, recipe: SettledRecipe, learner: Learner, state: TrainingState, since: int
) -> TrainingState:
    """Put the last good checkpoint from before step `since` back, or fresh weights; the state to continue from.

    Later checkpoints are removed: the run will write them again. What the guard has learned is on the disk with the
    next one only: a process that is killed before goes through the same trouble once more, to the same end. After too
    many attempts in a row the run gives up.
    """
    guard = state.guard
    if guard.tries >= recipe.guard.rollbacks:
        tried = f"{guard.tries} rollback{'s' if guard.tries > 1 else ''} did not help"
        raise DivergedError(
            f"{run.path}: training went wrong at step {since}{f' and {tried}' if guard.tries else ''}; lower "
            f"optimizer.lr, lengthen schedule.warmup, look at the text, or allow more with guard.rollbacks"
        )
    # an attempt that failed from one checkpoint is followed by one from the checkpoint before it
    before = min(since, guard.back_to) if guard.tries else since
    if (path := next(checkpoint.intact(run.checkpoints, before), None)) is not None:
        earlier = TrainingState.from_notes(learner.load(path))
    else:
        earlier = TrainingState(micro=state.micro)
        learner.restart(recipe)
    with writing(run.checkpoints):
        checkpoint.forget_after(run.checkpoints, earlier.step)
    earlier.lose_best(run)
    earlier.guard = guard.go_back(earlier.guard, recipe.guard)
    return earlier


# ---- beside the training: the loop waits for a copy in memory, a thread writes it to the disk
#
# At most one write is in flight. One that fails, on a full disk for instance, is reported and the training goes on: the
# checkpoints that exist are untouched, and the next write may succeed. Only the last one must.

Write = Callable[[Path, Copy, int, bool], Path]  # folder, copy, how many to keep, whether the run was interrupted


class Saver:
    """Writes a run's checkpoints by `write`. `before` is called first each time: it brings the metrics to the disk."""

    def __init__(self, run: RunFolder, write: Write, keep: int, before: Callable[[], None]):
        self._run, self._write_copy, self._keep, self._before = run, write, keep, before
        self._thread: threading.Thread | None = None
        self._failure: RunError | None = None
        self._fatal: BaseException | None = None  # raised where the loop waits
        self._unreported = False
        self.lost_best = False  # the best weights so far never reached the disk

    def save(self, step: int, take: Callable[[], Copy], best: bool = False, interrupted: bool = False) -> None:
        """Take a snapshot and start to write it, after the write before it has ended."""
        self.wait()
        try:
            self._before()
        except OSError as error:
            self._fail(step, f"{self._run.metrics}: cannot be written: {error.strerror or error}", best)
            return
        self._thread = threading.Thread(target=self._write, args=(take(), best, interrupted), daemon=True)
        self._thread.start()

    def _write(self, copy: Copy, best: bool, interrupted: bool) -> None:
        try:
            path = self._write_copy(self._run.checkpoints, copy, self._keep, interrupted)
        except LostError as error:  # nothing that the next write could make good
            self._fatal = error
        except RunError as error:
            self._fail(copy.step, str(error), best)
        except BaseException as error:  # a bug, or the end of this process
            self._fatal = error
        else:
            self._failure = None
            self.lost_best = self.lost_best and not best
            self._run.event("checkpoint", step=copy.step, path=path.name, best=best)

    def _fail(self, step: int, reason: str, best: bool) -> None:
        self._failure, self._unreported = RunError(reason), True
        self.lost_best = self.lost_best or best
        self._run.event("checkpoint failed", step=step, reason=reason)

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fatal is not None:
            raise self._fatal

    def news(self) -> str | None:
        """A message about a write that has failed since the last call, without waiting for one in flight."""
        if self._unreported:
            self._unreported = False
            return f"{self._failure}; training continues, and the next checkpoint may succeed"
        return None

    def finish(self) -> None:
        """Wait, and raise if the newest state is not on the disk."""
        self.wait()
        if self._failure is not None:
            standing = checkpoint.all_checkpoints(self._run.checkpoints)
            left = f"the newest whole checkpoint is {standing[-1].name}" if standing else "no checkpoint was written"
            raise RunError(f"{self._failure}; {left}; `weft train --resume {self._run.path}` continues from there")
