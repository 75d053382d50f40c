"""Steps captured as CUDA graphs, and the few shapes of batches that they need."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.training.small import VOCAB
from torch import Tensor

from weft.data.batch import Batch, Source
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.nn.dropout import row_keys
from weft.objectives.tokens import token_loss
from weft.parallel.passes import Parallel
from weft.recipe.objective import NextToken
from weft.recipe.optimizer import SGD, AdamW, Muon, Optimizer
from weft.recipe.resolve import resolve
from weft.training import optimizer as optimizers
from weft.training.captured import CapturedStep
from weft.training.step import OptimisationStep

LOSS = partial(token_loss, settings=NextToken(smoothing=0.1))


def make_model(preset: str, *changes: str) -> LanguageModel:
    torch.manual_seed(0)
    sizes = ["tokenizer=byte", f"model.vocab_size={VOCAB}", "model.d_model=32", "model.layers=2", "model.dropout=0.3"]
    recipe = resolve(preset, [*sizes, *changes])
    return build(recipe.model)


def random_tokens(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=rng)


def pairs_batch(rows: int, source_time: int, time: int, *, seed: int) -> Batch:
    """Rows of unequal lengths with a source each."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, time + 1, (rows, 1), generator=rng)
    source_lengths = torch.randint(1, source_time + 1, (rows, 1), generator=rng)
    source = Source(random_tokens(rng, rows, source_time), torch.arange(source_time) < source_lengths)
    counts = torch.arange(time) < lengths
    tokens, targets = random_tokens(rng, rows, time), random_tokens(rng, rows, time)
    return Batch(tokens, targets, loss_mask=counts, source=source, keys=row_keys(seed, torch.arange(rows)))


def lanes_batch(rows: int, time: int, *, seed: int) -> Batch:
    """Rows that continue those of the previous step."""
    rng = torch.Generator().manual_seed(seed)
    tokens, targets = random_tokens(rng, rows, time), random_tokens(rng, rows, time)
    lanes, begins = torch.arange(rows), torch.full((rows,), seed % 4 == 0)
    return Batch(tokens, targets, lanes=lanes, begins=begins, keys=row_keys(seed, lanes))


@pytest.mark.parametrize("preset", ["vaswani-tiny", "bahdanau"])
def test_buckets_do_not_change_the_loss_or_the_gradient(preset: str) -> None:
    model, batch = make_model(preset), pairs_batch(19, 13, 9, seed=1)
    padded = batch.bucketed()
    assert padded.source is not None
    assert padded.tokens.shape == padded.source.tokens.shape == (24, 16)
    assert (padded.count, padded.read) == (batch.count, batch.read)
    results = []
    for each in (batch, padded):
        model.zero_grad()
        loss, _, extras = LOSS(model, model.read(each), each)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([loss.detach(), extras["nll"], *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def train(preset: str, settings: Optimizer, batches: list[Batch], *, max_graphs: int) -> list[Tensor]:
    """Return the weights after a step per batch, and the measurements of the steps."""
    model = make_model(preset).cuda().train()
    optimizer, limits = optimizers.build(settings, model), torch.tensor([50.0, 1e3], device="cuda")
    lanes = 0 if batches[0].lanes is None else len(batches[0].lanes)
    step = OptimisationStep(Parallel(model), optimizer, LOSS, torch.device("cuda"), clip=1.0, lanes=lanes)
    take = replace(CapturedStep.of(step), max_graphs=max_graphs)
    measured = []
    for number, batch in enumerate(batches):
        if number == len(batches) - 2:
            limits = limits * 0.0  # this update and the last are discarded
        result = take([batch.bucketed().pin()], 0.1 / (1 + number), limits)
        measured.append(torch.stack([result.loss, result.nll, result.gradient_norm, result.discarded]))  # type: ignore[list-item]
    captured = [graph for graph in take.graphs.values() if graph is not None]
    assert bool(captured) == bool(max_graphs)
    return [*measured, *[p.detach().cpu() for p in model.parameters()]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("lstm", SGD(lr=1.0, momentum=0.0)),
        ("gru", AdamW()),
        ("elman", SGD(lr=1.0)),
        ("vaswani-tiny", Muon()),
        ("vaswani-tiny", AdamW()),
        ("bahdanau", AdamW()),
    ],
)
def test_captured_steps_have_the_bits_of_plain_steps(preset: str, settings: Optimizer) -> None:
    if preset in ("lstm", "gru", "elman"):
        batches = [lanes_batch(6, 10, seed=seed) for seed in range(8)]
    else:  # two shapes, in turns
        shapes = [(19, 13, 9), (30, 5, 17)]
        batches = [pairs_batch(*shapes[seed % 2], seed=seed) for seed in range(10)]
    torch.use_deterministic_algorithms(True)
    try:
        plain, captured = (train(preset, settings, batches, max_graphs=graphs) for graphs in (0, 8))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, two) for one, two in zip(plain, captured, strict=True))
    assert plain[len(batches) - 1][3] == 1.0  # the last update was discarded
