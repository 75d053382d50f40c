"""Jobs run in processes, by Slurm with a stand-in for srun, and by a stand-in for Ray."""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.compare import pools, worker
from weft.compare.contenders import ReadyContender
from weft.compare.jobs import Job, Sweep
from weft.compare.pools import FinishedJob, JobScheduler, Processes, RayTasks, parse_jobs, ray_tasks, srun
from weft.compare.runner import JobResources, Runner, resources_for
from weft.errors import ConfigError, DataError, RunError

MakeSlurm = Callable[..., Path]
JOBS = {Job("ngram-3", 1 / 3, None, seed=0), Job("ngram-3", 1.0, None, seed=0)}
# like srun: runs a command in another process, which ends when srun is terminated
SRUN = """#!{python}
import pathlib, signal, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
with open({log!r}, "a") as log:
    log.write(" ".join(options) + "\\n")
if {failure!r}:
    sys.exit({failure!r})
child = subprocess.Popen(sys.argv[1 + len(options):])
def end(number, frame):
    child.kill()
signal.signal(signal.SIGTERM, end)
sys.exit(child.wait())
"""
# measures a job immediately, with more warnings than a pipe holds
MEASURES = """
import json, pathlib, sys
for line in sys.stdin:
    folder = pathlib.Path(json.loads(line))
    sys.stderr.write("UserWarning: this again\\n" * 9000)
    job = json.loads((folder / "job.json").read_text())
    cost = dict(steps=1, tokens=8, flops=0.0, seconds=0.1, parameters=5, nats=[3.0], bytes=[2.0])
    (folder / "outcome.json").write_text(json.dumps(job["names"] | cost))
    print(json.dumps({"folder": str(folder)}), flush=True)
"""
DIES = "import sys; sys.stdin.readline(); sys.exit('a warning\\n' * 9000 + 'MemoryError: 9 GB\\n')"
# trains until it is asked to stop, then saves; or ignores the request
TRAINS = """
import json, os, pathlib, sys, time
folder = pathlib.Path(json.loads(sys.stdin.readline()))
(folder / "pid").write_text(str(os.getpid()))
if folder.name == "deaf":
    time.sleep(60)
if json.loads(sys.stdin.readline()) is None:
    (folder / "saved").write_text("")
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSlurm:
    """Put a stand-in for srun on PATH; return the file that its options are written to."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)

    def make(script: str = MEASURES, failure: str = "") -> Path:
        monkeypatch.setattr(pools, "WORKER", (sys.executable, "-c", script))
        log, program = tmp_path / "options", tmp_path / "bin" / "srun"
        program.parent.mkdir(exist_ok=True)
        program.write_text(SRUN.format(python=sys.executable, log=str(log), failure=failure))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        return log

    return make


def run(ngram: ReadyContender, folder: Path, resources: JobResources) -> Runner:
    folder.mkdir()
    runner = Runner(folder, {ngram.name: ngram}, resources, held_out=None)
    runner.run([Sweep(ngram.name, (), (), shares=(1 / 3, 1.0), seeds=(0,))], lambda progress: None)
    return runner


# ---- the option


def test_the_option_is_parsed(slurm: MakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm()
    schedulers = [parse_jobs(option) for option in (None, "3", "slurm:8")]
    assert schedulers == [JobScheduler("here", None), JobScheduler("here", 3), JobScheduler("slurm", 8)]
    with pytest.raises(ConfigError, match=r"how many at a time\? give a number, as in slurm:8"):
        parse_jobs("slurm")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert parse_jobs("slurm") == JobScheduler("slurm", None)
    for wrong in ("0", "-1", "many", "slurm:", "slurm:x", "ray:0", "here:2"):
        with pytest.raises(ConfigError, match=f"--jobs {wrong}: expected a number of processes, slurm"):
            parse_jobs(wrong)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package ray isn't installed: pip install 'weft\[ray\]'"):
        parse_jobs("ray:2")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="there is no srun on this machine"):
        parse_jobs("slurm:8")


def test_an_allocation_decides_the_tasks_and_threads(
    slurm: MakeSlurm, ngram: ReadyContender, monkeypatch: pytest.MonkeyPatch
) -> None:
    six, default = JobScheduler("slurm", 6), JobScheduler("slurm")
    assert resources_for([ngram], six) == JobResources(6, 1, 0, scheduler=six)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    assert resources_for([ngram], default) == JobResources(4, 3, 0, scheduler=default)
    assert resources_for([ngram], JobScheduler("here", 2)).jobs == 2


# ---- processes


@pytest.mark.timeout(60)
def test_warnings_do_not_block_a_process_and_one_that_dies_is_quoted(
    ngram: ReadyContender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "WORKER", (sys.executable, "-c", MEASURES))
    assert set(run(ngram, tmp_path / "out", JobResources(1, 1)).outcomes) == JOBS
    lines = (tmp_path / "out/results.jsonl").read_text().splitlines()
    assert [json.loads(line)["nats"] for line in lines] == [[3.0], [3.0]]
    monkeypatch.setattr(pools, "WORKER", (sys.executable, "-c", DIES))
    with pytest.raises(RunError, match=r"^ngram-3, .*: its process died: MemoryError: 9 GB; run the same command"):
        run(ngram, tmp_path / "other", JobResources(1, 1))


# ---- Slurm


@pytest.mark.timeout(60)
def test_jobs_run_as_slurm_tasks(
    slurm: MakeSlurm, ngram: ReadyContender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = slurm()
    assert set(run(ngram, tmp_path / "out", JobResources(1, 2, 1, scheduler=JobScheduler("slurm", 1))).outcomes) == JOBS
    assert log.read_text() == "--ntasks=1 --nodes=1 --cpus-per-task=2 --gpus-per-task=1\n"  # one task for both jobs
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert srun(2, 0)[1:] == ("--ntasks=1", "--nodes=1", "--cpus-per-task=2", "--exclusive")


@pytest.mark.timeout(60)
def test_slurms_error_is_reported(slurm: MakeSlurm, ngram: ReadyContender, tmp_path: Path) -> None:
    slurm(failure="srun: error: Node failure on n3")
    message = r"^ngram-3, .*: its process died: srun: error: Node failure on n3; run the same command to continue$"
    with pytest.raises(RunError, match=message):
        run(ngram, tmp_path / "out", JobResources(2, 1, 0, scheduler=JobScheduler("slurm", 2)))


@pytest.mark.timeout(60)
def test_stopped_jobs_save_and_none_continues(slurm: MakeSlurm, tmp_path: Path) -> None:
    slurm(TRAINS)
    pool, folders = Processes(1, srun(1, 0)), [tmp_path / name for name in ("one", "two", "deaf")]
    for folder in folders:
        folder.mkdir()
        pool.submit(folder)
    while not all((folder / "pid").exists() for folder in folders):
        time.sleep(0.02)
    time.sleep(0.1)  # until the pid is written
    started = [int((folder / "pid").read_text()) for folder in folders]
    pool.stop(1.0)
    assert [(folder / "saved").exists() for folder in folders] == [True, True, False]
    pool.close()
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


# ---- Ray


class Ray(SimpleNamespace):
    """Stand-in for the part of Ray that is used, with threads."""

    def __init__(self) -> None:
        super().__init__(calls=[], options={}, pool=ThreadPoolExecutor(4))

    def is_initialized(self) -> bool:
        return False

    def init(self, **settings: Any) -> None:
        self.calls.append("init")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 9.0, "GPU": 2.0, "memory": 1e9}

    def remote(self, function: Any) -> Any:
        def options(**given: Any) -> Any:
            self.options = given
            return SimpleNamespace(remote=lambda *args: self.pool.submit(function, *args))

        return SimpleNamespace(options=options)

    def wait(self, tasks: list[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        end = time.monotonic() + timeout
        while time.monotonic() < end and sum(task.done() for task in tasks) < num_returns:
            time.sleep(0.01)
        done = [task for task in tasks if task.done()][:num_returns]
        return done, [task for task in tasks if task not in done]

    def get(self, task: Future[Any]) -> Any:
        return task.result()

    def cancel(self, task: Future[Any], force: bool) -> None:
        self.calls.append(("cancel", force))

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    stand_in = Ray()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    return stand_in


@pytest.mark.timeout(60)
def test_jobs_run_as_ray_tasks(
    ray: Ray, ngram: ReadyContender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(folder: Path) -> None:
        names = json.loads((folder / "job.json").read_text())["names"]
        cost = {"steps": 1, "tokens": 8, "flops": 0.0, "seconds": 0.1, "parameters": 5, "nats": [3.0], "bytes": [2.0]}
        (folder / "outcome.json").write_text(json.dumps(names | cost))

    monkeypatch.setattr(worker, "run_job", measure)
    assert resources_for([ngram], JobScheduler("ray")) == JobResources(9, 1, 0, scheduler=JobScheduler("ray"))
    assert ray_tasks(2, 1) == 2
    runner = run(ngram, tmp_path / "out", JobResources(2, 1, 0, scheduler=JobScheduler("ray", 2)))
    assert [outcome.nats for outcome in runner.outcomes.values()] == [(3.0,), (3.0,)]
    assert (ray.options["num_cpus"], ray.options["num_gpus"], ray.options["max_retries"]) == (1, 0, 0)
    assert ray.options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"
    assert ray.calls[-1] == "shutdown"


@pytest.mark.timeout(60)
def test_ray_tasks_fail_and_stop(ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        match folder.name:
            case "wrong":
                raise DataError("the text is gone")
            case "dead":
                raise OSError("worker crashed\n  The worker died: out of memory\n")
        time.sleep(0.3)

    monkeypatch.setattr(worker, "run_job", fail)
    pool = RayTasks(1, 0)
    wrong = FinishedJob(tmp_path / "wrong", "the text is gone")
    for expected in (wrong, FinishedJob(tmp_path / "dead", None, "The worker died: out of memory")):
        pool.submit(expected.folder)
        assert pool.wait(5.0) == expected
    pool.submit(tmp_path / "slow")
    assert pool.wait(0.05) is None
    pool.stop(5.0)
    assert ray.calls == ["init", ("cancel", False)]
    pool.close()
    assert ray.calls[2:] == [("cancel", True), "shutdown"]
