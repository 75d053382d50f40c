"""A model in training with its optimizer: started, saved, restored, and rolled back when training has diverged."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import optim

from weft.errors import DivergedError, LostError, RunError, counted, quoted
from weft.figures.formats import general
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
from weft.training.step import StepState
from weft.training.weights import first_model

Copy = Any  # a Snapshot, everything resumable in host memory; or this process's shard of it


@dataclass
class Learner:
    """A model in training that this process holds in full."""

    parallel: Parallel
    optimizer: optim.Optimizer
    step_state: StepState = field(default_factory=StepState)

    @property
    def model(self) -> LanguageModel:
        """The model, or this process's shard of it."""
        return self.parallel.model

    def restart(self, recipe: SettledRecipe) -> None:
        """Return to the weights before the first step, with a new optimizer."""
        torch.manual_seed(recipe.seed)
        self.model.load_state_dict(first_model(recipe).state_dict())
        self.optimizer = optimizer.build(recipe.optimizer, self.model)
        self.step_state.restore({})

    def copy(self, step: int, notes: Mapping[str, Any]) -> Copy:
        """Copy everything resumable into host memory."""
        return snapshot.snapshot(step, self.model, self.optimizer, notes=notes, step_state=self.step_state.tensors())

    def write(self, folder: Path, copy: Copy, keep: int, *, interrupted: bool = False) -> Path:
        """Write a copy as a checkpoint, keep the last `keep` checkpoints, and return its path."""
        return checkpoint.write(folder, copy, keep, interrupted=interrupted)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint; return its notes."""
        notes, step_state = checkpoint.load(path, self.model, self.optimizer)
        self.step_state.restore(step_state)
        return notes

    def load_weights(self, path: Path) -> None:
        """Restore the weights of a checkpoint alone."""
        checkpoint.load_weights(path, self.model)

    def size(self) -> int:
        """Return about how many bytes a checkpoint takes on disk."""
        state = sum(tensor.nbytes for tensor in self.step_state.tensors().values())
        return snapshot.size(self.model, self.optimizer) + state

    def try_moments(self, folder: Path) -> None:
        """Write and remove the moments: they are most of a checkpoint, and exist only after the first update."""
        file = folder / "moments.safetensors"
        with writing(file):
            moments = snapshot.optimizer_state(self.optimizer, self.model) | self.step_state.tensors()
            tensors.save(file, snapshot.copies(moments))
            file.unlink()

    @contextmanager
    def using_weights(self, path: Path) -> Iterator[None]:
        """Load the weights of another checkpoint; undone on exit."""
        weights = {name: local.detach().clone() for name, local in self.parallel.local.items()}
        try:
            self.load_weights(path)
            yield
        finally:
            with torch.no_grad():
                for name, local in self.parallel.local.items():
                    local.copy_(weights[name])


def start(recipe: SettledRecipe, mesh: Mesh, device: torch.device) -> Learner:
    """Return the recipe's model before its first step; refuse a precision that the device does not support."""
    check_precision(recipe.precision, device)
    model = prepare_model(first_model(recipe).to(device), recipe)
    parallel = Parallel(model, mesh) if mesh.world.alone else Replicas(model, mesh)
    return Learner(parallel, optimizer.build(recipe.optimizer, model))


def prepare_model(model: LanguageModel, recipe: SettledRecipe) -> LanguageModel:
    """Apply the recipe's eight-bit products and activation checkpointing to a model, in place."""
    if recipe.precision == "fp8":
        use_eight_bits(model)
    for module in model.modules():
        if isinstance(module, Stack):
            module.recompute = recipe.batch.recompute
    return model


def roll_back(
    run: RunFolder, recipe: SettledRecipe, learner: Learner, *, state: TrainingState, since: int
) -> TrainingState:
    """Restore the last good checkpoint from before step `since`, or the first weights; return the state to resume from.

    Later checkpoints are removed. The guard's new state reaches the disk with the next checkpoint: a process killed
    before that diverges once more and rolls back the same way. After too many attempts in a row the run gives up.
    """
    guard = state.guard
    if guard.tries >= recipe.guard.rollbacks:
        why = f"{counted(guard.tries, 'rollback')}, down to {general(guard.rate, 3)} of the learning rate, did not help"
        raise DivergedError(
            f"{run.path}: training diverged at step {since}{f' and {why}' if guard.tries else ''}; lower "
            f"optimizer.lr, lengthen schedule.warmup, look at the text, or allow more with guard.rollbacks"
        )
    # after an attempt that failed from one checkpoint, go back to the checkpoint before it
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


class Saver:
    """Writes a run's checkpoints in a thread, while training continues: the loop waits only for a copy in memory.

    At most one write is in flight. A failed write, on a full disk for instance, is reported and training continues: the
    next one may succeed, and only the last one must. `before` is called before each write, to sync the metrics.
    """

    def __init__(self, run: RunFolder, write: Callable[..., Path], keep: int, *, before: Callable[[], None]):
        self._run, self._write_copy, self._keep, self._before = run, write, keep, before
        self._thread: threading.Thread | None = None
        self._failure: RunError | None = None
        self._fatal: BaseException | None = None  # raised in the loop when it waits
        self._unreported = False
        self.lost_best = False  # the best weights so far never reached the disk

    def save(self, step: int, take: Callable[[], Copy], *, best: bool = False, interrupted: bool = False) -> None:
        """Take a copy and start to write it, once the previous write has ended."""
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
            path = self._write_copy(self._run.checkpoints, copy, self._keep, interrupted=interrupted)
        except LostError as error:  # the next write would fail as well
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
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fatal is not None:
            raise self._fatal

    def failure_message(self) -> str | None:
        """Return a message if a write has failed since the last call, without waiting for one in flight."""
        if self._unreported:
            self._unreported = False
            return f"{self._failure}; training continues, and the next checkpoint may succeed"
        return None

    def finish(self) -> None:
        """Wait, and raise if the newest state is not on disk."""
        self.wait()
        if self._failure is not None:
            standing = checkpoint.all_checkpoints(self._run.checkpoints)
            left = f"the newest whole checkpoint is {standing[-1].name}" if standing else "no checkpoint was written"
            resume = f"weft train --resume {quoted(self._run.path)}"
            raise RunError(f"{self._failure}; {left}; `{resume}` continues from there")
