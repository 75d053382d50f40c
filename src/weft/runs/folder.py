"""A run's folder: what is in it, how it is claimed, and how a finished one is read back.

runs/NAME/
  config.toml        the recipe with nothing left to choose; `weft train runs/NAME/config.toml` repeats the run
  tokenizer.json     Hugging Face format
  metrics.jsonl      losses, rates and norms, a line a logged step: the same again when the run is repeated
  timings.jsonl      seconds and tokens a second, which no two runs share
  events.jsonl       starts, resumes, evaluations, checkpoints, discarded updates, returns to a checkpoint
  checkpoints/       step-00000500/ …; `latest` and `best` are links
  data/              the prepared text, where the run prepared it
  base.json          the hash of the weights that an adapter stands beside
  report.html        curves, samples, counts
"""

import errno
import fcntl
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from weft.config import read_toml, to_toml, validate
from weft.errors import RunError
from weft.models.config import TransformerConfig
from weft.recipe.config import SOURCE_TOKENIZER, Recipe

if TYPE_CHECKING:
    import torch

    from weft.models.base import LanguageModel

T = TypeVar("T")

# what may stand in a folder whose run never came to its first step
BEFORE_START = {
    "data",
    "tokenizer.json",
    "tokenizer_config.json",
    SOURCE_TOKENIZER,
    "base.json",
    "events.jsonl",
    ".preflight",
}
LOCK = ".lock"  # there while a process writes to the run, and in what a killed one left


@dataclass(frozen=True)
class RunFolder:
    """The places of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timings(self) -> Path:
        return self.path / "timings.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def scratch(self) -> Path:
        return self.path / ".preflight"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def base(self) -> Path:
        return self.path / "base.json"

    @property
    def origin(self) -> Path:
        """What came with an imported model: notes.json, unused.safetensors and files/."""
        return self.path / "origin"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def recipe(self) -> Recipe:
        """The run's recipe as it was saved."""
        return validate(Recipe, read_toml(self.config), str(self.config))

    def event(self, what: str, /, **details: Any) -> None:
        """Note that something happened, with the time of day. A disk that is full does not end what goes on."""
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": what, **details}
        try:
            with open(self.events, "a", encoding="utf-8") as file:
                file.write(record(line) + "\n")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise


@dataclass(frozen=True)
class FollowedRun(RunFolder):
    """A run that another process leads and writes: it is read from here, and nothing is written into its folder."""

    @property
    def scratch(self) -> Path:
        return Path(tempfile.gettempdir()) / f"weft-preflight-{os.getpid()}"

    def event(self, what: str, /, **details: Any) -> None:
        """The process that leads notes it."""


@dataclass(frozen=True)
class RunResult:
    """What came out of a run. `validation` holds the last evaluation's numbers, empty where nothing was held out."""

    run: RunFolder
    model: "LanguageModel"
    steps: int
    loss: float
    validation: dict[str, float]
    best_step: int | None
    seconds: float


@contextmanager
def claimed(path: Path | str) -> Iterator[RunFolder]:
    """A folder for a new run, to which this process alone writes.

    An existing run, a folder with other things in it and an unwritable place are refused, before any work starts. What
    a start that was killed left behind is taken over; one that fails in here leaves nothing of its own.
    """
    run = RunFolder(Path(path))
    try:
        _refuse_run(run)
        there = run.path.exists()
        run.path.mkdir(parents=True, exist_ok=True)
        entries = {entry.name for entry in run.path.iterdir()}
        known = BEFORE_START if LOCK in entries else set()  # without it, nothing in here is ours
        others = sorted(name for name in entries - known if not (known and name.startswith(".")))
        if others:
            raise RunError(f"{run.path}: the folder holds other things ({others[0]} …); choose another with --run")
    except OSError as error:
        raise RunError(f"{run.path}: cannot be written: {error.strerror or error}") from None
    with held(run):
        _refuse_run(run)  # another process may have begun one since
        try:
            yield run
        except BaseException:
            if not run.config.exists():
                _clear(run, folder_too=not there or bool(entries))
            raise


def _refuse_run(run: RunFolder) -> None:
    if run.config.exists():
        raise RunError(
            f"{run.path}: a run is already here; go on with `weft train --resume {run.path}`, "
            "or choose another folder with --run"
        )


def _clear(run: RunFolder, folder_too: bool) -> None:
    """Remove what a start has made before its first step, and the folder if nothing else is in it."""
    for place in (run.path / name for name in BEFORE_START | {LOCK}):
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)
    if folder_too:
        with suppress(OSError):  # there is something else
            run.path.rmdir()


@contextmanager
def held(run: RunFolder) -> Iterator[None]:
    """Keep other processes from writing to a run. A process that is killed lets go of it."""
    lock = run.path / LOCK
    try:
        while True:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                raise RunError(
                    f"{run.path}: another process is training there; wait for it, or choose another folder with --run"
                ) from None
            except OSError as error:  # some network folders know no locks; there we trust whoever starts runs
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
            if lock.exists() and os.path.samestat(os.fstat(handle), lock.stat()):
                break
            os.close(handle)  # whoever held it has removed it in between
    except OSError as error:
        raise RunError(f"{run.path}: cannot be written: {error.strerror or error}") from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def open_run(path: Path | str) -> RunFolder:
    """The folder of a run that has started."""
    run = RunFolder(Path(path))
    if not run.config.is_file():
        known = "no such folder" if not run.path.exists() else "there is no config.toml in it"
        raise RunError(f"{run.path}: not a run: {known}")
    return run


def found(run: RunFolder, recipe: Recipe) -> None:
    """Write config.toml: from here on the folder is a run."""
    from weft.runs.checkpoint import write_atomic
    from weft.training.weights import base_hash

    try:
        if recipe.adapter is not None and recipe.init is not None:
            write_atomic(run.base, json.dumps({"init": recipe.init, "sha256": base_hash(recipe.init)}))
        write_atomic(run.config, to_toml(recipe))
    except OSError as error:
        raise RunError(f"{run.config}: cannot be written: {error.strerror or error}") from None


def checkpoint_path(run: RunFolder, which: Literal["best", "latest"] = "best") -> tuple[Path, list[str]]:
    """A whole checkpoint: the one asked for, or the newest good one with lines that say why it was not that."""
    from weft.runs.checkpoint import whole

    return _first_good(run, which, whole)


def _first_good(run: RunFolder, which: Literal["best", "latest"], use: Callable[[Path], T]) -> tuple[T, list[str]]:
    """What `use` makes of the checkpoint asked for, or of the newest in which it finds no damage; and that damage."""
    from weft.runs.checkpoint import checkpoints, first_good

    if not run.checkpoints.is_dir():
        raise RunError(f"{run.path}: no checkpoint yet; go on with `weft train --resume {run.path}`")
    link = run.checkpoints / which
    asked = [link.resolve()] if link.exists() else []
    others = [path for path in reversed(checkpoints(run.checkpoints)) if path.resolve() not in asked]
    return first_good(run.checkpoints, [*asked, *others], use)


def load_model(
    run: RunFolder, which: Literal["best", "latest"] = "best", device: "torch.device | str" = "cpu"
) -> "tuple[LanguageModel, list[str]]":
    """The run's model with its best (or latest) weights, ready to use, and lines about damage that was passed over."""
    import torch

    from weft.models.build import build
    from weft.nn.init import empty_weights
    from weft.runs.checkpoint import load_weights, place_weights, verify

    recipe = run.recipe()
    settings = recipe.model

    def filled(path: Path) -> "LanguageModel":
        if isinstance(settings, TransformerConfig) and recipe.adapter is None:
            with empty_weights():
                model: LanguageModel = build(settings)
            place_weights(path, model, torch.device(device))
            return model
        verify(path)
        if recipe.adapter is not None:
            from weft.training.weights import learned_model

            return learned_model(run, recipe, path)
        model = build(settings)
        load_weights(path, model)
        return model

    model, damage = _first_good(run, which, filled)
    return model.to(device).eval(), damage


def record(values: Mapping[str, Any]) -> str:
    """A line of a .jsonl file. JSON has no NaN and no infinity; null stands for them."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite, ensure_ascii=False)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a .jsonl file; a last line that a crash cut short is passed over, as is any other damage."""
    if path.exists():
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                with suppress(json.JSONDecodeError):
                    if isinstance(values := json.loads(line), dict):
                        yield values
