"""Kill one of four processes repeatedly: torchrun restarts the job, whose result must be that of an undisturbed job.

    python benchmarks/kills.py --kills 20

Each layout below trains once undisturbed. Then jobs with the same settings run under `torchrun --max-restarts 3`, and a
random process of theirs gets `kill -9`: half of the time at a random instant, half of the time while a checkpoint is
being written. Every checkpoint, `latest`, `best` and metrics.jsonl must equal those of the undisturbed job bit for bit,
and no other files may be left.
"""

import argparse
import hashlib
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import RunError
from weft.runs import checkpoint
from weft.runs.folder import RunFolder

PROCESSES, RESTARTS = 4, 3
LAYOUTS = {
    "shard 4": ["parallel.shard=4"],
    "tensor 2 × shard 2": ["parallel.tensor=2", "parallel.shard=2"],
    "tensor 2 × replicate 2": ["parallel.tensor=2"],
    "replicate 4": [],
}
MODEL = ["model.d_model=32", "model.attention.heads=4", "model.feedforward.d_ff=48", "model.layers=2"]
SETTINGS = [*MODEL, "tokenizer=byte", "model.dropout=0.1", "batch.size=8", "batch.length=16", "steps=72", "log.every=2",
            "schedule.warmup=2", "evaluate.every=24", "evaluate.tokens=100", "checkpoint.every=12"]  # fmt: skip
# torchrun's program: `weft` with a slow fsync, so that a checkpoint of this small model takes a second
ENTRY = """
import os, sys, threading, time
original = os.fsync
def fsync(handle):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.06)
    original(handle)
os.fsync = fsync
from weft.cli.main import main
sys.argv[0] = "weft"
main()
"""
MAX_SECONDS = 400.0  # a job without progress for longer hangs
LOST_PROCESS = re.compile(r"^weft: .*\bprocess (\d) of 4 \(pid (\d+) on [^)]+\) has ended", re.MULTILINE)


def text() -> str:
    pick = random.Random(0)
    words = ["the", "a", "cat", "dog", "bird", "sees", "hears", "likes", "small", "old", "tree", "and", "slowly"]
    return "\n\n".join(" ".join(pick.choice(words) for _ in range(24)) for _ in range(60))


@dataclass
class Kill:
    """One `kill -9`, and the seconds until a message reports it and until the next training step."""

    when: str  # "starting", "training" or "saving"
    rank: int
    reported: float | None = None
    resumed: float | None = None


@dataclass
class Job:
    """torchrun with four processes that train `run`; their output goes to a log file."""

    run: Path
    changes: list[str]
    kills: list[Kill] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    def __enter__(self) -> "Job":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)]
        words += ["--max-restarts", str(RESTARTS), "--master-port", str(port), "--", "entry.py", "train", "gpt-tiny"]
        words += ["--data", "text.txt", "--run", str(self.run), *SETTINGS, *self.changes]
        self.log = self.run.with_suffix(".log")
        self.agent = subprocess.Popen(words, stdout=self.log.open("w"), stderr=subprocess.STDOUT)
        self.began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if self.agent.poll() is None:
            self.agent.terminate()
        self.agent.wait()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> dict[int, int]:
        """Process ids of the running workers, by rank."""
        processes = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                words = entry.joinpath("environ").read_bytes().split(b"\0") if parent == self.agent.pid else []
            except OSError:
                continue
            processes.update({int(word[5:]): int(entry.name) for word in words if word.startswith(b"RANK=")})
        return processes

    def poll(self, seconds: float = MAX_SECONDS) -> Iterator[None]:
        """Yield until the job ends; exit after `seconds` without an end."""
        until = time.perf_counter() + seconds
        while self.agent.poll() is None:
            if time.perf_counter() > until:
                raise SystemExit(f"{self.run.name}: no end after {seconds:.0f} s:\n{self.output[-3000:]}")
            yield
            time.sleep(0.01)

    def kill(self, saving: bool, pick: random.Random, straight: float) -> bool:
        """Kill a process and wait for the restart; return whether there was a process to kill."""
        delay = pick.uniform(0, 0.4) if saving else pick.uniform(0, 0.8 * straight)
        until: float | None = None if saving else time.perf_counter() + delay
        for _ in self.poll():
            if until is None and any((self.run / "checkpoints").glob(".step-*")):
                until = time.perf_counter() + delay
            if until is not None and time.perf_counter() > until and len(self.processes()) == PROCESSES:
                break
        else:
            return False
        rank, processes, before = pick.randrange(PROCESSES), self.processes(), len(self.output)
        trained = "pre-flight:" in self.output.rpartition("begun by this job")[2]
        writing = any((self.run / "checkpoints").glob(".step-*"))
        if rank not in processes:
            return False
        os.kill(processes[rank], signal.SIGKILL)
        now, kill = time.perf_counter(), Kill("saving" if writing else "training" if trained else "starting", rank)
        self.kills.append(kill)
        for _ in self.poll():
            match = LOST_PROCESS.search(self.output, before)
            if match is not None and kill.reported is None:
                kill.reported = time.perf_counter() - now
                if (int(match[1]), int(match[2])) != (rank, processes[rank]):
                    raise SystemExit(f"process {rank} (pid {processes[rank]}) was killed, not: {match[0]}")
            if re.search(r"^step \d+/", self.output[before:].partition("pre-flight:")[2], re.MULTILINE):
                kill.resumed = time.perf_counter() - now
                return True
        return True


def outcome(run: Path) -> dict[str, str]:
    """Verified checksums of the checkpoints' files, the links, a hash of the metrics, and all file names."""
    folder = RunFolder(run)
    result = {"metrics.jsonl": hashlib.sha256(folder.metrics.read_bytes()).hexdigest()}
    for parent in (run, folder.checkpoints):
        result[f"in {parent.name}"] = " ".join(sorted(path.name for path in parent.iterdir())).replace(run.name, "run")
    for entry in sorted(folder.checkpoints.iterdir()):
        try:
            result[entry.name] = os.readlink(entry) if entry.is_symlink() else str(checkpoint.verify(entry)["files"])
        except RunError as error:
            result[entry.name] = f"damaged: {error}"
    return {name.replace(run.name, "run"): value for name, value in result.items()}


def undisturbed(name: str) -> tuple[dict[str, str], float]:
    """Outcome and seconds of an undisturbed job."""
    with Job(Path(f"straight-{[*LAYOUTS].index(name)}"), LAYOUTS[name]) as job:
        for _ in job.poll():
            pass
        seconds = time.perf_counter() - job.began
    if job.agent.returncode != 0:
        raise SystemExit(f"{name}: failed undisturbed:\n{job.output[-3000:]}")
    print(f"{name}: undisturbed in {seconds:.0f} s", flush=True)
    return outcome(job.run), seconds


def disturbed(
    name: str, number: int, max_kills: int, *, known: tuple[dict[str, str], float], pick: random.Random
) -> Job:
    """Run a job whose processes are killed up to `max_kills` times, and compare its outcome."""
    expected, straight = known
    with Job(Path(f"broken-{number}"), LAYOUTS[name]) as job:
        while len(job.kills) < max_kills and job.kill((number + len(job.kills)) % 2 == 0, pick, straight):
            pass
        for _ in job.poll():
            pass
    actual = outcome(job.run) if job.agent.returncode == 0 else {}
    job.differs = wrong = [
        key for key in sorted(expected.keys() | actual.keys()) if expected.get(key) != actual.get(key)
    ]
    if "Traceback" in job.output:
        wrong.append("a traceback")
    how = ", ".join(f"process {kill.rank} while {kill.when}" for kill in job.kills)
    print(f"{name}: killed {how}: {'the same' if not wrong else f'DIFFERENT: {wrong}'}", flush=True)
    if wrong:
        print(job.output[-6000:], flush=True)
    return job


def row(name: str, jobs: list[Job]) -> str:
    kills = [kill for job in jobs for kill in job.kills]
    cells = [str(sum(kill.when == when for kill in kills)) for when in ("starting", "training", "saving")]
    cells.append(str(sum(kill.rank == 0 for kill in kills)))
    for values in (
        [k.reported for k in kills if k.reported is not None],
        [k.resumed for k in kills if k.resumed is not None],
    ):
        cells.append(f"{statistics.median(values):.1f} / {max(values):.1f} s ({len(values)})" if values else "")
    cells.append(str(sum(bool(job.differs) for job in jobs)))
    return f"| {' | '.join([name, str(len(jobs)), *cells])} |"


def main() -> int:
    """Kill processes and compare the outcomes; return exit status 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=[*LAYOUTS])
    options = parser.parse_args()
    pick, number = random.Random(options.seed), 0
    jobs: dict[str, list[Job]] = {name: [] for name in options.layouts}
    with tempfile.TemporaryDirectory(prefix="weft-kills-") as folder:
        os.chdir(folder)
        Path("text.txt").write_text(text())
        Path("entry.py").write_text(ENTRY)
        known = {name: undisturbed(name) for name in options.layouts}
        left = options.kills
        while left > 0:
            name = options.layouts[number % len(options.layouts)]
            jobs[name].append(disturbed(name, number, min(RESTARTS, left), known=known[name], pick=pick))
            number, left = number + 1, left - len(jobs[name][-1].kills)
        os.chdir("/")
    print("\n| layout | jobs | killed while starting | training | saving | rank 0 | until the message, median / max "
          "(of) | until the next step | different |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name, done in jobs.items():
        print(row(name, done))
    return 1 if any(job.differs for done in jobs.values() for job in done) else 0


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.exit(main())
