"""Where a comparison's jobs run: in processes on this machine, or in tasks that Slurm starts wherever there is space.

Slurm's tasks are the same processes behind `srun`, which passes on what they are told and what they say. Inside an
allocation each is a step of it; outside, each is a job of its own, which waits in the queue. What they need to know
besides is in the comparison's folder, which every machine has to see.
"""

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Literal, NamedTuple

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


def slurm_tasks(where: Where) -> int:
    """How many tasks run at once: as many as were said, or as the allocation has."""
    tasks = where.count or int(os.environ.get("SLURM_NTASKS", 0))
    if not tasks:
        raise ConfigError(
            "--jobs slurm: how many at once? say so, as in slurm:8, or start inside an allocation of so many tasks: "
            "salloc --ntasks=8"
        )
    return tasks


def environment(threads: int) -> dict[str, str]:
    """What is set in the environment of a process that has so many threads."""
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def srun(threads: int, gpus: int) -> tuple[str, ...]:
    """The command that starts a process as a task of Slurm with so many processors and GPUs."""
    command = ["srun", "--ntasks=1", "--nodes=1", f"--cpus-per-task={threads}"]
    if gpus:
        command.append(f"--gpus-per-task={gpus}")
    if "SLURM_JOB_ID" in os.environ:
        command.append("--exclusive")  # of a step: processors that no other step has
    return tuple(command)


class Processes:
    """Processes that take one job after another. With `before`, such as srun and its options, that starts them.

    A job is a folder that has its job.json; whoever gives them out knows how many at once.
    """

    def __init__(self, threads: int, before: tuple[str, ...] = ()) -> None:
        self._children = Children([*before, *WORKER, str(threads)], environment(threads))
        self._ending = SRUN_SECONDS if before else 0.0
        self._ended: SimpleQueue[Ended] = SimpleQueue()

    def begin(self, folder: Path) -> None:
        """Hand a job to a process that has none, or to a new one."""
        Thread(target=self._run, args=(folder,), daemon=True).start()

    def _run(self, folder: Path) -> None:
        try:
            with self._children.free() as child:
                answer = child.ask(str(folder))
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
