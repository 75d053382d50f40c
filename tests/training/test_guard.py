"""The guard: an outlier's update is discarded, a run that diverges rolls back, and a resumed run does both again."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.small import (
    CPU,
    Corpus,
    Runs,
    change_steps,
    events,
    loader,
    next_token_loss,
    overwrite_weights,
    same_parameters,
    small,
)

from weft.data.batch import Batch
from weft.errors import RunError
from weft.models.build import build
from weft.parallel.passes import Parallel
from weft.recipe.config import GuardConfig
from weft.recipe.optimizer import SGD, Adam, AdamW, Optimizer
from weft.runs import checkpoint
from weft.runs.lines import read_lines
from weft.runs.snapshot import snapshot
from weft.training import optimizer as optimizers
from weft.training.guard import MAX_FLOAT32, Guard, StepRecord
from weft.training.objective import Loss
from weft.training.step import OptimisationStep

CHANCE = math.log(23)


def calm(guard: Guard, steps: int, settings: GuardConfig, loss: float = 2.0) -> None:
    """Observe ordinary steps: losses around `loss`, norms around 1."""
    records = [StepRecord(loss + 0.02 * (i % 5 - 2), 1.0 + 0.1 * (i % 3 - 1), False) for i in range(steps)]
    assert guard.observe(records, settings, CHANCE) is None


# ---- outliers


def test_at_first_only_finiteness_counts() -> None:
    guard, settings = Guard(), GuardConfig()
    assert guard.limits(settings) == (MAX_FLOAT32, MAX_FLOAT32)
    calm(guard, 31, settings)
    assert guard.limits(settings) == (MAX_FLOAT32, MAX_FLOAT32)
    calm(guard, 1, settings)
    loss, norm = guard.limits(settings)
    assert 2.5 < loss < 4.0
    assert 3.0 < norm < 10.0


def test_limits_follow_the_median_and_ignore_outliers() -> None:
    guard, settings = Guard(), GuardConfig()
    calm(guard, 64, settings)
    before = guard.limits(settings)
    guard.observe([StepRecord(50.0, 900.0, True)] * 3, settings, CHANCE)
    assert guard.limits(settings) == pytest.approx(before, rel=0.1)
    calm(guard, 128, settings, loss=1.0)
    assert guard.limits(settings)[0] < 2.0


def test_without_spikes_every_finite_loss_passes() -> None:
    guard, settings = Guard(), GuardConfig(spike=0.0)
    records = [StepRecord(2.0, 1.0, False)] * 40 + [StepRecord(1e6, 1e6, False)] * 40
    assert guard.observe(records, settings, CHANCE) is None
    assert guard.limits(settings) == (MAX_FLOAT32, MAX_FLOAT32)
    assert guard.observe([StepRecord(math.nan, 1.0, True)] * 8, settings, CHANCE) == 81


def test_many_bad_steps_are_a_divergence_and_few_are_not() -> None:
    guard, settings = Guard(), GuardConfig(patience=4)
    calm(guard, 40, settings)
    for _ in range(10):  # three in eight
        assert guard.observe([StepRecord(math.inf, math.nan, True)] * 3, settings, CHANCE) is None
        calm(guard, 8, settings)
    assert guard.observe([StepRecord(9.0, 1.0, True)] * 4, settings, CHANCE) == 40 + 10 * 11 + 1


def test_a_loss_above_chance_is_a_divergence_from_the_start() -> None:
    guard = Guard()
    records = [StepRecord(CHANCE, 1.0, False)] + [StepRecord(1.5 * CHANCE, 1.0, False)] * 8
    assert guard.observe(records, GuardConfig(), CHANCE) == 2


def test_a_loss_that_creeps_up_is_noticed() -> None:
    """Each step is close to the one before it, yet the loss doubles: the measure is the lowest median."""
    guard, settings = Guard(), GuardConfig(window=32)
    calm(guard, 100, settings, loss=1.0)
    noticed = [guard.observe([StepRecord(1.0 + 0.002 * i, 1.0, False)], settings, CHANCE) for i in range(500)]
    assert any(noticed)


def test_tries_count_until_the_run_gets_further() -> None:
    settings = GuardConfig(patience=2)
    guard = Guard(step=100, shift=3)
    guard = guard.go_back(Guard(step=80), settings)
    assert (guard.tries, guard.rate, guard.back_to, guard.shift) == (1, 0.5, 80, 23)  # batch 104 comes next
    guard.step = 90
    guard = guard.go_back(Guard(step=60), settings)
    assert (guard.tries, guard.rate, guard.furthest, guard.shift) == (2, 0.125, 100, 53)
    calm(guard, 44, settings)
    assert guard.tries == 2
    calm(guard, 1, settings)
    assert guard.tries == 0


# ---- discarded updates


@pytest.mark.parametrize("optimizer", [AdamW(), Adam(), SGD()])
@pytest.mark.parametrize("first", [True, False])
def test_a_discarded_update_changes_nothing(corpus: Corpus, optimizer: Optimizer, first: bool) -> None:
    """Weights and moments are the same bits after a step over the limit, and later steps as if it had not been."""
    settings = small("model.dropout=0.0")
    batches = loader(settings, corpus)
    wide, narrow = torch.tensor([MAX_FLOAT32, MAX_FLOAT32]), torch.tensor([MAX_FLOAT32, 1e-6])

    def steps(limits: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        model = build(settings.model)
        built = optimizers.build(optimizer, model)
        step = OptimisationStep(Parallel(model), built, next_token_loss, CPU, clip=1.0)
        discarded = [step(batches.parts(1), 0.01, limit).discarded for limit in limits]
        moments = [value for values in built.state.values() for value in values.values()]
        return [*model.parameters(), *moments], [float(d) for d in discarded if d is not None]

    with_one, discarded = steps([narrow, wide] if first else [wide, narrow])
    without, _ = steps([wide])
    assert discarded == ([1.0, 0.0] if first else [0.0, 1.0])
    assert len(with_one) == len(without)
    assert all(torch.equal(a, b) for a, b in zip(with_one, without, strict=True))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_an_update_that_is_not_finite_is_discarded(corpus: Corpus, number: float) -> None:
    settings = small("model.dropout=0.0")
    model = build(settings.model)
    before = [p.detach().clone() for p in model.parameters()]

    def broken(model: Any, features: torch.Tensor, batch: Batch) -> Loss:
        loss, count, extras = next_token_loss(model, features, batch)
        return loss * number, count, extras

    step = OptimisationStep(Parallel(model), optimizers.build(AdamW(), model), broken, CPU, clip=1.0)
    result = step(loader(settings, corpus).parts(1), 0.01, torch.tensor([MAX_FLOAT32, MAX_FLOAT32]))
    assert result.discarded == 1.0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# ---- rolling back


def overwrite_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Overwrite the weights with noise before these steps."""

    def overwrite(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if number in steps:
            overwrite_weights(step.parallel.model)

    change_steps(monkeypatch, overwrite)


LONG = ["steps=80", "log.every=5", "checkpoint.every=20", "evaluate.every=40", "optimizer.lr=0.01"]
LONG += ["guard.window=32", "guard.patience=4"]


def test_overwritten_weights_are_rolled_back(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite_at(monkeypatch, 50)
    lines: list[str] = []
    result = runs.train(*LONG, log=lines.append, evaluate=runs.evaluate, quiet=False)
    (event,) = events(result.run, "rollback")
    assert (event["to"], event["since"]) == (40, 50)
    assert event["rate"] == 0.5
    assert any("rolling back to step 40" in line and "attempt 1 of 4" in line for line in lines)
    metrics = [line for line in read_lines(result.run.metrics) if "loss" in line]
    assert [line["step"] for line in metrics] == list(range(5, 81, 5))  # each step once
    assert metrics[-1]["loss"] < metrics[7]["loss"] < metrics[0]["loss"]
    assert metrics[-1]["lr"] < 0.01 / 2
    # the text continues after what was read before the rollback
    assert metrics[8]["epoch"] == pytest.approx(loader(small(), runs.corpus).epochs(45 + event["shift"]))


def test_no_progress_means_further_back_and_then_the_end(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite_at(monkeypatch, *range(50, 400))
    settings = [*LONG, "guard.rollbacks=2"]
    with pytest.raises(RunError, match=r"2 rollbacks, down to 0.125 of the learning rate, did not help; lower") as e:
        runs.train(*settings)
    assert "\n" not in str(e.value)
    assert [line["to"] for line in events(runs.folder / "run", "rollback")] == [40, 20]


def test_a_diverged_model_is_never_called_the_best(runs: Runs) -> None:
    lines: list[str] = []
    wild = ["optimizer.lr=1e4", "evaluate.every=1", "schedule.warmup=1", "guard.spike=0", "log.every=1"]
    huge = {"loss": 2.376e10, "perplexity": math.inf}
    runs.train(*wild, "steps=3", log=lines.append, evaluate=lambda model: huge, quiet=False)
    (line, *_) = [line for line in lines if "validation" in line]
    assert line == (
        "step 1: validation loss 2.38e10 · perplexity ∞ (worse than a model that has learned nothing, 3.14)"
    )
    assert all(len(word) < 12 for line in lines if line.startswith("step") for word in line.split())


@pytest.mark.slow
def test_a_run_that_rolled_back_resumes_to_the_same(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning rate is so high that the run rolls back more than once; it is stopped in between."""
    wild = ["optimizer.lr=3.0", "steps=60", "log.every=5", "checkpoint.every=10", "schedule.warmup=1"]
    settings = [*wild, "guard.patience=4"]
    straight = runs.train(*settings, name="straight", evaluate=runs.evaluate)
    assert len(events(straight.run, "rollback")) >= 2
    for stop in (17, 45):

        def crash(number: int, step: OptimisationStep, parts: Sequence[Batch], last: int = stop) -> None:
            if number >= last:
                raise RuntimeError("power cut")

        change_steps(monkeypatch, crash)
        with pytest.raises(RuntimeError, match="power cut"):
            runs.train(*settings, name=f"cut-{stop}", evaluate=runs.evaluate)
        monkeypatch.undo()
        resumed = runs.resume(f"cut-{stop}", evaluate=runs.evaluate)
        assert resumed.run.metrics.read_text() == straight.run.metrics.read_text()
        assert same_parameters(resumed.model, straight.model)


def test_the_last_good_checkpoint_outlives_those_of_a_divergence(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for step in (10, 20, 30):
        notes = {"guard": {"wrong": [15, 17] if step > 10 else []}}
        checkpoint.write(tmp_path, snapshot(step, model, None, notes=notes), keep=1)
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [10, 30]
    assert [checkpoint.step_of(path) for path in checkpoint.intact(tmp_path, before=30)] == [10]
