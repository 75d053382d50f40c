"""Where a comparison's jobs run: in processes on this machine, or in tasks that Slurm starts wherever there is space.

Slurm's tasks are the same processes behind `srun`, which passes on what they are told and what they say. Inside an
allocation each is a step of it; outside, each is a job of its own, which waits in the queue. What they need to know
besides is in the comparison's folder, which every machine has to see.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any, Literal, NamedTuple, Protocol

from weft.errors import ConfigError

WORKER = (sys.executable, "-m", "weft.compare.worker")
TAIL = 10_000  # bytes of what a process wrote to standard error, of which the last line says why it died
ENDING = 10.0  # seconds that srun has to end its tasks


@dataclass(frozen=True)
class Where:
    """On which machines jobs run, and how many at once where somebody said so."""

    kind: Literal["here", "slurm", "ray"] = "here"
    count: int | None = None

    def __str__(self) -> str:
        return {"here": "side by side", "slurm": "at once by Slurm", "ray": "at once by Ray"}[self.kind]


HERE = Where()


class Ended(NamedTuple):
    """The job of a folder came to its end: measured, or with what is wrong with it, or its process `died`."""

    folder: Path | None  # none where a process died without a job
    error: str | None = None
    died: str | None = None


class Pool(Protocol):
    """Runs jobs, each in a folder that has its job.json, and as many at once as it was made for."""

    def begin(self, folder: Path) -> None:
        """Start a job, or go on with it."""

    def ended(self, seconds: float) -> Ended | None:
        """The next job that comes to its end, if one does within so many seconds."""

    def stop(self, seconds: float) -> None:
        """Have every job save its step and stop, which may take so many seconds."""

    def close(self) -> None:
        """End everything, at once."""


def parse_jobs(words: str | None) -> Where:
    """`--jobs`: a number of processes here, or `slurm` or `ray`, perhaps with a number, as in `slurm:8`."""
    if words is None:
        return HERE
    if words.isdecimal() and int(words):
        return Where("here", int(words))
    kind, colon, number = words.partition(":")
    if kind not in ("slurm", "ray") or (colon and not (number.isdecimal() and int(number))):
        raise ConfigError(f"--jobs {words}: expected a number of processes, slurm, slurm:NUMBER, ray or ray:NUMBER")
    where = Where("slurm" if kind == "slurm" else "ray", int(number) if colon else None)
    if kind == "slurm":
        if shutil.which("srun") is None:
            raise ConfigError(f"--jobs {words}: there is no srun on this machine; Slurm's own commands must be on PATH")
        slurm_tasks(where)
    if kind == "ray" and getattr(importlib.util.find_spec("ray"), "origin", None) is None:  # not any folder of the name
        raise ConfigError(f"--jobs {words}: the package ray isn't installed: pip install 'weft[ray]'")
    return where


def slurm_tasks(where: Where) -> int:
    """How many tasks run at once: as many as were said, or as the allocation has."""
    tasks = where.count or int(os.environ.get("SLURM_NTASKS", 0))
    if not tasks:
        raise ConfigError(
            "--jobs slurm: how many at once? say so, as in slurm:8, or start inside an allocation of so many tasks: "
            "salloc --ntasks=8"
        )
    return tasks


def srun(threads: int, gpus: int) -> tuple[str, ...]:
    """The command that starts a process as a task of Slurm with so many processors and GPUs."""
    command = ["srun", "--ntasks=1", "--nodes=1", f"--cpus-per-task={threads}"]
    if gpus:
        command.append(f"--gpus-per-task={gpus}")
    if "SLURM_JOB_ID" in os.environ:
        command.append("--exclusive")  # of a step: processors that no other step has
    return tuple(command)


@dataclass
class _Process:
    """A process, the file that its standard error goes to, and the folder of its job, if it has one."""

    process: subprocess.Popen[str]
    errors: IO[bytes]
    folder: Path | None = None

    def tell(self, value: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died; its listener says so
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def last_words(self) -> str:
        """The last line that it wrote to standard error; nothing where it wrote none."""
        end = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, end - TAIL))
        lines = self.errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Processes:
    """Processes that take one job after another. With `before`, such as srun and its options, that starts them."""

    def __init__(self, threads: int, before: tuple[str, ...] = ()) -> None:
        self._threads, self._before = threads, before
        self._processes: list[_Process] = []
        self._events: SimpleQueue[tuple[_Process, dict[str, Any] | None]] = SimpleQueue()

    def begin(self, folder: Path) -> None:
        """Hand a job to a process that has none, or to a new one."""
        process = next((each for each in self._processes if each.folder is None), None) or self._started()
        process.folder = folder
        process.tell(str(folder))

    def ended(self, seconds: float) -> Ended | None:
        """What a process says of its job, or that it died."""
        try:
            process, said = self._events.get(timeout=seconds)
        except Empty:
            return None
        folder, process.folder = process.folder, None
        if said is None:
            return Ended(folder, died=process.last_words() or f"it ended with exit status {process.process.wait()}")
        return Ended(folder, said.get("error"))

    def stop(self, seconds: float) -> None:
        """Training saves its step before it stops."""
        busy = [each for each in self._processes if each.folder is not None]
        for process in busy:
            process.tell(None)  # not a signal: srun kills on those that mean an end
        end = time.monotonic() + seconds
        for process in busy:
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.process.wait(max(0.1, end - time.monotonic()))

    def close(self) -> None:
        """None of them goes on."""
        for each in self._processes:
            each.process.send_signal(signal.SIGTERM if self._before else signal.SIGKILL)
        end = time.monotonic() + ENDING
        for each in self._processes:
            try:
                each.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
            for pipe in (each.process.stdin, each.process.stdout, each.errors):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    def _started(self) -> _Process:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "TOKENIZERS_PARALLELISM": "false"}
        # a pipe that nobody reads would hold the process up once it is full
        errors = tempfile.TemporaryFile()  # noqa: SIM115 — closed when the process has ended
        # a session of its own: Ctrl-C comes to us alone, who know what has to be saved
        process = subprocess.Popen(
            [*self._before, *WORKER, str(self._threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
        started = _Process(process, errors)
        self._processes.append(started)
        Thread(target=self._listen, args=(started,), daemon=True).start()
        return started

    def _listen(self, process: _Process) -> None:
        """Pass on what a process says, and that it ended."""
        assert process.process.stdout is not None
        with suppress(ValueError, OSError):  # closed while it was read: everything is over
            for line in process.process.stdout:
                if line.startswith("{"):
                    self._events.put((process, json.loads(line)))
            self._events.put((process, None))
