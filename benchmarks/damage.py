"""Damage files of a run at random: every command must detect the damage or be unaffected by it.

    python benchmarks/damage.py --damages 1000

Small runs of several kinds, finished and interrupted, are copied; one file of the copy is damaged (a bit flipped, a
block overwritten, truncated, emptied, removed, lines moved, replaced by a pipe, an endless file or a checkpoint of
another run …), and a command runs on the copy in a separate process. The command must exit with code 2 and one line,
or warn in a line that names the file, or produce its usual output. Anything else, including a traceback or a hang,
is a failure.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.cli.main import run as command
from weft.runs.lines import read
from weft.training.step import OptimisationStep

MAX_SECONDS = 60  # a command that runs longer hangs
MAX_ADDRESS_SPACE = 12 << 30  # bytes; torch's libraries map most of it
STEPS = 13  # training steps of each run

SMALL = [
    "model.layers=1", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=24", f"steps={STEPS}",
    "log.every=2", "evaluate.every=4", "checkpoint.every=4", "batch.length=16", "seed=3",
]  # fmt: skip

# name → preset, data, changes, the command that uses the run
KINDS: dict[str, tuple[str, str, list[str], list[str]]] = {
    "text": (
        "llama-tiny",
        "text.txt",
        ["batch.size=4", "tokenizer=byte"],
        ["generate", "--prompt", "the", "--greedy", "--max-tokens", "12"],
    ),
    "averaged": (
        "gpt-tiny",
        "text.txt",
        ["batch.size=4", "tokenizer=byte", "checkpoint.average=3", "checkpoint.keep=3"],
        ["generate", "--prompt", "a", "--greedy", "--max-tokens", "12"],
    ),
    "pairs": (
        "vaswani-tiny",
        "pairs.tsv",
        ["batch.size=8", "tokenizer=byte"],
        ["translate", "few.txt", "--beam", "1", "--max-tokens", "12"],
    ),
    "classify": (
        "bert-tiny",
        "rows.tsv",
        ["batch.size=8", "tokenizer.vocab_size=70", "objective=classify"],
        ["classify", "few.txt", "--json"],
    ),
    "ngram": (
        "ngram-3",
        "text.txt",
        ["tokenizer=byte"],
        ["generate", "--prompt", "the", "--greedy", "--max-tokens", "12"],
    ),
}


# ---- the runs


def write_data(folder: Path) -> None:
    """Write the text, pairs and labelled rows that the runs train on."""
    pick = random.Random(0)
    words = ["the", "red", "cat", "sat", "on", "a", "warm", "mat", "and", "saw", "cold", "blue", "fish", "near", "old",
             "dogs"]  # fmt: skip
    sentences = [" ".join(pick.choices(words, k=pick.randint(4, 9))) for _ in range(400)]
    (folder / "text.txt").write_text(".\n\n".join(sentences), encoding="utf-8")
    (folder / "few.txt").write_text("\n".join(sentences[:3]) + "\n", encoding="utf-8")
    pairs = [f"{s[:12]}\t{s[:12][::-1]}" for s in sentences[:120]]
    (folder / "pairs.tsv").write_text("source\ttarget\n" + "\n".join(pairs) + "\n", encoding="utf-8")
    rows = [f"{s}\t{'warm' if 'red' in s else 'cold'}" for s in sentences[:120]]
    (folder / "rows.tsv").write_text("text\tlabel\n" + "\n".join(rows) + "\n", encoding="utf-8")


def interrupted(steps: int) -> Callable[..., Any]:
    """Optimisation step that ends the process after `steps` steps, as a kill would."""
    take, taken = OptimisationStep.__call__, 0

    def step(self: OptimisationStep, *args: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken > steps + 2:  # the pre-flight takes two steps
            os._exit(9)
        return take(self, *args)

    return step


def train(kind: str, path: Path, stop: int | None) -> None:
    """Train one of the runs in a subprocess, interrupted after `stop` steps unless that is None."""
    preset, data, words, _ = KINDS[kind]
    small = SMALL if kind != "ngram" else ["seed=3"]
    words = ["train", preset, "--data", data, "--run", str(path), *small, *words]

    def go() -> int:
        if stop is not None:
            OptimisationStep.__call__ = interrupted(stop)  # type: ignore[method-assign]
        return command(words)

    found = run_in_subprocess(go)
    if found["code"] != (0 if stop is None else 9):
        raise SystemExit(f"{kind}: {found}")


def export_and_import(source: Path, path: Path) -> None:
    """Export a finished run to Hugging Face's format and import the result as `path`."""
    for words in (
        ["export", str(source), str(path.with_name("exported")), "--to", "hf"],
        ["import", str(path.with_name("exported")), str(path)],
    ):
        found = run_in_subprocess(lambda words=words: command(words))  # type: ignore[misc]
        if found["code"] != 0:
            raise SystemExit(f"{words}: {found}")


# ---- commands


def run_in_subprocess(go: Callable[[], int]) -> dict[str, Any]:
    """Call `go` in a forked process; return its exit code and output. A hang ends with SIGALRM."""
    with tempfile.TemporaryDirectory(prefix="weft-damage-") as name:
        out, err = Path(name, "out"), Path(name, "err")
        number = os.fork()
        if number == 0:
            code = 1
            signal.alarm(MAX_SECONDS)
            resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
            with open(out, "w") as sys.stdout, open(err, "w") as sys.stderr:
                try:
                    code = go()
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(number, 0)
        code = os.waitstatus_to_exitcode(status)
        return {"code": code, "out": out.read_text(errors="replace"), "err": err.read_text(errors="replace")}


def run_action(action: str, kind: str, path: Path, folder: Path) -> dict[str, Any]:
    """Run a command on a run; its `answer` is the output, or the weights and metrics after resuming."""
    if action == "resume":
        found = run_in_subprocess(lambda: command(["train", "--resume", str(path)]))
        found["answer"] = outcome(path) if found["code"] == 0 else None
        return found
    if action == "runs":
        found = run_in_subprocess(lambda: command(["runs", str(folder), "--json"]))
        return {**found, "answer": found["out"] if found["code"] else None}
    if action == "evaluate":
        data = ["--data", str(folder / "text.txt")] if kind == "imported" else []
        found = run_in_subprocess(lambda: command(["evaluate", str(path), "--json", *data]))
        with contextlib.suppress(ValueError):
            found["out"] = json.loads(found["out"])
            found["out"].pop("baseline_bits_per_byte", None)  # missing if the events are damaged
    elif action == "export":
        target = path.with_name("exported-copy")
        shutil.rmtree(target, ignore_errors=True)
        found = run_in_subprocess(lambda: command(["export", str(path), str(target), "--to", "hf"]))
        files = sorted(file for file in target.rglob("*") if file.is_file()) if target.exists() else []
        found["out"] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    else:
        use = KINDS.get(kind, KINDS["text"])[3]
        found = run_in_subprocess(lambda: command([use[0], str(path), *use[1:]]))
    found["answer"] = found["out"]
    return found


def outcome(path: Path) -> dict[str, Any]:
    """Hashes of a run's latest and best weights, and its metrics and result."""
    found: dict[str, Any] = {"metrics": read(path / "metrics.jsonl")[0]}
    for name in ("latest", "best"):
        file = path / "checkpoints" / name / "model.safetensors"
        found[name] = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None
    results = [line for line in read(path / "events.jsonl")[0] if line["event"] == "result"]
    found["result"] = {key: value for key, value in results[-1].items() if key != "time"} if results else None
    return found


# ---- damages


def swap(copy: Path, path: Path, others: list[Path], pick: random.Random) -> tuple[Path, str]:
    """Replace a checkpoint of the copy by another run's, often its twin's (same recipe), or remove it."""
    file = pick.choice(_checkpoints(copy))
    twin = path.with_name(f"{path.name}-twin") / "checkpoints" / file.name
    other = twin if twin.exists() and pick.random() < 0.7 else pick.choice(_checkpoints(pick.choice(others)))
    shutil.rmtree(file)
    if pick.random() < 0.8:
        shutil.copytree(other, file)
        return file, f"swapped for {other}"
    return file, "removed"


def _checkpoints(run: Path) -> list[Path]:
    return [path for path in (run / "checkpoints").glob("*-0*") if not path.is_symlink()]


def corrupt(file: Path, pick: random.Random) -> str:
    """Damage a file at random; return the name of the damage."""
    if file.is_symlink():
        how = pick.choice(["removed", "dangling", "elsewhere"])
        others = [path for path in file.parent.glob("step-*") if path.name != os.readlink(file)]
        file.unlink()
        if how == "dangling":
            file.symlink_to("step-00099999")
        elif how == "elsewhere" and others:
            file.symlink_to(pick.choice(others).name)
        return how
    data = file.read_bytes()
    damages: dict[str, Callable[[], bytes | None]] = {
        "bit": lambda: _put(data, pick.randrange(len(data)), lambda old: bytes([old[0] ^ 1 << pick.randrange(8)])),
        "zeros": lambda: _put(data, pick.randrange(len(data)), lambda old: bytes(len(old)), pick.choice([16, 512])),
        "noise": lambda: _put(data, pick.randrange(len(data)), lambda old: pick.randbytes(len(old)), 64),
        "cut": lambda: data[: pick.randrange(len(data))],
        "empty": lambda: b"",
        "removed": lambda: None,
        "appended": lambda: data + pick.randbytes(40),
        "folder": lambda: None,
        "dangling": lambda: None,
        "pipe": lambda: None,
        "endless": lambda: None,
        "itself": lambda: None,
        "doubled": lambda: data + data,
    }
    lines = data.splitlines(keepends=True)
    if file.suffix in (".jsonl", ".json", ".toml") and len(lines) > 2:
        at, other = pick.sample(range(len(lines)), 2)
        damages |= {
            "line twice": lambda: b"".join([*lines[:at], lines[at], *lines[at:]]),
            "line lost": lambda: b"".join([*lines[:at], *lines[at + 1 :]]),
            "lines swapped": lambda: b"".join(
                lines[other] if n == at else lines[at] if n == other else line for n, line in enumerate(lines)
            ),
        }
    how = pick.choice(list(damages)) if data else "removed"
    changed = damages[how]()
    if changed is not None:
        file.write_bytes(changed)
        return how if changed != data else "nothing"
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how == "dangling":
        file.symlink_to("nowhere")
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "endless":
        file.symlink_to("/dev/zero")
    elif how == "itself":
        file.symlink_to(file.name)
    return how


def _put(data: bytes, at: int, new: Callable[[bytes], bytes], size: int = 1) -> bytes:
    return data[:at] + new(data[at : at + size]) + data[at + size :]


def verdict(found: dict[str, Any], expected: dict[str, Any], file: Path) -> str:
    """Return whether the damage was refused, warned about or harmless; failures are in capitals."""
    lines = found["err"].strip().splitlines()
    if found["code"] == -signal.SIGALRM:
        return "HANG"
    if "Traceback" in found["err"] or found["code"] not in (0, 2):
        return "TRACEBACK"
    if found["code"] == 2:
        return "refused" if lines and lines[-1].startswith("weft: ") else "NO LINE"
    known = expected["err"].splitlines()
    if any(part in line for line in lines if line not in known for part in (file.name, file.parent.name)):
        return "warned"
    return "harmless" if found["answer"] == expected["answer"] else "UNSEEN"


def damageable(path: Path) -> list[Path]:
    """Every file and link of a run that some command reads."""
    ignored = ("report.html", ".lock")
    return sorted(
        file for file in path.rglob("*") if (file.is_file() or file.is_symlink()) and file.name not in ignored
    )


def bench(damages: int, seed: int, kinds: list[str]) -> Counter[str]:
    """Apply `damages` random damages and count the verdicts."""
    pick, verdicts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="weft-damage-") as name, contextlib.chdir(name):
        folder = Path(name)
        write_data(folder)
        runs: list[tuple[str, Path]] = []
        for kind in kinds:
            runs.append((kind, folder / f"{kind}-finished"))
            train(kind, runs[-1][1], None)
            train(kind, folder / f"{kind}-finished-twin", None)
            if kind != "ngram":
                runs.append((kind, folder / f"{kind}-interrupted"))
                train(kind, runs[-1][1], 10)
        if "text" in kinds:
            export_and_import(folder / "text-finished", folder / "imported")
            runs.append(("imported", folder / "imported"))
        expected: dict[tuple[Path, str], dict[str, Any]] = {}
        for number in range(damages):
            kind, path = pick.choice(runs)
            action = pick.choice(
                ["evaluate", "use", "export"] if kind == "imported" else ["evaluate", "use", "resume", "resume", "runs"]
            )
            if (path, action) not in expected:
                expected[path, action] = run_action(action, kind, copy_run(path, folder), folder)
                if expected[path, action]["code"] != 0:
                    raise SystemExit(f"{path.name} {action}: {expected[path, action]}")
            copy = copy_run(path, folder)
            files = damageable(copy)
            # names are equally likely, however many checkpoints have a file of that name
            file = pick.choice(pick.choice(list(_by_name(files).values())))
            if number % 8 == 0 and (copy / "checkpoints").is_dir():
                file, how = swap(copy, path, [other for _, other in runs if other != path], pick)
            else:
                how = corrupt(file, pick)
            found = run_action(action, kind, copy, folder)
            result = verdict(found, expected[path, action], file)
            verdicts[result] += 1
            if number % 100 == 99:
                print(number + 1, dict(verdicts), flush=True)
            if result.isupper():
                shown = found["err"].strip().splitlines()[-1:] or [""]
                print(f"{number}: {path.name} {file.relative_to(copy)} {how}, {action}: {result} {shown[0][:300]}")
    return verdicts


def copy_run(path: Path, folder: Path) -> Path:
    """Copy a run, always to the same path, because commands print it."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy, symlinks=True)
    return copy


def _by_name(files: list[Path]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in files:
        found.setdefault(file.name, []).append(file)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    torch.set_num_threads(1)  # a fork inherits no threads
    importlib.import_module(
        "torch._dynamo"
    )  # the first optimizer imports it, which takes seconds; do it once, before forking
    for module in ("weft.api.train", "weft.api.export_model", "weft.api.import_model"):
        importlib.import_module(module)
    began = time.perf_counter()
    verdicts = bench(options.damages, options.seed, options.kinds)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(verdicts.items()))
    print(f"{options.damages} damages: {counts} ({time.perf_counter() - began:.0f} s)")
    return 1 if any(name.isupper() for name in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
