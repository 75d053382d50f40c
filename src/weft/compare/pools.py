"""Run a comparison's jobs: in processes on this machine, or in tasks that Slurm or Ray starts.

A Slurm task is the same process behind `srun`, which forwards standard input and output. Inside an allocation each
task is a step of it; outside, each is a separate job that waits in the queue. The Ray cluster (Moritz et al. 2018) is
the one that RAY_ADDRESS or the machine names, or else a new one on this machine. Everything else that tasks need is in
the comparison's folder, which all machines must see under the same path.
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
SRUN_SECONDS = 10.0  # time for srun to end its tasks


@dataclass(frozen=True)
class JobScheduler:
    """Scheduler of the jobs, and how many run at a time if the user chose a number."""

    kind: Literal["here", "slurm", "ray"] = "here"
    count: int | None = None

    def __str__(self) -> str:
        return {"here": "at a time", "slurm": "at a time by Slurm", "ray": "at a time by Ray"}[self.kind]


HERE = JobScheduler()


class FinishedJob(NamedTuple):
    """End of the job in a folder: measured, or refused with an `error`, or its process `died`."""

    folder: Path
    error: str | None = None
    died: str | None = None


def parse_jobs(option: str | None) -> JobScheduler:
    """Parse `--jobs`: a number of processes here, or `slurm` or `ray`, optionally with a number, as in `slurm:8`."""
    if option is None:
        return HERE
    if option.isdecimal() and int(option):
        return JobScheduler("here", int(option))
    kind, colon, number = option.partition(":")
    if kind not in ("slurm", "ray") or (colon and not (number.isdecimal() and int(number))):
        raise ConfigError(f"--jobs {option}: expected a number of processes, slurm, slurm:NUMBER, ray or ray:NUMBER")
    count = int(number) if colon else None
    if kind == "slurm":
        if shutil.which("srun") is None:
            raise ConfigError(f"--jobs {option}: there is no srun on this machine; Slurm's commands must be on PATH")
        slurm_tasks(scheduler := JobScheduler("slurm", count))
        return scheduler
    if getattr(importlib.util.find_spec("ray"), "origin", None) is None:  # a mere folder of that name has no origin
        raise ConfigError(f"--jobs {option}: the package ray isn't installed: pip install 'weft[ray]'")
    return JobScheduler("ray", count)


def _environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def slurm_tasks(scheduler: JobScheduler) -> int:
    """Return the number of tasks at a time: the user's, or the allocation's."""
    tasks = scheduler.count or int(os.environ.get("SLURM_NTASKS", 0))
    if not tasks:
        hint = "give a number, as in slurm:8, or start inside an allocation: salloc --ntasks=8"
        raise ConfigError(f"--jobs slurm: how many at a time? {hint}")
    return tasks


def srun(threads: int, gpus: int) -> tuple[str, ...]:
    """Return the command that starts a process as a Slurm task with this many CPU cores and GPUs."""
    gpu = (f"--gpus-per-task={gpus}",) if gpus else ()
    step = ("--exclusive",) if "SLURM_JOB_ID" in os.environ else ()  # don't share cores with other steps
    return ("srun", "--ntasks=1", "--nodes=1", f"--cpus-per-task={threads}", *gpu, *step)


class Processes:
    """Worker processes, started by a `launcher` such as srun, that run jobs, folders with a job.json, in turn."""

    def __init__(self, threads: int, launcher: tuple[str, ...] = ()) -> None:
        self._children = Children([*launcher, *WORKER, str(threads)], _environment(threads))
        self._closing_seconds = SRUN_SECONDS if launcher else 0.0
        self._finished: SimpleQueue[FinishedJob] = SimpleQueue()

    def submit(self, folder: Path) -> None:
        """Run a job in an idle process, or in a new one."""
        Thread(target=self._run, args=(folder,), daemon=True).start()

    def _run(self, folder: Path) -> None:
        try:
            with self._children.acquire() as child:
                answer = child.request(str(folder))
            self._finished.put(FinishedJob(folder, answer.get("error")))
        except ChildProcessError as error:
            self._finished.put(FinishedJob(folder, died=str(error)))
        except (OSError, ValueError):  # the pool was closed meanwhile
            return

    def wait(self, seconds: float) -> FinishedJob | None:
        """Return the next job that finishes, or None if none does in time."""
        try:
            return self._finished.get(timeout=seconds)
        except Empty:
            return None

    def stop(self, seconds: float) -> None:
        """Let every job save a checkpoint and stop, within this time."""
        self._children.interrupt(seconds)

    def close(self) -> None:
        """End all processes."""
        self._children.close(self._closing_seconds)


def _ray() -> ModuleType:
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    return ray


def ray_tasks(threads: int, gpus: int) -> int:
    """Return the number of tasks of this size that the cluster runs at a time."""
    resources = _ray().cluster_resources()
    tasks = int(resources.get("CPU", 0) // threads)
    return max(1, min(tasks, int(resources.get("GPU", 0) // gpus)) if gpus else tasks)


class RayTasks:
    """Ray tasks, one per job, with the interface of `Processes`."""

    def __init__(self, threads: int, gpus: int) -> None:
        self._ray, self._threads = _ray(), threads
        resources = {"num_cpus": threads, "num_gpus": gpus, "runtime_env": {"env_vars": _environment(threads)}}
        self._run = self._ray.remote(_run_remotely).options(max_retries=0, **resources)
        self._folders: dict[Any, Path] = {}

    def submit(self, folder: Path) -> None:
        self._folders[self._run.remote(os.getcwd(), str(folder), self._threads)] = folder

    def wait(self, seconds: float) -> FinishedJob | None:
        ready, _ = self._ray.wait(list(self._folders), num_returns=1, timeout=seconds)
        if not ready:
            return None
        folder = self._folders.pop(ready[0])
        try:
            return FinishedJob(folder, self._ray.get(ready[0]))
        except Exception as error:  # Ray's or the task's, of any type
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return FinishedJob(folder, died=(lines or [type(error).__name__])[-1])

    def stop(self, seconds: float) -> None:
        for task in self._folders:  # raises KeyboardInterrupt in the task, so that training saves a checkpoint
            self._ray.cancel(task, force=False)
        self._ray.wait(list(self._folders), num_returns=len(self._folders), timeout=seconds)

    def close(self) -> None:
        for task in self._folders:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()


def _run_remotely(working_directory: str, folder: str, threads: int) -> str | None:
    """Run the job in a folder, inside a Ray task."""
    os.chdir(working_directory)
    torch.set_num_threads(threads)
    return attempt(Path(folder))
