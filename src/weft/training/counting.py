"""Training by counting: an n-gram model reads its text once, and its tables are all there is to save."""

import math
import time
from typing import Protocol

import numpy as np

from weft.data.shards import Tokens
from weft.models.build import build
from weft.models.ngram import NGram
from weft.recipe.config import SettledRecipe
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.runs.journal import Journal
from weft.runs.snapshot import snapshot
from weft.training.objective import Objective
from weft.training.state import RunResult
from weft.training.worker import Worker


class CountedObjective(Objective, Protocol):
    """An objective whose training text can be counted."""

    @property
    def training_text(self) -> Tokens: ...


def count(recipe: SettledRecipe, run: RunFolder, objective: CountedObjective, worker: Worker) -> RunResult:
    """Count the training text into the recipe's n-gram model, evaluate it and save it as step 1."""
    started = time.perf_counter()
    text = objective.training_text
    model = build(recipe.model)
    assert isinstance(model, NGram)
    documents = text.documents(0, len(text))
    starts = np.concatenate([[0], np.flatnonzero(np.diff(documents)) + 1])
    model.fit(text.read(0, len(text)), starts, progress=not worker.quiet)
    model.eval()
    run.event("model", parameters=sum(model.entries))
    validation = objective.evaluate(model) if objective.holds_out else {}
    journal = Journal(run, recipe)
    journal.metrics(1, {"tokens": len(text), **{f"validation_{key}": value for key, value in validation.items()}})
    journal.close()
    notes = {"step": 1, "tokens": len(text), "validation": validation}
    checkpoint.write(run.checkpoints, snapshot(1, model, None, notes), recipe.checkpoint.keep, best=True)
    seconds = time.perf_counter() - started
    run.event("finish", step=1, seconds=round(seconds, 3))
    return RunResult(run, model, 1, math.nan, validation, 1, seconds)
