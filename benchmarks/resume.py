"""Check bit-exact resume: a run that is killed and interrupted repeatedly ends like one that never stopped.

    make test-resume
    python benchmarks/resume.py --kills 1000 --interrupts 200

Each kind of run below is trained once without interruption, from text to report. Then it is trained again; its
processes get SIGKILL, Ctrl-C, SIGTERM or two Ctrl-C in a row, half of them at a random instant and half right before a
random disk operation, and are resumed, until a random number of signals was sent. All files of every checkpoint,
`latest`, `best`, the averaged weights, metrics.jsonl and the final metrics must be identical, and no other files may be
left in the folder.
"""

import argparse
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from weft.api.train import resume, train
from weft.errors import RunError
from weft.objectives import next_token
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.runs.lines import read_lines

OPERATIONS = ("replace", "rename", "symlink", "unlink", "rmdir", "mkdir", "fsync")
SIGNALS = ([signal.SIGINT], [signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT])
TEXT, OTHER, PAIRS, LABELS, BASE = "text.txt", "other.txt", "pairs.tsv", "labels.tsv", "base"
REACH = 0.3  # fraction of an uninterrupted run within which a process is stopped, so that later ones have work
MAX_SECONDS = 200.0  # a process that runs longer hangs

# ---- the runs

TRANSFORMER = ["model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=24", "model.layers=1"]
DECODER = ["tokenizer=byte", "batch.size=4", "batch.length=16", "model.dropout=0.1", *TRANSFORMER]
OFTEN = [
    "steps=24",
    "schedule.warmup=2",
    "log.every=2",
    "evaluate.every=4",
    "evaluate.tokens=100",
    "checkpoint.every=3",
]
# learning rates so high and a guard so strict that a run rolls back several times
WILD = ["steps=40", "log.every=1", "schedule.warmup=30", "guard.patience=3", "guard.window=16"]


@dataclass(frozen=True)
class Kind:
    """A run: its preset or recipe, data and changed settings; `event` must be among its events."""

    recipe: str
    data: tuple[str, ...]
    changes: Sequence[str]
    event: str = "finish"


KINDS = {
    "plain": Kind("gpt-tiny", (TEXT,), [*DECODER, *OFTEN]),
    "averaged": Kind(
        "llama-tiny", (TEXT,), [*DECODER, *OFTEN, "checkpoint.average=3", "checkpoint.keep=3"], "averaged"
    ),
    "patience": Kind(
        "llama-tiny", (TEXT,), [*DECODER, *OFTEN, "optimizer.lr=0.3", "steps=60", "evaluate.patience=2"], "enough"
    ),
    "rolled back": Kind(
        "llama-tiny", (TEXT,), [*DECODER, *OFTEN, *WILD, "optimizer.lr=8.0", "guard.spike=3.0"], "rollback"
    ),
    "fresh again": Kind("llama-tiny", (TEXT,), [*DECODER, *OFTEN, *WILD, "optimizer.lr=100.0"], "rollback"),
    "rolled back and averaged": Kind(
        "llama-tiny",
        (TEXT,),
        [*DECODER, *OFTEN, *WILD, "optimizer.lr=3.0", "guard.spike=2.0", "checkpoint.keep=4", "checkpoint.average=4"],
        "rollback",
    ),
    "masked": Kind(
        "bert", (TEXT,), [*OFTEN, *TRANSFORMER, "tokenizer.vocab_size=75", "batch.size=4", "batch.length=16"]
    ),
    "pairs": Kind("copy", (PAIRS,), [*OFTEN, *TRANSFORMER, "batch.tokens=60"]),
    "recurrent pairs": Kind("copy-bahdanau", (PAIRS,), [*OFTEN, "steps=12", "model.d_model=12", "batch.tokens=60"]),
    "recurrent": Kind(
        "lstm",
        (TEXT,),
        [
            *OFTEN,
            "tokenizer=byte",
            "model.d_model=12",
            "model.layers=1",
            "batch.size=4",
            "batch.micro=2",
            "batch.length=8",
        ],
    ),
    "classified": Kind("sentiment", (LABELS,), [*OFTEN, *TRANSFORMER, "tokenizer.vocab_size=75", "batch.size=8"]),
    "adapted": Kind("llama-tiny", (OTHER,), [*OFTEN, "init=base", "adapter.rank=2", "batch.size=4", "batch.length=16"]),
    "mixed": Kind(
        "gpt-tiny", (), [*DECODER, *OFTEN, f"data.mixture=[{{sources=['{TEXT}']}}, {{sources=['{OTHER}']}}]"]
    ),
    "counted": Kind("ngram-3", (TEXT,), ["tokenizer=byte"]),
}


def write_data(folder: Path) -> None:
    """Write a few kilobytes of training data for each kind of run."""
    pick = random.Random(0)
    words = ["the", "a", "cat", "dog", "bird", "sees", "hears", "likes", "small", "old", "tree", "and", "slowly"]

    def sentence() -> str:
        return " ".join(pick.choice(words) for _ in range(pick.randint(3, 8)))

    for name in (TEXT, OTHER):
        (folder / name).write_text("\n\n".join(". ".join(sentence() for _ in range(4)) for _ in range(40)))
    rows = [sentence() for _ in range(60)]
    (folder / PAIRS).write_text("source\ttarget\n" + "".join(f"{row[:16]}\t{row[15::-1]}\n" for row in rows))
    (folder / LABELS).write_text("text\tlabel\n" + "".join(f"{row}\t{'cat' in row}\n" for row in rows))


def go(kind: Kind, path: Path) -> None:
    """Start the run, or continue it."""
    if (path / "config.toml").exists():
        resume(path, log=silent)
    else:
        train(kind.recipe, data=kind.data, run=path, changes=kind.changes, log=silent)


def silent(line: str) -> None:
    pass


# ---- processes


def child(work: Callable[[], None], errors: Path) -> int:
    """Run `work` in a forked process, without restarting Python; return its id. Fork before starting threads."""
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        sys.stderr = errors.open("w")
        work()
        code = 0
    except (KeyboardInterrupt, SystemExit):
        code = 130
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def at_operation(number: int, act: Callable[[], None]) -> Callable[[], int]:
    """Call `act` right before the disk operation of this number, in any thread; return a count of operations so far."""
    done, lock = 0, threading.Lock()

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            with lock:
                done += 1
                now = done == number
            if now:
                act()
            return operation(*args, **kwargs)

        return wrapped

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    return lambda: done


def end_of(process: int, seconds: float = MAX_SECONDS) -> int | None:
    """Exit status of a process, or None if it runs longer than `seconds`."""
    until = time.perf_counter() + seconds
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status
        if time.perf_counter() > until:
            return None
        time.sleep(0.002)


@dataclass
class Straight:
    """An uninterrupted run: its duration, number of disk operations, and outcome."""

    seconds: float
    operations: int
    outcome: dict[str, str]


def straight(kind: Kind, path: Path, errors: Path) -> Straight:
    """Train without interruption."""
    count_file, began = path.with_suffix(".operations"), time.perf_counter()

    def work() -> None:
        count = at_operation(0, lambda: None)
        go(kind, path)
        count_file.write_text(str(count()))

    status = end_of(child(work, errors))
    if status != 0:
        raise SystemExit(f"{path.name}: failed uninterrupted with status {status}: {errors.read_text()[-2000:]}")
    if not any(event["event"] == kind.event for event in read_lines(path / "events.jsonl")):
        raise SystemExit(f"{path.name}: the uninterrupted run has no event '{kind.event}'")
    return Straight(time.perf_counter() - began, int(count_file.read_text()), outcome(path))


def disturb(kind: Kind, path: Path, known: Straight, signals: Sequence[int], pick: random.Random, errors: Path) -> str:
    """Run a process that gets signals at a random instant or before a disk operation; return how it ended."""
    at_disk = pick.random() < 0.5
    number = pick.randint(1, max(2, int(REACH * known.operations))) if at_disk else 0

    def act() -> None:
        for sent in signals:
            os.kill(os.getpid(), sent)

    def work() -> None:
        if at_disk:
            at_operation(number, act)
        go(kind, path)

    process = child(work, errors)
    if not at_disk:
        for sent in signals:
            status = end_of(process, pick.random() * REACH * known.seconds)
            if status is not None:
                break
            os.kill(process, sent)
    if at_disk or status is None:
        status = end_of(process)
    if status is None:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return "hung"
    if os.WIFSIGNALED(status):
        return "killed"
    return {0: "finished", 130: "interrupted"}.get(os.WEXITSTATUS(status), "failed")


# ---- outcomes


def outcome(path: Path) -> dict[str, str]:
    """Everything a recipe determines, by name: checksums of the checkpoints, links, metrics, file names."""
    run = RunFolder(path)
    result = {"metrics.jsonl": run.metrics.read_text(), "files": " ".join(sorted(os.listdir(path)))}
    for entry in sorted(run.checkpoints.iterdir()):
        if entry.is_symlink():
            result[f"checkpoints/{entry.name}"] = os.readlink(entry)
        else:
            result[f"checkpoints/{entry.name}"] = json.dumps(checksums(entry), sort_keys=True)
    result["result"] = json.dumps({key: value for key, value in run.results().items() if key != "samples"})
    return result


def checksums(path: Path) -> dict[str, Any]:
    """Verified checksums of a checkpoint's files."""
    try:
        files: dict[str, Any] = checkpoint.verify(path)["files"]
    except RunError as error:
        return {"damaged": str(error)}
    return files


def differences(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    return [name for name in sorted(expected.keys() | actual.keys()) if expected.get(name) != actual.get(name)]


# ---- trials


@dataclass
class Tally:
    """Settings of the trials, and counts of what happened."""

    interrupt_share: float  # fraction of signals that are not SIGKILL
    max_signals: int  # per run
    ended: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    interrupts: int = 0
    runs: int = 0


def trial(kind: Kind, path: Path, known: Straight, pick: random.Random, tally: Tally) -> list[str]:
    """Train a run whose processes are killed or interrupted; return its differences from the uninterrupted run."""
    errors = path.with_suffix(".errors")
    for _ in range(pick.randint(tally.max_signals // 2, tally.max_signals)):
        interrupt = pick.random() < tally.interrupt_share
        ended = disturb(kind, path, known, pick.choice(SIGNALS) if interrupt else [signal.SIGKILL], pick, errors)
        tally.ended[ended] += 1
        if ended in ("failed", "hung"):
            return [f"{ended}: {errors.read_text()[-1500:]}"]
        if ended == "finished":
            break
        tally.interrupts += interrupt
        tally.kills += not interrupt
    for _ in range(pick.choice((1, 1, 2))):  # resuming a finished run must not change it
        status = end_of(child(lambda: go(kind, path), errors))
        if status != 0:
            return [f"the last process ended with status {status}: {errors.read_text()[-1500:]}"]
    tally.runs += 1
    return differences(known.outcome, outcome(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--interrupts", type=int, default=200)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[*KINDS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for runs that ended differently")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a fork inherits no threads, and the order of sums depends on them
    importlib.import_module(
        "torch._dynamo"
    )  # the first optimizer imports it, which takes seconds; do it once, before forking
    # sample texts take half of the time, and the outcome does not depend on them
    next_token.complete = lambda model, prompts, settings: [SimpleNamespace(text="")] * len(prompts)  # type: ignore
    pick, began, wrong = random.Random(options.seed), time.perf_counter(), 0
    signals = max(1, options.kills + options.interrupts)
    # every kind of run gets its share
    tally = Tally(options.interrupts / signals, max(2, min(16, signals // len(options.kinds))))
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a kill loses nothing that the kernel already has
    with tempfile.TemporaryDirectory(prefix="weft-resume-", dir=memory) as name:
        os.chdir(name)
        write_data(Path())
        if "adapted" in options.kinds:
            straight(Kind("llama-tiny", (TEXT,), [*DECODER, *OFTEN]), Path(BASE), Path("errors"))
        known = {kind: straight(KINDS[kind], Path(f"straight {kind}"), Path("errors")) for kind in options.kinds}
        for kind, run in known.items():
            print(f"{kind}: {run.seconds:.1f} s, {run.operations} disk operations", flush=True)
        for kind in itertools.cycle(options.kinds):
            if tally.kills >= options.kills and tally.interrupts >= options.interrupts:
                break
            path = Path("run")
            wrong_files = trial(KINDS[kind], path, known[kind], pick, tally)
            if wrong_files:
                wrong += 1
                print(f"{kind}: DIFFERENT: {', '.join(wrong_files)}", flush=True)
                if options.keep is not None:
                    shutil.copytree(path, options.keep / f"{wrong} {kind}", symlinks=True)
                    shutil.copytree(f"straight {kind}", options.keep / f"{wrong} straight", symlinks=True)
            shutil.rmtree(path)
            if tally.runs % 10 == 0:
                print(f"… {tally.runs} runs, {tally.kills} kills, {tally.interrupts} interruptions", flush=True)
        os.chdir("/")
    seconds = time.perf_counter() - began
    print(
        f"{len(options.kinds)} kinds of run, {tally.runs} runs: {tally.kills} kills, {tally.interrupts} interruptions"
    )
    print(f"{wrong} runs ended differently ({seconds:.0f} s)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
