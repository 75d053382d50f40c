"""Running a comparison's jobs on one machine: several side by side, stopped and continued at any moment.

out/
  plan.json        what was asked; the same command continues, another one is refused
  data/            the text as tokens, once for each tokenizer
  jobs/            jobs under way: job.json, run/ and, once measured, outcome.json
  results.jsonl    a line for each finished job
  runs/            the model of each contender that had the whole budget, with the first seed
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

import torch

from weft.compare.entrants import Entrant
from weft.compare.jobs import Job, Sweep
from weft.compare.results import Outcome
from weft.compare.worker import JOB, OUTCOME, RUN
from weft.config import validate
from weft.errors import RunError
from weft.files import write_text
from weft.runs.lines import append, read_lines
from weft.training.memory import free_memory

PROCESS = 600e6  # bytes that a process takes before it does anything
CONTEXT = 800e6  # the same of a GPU's memory
AMPLE = 1.5  # times the memory that a step is predicted to take
MOST_ON_A_GPU = 6  # small jobs there wait for the processor; more of them wait for each other
STOPPING = 60.0  # seconds that jobs have to save when the comparison is interrupted
WORKER = (sys.executable, "-m", "weft.compare.worker")
TAIL = 10_000  # bytes of what a process wrote to standard error, of which the last line says why it died


@dataclass(frozen=True)
class Machine:
    """What jobs run on: so many side by side, each with so many threads."""

    jobs: int
    threads: int


def machine_for(entrants: Sequence[Entrant], wanted: int | None) -> Machine:
    """As many jobs side by side as cores and memory allow, for the contender that needs most; or the `wanted` ones."""
    device = torch.device(entrants[0].device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = AMPLE * max(entrant.memory for entrant in entrants) + (PROCESS if device.type == "cpu" else CONTEXT)
    fit = min(cores if device.type == "cpu" else min(MOST_ON_A_GPU, cores // 2), int(free_memory(device) // each))
    jobs = wanted or max(1, fit)
    return Machine(jobs, max(1, cores // jobs))


@dataclass
class Running:
    """A process, the file that its standard error goes to, and the job it has, if any."""

    process: subprocess.Popen[str]
    errors: IO[bytes]
    job: Job | None = None


@dataclass
class Progress:
    """What a live table shows: finished outcomes, and how far the running jobs are."""

    outcomes: dict[Job, Outcome]
    running: dict[Job, tuple[int, int, float | None]]  # step, steps, loss
    wanted: dict[Job, float]  # every job that is known to be needed, and its operations


Watch = Callable[[Progress], None]


@dataclass
class Runner:
    """The jobs of a comparison in its folder."""

    out: Path
    entrants: Mapping[str, Entrant]
    machine: Machine
    held_out: int | None
    outcomes: dict[Job, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.results = self.out / "results.jsonl"
        for line in read_lines(self.results):
            outcome = validate(Outcome, line)
            self.outcomes[job_of(outcome)] = outcome
        for job in list(self.outcomes):  # a job whose outcome was noted just before the end
            self._tidy(job)

    def run(self, sweeps: Sequence[Sweep], watch: Watch) -> dict[Job, Outcome]:
        """Run every job that the sweeps ask for; what they ask for follows from what is measured."""
        if all(job in self.outcomes for job in self._wanted(sweeps)):
            return self.outcomes
        events: SimpleQueue[tuple[Running, dict[str, Any] | None]] = SimpleQueue()
        with self._workers(events) as workers:
            while True:
                wanted, searching = self._wanted(sweeps), self._searching(sweeps)
                under_way = {worker.job for worker in workers if worker.job is not None}
                waiting = [job for job in wanted if job not in self.outcomes and job not in under_way]
                # a search comes first, for what follows from it; a long job that starts last keeps everybody waiting
                waiting.sort(key=lambda job: (job.contender not in searching, -wanted[job]))
                for worker in workers:
                    while worker.job is None and waiting:
                        self._give(worker, waiting.pop(0))
                watch(Progress(self.outcomes, {job: self._step(job) for job in self._jobs(workers)}, wanted))
                if not any(worker.job for worker in workers):
                    return self.outcomes
                with suppress(Empty):
                    self._take(*events.get(timeout=0.5))

    def _wanted(self, sweeps: Sequence[Sweep]) -> dict[Job, float]:
        """Every job that is known to be needed, and its operations."""
        return {job: self._cost(job) for sweep in sweeps for job in sweep.wanted(self.outcomes)}

    def _searching(self, sweeps: Sequence[Sweep]) -> set[str]:
        """The contenders whose learning rate for the whole budget isn't known yet."""
        return {sweep.contender for sweep in sweeps if not sweep.rate(1.0, self.outcomes)[1]}

    def _cost(self, job: Job) -> float:
        entrant = self.entrants[job.contender]
        return 0.0 if entrant.counts else entrant.flops_per_step * entrant.whole.steps * job.share

    @staticmethod
    def _jobs(workers: Sequence[Running]) -> list[Job]:
        return [worker.job for worker in workers if worker.job is not None]

    # ---- processes

    @contextmanager
    def _workers(self, events: SimpleQueue[Any]) -> Iterator[list[Running]]:
        """Processes that wait for jobs. However this ends, none of them goes on."""
        workers: list[Running] = []
        try:
            for _ in range(self.machine.jobs):
                workers.append(_started(self.machine.threads))
                Thread(target=_listen, args=(workers[-1], events), daemon=True).start()
            yield workers
        except KeyboardInterrupt:
            for worker in workers:
                if worker.job is not None:  # training saves its step before it stops
                    worker.process.send_signal(signal.SIGINT)
            _wait(workers, STOPPING)
            raise
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.wait()
                for pipe in (worker.process.stdin, worker.process.stdout, worker.errors):
                    if pipe is not None:
                        with suppress(OSError):
                            pipe.close()

    def _give(self, worker: Running, job: Job) -> None:
        """Hand a job to a process; one that was measured already when everything stopped is only noted."""
        folder = self._folder(job)
        if (folder / OUTCOME).is_file():
            self._note(job)
            return
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / JOB).is_file():
            entrant = self.entrants[job.contender]
            names = {"contender": job.contender, "share": job.share, "lr": job.lr, "seed": job.seed}
            recipe = entrant.settled(job).model_dump(mode="json", exclude_none=True)
            kept = job.share == 1 and job.seed == 0
            write_text(
                folder / JOB,
                json.dumps({"names": names, "recipe": recipe, "held_out": self.held_out, "kept": kept}),
            )
        assert worker.process.stdin is not None
        worker.job = job
        with suppress(BrokenPipeError):  # it died; its listener says so
            worker.process.stdin.write(json.dumps(str(folder)) + "\n")
            worker.process.stdin.flush()

    def _take(self, worker: Running, said: dict[str, Any] | None) -> None:
        """What a process said of its job, or that it ended."""
        job = worker.job
        if said is None:
            reason = _last_words(worker) or f"it ended with exit status {worker.process.wait()}"
            raise RunError(f"{job or 'a worker'}: the process that ran it died: {reason}; start again to go on")
        assert job is not None
        if "error" in said:
            raise RunError(f"{job}: {said['error']}")
        worker.job = None
        self._note(job)

    # ---- outcomes

    def _note(self, job: Job) -> None:
        """Put a job's outcome among the results, then remove what it left."""
        outcome = validate(Outcome, json.loads((self._folder(job) / OUTCOME).read_text("utf-8")))
        append(self.results, outcome.model_dump(mode="json"))
        self.outcomes[job] = outcome
        self._tidy(job)

    def _tidy(self, job: Job) -> None:
        folder = self._folder(job)
        kept = self.out / "runs" / job.contender
        if (folder / RUN).is_dir() and job.share == 1 and job.seed == 0 and not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / RUN, kept)
        shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, job: Job) -> Path:
        return self.out / "jobs" / job.folder

    def _step(self, job: Job) -> tuple[int, int, float | None]:
        """How far a job is, by the last line of its metrics."""
        entrant = self.entrants[job.contender]
        steps = 1 if entrant.counts else max(1, round(entrant.whole.steps * job.share))
        last = _last_line(self._folder(job) / RUN / "metrics.jsonl")
        return int(last.get("step", 0)), steps, last.get("loss")


def job_of(outcome: Outcome) -> Job:
    """The job that an outcome is of."""
    return Job(outcome.contender, outcome.share, outcome.lr, outcome.seed)


def _started(threads: int) -> Running:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    # a pipe that nobody reads would hold the process up once it is full
    errors = tempfile.TemporaryFile()  # noqa: SIM115 — closed when the process has ended
    # a session of its own: Ctrl-C comes from us alone, once we know what has to be saved
    process = subprocess.Popen(
        [*WORKER, str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
        start_new_session=True,
    )
    return Running(process, errors)


def _last_words(worker: Running) -> str:
    """The last line that a process wrote to standard error; nothing where it wrote none."""
    end = worker.errors.seek(0, os.SEEK_END)
    worker.errors.seek(max(0, end - TAIL))
    lines = worker.errors.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _listen(worker: Running, events: SimpleQueue[Any]) -> None:
    """Pass on what a process says, and that it ended."""
    assert worker.process.stdout is not None
    with suppress(ValueError, OSError):  # closed while it was read: everything is over
        for line in worker.process.stdout:
            if line.startswith("{"):
                events.put((worker, json.loads(line)))
        events.put((worker, None))


def _wait(workers: Sequence[Running], seconds: float) -> None:
    end = time.monotonic() + seconds
    for worker in workers:
        if worker.job is not None:
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                worker.process.wait(max(0.1, end - time.monotonic()))


def _last_line(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1000))
            lines = file.read().splitlines()
        return next(json.loads(line) for line in reversed(lines) if line.endswith(b"}") and b'"loss"' in line)
    except (OSError, ValueError, StopIteration):
        return {}
