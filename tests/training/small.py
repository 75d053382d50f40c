"""A model, a text and a recipe small enough to train in a second, without a tokenizer or input files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.data import held as in_memory

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.objectives.next_token import NextToken
from weft.objectives.tokens import token_loss
from weft.recipe import objective as config
from weft.recipe.config import Recipe, SettledRecipe
from weft.recipe.resolve import resolve
from weft.recipe.settle import Facts, settle
from weft.runs.folder import RunFolder, claim_run, lock_run, open_run
from weft.runs.lines import read_lines
from weft.training import start
from weft.training.loader import Loader
from weft.training.objective import Loss
from weft.training.state import RunResult
from weft.training.step import OptimisationStep, StepResult
from weft.training.worker import TrainingWorker

VOCAB = 23
CPU = torch.device("cpu")
Corpus = Any  # has `train` and `validation`
Evaluate = Callable[[LanguageModel], dict[str, float]]
Sample = Callable[[LanguageModel], list[str]]


# ---- a recipe and a text


def settled(preset: str, *changes: str) -> SettledRecipe:
    """Return a preset for the text below, with nothing left open."""
    recipe = resolve(preset, ["tokenizer=byte", f"model.vocab_size={VOCAB}", *changes])
    return settle(recipe, Facts(3500, VOCAB))[0]


def small(*changes: str) -> SettledRecipe:
    """Return the settled recipe of a two-layer LLaMA with dropout, so that random numbers matter too."""
    model = ["layers=2", "d_model=16", "attention.heads=2", "feedforward.d_ff=24", "dropout=0.1"]
    training = ["batch.size=4", "batch.length=12", "steps=12", "log.every=3", "evaluate.every=4", "checkpoint.every=5"]
    return settled("llama-tiny", *(f"model.{setting}" for setting in model), *training, *changes)


def counting_text(tokens: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return tokens with something to learn: each is likely to be followed by the next number."""
    generator = np.random.default_rng(seed)
    jumps = np.where(generator.random(tokens) < 0.8, 1, generator.integers(0, VOCAB, tokens))
    return np.cumsum(jumps) % VOCAB


def small_text(tokens: int = 4000, document: int = 500, size: int = 600) -> Corpus:
    """Return a counting text in documents of `document` tokens and `size` bytes, with 500 tokens held out."""
    ids, starts = counting_text(tokens), list(range(0, tokens - 500, document))
    return SimpleNamespace(
        train=in_memory.tokens(ids[:-500], starts, [size] * len(starts)),
        validation=in_memory.tokens(ids[-500:], [0], [size]),
    )


# ---- an objective in memory


class TextInMemory(NextToken):
    """Next-token prediction on texts in memory. `evaluate_with` and `sample_with` replace its evaluation and samples;
    without the first nothing is held out."""

    def __init__(
        self,
        recipe: Recipe,
        texts: Sequence[Corpus],
        evaluate_with: Evaluate | None = None,
        *,
        sample_with: Sample | None = None,
    ):
        super().__init__(recipe, RunFolder("in-memory"))
        self.corpora = list(texts)
        self.evaluate_with, self.sample_with = evaluate_with, sample_with

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return ()

    @property
    def holds_out(self) -> bool:
        return self.evaluate_with is not None

    def validation_metrics(self, model: LanguageModel, max_tokens: int | None) -> dict[str, float]:
        assert self.evaluate_with is not None
        return self.evaluate_with(model)

    def sample(self, model: LanguageModel) -> list[str]:
        return [] if self.sample_with is None else self.sample_with(model)


def loader(recipe: Recipe, *texts: Corpus) -> Loader:
    """Return the batches that a recipe draws from texts."""
    return TextInMemory(recipe, texts).loader


def next_token_loss(model: LanguageModel, features: torch.Tensor, batch: Batch) -> Loss:
    return token_loss(model, features, batch, settings=config.NextToken())


def held_out_loss(text: Corpus) -> Evaluate:
    """Return an evaluation: the mean loss of one batch of a text's held-out part."""
    (batch,) = loader(small(), SimpleNamespace(train=text.validation)).parts(1)

    def evaluate(model: LanguageModel) -> dict[str, float]:
        with torch.no_grad():
            loss, count, _ = next_token_loss(model, model.read(batch), batch)
        return {"loss": float(loss) / float(count)}

    return evaluate


# ---- runs


def train(
    recipe: SettledRecipe,
    path: Path,
    *,
    corpus: Corpus,
    evaluate: Evaluate | None = None,
    sample: Sample | None = None,
    command: str | None = None,
    device: str = "cpu",
    **options: Any,
) -> RunResult:
    """Train on a text in memory, in a new run folder. `options` are those of the worker."""
    worker = TrainingWorker(torch.device(device), **options)
    objective = TextInMemory(recipe, [corpus], evaluate, sample_with=sample)
    with claim_run(path) as folder:
        return start.train(recipe, folder, objective, worker=worker, notes={"command": command})


def resume(path: Path, *, corpus: Corpus, evaluate: Evaluate | None = None, **options: Any) -> RunResult:
    """Continue a run that `train` began. `options` are those of the worker."""
    folder = open_run(path)
    recipe, worker = folder.settled_recipe(), TrainingWorker(CPU, **options)
    with lock_run(folder):
        return start.resume(recipe, folder, TextInMemory(recipe, [corpus], evaluate), worker=worker)


class Runs:
    """Small runs in a folder, on one text. `changes` are those of the recipe of `small`."""

    def __init__(self, folder: Path):
        self.folder, self.corpus = folder, small_text()
        self.evaluate = held_out_loss(self.corpus)

    def train(self, *changes: str, name: str = "run", quiet: bool = True, **options: Any) -> RunResult:
        return train(small(*changes), self.folder / name, corpus=self.corpus, quiet=quiet, **options)

    def resume(self, name: str = "run", quiet: bool = True, **options: Any) -> RunResult:
        return resume(self.folder / name, corpus=self.corpus, quiet=quiet, **options)


def events(run: RunFolder | Path, kind: str) -> list[dict[str, Any]]:
    folder = RunFolder(run) if isinstance(run, Path) else run
    return [line for line in read_lines(folder.events) if line["event"] == kind]


def same_parameters(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    """Return whether two models have the same weights, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


# ---- interference with steps

Change = Callable[[int, OptimisationStep, Sequence[Batch]], OptimisationStep | None]


def changed_step(change: Change) -> Callable[..., StepResult]:
    """Return a replacement of `OptimisationStep.__call__` that calls `change` first, which may act, raise, or return
    another step to take. Steps are numbered as in the run; the pre-flight's, on a CPU, is 0."""
    take, number = OptimisationStep.__call__, -1

    def step(self: OptimisationStep, parts: Sequence[Batch], *args: Any) -> StepResult:
        nonlocal number
        number += 1
        return take(change(number, self, parts) or self, parts, *args)

    return step


def change_steps(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let `change` interfere with every step until the test ends."""
    monkeypatch.setattr(OptimisationStep, "__call__", changed_step(change))


def overwrite_weights(model: torch.nn.Module) -> None:
    """Replace the weights by noise, as a failing device might."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-3.0, 3.0, p.numel()).reshape(p.shape))
