"""Where a comparison's jobs run: in processes on this machine, or in tasks that Slurm or Ray starts where it has space.

Slurm's tasks are the same processes behind `srun`, which passes on what they are told and what they say. Inside an
allocation each is a step of it; outside, each is a job of its own, which waits in the queue. Ray's cluster (Moritz et
al. 2018) is the one that RAY_ADDRESS or the machine names; where there is none, one of this machine alone is made. What
tasks need to know besides is in the comparison's folder, which every machine has to see under the same name.
"""

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from weft.compare.worker import attempt
from weft.errors import ConfigError
from weft.workers import Children

WORKER = (sys.executable, "-m", "weft.compare.worker")
SRUN_SECONDS = 10.0  # that srun has to end its tasks


@dataclass(frozen=True)
class Where:
    """On which machines jobs run, and how many at once where somebody said so."""

    kind: Literal["here", "slurm", "ray"] = "here"
    count: int | None = None

    def __str__(self) -> str:
        return {"here": "side by side", "slurm": "at once by Slurm", "ray": "at once by Ray"}[self.kind]


HERE = Where()


class Ended(NamedTuple):
    """The job of a folder came to its end: measured, or with what is wrong with it, or with why its process `died`."""

    folder: Path
    error: str | None = None
    died: str | None = None


def parse_jobs(words: str | None) -> Where:
    """`--jobs`: a number of processes here, or `slurm` or `ray`, perhaps with a number, as in `slurm:8`."""
    if words is None:
        return HERE
    if words.isdecimal() and int(words):
        return Where("here", int(words))
    kind, colon, number = words.partition(":")
    if kind not in ("slurm", "ray") or (colon and not (number.isdecimal() and int(number))):
        raise ConfigError(f"--jobs {words}: expected a number of processes, slurm, slurm:NUMBER, ray or ray:NUMBER")
    count = int(number) if colon else None
    if kind == "slurm":
        if shutil.which("srun") is None:
            raise ConfigError(f"--jobs {words}: there is no srun on this machine; Slurm's own commands must be on PATH")
        slurm_tasks(where := Where("slurm", count))
        return where
    if getattr(importlib.util.find_spec("ray"), "origin", None) is None:  # not any folder of the name
        raise ConfigError(f"--jobs {words}: the package ray isn't installed: pip install 'weft[ray]'")
    return Where("ray", count)


def _environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def slurm_tasks(where: Where) -> int:
    """How many tasks run at once: as many as were said, or as the allocation has."""
    tasks = where.count or int(os.environ.get("SLURM_NTASKS", 0))
    if not tasks:
        allocation = "start inside an allocation of so many tasks: salloc --ntasks=8"
        raise ConfigError(f"--jobs slurm: how many at once? say so, as in slurm:8, or {allocation}")
    return tasks


def srun(threads: int, gpus: int) -> tuple[str, ...]:
    """The command that starts a process as a task of Slurm with so many processors and GPUs."""
    gpu = (f"--gpus-per-task={gpus}",) if gpus else ()
    step = ("--exclusive",) if "SLURM_JOB_ID" in os.environ else ()  # processors that no other step has
    return ("srun", "--ntasks=1", "--nodes=1", f"--cpus-per-task={threads}", *gpu, *step)


class Processes:
    """Processes that take one job after another. With `before`, such as srun and its options, that starts them.

    A job is a folder that has its job.json; whoever gives them out knows how many at once.
    """

    def __init__(self, threads: int, before: tuple[str, ...] = ()) -> None:
        self._children = Children([*before, *WORKER, str(threads)], _environment(threads))
        self._ending = SRUN_SECONDS if before else 0.0
        self._ended: SimpleQueue[Ended] = SimpleQueue()

    def begin(self, folder: Path) -> None:
        """Hand a job to a process that has none, or to a new one."""
        Thread(target=self._run, args=(folder,), daemon=True).start()

    def _run(self, folder: Path) -> None:
        try:
            with self._children.acquire() as child:
                answer = child.request(str(folder))
            self._ended.put(Ended(folder, answer.get("error")))
        except ChildProcessError as error:
            self._ended.put(Ended(folder, died=str(error)))
        except (OSError, ValueError):  # closed while it was read: everything is over
            return

    def ended(self, seconds: float) -> Ended | None:
        """The next job that comes to its end, if one does within so many seconds."""
        try:
            return self._ended.get(timeout=seconds)
        except Empty:
            return None

    def stop(self, seconds: float) -> None:
        """Have every job save its step and stop, which may take so many seconds."""
        self._children.interrupt(seconds)

    def close(self) -> None:
        """End everything at once."""
        self._children.close(self._ending)


def _ray() -> ModuleType:
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    return ray


def ray_tasks(threads: int, gpus: int) -> int:
    """How many tasks of this size the cluster runs at once."""
    there = _ray().cluster_resources()
    tasks = int(there.get("CPU", 0) // threads)
    return max(1, min(tasks, int(there.get("GPU", 0) // gpus)) if gpus else tasks)


class RayTasks:
    """Every job is a task of its own; otherwise as `Processes`."""

    def __init__(self, threads: int, gpus: int) -> None:
        self._ray, self._threads = _ray(), threads
        size = {"num_cpus": threads, "num_gpus": gpus, "runtime_env": {"env_vars": _environment(threads)}}
        self._run = self._ray.remote(_run_there).options(max_retries=0, **size)
        self._folders: dict[Any, Path] = {}

    def begin(self, folder: Path) -> None:
        self._folders[self._run.remote(os.getcwd(), str(folder), self._threads)] = folder

    def ended(self, seconds: float) -> Ended | None:
        ready, _ = self._ray.wait(list(self._folders), num_returns=1, timeout=seconds)
        if not ready:
            return None
        folder = self._folders.pop(ready[0])
        try:
            return Ended(folder, self._ray.get(ready[0]))
        except Exception as error:  # Ray's own, or that of the task, as the kind of error that it was
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return Ended(folder, died=(lines or [type(error).__name__])[-1])

    def stop(self, seconds: float) -> None:
        """Cancelling a task is its Ctrl-C: training saves its step before it stops."""
        for task in self._folders:
            self._ray.cancel(task, force=False)
        self._ray.wait(list(self._folders), num_returns=len(self._folders), timeout=seconds)

    def close(self) -> None:
        for task in self._folders:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()


def _run_there(place: str, folder: str, threads: int) -> str | None:
    """Run the job of a folder on the machine of a task, in the working directory `place`."""
    os.chdir(place)
    torch.set_num_threads(threads)
    return attempt(Path(folder))
