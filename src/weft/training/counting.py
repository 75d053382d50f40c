"""Training by counting: an n-gram model reads its text once, and its tables are all there is to save."""

import math
import time
from collections.abc import Sequence

import numpy as np

from weft.errors import ConfigError
from weft.models.build import build
from weft.models.ngram import NGram
from weft.recipe.config import Recipe
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, RunResult
from weft.runs.journal import Journal
from weft.training.evaluation import Evaluator
from weft.training.loader import Corpus


def count_corpus(
    recipe: Recipe,
    run: RunFolder,
    corpus: Corpus | Sequence[Corpus],
    evaluators: Sequence[Evaluator],
    quiet: bool,
) -> RunResult:
    """Count the training text into the recipe's n-gram model, evaluate it and save it as step 1."""
    if isinstance(corpus, Sequence):
        raise ConfigError("data.mixture: an n-gram model counts one text; give sources or a prepared folder")
    started = time.perf_counter()
    text = corpus.train
    model = build(recipe.model)
    assert isinstance(model, NGram)
    documents = text.documents(0, len(text))
    starts = np.concatenate([[0], np.flatnonzero(np.diff(documents)) + 1])
    model.fit(text.read(0, len(text)), starts, progress=not quiet)
    model.eval()
    run.event("model", parameters=sum(model.entries))
    validation: dict[str, float] = {}
    for evaluator in evaluators:
        validation |= evaluator(model)
    journal = Journal(run, recipe)
    journal.metrics(1, {"tokens": len(text), **{f"validation_{key}": value for key, value in validation.items()}})
    journal.close()
    notes = {"step": 1, "tokens": len(text), "validation": validation}
    checkpoint.save(run.checkpoints, 1, model, None, notes, recipe.checkpoint.keep, best=True)
    seconds = time.perf_counter() - started
    run.event("finish", step=1, seconds=round(seconds, 3))
    return RunResult(run, model, 1, math.nan, validation, 1, seconds)
