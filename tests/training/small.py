"""A model, a text and a recipe small enough to train in a second, without a tokenizer and without files to read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.data import held as in_memory

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.objectives.next_token import NextToken
from weft.objectives.tokens import token_loss
from weft.parallel.ranks import ALONE, Ranks
from weft.progress import Log, log_to_stderr
from weft.recipe.config import Recipe, SettledRecipe
from weft.recipe.resolve import resolve
from weft.recipe.settle import Facts, settle
from weft.runs.folder import RunFolder, claim_run, lock_run, open_run
from weft.training import start
from weft.training.loader import Loader
from weft.training.state import RunResult
from weft.training.step import OptimisationStep, StepResult
from weft.training.worker import Worker

VOCAB = 23
Evaluate = Callable[[LanguageModel], dict[str, float]]
Sample = Callable[[LanguageModel], list[str]]


# ---- a recipe and a text


def settled(preset: str, *changes: str) -> SettledRecipe:
    """A preset for the text below, with nothing left open."""
    wanted = resolve(preset, ["tokenizer=byte", f"model.vocab_size={VOCAB}", *changes])
    return settle(wanted, Facts(3500, VOCAB))[0]


def small(*changes: str) -> SettledRecipe:
    """A settled recipe of a two-layer LLaMA with dropout, so that random numbers matter too."""
    base = [
        "model.layers=2",
        "model.d_model=16",
        "model.attention.heads=2",
        "model.feedforward.d_ff=24",
        "model.dropout=0.1",
        "batch.size=4",
        "batch.length=12",
        "steps=12",
        "log.every=3",
        "evaluate.every=4",
        "checkpoint.every=5",
    ]
    return settled("llama-tiny", *base, *changes)


def counting_text(tokens: int, seed: int = 0) -> np.ndarray:
    """Tokens with something to learn: each is likely to be followed by the next number."""
    generator = np.random.default_rng(seed)
    jumps = np.where(generator.random(tokens) < 0.8, 1, generator.integers(0, VOCAB, tokens))
    return np.cumsum(jumps) % VOCAB


def small_text() -> SimpleNamespace:
    """Such a text in documents, and a part of it held out."""
    ids = counting_text(4000)
    return SimpleNamespace(
        train=in_memory.tokens(ids[:3500], list(range(0, 3500, 500)), [600] * 7),
        validation=in_memory.tokens(ids[3500:], [0], [600]),
    )


# ---- an objective in memory


class GivenText(NextToken):
    """The next token of texts that are given, not read. `evaluate_with` and `sample_with` take the place of its own
    evaluation and samples; without the first one nothing is held out."""

    def __init__(
        self,
        recipe: Recipe,
        texts: Sequence[Any],
        evaluate_with: Evaluate | None = None,
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

    def evaluate(self, model: LanguageModel) -> dict[str, float]:
        assert self.evaluate_with is not None
        return self.evaluate_with(model)

    def sample(self, model: LanguageModel) -> list[str]:
        return [] if self.sample_with is None else self.sample_with(model)


def loader(recipe: Recipe, *texts: Any) -> Loader:
    """The batches that a recipe draws from some texts."""
    return GivenText(recipe, texts).loader


def held_out_loss(text: Any) -> Evaluate:
    """An evaluation: the mean loss of one batch of a text's held-out part."""
    recipe = small()
    (batch,) = loader(recipe, SimpleNamespace(train=text.validation)).parts(1)

    def evaluate(model: LanguageModel) -> dict[str, float]:
        with torch.no_grad():
            loss, count, _ = token_loss(recipe.objective, model, model.read(batch), batch)  # type: ignore[arg-type]
        return {"loss": float(loss) / float(count)}

    return evaluate


# ---- runs


def train(
    recipe: SettledRecipe,
    path: Path,
    *,
    corpus: Any,
    evaluate: Evaluate | None = None,
    sample: Sample | None = None,
    log: Log = log_to_stderr,
    quiet: bool = False,
    ranks: Ranks = ALONE,
    device: str = "cpu",
    command: str | None = None,
) -> RunResult:
    """Train on a text in memory, in a new run folder."""
    worker = Worker(torch.device(device), ranks, log, quiet)
    objective = GivenText(recipe, [corpus], evaluate, sample)
    with claim_run(path) as folder:
        return start.train(recipe, folder, objective, worker, {"command": command})


def resume(
    path: Path,
    *,
    corpus: Any,
    evaluate: Evaluate | None = None,
    log: Log = log_to_stderr,
    quiet: bool = False,
    ranks: Ranks = ALONE,
    device: str = "cpu",
) -> RunResult:
    """Continue such a run."""
    folder = open_run(path)
    recipe = folder.settled_recipe()
    worker = Worker(torch.device(device), ranks, log, quiet)
    with lock_run(folder):
        return start.resume(recipe, folder, GivenText(recipe, [corpus], evaluate), worker)


# ---- what happens in the middle of it

Meddle = Callable[[int, OptimisationStep, Sequence[Batch]], OptimisationStep | None]


def meddle(change: Meddle) -> Callable[..., StepResult]:
    """What `OptimisationStep.__call__` may be replaced with: `change` is asked before each step, and may act, raise, or
    give another step to take instead. Steps are numbered as the run's are; the pre-flight's, on a processor, has 0."""
    take, number = OptimisationStep.__call__, -1

    def step(self: OptimisationStep, parts: Sequence[Batch], *given: Any) -> StepResult:
        nonlocal number
        number += 1
        return take(change(number, self, parts) or self, parts, *given)

    return step


def meddle_with_steps(monkeypatch: pytest.MonkeyPatch, change: Meddle) -> None:
    """The same, until the test ends."""
    monkeypatch.setattr(OptimisationStep, "__call__", meddle(change))


def overwrite_weights(model: LanguageModel) -> None:
    """Put noise in place of the weights, as a failing device might."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-3.0, 3.0, p.numel()).reshape(p.shape))
