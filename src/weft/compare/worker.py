"""One process that runs a comparison's jobs, one after the other, as it is told on standard input.

A line of JSON names a job's folder, in which job.json has its recipe. What the job measured is in outcome.json there
before its folder's name is printed. `null` is Ctrl-C: training saves its step before it stops. When standard input
ends, whoever gave the jobs is gone, and the process ends too.
"""

import json
import os
import shutil
import signal
import statistics
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from weft.api.train import finish
from weft.compare.results import Outcome
from weft.compare.sizes import multiplied
from weft.config import validate
from weft.costs.count import count
from weft.errors import DivergedError, WeftError
from weft.files import write_text
from weft.models.base import LanguageModel, device_of
from weft.models.ngram import NGram
from weft.objectives import table as objectives
from weft.objectives.next_token import NextToken
from weft.recipe.config import SettledRecipe
from weft.runs.folder import RunFolder, claimed, held
from weft.runs.lines import read_lines
from weft.text.tokenizer import Tokenizer
from weft.training import start
from weft.training.objective import Tokenizers
from weft.training.precision import autocast
from weft.training.worker import Worker

JOB, OUTCOME, RUN = "job.json", "outcome.json", "run"


def run_job(folder: Path) -> Outcome:
    """Train what job.json asks for, or go on with it, and measure it. The outcome is in the folder as well."""
    job = json.loads((folder / JOB).read_text("utf-8"))
    recipe = validate(SettledRecipe, job["recipe"])
    try:
        measured = _measured(recipe, folder / RUN, job)
    except DivergedError as error:
        measured = {"failed": str(error), "tokens": 0, "flops": 0.0, "seconds": 0.0, "parameters": 0}
    outcome = validate(Outcome, {**job["names"], "steps": recipe.steps, **measured})
    write_text(folder / OUTCOME, outcome.model_dump_json())
    if not job["kept"]:
        shutil.rmtree(folder / RUN, ignore_errors=True)
    return outcome


def _measured(recipe: SettledRecipe, path: Path, job: dict[str, Any]) -> dict[str, Any]:
    assert recipe.data.prepared is not None
    worker = Worker(log=lambda line: None, quiet=True)
    tokenizer = Tokenizer.load(Path(recipe.data.prepared))
    run = RunFolder(path)
    if run.config.exists():
        with held(run):
            objective = objectives.build(recipe, run, Tokenizers(tokenizer, tokenizer))
            result = start.resume(recipe, run, objective, worker)
            return _outcome(recipe, objective, result.model, job)
    with claimed(path):
        tokenizer.save(path)
        objective = objectives.build(recipe, run, Tokenizers(tokenizer, tokenizer))
        result = start.train(recipe, run, objective, worker)
        return _outcome(recipe, objective, result.model, job)


def _outcome(recipe: SettledRecipe, objective: Any, model: LanguageModel, job: dict[str, Any]) -> dict[str, Any]:
    """What a trained model costs on the held-out text, and what training it took."""
    assert isinstance(objective, NextToken)
    run = objective.folder
    if not job["names"]["share"]:
        return _probed(recipe, run)
    model.eval()
    with autocast(recipe.precision, device_of(model)):
        sections = objective.sections(model, most_bytes=job["held_out"])
        sample = objective.sample(model)[0] if job["names"]["share"] == 1 else ""
    if job["kept"]:
        finish(recipe, run, objective)
    if isinstance(model, NGram):
        tokens, cost, parameters = len(objective.training_text), 0.0, sum(model.entries)
        seconds = next(line["seconds"] for line in read_lines(run.events) if line["event"] == "finish")
    else:
        counted = count(recipe.model, recipe.batch.length, recipe.adapter)
        tokens = recipe.steps * (recipe.batch.size or 1) * recipe.batch.length
        cost, parameters = counted.training(recipe.batch.recompute) * tokens, counted.parameters
        seconds = sum(line["seconds"] for line in read_lines(run.timings) if "seconds" in line)
    return {
        "tokens": tokens,
        "flops": cost,
        "seconds": round(seconds, 3),
        "parameters": parameters,
        "multiplied": 0 if isinstance(model, NGram) else multiplied(recipe.model),
        "nats": sections.nats.tolist(),
        "bytes": sections.bytes.tolist(),
        "progress": [] if isinstance(model, NGram) else _progress(run, recipe),
        "sample": sample,
    }


def _probed(recipe: SettledRecipe, run: RunFolder) -> dict[str, Any]:
    """How long the steps of a short run would have taken without its start: by the median of its later laps."""
    laps = [line["seconds"] / line["steps"] for line in read_lines(run.timings) if "seconds" in line]
    seconds = statistics.median(laps[1:] or laps) * recipe.steps
    return {"tokens": 0, "flops": 0.0, "seconds": seconds, "parameters": 0}


def _progress(run: RunFolder, recipe: SettledRecipe) -> list[tuple[int, float]]:
    """(tokens read, bits per byte) of the evaluations during training."""
    each = (recipe.batch.size or 1) * recipe.batch.length
    key = "validation_bits_per_byte"
    return [(line["step"] * each, line[key]) for line in read_lines(run.metrics) if key in line]


def main(threads: int) -> None:
    """Take jobs from standard input until it ends."""
    torch.set_num_threads(threads)
    jobs: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            if json.loads(line) is None:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                jobs.put(line)
        os._exit(0)  # a job that is under way goes on from its last checkpoint when it is given out again

    threading.Thread(target=read, daemon=True).start()
    while True:
        folder = Path(json.loads(jobs.get()))
        try:
            run_job(folder)
        except WeftError as error:
            print(json.dumps({"folder": str(folder), "error": str(error)}), flush=True)
            continue
        print(json.dumps({"folder": str(folder)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
