"""Bit-exact resume under fire: a run that is killed again and again ends as the run that never stopped.

    make test-resume
    python benchmarks/resume.py --steps 300 --kills 60

A small model with dropout, a guard that has to roll back, evaluations and checkpoints is trained once straight through,
and once killed with SIGKILL at random instants, every fourth of them while a checkpoint is being written, and resumed
each time. The lines of metrics.jsonl and the checksum of the final weights must be the same.
"""

import argparse
import hashlib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from weft.data.batch import Batch
from weft.data.shards import Tokens
from weft.models.base import LanguageModel
from weft.objectives.next_token import NextToken
from weft.recipe.config import SettledRecipe
from weft.recipe.resolve import resolve
from weft.recipe.settle import Facts, settle
from weft.runs.folder import RunFolder, claimed, held, open_run, read_lines
from weft.training import start
from weft.training.worker import Worker

VOCAB = 23


def text(tokens: int, seed: int) -> Tokens:
    """A text where each token is likely to be followed by the next number."""
    generator = np.random.default_rng(seed)
    jumps = np.where(generator.random(tokens) < 0.8, 1, generator.integers(0, VOCAB, tokens))
    return Tokens([np.cumsum(jumps) % VOCAB], [np.zeros((3, 1), dtype=np.int64)])


class MadeUpText(NextToken):
    """The next token of a made-up text; the mean loss on another one is measured."""

    fingerprints = ()

    @cached_property
    def corpora(self) -> list[Any]:  # type: ignore[override]
        return [SimpleNamespace(train=text(20_000, seed=0), validation=text(2000, seed=1))]

    @cached_property
    def held_out(self) -> Batch:
        other = MadeUpText(self.recipe, self.folder)
        other.corpora = [SimpleNamespace(train=self.corpora[0].validation)]
        return other.loader.batch(1)

    def evaluate(self, model: LanguageModel) -> dict[str, float]:
        loss, count, _ = self.loss(model, self.held_out)
        return {"loss": float(loss) / float(count)}

    def sample(self, model: LanguageModel) -> list[str]:
        return []


def settings(steps: int) -> SettledRecipe:
    """A two-layer LLaMA that starts with far too high a rate, so that the guard rolls back in the middle of it all."""
    words = ["model.layers=2", "model.d_model=32", "model.attention.heads=2", "model.feedforward.d_ff=64"]
    words += ["model.dropout=0.1", f"model.vocab_size={VOCAB}", "tokenizer=byte", "batch.size=8", "batch.length=32"]
    words += [f"steps={steps}", "log.every=1", "evaluate.every=9", "checkpoint.every=4", "optimizer.lr=3.0"]
    words += ["schedule.warmup=1", "guard.patience=4"]
    return settle(resolve("llama-tiny", words), Facts(20_000, VOCAB))[0]


def go(recipe: SettledRecipe, path: Path) -> None:
    """Start the run, or continue it."""
    worker = Worker(torch.device("cpu"), log=lambda line: None, quiet=True)
    if (path / "config.toml").exists():
        folder = open_run(path)
        with held(folder):
            start.resume(folder.settled_recipe(), folder, MadeUpText(recipe, folder), worker)
    else:
        shutil.rmtree(path, ignore_errors=True)
        with claimed(path) as folder:
            start.train(recipe, folder, MadeUpText(recipe, folder), worker)


def child(recipe: SettledRecipe, path: Path) -> int:
    """`go` in a process of its own. A fork needs no second start of Python; only this thread exists yet."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            go(recipe, path)
            code = 0
        finally:
            os._exit(code)
    return number


def ended(number: int) -> bool:
    """Whether the process is over; a failure of its own is an error."""
    done, status = os.waitpid(number, os.WNOHANG)
    if done and status != 0:
        raise SystemExit(f"a resumed process failed by itself with status {status}")
    return bool(done)


def lines(path: Path) -> int:
    try:
        return (path / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def kill_somewhere(recipe: SettledRecipe, path: Path, pick: random.Random, in_write: bool, advance: int) -> str | None:
    """Run until a random instant and kill; where it struck, or None if the run came to its end first."""
    before = unfinished(path)
    number = child(recipe, path)
    aim = lines(path) + pick.randint(0, advance)
    while lines(path) < aim:
        if ended(number):
            return None
        time.sleep(0.001)
    if in_write:
        while not unfinished(path) - before:
            if ended(number):
                return None
        time.sleep(pick.random() * 0.004)
    else:
        time.sleep(pick.random() * 0.05)
    if ended(number):
        return None
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    return "inside a checkpoint write" if unfinished(path) - before else "between writes"


def unfinished(path: Path) -> set[str]:
    """The checkpoints that are being written, and those that a killed process left so."""
    return {folder.name for folder in (path / "checkpoints").glob(".step-*")}


def outcome(path: Path) -> tuple[str, str]:
    """The metrics as text, and the checksum of the final weights."""
    run = RunFolder(path)
    weights = (run.checkpoints / "latest" / "model.safetensors").read_bytes()
    return run.metrics.read_text(), hashlib.sha256(weights).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a fork inherits no threads, and sums come in the order of the threads
    importlib.import_module("torch._dynamo")  # the first optimizer loads it, which takes seconds: once here, for all
    recipe, pick = settings(options.steps), random.Random(options.seed)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="weft-resume-") as name:
        folder = Path(name)
        straight = child(recipe, folder / "straight")
        while not ended(straight):
            time.sleep(0.05)
        struck: dict[str, int] = {}
        for kill in range(options.kills):
            # so far at most that the last kills still find a run to kill
            left = max(0, options.steps - 8 - lines(folder / "killed"))
            where = kill_somewhere(
                recipe, folder / "killed", pick, kill % 4 == 3, min(left, 2 * options.steps // options.kills)
            )
            if where is None:
                print(f"the run ended after {kill} kills")
                break
            struck[where] = struck.get(where, 0) + 1
        last = child(recipe, folder / "killed")
        while not ended(last):
            time.sleep(0.05)
        expected, found = outcome(folder / "straight"), outcome(folder / "killed")
        rollbacks = sum(event["event"] == "rollback" for event in read_lines(folder / "straight" / "events.jsonl"))
    kills = ", ".join(f"{count} {where}" for where, count in sorted(struck.items()))
    seconds = time.perf_counter() - began
    print(f"{options.steps} steps, {rollbacks} rollbacks; killed {sum(struck.values())} times: {kills}")
    print(f"metrics.jsonl: {'the same' if expected[0] == found[0] else 'DIFFERENT'}")
    print(f"weights: {expected[1][:16]} straight, {found[1][:16]} killed and resumed ({seconds:.0f} s)")
    return 0 if expected == found and sum(struck.values()) == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
