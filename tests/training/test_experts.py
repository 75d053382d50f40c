"""Training mixtures of experts: resumed to the bit, balanced without a gradient, and the same on two processes."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.later import Later
from tests.parallel.test_ranks import in_processes, note, noted
from tests.spread import spread
from tests.training.small import VOCAB, Runs, settled
from tests.training.test_resume import stop_after, weights_hash

from weft.data.batch import Batch
from weft.errors import ConfigError, DivergedError
from weft.layout import Layout
from weft.models.build import build
from weft.nn.experts import ExpertLayers, Router
from weft.objectives.tokens import token_loss
from weft.parallel import mesh
from weft.parallel.context import check_context
from weft.parallel.passes import Parallel, Replicas
from weft.parallel.ranks import Ranks
from weft.recipe import objective
from weft.recipe.config import SettledRecipe
from weft.recipe.optimizer import AdamW, Muon
from weft.runs.lines import read_lines
from weft.training import optimizer
from weft.training.step import OptimisationStep, StepResult

pipeline = Later("weft.parallel.pipeline")

EXPERTS = "model.feedforward={ kind = 'experts', experts = 4, d_ff = 8, score = 'sigmoid', choice_bias = 0.01 }"


def recipe(*changes: str) -> SettledRecipe:
    sizes = ["model.layers=2", "model.d_model=16", "model.attention.heads=2", EXPERTS]
    return settled("llama-tiny", *sizes, "batch.size=4", "batch.length=12", "steps=12", *changes)


def take_steps(*parts: slice, parallel: Parallel | None = None, count: int = 2, **settings: Any) -> StepResult:
    """Take steps on one batch in these parts; return the last result."""
    torch.manual_seed(5)
    parallel = parallel or Parallel(build(recipe().model))
    adam = optimizer.build(settings.pop("optimizer", AdamW(lr=0.01)), parallel.model)
    tokens = torch.randint(VOCAB, (4, 13), generator=torch.Generator().manual_seed(1))

    def loss(model: Any, features: Any, batch: Batch) -> Any:
        return token_loss(model, features, batch, settings=objective.NextToken())

    step = OptimisationStep(parallel, adam, loss, torch.device("cpu"), **settings)
    for _ in range(count):
        result = step([Batch(tokens[part, :-1], tokens[part, 1:]) for part in parts], 0.01)
    return result


@pytest.mark.parametrize("kind", spread(["adamw", "muon"], 1))
def test_a_resumed_run_equals_one_that_never_stopped(runs: Runs, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    changes = [EXPERTS, f"optimizer.kind={kind}"]
    whole = runs.train(*changes, name="whole")
    biases = [part.choice_bias for part in whole.model.modules() if isinstance(part, Router)]
    assert all(bias is not None and bias.count_nonzero() for bias in biases)
    stop_after(monkeypatch, 7, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        runs.train(*changes, name="cut")
    monkeypatch.undo()
    resumed = runs.resume("cut")
    assert resumed.run.metrics.read_text() == whole.run.metrics.read_text()
    assert weights_hash(resumed.run) == weights_hash(whole.run)
    logged = [line for line in read_lines(whole.run.metrics) if "loss" in line]
    for line in logged:
        assert 1.0 <= line["busiest_expert"] <= 2.0 and 0.0 < line["router_entropy"] <= 1.387
        assert line["dropped_tokens"] == 0.0 and 0.0 <= line["idle_experts"] <= 0.5


def test_the_loss_is_the_mean_over_targets_plus_each_parts_auxiliary_loss() -> None:
    """Dividing a batch changes the loss by the balance of the parts alone."""
    whole = take_steps(slice(0, 4), count=1)
    halves = take_steps(slice(0, 2), slice(2, 4), count=1)
    single = [take_steps(slice(n, n + 2), count=1) for n in (0, 2)]
    torch.testing.assert_close(whole.nll, halves.nll)
    auxiliary = sum(part.loss - part.nll for part in single) / 2
    torch.testing.assert_close(halves.loss - halves.nll, auxiliary)
    assert whole.loss > whole.nll
    assert whole.routing is not None and halves.routing is not None
    torch.testing.assert_close(whole.routing, halves.routing)


def test_a_discarded_update_leaves_the_choice_unchanged() -> None:
    model = build(recipe().model)
    biases = [part.choice_bias for part in model.modules() if isinstance(part, Router)]
    parallel = Parallel(model)
    adam = optimizer.build(AdamW(lr=0.01), model)
    tokens = torch.randint(VOCAB, (4, 13))
    loss = lambda model, features, batch: token_loss(model, features, batch, settings=objective.NextToken())  # noqa: E731
    step, parts = OptimisationStep(parallel, adam, loss, torch.device("cpu")), [Batch(tokens[:, :-1], tokens[:, 1:])]
    step(parts, 0.01, torch.zeros(2))  # every loss is above 0
    assert all(bias is not None and not bias.count_nonzero() for bias in biases)
    step(parts, 0.01, torch.full((2,), 1e30))
    assert all(bias is not None and bias.count_nonzero() for bias in biases)


def test_scores_that_are_not_a_number_are_the_guards(runs: Runs) -> None:
    """A router with NaN scores changes no weight; the run rolls back, and gives up in one line."""
    recipe_changes = [EXPERTS, "guard.patience=2", "guard.rollbacks=1"]

    def broken(router: Router, args: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits * torch.nan

    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: broken(module, args, output) if isinstance(module, Router) else None  # type: ignore[arg-type]
    )
    try:
        with pytest.raises(DivergedError, match="training diverged at step 1"):
            runs.train(*recipe_changes, name="broken")
    finally:
        handle.remove()


def test_a_collapsed_router_is_said_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.training.loop.COLLAPSED", 0.0)
    monkeypatch.setattr("weft.training.loop.COLLAPSED_LOGS", 2)
    runs.train(EXPERTS, name="collapsed")
    collapsed = [event for event in read_lines(runs.folder / "collapsed" / "events.jsonl") if "busiest" in event]
    assert [event["step"] for event in collapsed] == [6]


def test_a_mixture_whose_layers_are_all_dense_trains(runs: Runs) -> None:
    dense = EXPERTS.replace(" }", ", every = 3, dense = { kind = 'gated', d_ff = 8 } }")
    trained = runs.train(dense, name="dense")
    assert not any("busiest_expert" in line for line in read_lines(trained.run.metrics))


def test_muon_orthogonalises_each_experts_matrices() -> None:
    torch.manual_seed(0)
    model = build(recipe().model)
    parallel = Parallel(model)
    (layers, *_) = [part for part in model.modules() if isinstance(part, ExpertLayers)]
    before = [layers.gate_up.detach().clone(), layers.down.detach().clone()]
    take_steps(slice(0, 4), parallel=parallel, count=1, optimizer=Muon(lr=0.01, weight_decay=0.0))
    for old, new in zip(before, (layers.gate_up, layers.down), strict=True):
        for change in (old - new.detach()).flatten(0, 1).split(8 if old.shape[1] == 16 and old is before[0] else 16):
            values = torch.linalg.svdvals(change) / (0.01 * 0.2 * 16**0.5)
            assert values.max() < 1.3 and values.max() > 0.5


def _replicas(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(5)
    model = build(recipe().model)
    layout = mesh.build(recipe("parallel.replicate=2").parallel, ranks, torch.device("cpu"))
    rows = slice(2 * ranks.rank, 2 * ranks.rank + 2)
    result = take_steps(rows, parallel=Replicas(model, layout))
    biases = [part.choice_bias.tolist() for part in model.modules() if isinstance(part, Router)]  # type: ignore[union-attr]
    sums = [float(p.detach().double().sum()) for p in model.parameters()]
    note(folder, ranks, loss=float(result.loss), norm=float(result.gradient_norm), biases=biases, sums=sums)


@pytest.mark.slow
def test_two_replicas_equal_one_process(tmp_path: Path) -> None:
    assert in_processes(_replicas, tmp_path) == [0, 0]
    first, second = noted(tmp_path)
    torch.manual_seed(5)
    model = build(recipe().model)
    result = take_steps(slice(0, 4), parallel=Parallel(model))
    assert first == second
    assert first["loss"] == pytest.approx(float(result.loss), abs=1e-6)
    assert first["norm"] == pytest.approx(float(result.gradient_norm), rel=1e-5)
    biases = [part.choice_bias.tolist() for part in model.modules() if isinstance(part, Router)]  # type: ignore[union-attr]
    assert first["biases"] == biases
    assert first["sums"] == pytest.approx([float(p.detach().double().sum()) for p in model.parameters()], abs=1e-4)


REFUSALS: dict[str, Callable[[], object]] = {
    "tensor": lambda: recipe("parallel.tensor=2"),
    "experts": lambda: settled("gpt-tiny", "parallel.experts=2"),
    "experts and shard": lambda: recipe("parallel.experts=2", "parallel.shard=2"),
    "pipeline": lambda: pipeline.check_stages(recipe().model, Layout(pipeline=2)),
    "context": lambda: check_context(Layout(context=2), recipe().model, "next-token", length=12),
}


@pytest.mark.parametrize("axis", REFUSALS)
def test_what_cannot_be_divided_is_refused(axis: str) -> None:
    with pytest.raises(ConfigError, match=r"mixture|parallel\.experts = 2: can't be combined with parallel.shard"):
        REFUSALS[axis]()
