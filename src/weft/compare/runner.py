"""Run a comparison's jobs, several at a time; they can be interrupted and resumed at any point.

out/
  plan.json        the request; the same command continues it, another one is refused
  data/            the tokenized text, once per tokenizer
  jobs/            unfinished jobs: job.json, run/ and, once measured, outcome.json
  results.jsonl    a line per finished job
  runs/            the model of each contender, trained with the whole budget and the first seed
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
from weft.compare.pools import HERE, JobScheduler, Processes, RayTasks, ray_tasks, slurm_tasks, srun
from weft.compare.worker import JOB, OUTCOME, RUN
from weft.config import validate
from weft.errors import RunError
from weft.machine import free_memory
from weft.runs.lines import append, read_lines
from weft.storage import files
from weft.storage.files import write_text
from weft.workers import cores

PROCESS_BYTES = 600e6  # memory of an idle worker process
CUDA_CONTEXT_BYTES = 800e6  # GPU memory of an idle worker process
MEMORY_MARGIN = 1.5  # factor on the predicted memory of a job
MAX_JOBS_PER_GPU = 6  # small jobs wait for the CPU; more than this many wait for each other
CORES_PER_GPU_JOB = 4  # CPU cores of a GPU job started by Slurm or Ray
STOPPING_SECONDS = 60.0  # time for jobs to save a checkpoint when the comparison is interrupted

Pool = Processes | RayTasks


@dataclass(frozen=True)
class JobResources:
    """Number of jobs at a time, the threads of each, and its GPUs if Slurm or Ray starts it."""

    jobs: int
    threads: int
    gpus: int = 0
    scheduler: JobScheduler = HERE


def resources_for(contenders: Sequence[ReadyContender], scheduler: JobScheduler) -> JobResources:
    """Return the requested number of jobs, or as many as fit the cores and the memory for the largest contender."""
    device = torch.device(contenders[0].device)
    gpus = int(device.type == "cuda")
    if scheduler.kind != "here":
        threads = int(os.environ.get("SLURM_CPUS_PER_TASK", CORES_PER_GPU_JOB if gpus else 1))
        jobs = slurm_tasks(scheduler) if scheduler.kind == "slurm" else scheduler.count or ray_tasks(threads, gpus)
        return JobResources(jobs, threads, gpus, scheduler=scheduler)
    memory = MEMORY_MARGIN * max(each.memory for each in contenders) + (CUDA_CONTEXT_BYTES if gpus else PROCESS_BYTES)
    fitting = min(min(MAX_JOBS_PER_GPU, cores() // 2) if gpus else cores(), int(free_memory(device) // memory))
    jobs = scheduler.count or max(1, fitting)
    return JobResources(jobs, max(1, cores() // jobs))


@dataclass
class Progress:
    """Progress of a comparison: outcomes of finished jobs, and the steps of running ones."""

    outcomes: dict[Job, Outcome]
    running: dict[Job, tuple[int, int, float | None]]  # step, steps, loss
    wanted: dict[Job, float]  # all jobs that will be needed, as far as known, and their FLOPs


Watch = Callable[[Progress], None]


@dataclass
class Runner:
    """Runs the jobs of a comparison in its folder."""

    out: Path
    contenders: Mapping[str, ReadyContender]
    resources: JobResources
    held_out: int | None
    outcomes: dict[Job, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.results = self.out / "results.jsonl"
        for line in read_lines(self.results):
            outcome = validate(Outcome, line)
            self.outcomes[outcome.job] = outcome
            self._clean_up(outcome.job)  # the process may have been killed just after recording it

    def run(self, sweeps: Sequence[Sweep], watch: Watch) -> dict[Job, Outcome]:
        """Run all jobs of the sweeps, which depend on the outcomes so far; return all outcomes."""
        if all(job in self.outcomes for job in self._known_jobs(sweeps)):
            return self.outcomes
        with self._pool() as pool:
            running: dict[Path, Job] = {}
            while True:
                known = self._known_jobs(sweeps)
                searching = {sweep.contender for sweep in sweeps if not sweep.rate(1.0, self.outcomes)[1]}
                waiting = [job for job in known if job not in self.outcomes and job not in running.values()]
                # searches first, because other jobs depend on them; then long jobs, so that none runs alone at the end
                waiting.sort(key=lambda job: (job.contender not in searching, -known[job]))
                for job in waiting:
                    if len(running) < self.resources.jobs and self._submit(pool, job):
                        running[self._folder(job)] = job
                watch(Progress(self.outcomes, {job: self._step(job) for job in running.values()}, self.planned(sweeps)))
                if not running:
                    return self.outcomes
                if finished := pool.wait(0.5):
                    job = running.pop(finished.folder)
                    if finished.died is not None:
                        raise RunError(f"{job}: its process died: {finished.died}; run the same command to continue")
                    if finished.error is not None:
                        raise RunError(f"{job}: {finished.error}")
                    self._record(job)

    @contextmanager
    def _pool(self) -> Iterator[Pool]:
        """Open the pool that runs jobs; on exit, none of them continues."""
        kind, threads, gpus = self.resources.scheduler.kind, self.resources.threads, self.resources.gpus
        launcher = srun(threads, gpus) if kind == "slurm" else ()
        pool = RayTasks(threads, gpus) if kind == "ray" else Processes(threads, launcher)
        try:
            yield pool
        except KeyboardInterrupt:
            pool.stop(STOPPING_SECONDS)
            raise
        finally:
            pool.close()

    def planned(self, sweeps: Sequence[Sweep]) -> dict[Job, float]:
        """Return all jobs that will be needed, unless a search is widened, and their FLOPs."""
        return self._flops(job for sweep in sweeps for job in sweep.planned(self.outcomes))

    def _known_jobs(self, sweeps: Sequence[Sweep]) -> dict[Job, float]:
        return self._flops(job for sweep in sweeps for job in sweep.jobs(self.outcomes))

    def _flops(self, jobs: Iterable[Job]) -> dict[Job, float]:
        return {job: self.contenders[job.contender].flops * job.share for job in jobs}

    def _submit(self, pool: Pool, job: Job) -> bool:
        """Start a job, or only record it if it was measured before an interruption; return whether it was started."""
        folder = self._folder(job)
        if (folder / OUTCOME).is_file():
            self._record(job)
            return False
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / JOB).is_file():
            recipe = self.contenders[job.contender].recipe_for(job).model_dump(mode="json", exclude_none=True)
            request = {"names": asdict(job), "recipe": recipe, "held_out": self.held_out, "kept": job.kept}
            write_text(folder / JOB, json.dumps(request))
        pool.submit(folder)
        return True

    def _record(self, job: Job) -> None:
        outcome = validate(Outcome, json.loads(files.read_text(self._folder(job) / OUTCOME)))
        append(self.results, outcome.model_dump(mode="json"))
        self.outcomes[job] = outcome
        self._clean_up(job)

    def _clean_up(self, job: Job) -> None:
        folder, model = self._folder(job), self.out / "runs" / job.contender
        if (folder / RUN).is_dir() and job.kept and not model.exists():
            model.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / RUN, model)
        shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, job: Job) -> Path:
        return self.out / "jobs" / job.folder

    def _step(self, job: Job) -> tuple[int, int, float | None]:
        """Return a running job's last logged step, its number of steps, and its loss."""
        path, last = self._folder(job) / RUN / "metrics.jsonl", dict[str, Any]()
        with suppress(OSError, ValueError, StopIteration), files.open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - 1000))
            lines = reversed(file.read().splitlines())
            last = next(json.loads(line) for line in lines if line.endswith(b"}") and b'"loss"' in line)
        return int(last.get("step", 0)), self.contenders[job.contender].steps(job), last.get("loss")
