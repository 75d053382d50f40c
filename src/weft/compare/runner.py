"""Running a comparison's jobs: several side by side, stopped and continued at any moment.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from weft.compare.contenders import ReadyContender
from weft.compare.jobs import Job, Outcome, Sweep
from weft.compare.pools import HERE, Processes, RayTasks, Where, ray_tasks, slurm_tasks, srun
from weft.compare.worker import JOB, OUTCOME, RUN
from weft.config import validate
from weft.errors import RunError
from weft.machine import free_memory
from weft.runs.lines import append, read_lines
from weft.storage import files
from weft.storage.files import write_text
from weft.workers import cores

PROCESS_BYTES = 600e6  # bytes that a process takes before it does anything
CUDA_CONTEXT_BYTES = 800e6  # the same of a GPU's memory
AMPLE = 1.5  # times the memory that a step is predicted to take
MAX_JOBS_PER_GPU = 6  # small jobs there wait for the processor; more of them wait for each other
BESIDE_A_GPU = 4  # processors of a job that Slurm or Ray starts
STOPPING_SECONDS = 60.0  # seconds that jobs have to save when the comparison is interrupted

Pool = Processes | RayTasks


@dataclass(frozen=True)
class Machine:
    """What jobs run on: so many at once, each with so many threads, and with a GPU of its own where others start it."""

    jobs: int
    threads: int
    gpus: int = 0
    where: Where = HERE


def machine_for(contenders: Sequence[ReadyContender], where: Where) -> Machine:
    """As many jobs side by side as cores and memory allow, for the contender that needs most; or those wanted."""
    device = torch.device(contenders[0].device)
    gpus = int(device.type == "cuda")
    if where.kind != "here":  # each has the processors that a task of the allocation has, or a few
        threads = int(os.environ.get("SLURM_CPUS_PER_TASK", BESIDE_A_GPU if gpus else 1))
        jobs = slurm_tasks(where) if where.kind == "slurm" else where.count or ray_tasks(threads, gpus)
        return Machine(jobs, threads, gpus, where)
    on_cpu = device.type == "cpu"
    each = AMPLE * max(each.memory for each in contenders) + (PROCESS_BYTES if on_cpu else CUDA_CONTEXT_BYTES)
    fit = min(cores() if on_cpu else min(MAX_JOBS_PER_GPU, cores() // 2), int(free_memory(device) // each))
    jobs = where.count or max(1, fit)
    return Machine(jobs, max(1, cores() // jobs))


@dataclass
class Progress:
    """What a live table shows: finished outcomes, and how far the running jobs are."""

    outcomes: dict[Job, Outcome]
    running: dict[Job, tuple[int, int, float | None]]  # step, steps, loss
    wanted: dict[Job, float]  # every job that will be needed, as far as that is known, and its operations


Watch = Callable[[Progress], None]


@dataclass
class Runner:
    """The jobs of a comparison in its folder."""

    out: Path
    contenders: Mapping[str, ReadyContender]
    machine: Machine
    held_out: int | None
    outcomes: dict[Job, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.results = self.out / "results.jsonl"
        for line in read_lines(self.results):
            outcome = validate(Outcome, line)
            self.outcomes[outcome.job] = outcome
            self._tidy(outcome.job)  # its outcome may have been noted just before the end

    def run(self, sweeps: Sequence[Sweep], watch: Watch) -> dict[Job, Outcome]:
        """Run every job that the sweeps ask for; what they ask for follows from what is measured."""
        if all(job in self.outcomes for job in self._wanted(sweeps)):
            return self.outcomes
        with self._pool() as pool:
            running: dict[Path, Job] = {}
            while True:
                wanted = self._wanted(sweeps)
                searching = {each.contender for each in sweeps if not each.rate(1.0, self.outcomes)[1]}
                waiting = [job for job in wanted if job not in self.outcomes and job not in running.values()]
                # a search comes first, for what follows from it; a long job that starts last keeps everybody waiting
                waiting.sort(key=lambda job: (job.contender not in searching, -wanted[job]))
                for job in waiting:
                    if len(running) < self.machine.jobs and self._give(pool, job):
                        running[self._folder(job)] = job
                steps = {job: self._step(job) for job in running.values()}
                watch(Progress(self.outcomes, steps, self.planned(sweeps)))
                if not running:
                    return self.outcomes
                if ended := pool.ended(0.5):
                    job = running.pop(ended.folder)
                    if ended.died is not None:
                        raise RunError(f"{job}: the process that ran it died: {ended.died}; start again to go on")
                    if ended.error is not None:
                        raise RunError(f"{job}: {ended.error}")
                    self._note(job)

    @contextmanager
    def _pool(self) -> Iterator[Pool]:
        """Where jobs run. However this ends, none of them goes on."""
        pool: Pool
        match self.machine:
            case Machine(_, threads, _, Where("here")):
                pool = Processes(threads)
            case Machine(_, threads, gpus, Where("slurm")):
                pool = Processes(threads, srun(threads, gpus))
            case Machine(_, threads, gpus):
                pool = RayTasks(threads, gpus)
        try:
            yield pool
        except KeyboardInterrupt:
            pool.stop(STOPPING_SECONDS)
            raise
        finally:
            pool.close()

    def planned(self, sweeps: Sequence[Sweep]) -> dict[Job, float]:
        """Every job that will be needed, unless a search goes on beyond its ends, and its operations."""
        return self._costs(job for sweep in sweeps for job in sweep.planned(self.outcomes))

    def _wanted(self, sweeps: Sequence[Sweep]) -> dict[Job, float]:
        return self._costs(job for sweep in sweeps for job in sweep.wanted(self.outcomes))

    def _costs(self, jobs: Iterable[Job]) -> dict[Job, float]:
        return {job: self.contenders[job.contender].flops * job.share for job in jobs}

    def _give(self, pool: Pool, job: Job) -> bool:
        """Start a job; one that was measured already when everything stopped is only noted."""
        folder = self._folder(job)
        if (folder / OUTCOME).is_file():
            self._note(job)
            return False
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / JOB).is_file():
            recipe = self.contenders[job.contender].settled(job).model_dump(mode="json", exclude_none=True)
            asked = {"names": asdict(job), "recipe": recipe, "held_out": self.held_out, "kept": job.kept}
            write_text(folder / JOB, json.dumps(asked))
        pool.begin(folder)
        return True

    def _note(self, job: Job) -> None:
        outcome = validate(Outcome, json.loads(files.read_text(self._folder(job) / OUTCOME)))
        append(self.results, outcome.model_dump(mode="json"))
        self.outcomes[job] = outcome
        self._tidy(job)

    def _tidy(self, job: Job) -> None:
        folder, kept = self._folder(job), self.out / "runs" / job.contender
        if (folder / RUN).is_dir() and job.kept and not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / RUN, kept)
        shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, job: Job) -> Path:
        return self.out / "jobs" / job.folder

    def _step(self, job: Job) -> tuple[int, int, float | None]:
        path, last = self._folder(job) / RUN / "metrics.jsonl", dict[str, Any]()
        with suppress(OSError, ValueError, StopIteration), files.open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - 1000))
            lines = reversed(file.read().splitlines())
            last = next(json.loads(line) for line in lines if line.endswith(b"}") and b'"loss"' in line)
        return int(last.get("step", 0)), self.contenders[job.contender].steps(job), last.get("loss")
