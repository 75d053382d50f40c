"""Kill `weft compare` at random instants, restart it, and compare its table with that of an uninterrupted comparison.

    python benchmarks/compare_kills.py --kills 20

The tables must agree except for the seconds, and no finished job may run again.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from weft.runs.lines import read_lines

SMALL = "model.layers=1 model.d_model=32 model.attention.heads=2 model.feedforward.d_ff=64"
CONTENDERS = [f"post=transformer {SMALL}", f"pre=transformer {SMALL} model.placement=pre", "ngram-3"]
CONTENDERS += ["lstm model.d_model=32 model.layers=1"]
STARTUP_SECONDS = 8.0  # approximate time before the first job runs
OPTIONS = ["--flops", "2e10", "--seeds", "2", "--rungs", "3", "--rates", "3", "tokenizer=char", "batch.length=64"]


def command(text: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "weft", "compare", *CONTENDERS, "--data", str(text), "--out", str(out), *OPTIONS]


def results(out: Path) -> list[dict[str, Any]]:
    """Finished jobs in completion order."""
    return read_lines(out / "results.jsonl")


def job_key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[key] for key in ("contender", "share", "lr", "seed"))


def table(out: Path) -> dict[tuple[Any, ...], str]:
    """Result of each job as JSON, without its timings."""
    return {job_key(line): json.dumps({**line, "seconds": 0, "check": 0}, sort_keys=True) for line in results(out)}


def main() -> int:
    """Run the comparison uninterrupted, then with kills; return exit status 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="weft-kills-") as folder:
        text = Path(folder) / "book.txt"
        text.write_text("".join(f"frog {n} sat by river {n * n % 97} and dog {n % 13} ran\n" for n in range(2000)))
        whole = Path(folder) / "whole"
        began = time.perf_counter()
        subprocess.run(command(text, whole), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        print(f"uninterrupted: {len(results(whole))} jobs in {seconds:.0f} s", flush=True)
        kills = turns = wrong = 0
        while kills < options.kills:
            turns += 1
            broken = Path(folder) / f"broken-{turns}"
            kills += run_with_kills(command(text, broken), broken, rng, options.kills - kills)
            wrong += differences(whole, broken)
        print(f"{kills} kills of {turns} comparisons: {wrong} differences")
        return 1 if wrong else 0


def run_with_kills(words: list[str], out: Path, rng: random.Random, max_kills: int) -> int:
    """Restart a comparison until it finishes, killing it at random instants; return the number of kills."""
    kills = 0
    while True:
        before = {job_key(line) for line in results(out)}
        running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            running.wait(rng.uniform(2, 2.5 * STARTUP_SECONDS) if kills < max_kills else None)
            return kills
        except subprocess.TimeoutExpired:
            kill = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT])
            running.send_signal(kill)
            running.wait()
            kills += 1
        after = {job_key(line) for line in results(out)}
        print(f"{kill.name} after {len(after)} jobs, {len(before - after)} lost", flush=True)


def differences(whole: Path, broken: Path) -> int:
    """Number of jobs that differ or ran twice, and of files left in `jobs/`."""
    expected, actual, lines = table(whole), table(broken), results(broken)
    differing = sum(expected.get(key) != actual.get(key) for key in expected.keys() | actual.keys())
    repeated, left = len(lines) - len(actual), len(list((broken / "jobs").iterdir()))
    print(f"{differing} of {len(expected)} jobs differ, {repeated} were repeated, {left} are left over", flush=True)
    return differing + repeated + left


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT in background jobs
    sys.exit(main())
