"""A comparison that is killed at random instants and started again, beside one that never stopped.

    python benchmarks/compare_kills.py --kills 20

The table must be the same but for seconds, and no job that had finished may run again.
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
STARTING = 8.0  # seconds before the first job runs, about
OPTIONS = ["--flops", "2e10", "--seeds", "2", "--rungs", "3", "--rates", "3", "tokenizer=char", "batch.length=64"]


def command(text: Path, out: Path) -> list[str]:
    """The same each time."""
    return [sys.executable, "-m", "weft", "compare", *CONTENDERS, "--data", str(text), "--out", str(out), *OPTIONS]


def results(out: Path) -> list[dict[str, Any]]:
    """The finished jobs, in the order in which they finished."""
    return read_lines(out / "results.jsonl")


def job(line: dict[str, Any]) -> tuple[Any, ...]:
    """What names a job."""
    return tuple(line[key] for key in ("contender", "share", "lr", "seed"))


def table(out: Path) -> dict[tuple[Any, ...], str]:
    """What each job measured, without what a clock says."""
    return {job(line): json.dumps({**line, "seconds": 0, "check": 0}, sort_keys=True) for line in results(out)}


def main() -> int:
    """Run the comparison undisturbed, then disturbed; exit status 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="weft-kills-") as folder:
        text = Path(folder) / "book.txt"
        text.write_text("".join(f"frog {n} sat by river {n * n % 97} and dog {n % 13} ran\n" for n in range(2000)))
        whole = Path(folder) / "whole"
        began = time.perf_counter()
        subprocess.run(command(text, whole), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        print(f"undisturbed: {len(results(whole))} jobs in {seconds:.0f} s", flush=True)
        kills = turns = wrong = 0
        while kills < given.kills:
            turns += 1
            broken = Path(folder) / f"broken-{turns}"
            kills += disturbed(command(text, broken), broken, rng, given.kills - kills)
            wrong += differences(whole, broken)
        print(f"{kills} kills of {turns} comparisons: {wrong} differences")
        return 1 if wrong else 0


def disturbed(words: list[str], out: Path, rng: random.Random, most: int) -> int:
    """Start a comparison until it ends by itself, killed at random instants; how often it was killed."""
    kills = 0
    while True:
        before = {job(line) for line in results(out)}
        running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            running.wait(rng.uniform(2, 2.5 * STARTING) if kills < most else None)
            return kills
        except subprocess.TimeoutExpired:
            how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT])
            running.send_signal(how)
            running.wait()
            kills += 1
        after = {job(line) for line in results(out)}
        print(f"{how.name} after {len(after)} jobs, {len(before - after)} lost", flush=True)


def differences(whole: Path, broken: Path) -> int:
    """Jobs that measured something else, that were repeated, and what is left over."""
    one, other, lines = table(whole), table(broken), results(broken)
    differing = sum(one.get(key) != other.get(key) for key in one.keys() | other.keys())
    repeated, left = len(lines) - len(other), len(list((broken / "jobs").iterdir()))
    print(f"{differing} of {len(one)} jobs differ, {repeated} were repeated, {left} are left over", flush=True)
    return differing + repeated + left


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background ignores Ctrl-C
    sys.exit(main())
