"""Train word2vec and GloVe: epoch by epoch, without back-propagation.

Every epoch that is saved can be resumed from. With one thread (`deterministic = true`, or OMP_NUM_THREADS=1) the same
recipe gives the same vectors to the bit, resumed or not; several threads update shared tables without locks, so that
their vectors differ a little from run to run.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weft.models.build import build
from weft.models.config import GloVe, Word2Vec
from weft.models.glove import GloVeTraining
from weft.models.word2vec import Word2VecTraining
from weft.models.word_kernels import library
from weft.models.word_table import WordTable
from weft.progress import bar
from weft.recipe.config import SettledRecipe
from weft.runs import checkpoint
from weft.runs.checkpoint import MOMENTS
from weft.runs.folder import RunFolder
from weft.runs.journal import Journal
from weft.runs.snapshot import snapshot
from weft.training.state import RunResult
from weft.training.worker import TrainingWorker


def train_word_vectors(
    recipe: SettledRecipe,
    run: RunFolder,
    objective: Any,
    *,
    worker: TrainingWorker,
    begin: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train for the epochs that a run's newest checkpoint has not seen, and save them; a finished run is unchanged.

    `begin` is called once the text is known to be large enough.
    """
    started, model = time.perf_counter(), build(recipe.model)
    assert isinstance(model, WordTable)
    saved = checkpoint.newest_good(run.checkpoints)[0] if checkpoint.all_checkpoints(run.checkpoints) else None
    done = 0 if saved is None else checkpoint.step_of(saved)
    loss = math.nan if saved is None else checkpoint.notes_of(saved).get("loss", math.nan)
    if done < recipe.steps:
        training, words = _training(recipe, objective, progress=not worker.quiet)
        begin()
        if saved is not None:
            for name, tensor in checkpoint.load_tensors(saved / MOMENTS).items():
                training.state[name][:] = tensor.numpy()
        if library() is None:
            worker.log("without compiled kernels (weft doctor says why): training takes several hundred times as long")
        threads = 1 if recipe.deterministic else torch.get_num_threads()
        if not done:
            run.event("model", parameters=model.embedding.weight.numel())
        journal = Journal(run, recipe, after=done)
        for epoch in range(done, recipe.steps):
            begun, step = time.perf_counter(), epoch + 1
            title = f"epoch {step} of {recipe.steps}"
            with bar(title, training.chunks, enabled=not worker.quiet) as tick:
                loss = training.epoch(epoch, threads=threads, tick=tick)
            seconds = time.perf_counter() - begun
            journal.metrics(step, {"loss": loss, "tokens": words * step, "epoch": step})
            journal.timings(step, {"seconds": seconds, "tokens_per_second": words / max(1e-9, seconds)})
            worker.log(f"{title}: loss {loss:.4f}, {words / max(1e-9, seconds):,.0f} words per second")
            if step % recipe.checkpoint.every == 0 or step == recipe.steps:
                _save(run, recipe, model, training=training, notes={"step": step, "best_step": step, "loss": loss})
        journal.close()
    seconds = time.perf_counter() - started
    run.event("finish", step=recipe.steps, seconds=round(seconds, 3))
    return RunResult(run, model, recipe.steps, loss=loss, validation={}, best_step=recipe.steps, seconds=seconds)


def _training(recipe: SettledRecipe, objective: Any, *, progress: bool) -> tuple[Any, int]:
    """Return the tables to train, with the text in them, and the number of its words."""
    text = objective.words()
    words = int((text >= 0).sum())
    if isinstance(recipe.model, Word2Vec):
        return Word2VecTraining(recipe.model, text, epochs=recipe.steps, seed=recipe.seed), words
    assert isinstance(recipe.model, GloVe)
    return GloVeTraining(recipe.model, text, seed=recipe.seed, progress=progress), words


def _save(run: RunFolder, recipe: SettledRecipe, model: WordTable, *, training: Any, notes: dict[str, Any]) -> None:
    """Write a checkpoint: the vectors as the model, and the tables as the state of its optimizer."""
    model.embedding.weight.data.copy_(torch.from_numpy(training.vectors))
    copy = snapshot(notes["step"], model, None, notes=notes)
    moments = {name: torch.from_numpy(table) for name, table in training.state.items()}
    checkpoint.write(run.checkpoints, replace(copy, moments=moments), recipe.checkpoint.keep)
