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
    path = out / "results.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


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
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        began = time.perf_counter()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command(text, whole), check=True, **quiet)  # type: ignore[call-overload]
        seconds = time.perf_counter() - began
        print(f"undisturbed: {len(results(whole))} jobs in {seconds:.0f} s", flush=True)
        repeated = 0
        for number in range(given.kills):
            before = {job(line) for line in results(broken)}
            how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT])
            running = subprocess.Popen(command(text, broken), **quiet)  # type: ignore[call-overload]
            try:
                running.wait(rng.uniform(2, 2 * STARTING + 2 * seconds / given.kills))
            except subprocess.TimeoutExpired:
                running.send_signal(how)
                running.wait()
            after = [job(line) for line in results(broken)]
            repeated += len(after) - len(set(after))
            lost = before - set(after)
            print(f"{number + 1}: {how.name} after {len(after)} jobs, {len(lost)} lost", flush=True)
            if lost:
                return 1
        subprocess.run(command(text, broken), check=True, **quiet)  # type: ignore[call-overload]
        one, other = table(whole), table(broken)
        differing = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
        print(f"{given.kills} kills: {len(differing)} of {len(one)} jobs differ, {repeated} were repeated")
        left = [path.name for path in (broken / "jobs").iterdir()]
        print(f"left over in jobs/: {left or 'nothing'}")
        return 1 if differing or repeated or left else 0


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background ignores Ctrl-C
    sys.exit(main())
