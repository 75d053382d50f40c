"""One process that runs a comparison's jobs, one after the other, as it is told (`workers.py`).

It is told a job's folder, in which job.json has its recipe. What the job measured is in outcome.json there before it
answers. One that is interrupted saves its step; one whose parent is gone goes on from its last checkpoint when the job
is given out again.
"""

import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from weft.api.train import finish
from weft.compare.jobs import Outcome
from weft.compare.sizes import flops_per_step, multiplied
from weft.config import validate
from weft.costs.count import count
from weft.errors import DivergedError, WeftError
from weft.models.base import LanguageModel, device_of
from weft.models.ngram import NGram
from weft.objectives import table as objectives
from weft.objectives.next_token import NextToken
from weft.recipe.config import SettledRecipe
from weft.runs.folder import RunFolder, claimed, held
from weft.runs.lines import read_lines
from weft.storage import files
from weft.storage.files import write_text
from weft.text.tokenizer import Tokenizer
from weft.training import start
from weft.training.precision import autocast
from weft.training.run_data import Tokenizers
from weft.training.worker import TrainingWorker
from weft.workers import requests, respond

JOB, OUTCOME, RUN = "job.json", "outcome.json", "run"


def run_job(folder: Path) -> Outcome:
    """Train what job.json asks for, or go on with it, and measure it. The outcome is in the folder as well."""
    job = json.loads(files.read_text(folder / JOB))
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
    worker, run = TrainingWorker(log=lambda line: None, quiet=True), RunFolder(path)
    tokenizer, begun = Tokenizer.load(Path(recipe.data.prepared)), run.config.exists()
    with held(run) if begun else claimed(path):
        if not begun:
            tokenizer.save(path)
        objective = objectives.build(recipe, run, Tokenizers(tokenizer, tokenizer))
        result = (start.resume if begun else start.train)(recipe, run, objective, worker=worker)
        return _outcome(recipe, objective, result.model, job)


def _outcome(recipe: SettledRecipe, objective: Any, model: LanguageModel, job: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(objective, NextToken)
    run, share = objective.folder, job["names"]["share"]
    if not share:  # how long its steps would have taken without the start, by the median of its later laps
        laps = [line["seconds"] / line["steps"] for line in read_lines(run.timings) if "seconds" in line]
        seconds = statistics.median(laps[1:] or laps) * recipe.steps
        return {"tokens": 0, "flops": 0.0, "seconds": seconds, "parameters": 0}
    model.eval()
    with autocast(recipe.precision, device_of(model)):
        sections = objective.sections(model, most_bytes=job["held_out"])
        sample = objective.sample(model)[0] if share == 1 else ""
    if job["kept"]:
        finish(recipe, run, objective)
    measured = {"nats": sections.nats.tolist(), "bytes": sections.bytes.tolist(), "sample": sample}
    if isinstance(model, NGram):
        seconds = next(line["seconds"] for line in read_lines(run.events) if line["event"] == "finish")
        measured |= {"tokens": len(objective.training_text), "parameters": sum(model.entries)}
        return {**measured, "flops": 0.0, "seconds": round(seconds, 3)}
    counted = count(recipe.model, recipe.batch.length, recipe.adapter)
    each, key = (recipe.batch.size or 1) * recipe.batch.length, "validation_bits_per_byte"
    tokens = recipe.steps * each
    return {
        **measured,
        "tokens": tokens,
        "flops": flops_per_step(recipe) * recipe.steps,
        "seconds": round(sum(line["seconds"] for line in read_lines(run.timings) if "seconds" in line), 3),
        "parameters": counted.parameters,
        "multiplied": multiplied(recipe.model),
        "progress": [(line["step"] * each, line[key]) for line in read_lines(run.metrics) if key in line],
    }


def attempt(folder: Path) -> str | None:
    """Run the job of a folder, and say what is wrong with it if anything is."""
    try:
        run_job(folder)
    except WeftError as error:
        return str(error)
    return None


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    for told_folder in requests():
        respond({"error": attempt(Path(told_folder))})
