"""Where a comparison's jobs run: Slurm, by a stand-in for srun that runs a command in a process, and Ray by one."""

import json
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.compare import pools, worker
from weft.compare.config import contender, experiment
from weft.compare.contenders import ReadyContender, make_ready
from weft.compare.jobs import Job, Sweep
from weft.compare.pools import Ended, Processes, RayTasks, Where, parse_jobs, ray_tasks, srun
from weft.compare.runner import Machine, Runner, machine_for
from weft.errors import ConfigError, DataError, RunError

# as srun does it: a command in another process, which ends when srun is told to end
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
MEASURES = """
import json, pathlib, sys
for line in sys.stdin:
    folder = pathlib.Path(json.loads(line))
    job = json.loads((folder / "job.json").read_text())
    cost = dict(steps=1, tokens=8, flops=0.0, seconds=0.1, parameters=5, nats=[3.0], bytes=[2.0])
    (folder / "outcome.json").write_text(json.dumps(job["names"] | cost))
    print(json.dumps({"folder": str(folder)}), flush=True)
"""
# trains on and on; saves when it is asked to stop, or doesn't listen at all
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
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a stand-in for srun on PATH; the function that makes it returns the file of its options."""
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


@pytest.fixture
def counts(tmp_path: Path) -> ReadyContender:
    """A contender that takes no time to make ready."""
    book = tmp_path / "book.txt"
    book.write_text("".join(f"frog {n} sat by the river {n * n % 97}\n" for n in range(1200)))
    tree = {"data": {"sources": [str(book)]}, "budget": {"tokens": 1000}, "settings": {"tokenizer": {"kind": "byte"}}}
    wanted = experiment({**tree, "contenders": dict([contender("ngram-3")])})
    return make_ready(wanted, tmp_path / "data", "cpu", print)[0]


def run(counts: ReadyContender, folder: Path, machine: Machine) -> Runner:
    folder.mkdir()
    jobs = Runner(folder, {counts.name: counts}, machine, None)
    jobs.run([Sweep(counts.name, (), (), (1 / 3, 1.0), (0,))], lambda progress: None)
    return jobs


# ---- what is asked for


def test_words_of_the_option(slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm()
    assert parse_jobs(None) == Where("here", None)
    assert parse_jobs("3") == Where("here", 3)
    assert parse_jobs("slurm:8") == Where("slurm", 8)
    with pytest.raises(ConfigError, match=r"how many at once\? say so, as in slurm:8"):
        parse_jobs("slurm")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert parse_jobs("slurm") == Where("slurm", None)
    for wrong in ("0", "-1", "many", "slurm:", "slurm:x", "ray:0", "here:2"):
        with pytest.raises(ConfigError, match=f"--jobs {wrong}: expected a number of processes, slurm"):
            parse_jobs(wrong)
    monkeypatch.setattr(pools.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package ray isn't installed: pip install 'weft\[ray\]'"):
        parse_jobs("ray:2")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="there is no srun on this machine"):
        parse_jobs("slurm:8")


def test_an_allocation_says_how_many_and_with_how_many_threads(
    slurm: Any, counts: ReadyContender, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine_for([counts], Where("slurm", 6)) == Machine(6, 1, 0, Where("slurm", 6))
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    assert machine_for([counts], Where("slurm")) == Machine(4, 3, 0, Where("slurm"))
    assert machine_for([counts], Where("here", 2)).jobs == 2


# ---- Slurm


@pytest.mark.timeout(60)
def test_jobs_are_tasks_of_slurm(
    slurm: Any, counts: ReadyContender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = slurm()
    jobs = run(counts, tmp_path / "out", Machine(1, 2, 1, Where("slurm", 1)))
    assert set(jobs.outcomes) == {Job("ngram-3", 1 / 3, None, 0), Job("ngram-3", 1.0, None, 0)}
    assert log.read_text() == "--ntasks=1 --nodes=1 --cpus-per-task=2 --gpus-per-task=1\n"  # it takes both jobs
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert srun(2, 0)[1:] == ("--ntasks=1", "--nodes=1", "--cpus-per-task=2", "--exclusive")


@pytest.mark.timeout(60)
def test_what_slurm_says_of_a_failure_is_passed_on(slurm: Any, counts: ReadyContender, tmp_path: Path) -> None:
    slurm(failure="srun: error: Node failure on n3")
    message = r"^ngram-3, .*: the process that ran it died: srun: error: Node failure on n3; start again to go on$"
    with pytest.raises(RunError, match=message):
        run(counts, tmp_path / "out", Machine(2, 1, 0, Where("slurm", 2)))


@pytest.mark.timeout(60)
def test_jobs_save_when_they_are_stopped_and_none_goes_on(slurm: Any, tmp_path: Path) -> None:
    slurm(TRAINS)
    pool, folders = Processes(1, srun(1, 0)), [tmp_path / name for name in ("one", "two", "deaf")]
    for folder in folders:
        folder.mkdir()
        pool.begin(folder)
    while not all((folder / "pid").exists() for folder in folders):
        time.sleep(0.02)
    time.sleep(0.1)  # until it is written
    started = [int((folder / "pid").read_text()) for folder in folders]
    pool.stop(1.0)
    assert [(folder / "saved").exists() for folder in folders] == [True, True, False]
    pool.close()
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


# ---- Ray


class Ray(SimpleNamespace):
    """What of Ray is called, in threads."""

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
    monkeypatch.setitem(sys.modules, "ray", stand_in)  # type: ignore[arg-type]
    return stand_in


@pytest.mark.timeout(60)
def test_jobs_are_tasks_of_ray(
    ray: Ray, counts: ReadyContender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(folder: Path) -> None:
        names = json.loads((folder / "job.json").read_text())["names"]
        cost = {"steps": 1, "tokens": 8, "flops": 0.0, "seconds": 0.1, "parameters": 5, "nats": [3.0], "bytes": [2.0]}
        (folder / "outcome.json").write_text(json.dumps(names | cost))

    monkeypatch.setattr(worker, "run_job", measure)
    assert machine_for([counts], Where("ray")) == Machine(9, 1, 0, Where("ray"))
    assert ray_tasks(2, 1) == 2
    jobs = run(counts, tmp_path / "out", Machine(2, 1, 0, Where("ray", 2)))
    assert [outcome.nats for outcome in jobs.outcomes.values()] == [(3.0,), (3.0,)]
    assert (ray.options["num_cpus"], ray.options["num_gpus"], ray.options["max_retries"]) == (1, 0, 0)
    assert ray.options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"
    assert ray.calls[-1] == "shutdown"


@pytest.mark.timeout(60)
def test_tasks_of_ray_fail_and_stop(ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        match folder.name:
            case "wrong":
                raise DataError("the text is gone")
            case "dead":
                raise OSError("worker crashed\n  The worker died: out of memory\n")
        time.sleep(0.3)

    monkeypatch.setattr(worker, "run_job", fail)
    pool = RayTasks(1, 0)
    for name, expected in (
        ("wrong", Ended(tmp_path / "wrong", "the text is gone")),
        ("dead", Ended(tmp_path / "dead", None, "The worker died: out of memory")),
    ):
        pool.begin(tmp_path / name)
        assert pool.ended(5.0) == expected
    pool.begin(tmp_path / "slow")
    assert pool.ended(0.05) is None
    pool.stop(5.0)
    assert ray.calls == ["init", ("cancel", False)]
    pool.close()
    assert ray.calls[2:] == [("cancel", True), "shutdown"]
