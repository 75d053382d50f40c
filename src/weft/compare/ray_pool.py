"""A comparison's jobs as tasks of Ray (Moritz et al. 2018), which starts them wherever its cluster has space.

The cluster is the one that RAY_ADDRESS or the machine names; where there is none, one of this machine alone is made.
All its machines have to see the comparison's folder under the same name.
"""

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft.compare.pools import Ended, environment
from weft.compare.worker import run_job
from weft.errors import WeftError


def connected() -> ModuleType:
    """Ray, connected to its cluster."""
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    return ray


def ray_tasks(threads: int, gpus: int) -> int:
    """How many tasks of this size the cluster runs at once."""
    there = connected().cluster_resources()
    tasks = int(there.get("CPU", 0) // threads)
    return max(1, min(tasks, int(there.get("GPU", 0) // gpus)) if gpus else tasks)


class RayTasks:
    """Every job is a task of its own."""

    def __init__(self, threads: int, gpus: int) -> None:
        self._ray = connected()
        self._run = self._ray.remote(run_there).options(
            num_cpus=threads, num_gpus=gpus, max_retries=0, runtime_env={"env_vars": environment(threads)}
        )
        self._threads = threads
        self._folders: dict[Any, Path] = {}

    def begin(self, folder: Path) -> None:
        """Start a task, or queue it until there is space."""
        self._folders[self._run.remote(os.getcwd(), str(folder), self._threads)] = folder

    def ended(self, seconds: float) -> Ended | None:
        """What a task returned, or how it ended."""
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
        """Nothing goes on, and this process leaves the cluster."""
        for task in self._folders:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()


def run_there(place: str, folder: str, threads: int) -> str | None:
    """Run the job of a folder on the machine of a task, in the working directory `place`; what is wrong with it."""
    os.chdir(place)
    torch.set_num_threads(threads)
    try:
        run_job(Path(folder))
    except WeftError as error:
        return str(error)
    return None
