"""Worker process that runs a comparison's jobs one after another (`workers.py`).

A request is a job's folder, whose job.json holds the recipe. The job's outcome is in outcome.json before the worker
answers. An interrupted job saves a checkpoint; a job whose parent died resumes from its last checkpoint when it is
submitted again.
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
from weft.config import Tree, validate
from weft.costs.count import count
from weft.errors import DivergedError, WeftError
from weft.models.base import LanguageModel, device_of
from weft.models.ngram import NGram
from weft.objectives import table as objectives
from weft.objectives.next_token import NextToken
from weft.recipe.config import SettledRecipe
from weft.runs.folder import RunFolder, claim_run, lock_run
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
    """Train or resume the job in a folder, evaluate it, and write its outcome to the folder."""
    job = json.loads(files.read_text(folder / JOB))
    recipe = validate(SettledRecipe, job["recipe"])
    try:
        measures = _train(recipe, folder / RUN, job)
    except DivergedError as error:
        measures = {"failed": str(error), "tokens": 0, "flops": 0.0, "seconds": 0.0, "parameters": 0}
    outcome = validate(Outcome, {**job["names"], "steps": recipe.steps, **measures})
    write_text(folder / OUTCOME, outcome.model_dump_json())
    if not job["kept"]:
        shutil.rmtree(folder / RUN, ignore_errors=True)
    return outcome


def _train(recipe: SettledRecipe, path: Path, job: dict[str, Any]) -> dict[str, Any]:
    assert recipe.data.prepared is not None
    worker, run = TrainingWorker(log=lambda line: None, quiet=True), RunFolder(path)
    tokenizer, has_started = Tokenizer.load(Path(recipe.data.prepared)), run.config.exists()
    with lock_run(run) if has_started else claim_run(path):
        if not has_started:
            tokenizer.save(path)
        objective = objectives.build(recipe, run, Tokenizers(tokenizer, tokenizer))
        result = (start.resume if has_started else start.train)(recipe, run, objective, worker=worker)
        assert isinstance(objective, NextToken)
        return _measure(recipe, objective, result.model, job=job)


def _measure(recipe: SettledRecipe, objective: NextToken, model: LanguageModel, *, job: Tree) -> dict[str, Any]:
    """Return the fields of the outcome that are measured after training."""
    run, share = objective.folder, job["names"]["share"]
    if not share:  # a probe of the time per step; the median leaves out the slow first steps
        laps = [line["seconds"] / line["steps"] for line in read_lines(run.timings) if "seconds" in line]
        seconds = statistics.median(laps[1:] or laps) * recipe.steps
        return {"tokens": 0, "flops": 0.0, "seconds": seconds, "parameters": 0}
    model.eval()
    with autocast(recipe.precision, device_of(model)):
        sections = objective.sections(model, most_bytes=job["held_out"])
        sample = objective.sample(model)[0] if share == 1 else ""
    if job["kept"]:
        finish(recipe, run, objective)
    measures = {"nats": sections.nats.tolist(), "bytes": sections.bytes.tolist(), "sample": sample}
    if isinstance(model, NGram):
        seconds = next(line["seconds"] for line in read_lines(run.events) if line["event"] == "finish")
        measures |= {"tokens": len(objective.training_text), "parameters": sum(model.entries)}
        return {**measures, "flops": 0.0, "seconds": round(seconds, 3)}
    tokens_per_step, key = (recipe.batch.size or 1) * recipe.batch.length, "validation_bits_per_byte"
    return {
        **measures,
        "tokens": recipe.steps * tokens_per_step,
        "flops": flops_per_step(recipe) * recipe.steps,
        "seconds": round(sum(line["seconds"] for line in read_lines(run.timings) if "seconds" in line), 3),
        "parameters": count(recipe.model, recipe.batch.length, recipe.adapter).parameters,
        "multiplied": multiplied(recipe.model),
        "progress": [(line["step"] * tokens_per_step, line[key]) for line in read_lines(run.metrics) if key in line],
    }


def attempt(folder: Path) -> str | None:
    """Run the job in a folder; return a message if it is refused."""
    try:
        run_job(folder)
    except WeftError as error:
        return str(error)
    return None


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    for job_folder in requests():
        respond({"error": attempt(Path(job_folder))})
