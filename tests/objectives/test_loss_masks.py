"""Masked targets contribute exactly nothing to the gradient, objective by objective."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.batch import Batch, Source
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Decoder, Encoder, EncoderDecoder
from weft.models.head_config import TaggingHead
from weft.nn.config import Attention, LayerNorm, Plain
from weft.nn.dropout import row_keys
from weft.nn.position_config import Learned
from weft.objectives import table as objectives
from weft.recipe.resolve import resolve
from weft.runs.folder import RunFolder
from weft.training.objective import Objective

SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "context": 16,
    "layers": 1,
    "d_model": 8,
    "attention": Attention(heads=2),
    "feedforward": Plain(d_ff=16),
    "norm": LayerNorm(),
    "position": Learned(),
}


def gradient(model: LanguageModel, objective: Objective[Any], batch: Batch) -> list[Tensor]:
    model.zero_grad()
    loss, _, _ = objective.loss(model, model.read(batch), batch)
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def batch(targets: Tensor, mask: Tensor) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, targets.shape, generator=generator)
    return Batch(tokens, targets, loss_mask=mask)


MODELS: dict[str, Any] = {
    "chat": Decoder(**SHAPE),
    "masked": Encoder(**SHAPE),
    "tag": Encoder(**SHAPE, head=TaggingHead(labels=11, dropout=0.0)),
    "pairs": EncoderDecoder(**SHAPE),
}


def objective(name: str) -> Objective[Any]:
    """Return an objective that has read no data."""
    preset = {"chat": "gpt-tiny", "pairs": "vaswani-tiny"}.get(name, "bert-tiny")
    smoothing = ["objective.smoothing=0.1"] if name == "pairs" else []
    return objectives.build(resolve(preset, [f"objective={name}", *smoothing]), RunFolder("nowhere"))


@pytest.mark.parametrize("name", MODELS)
def test_a_masked_target_has_no_gradient_at_all(name: str) -> None:
    torch.manual_seed(0)
    model, learned = build(MODELS[name]).double(), objective(name)
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 11, (2, 6), generator=generator)
    mask = torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1]], dtype=torch.bool)
    first = batch(targets, mask)
    if name == "pairs":
        first = replace(first, source=Source(first.tokens.flip(1), torch.ones_like(mask)))
    other = replace(first, targets=torch.where(mask, targets, (targets + 3) % 11))
    assert not torch.equal(first.targets, other.targets)
    for one, two in zip(gradient(model, learned, first), gradient(model, learned, other), strict=True):
        assert torch.equal(one, two)  # bit for bit: masked targets make no difference
    # a target that counts makes one
    changed = replace(first, targets=torch.where(mask, (targets + 1) % 11, targets))
    pairs = zip(gradient(model, learned, first), gradient(model, learned, changed), strict=True)
    assert not all(torch.equal(one, two) for one, two in pairs)


def test_r_drop_is_the_mean_of_two_passes_and_their_divergence() -> None:
    """Liang et al. 2021, equation 4, halved: by torch's own cross-entropy and Kullback–Leibler divergence."""
    torch.manual_seed(0)
    alpha, model = 3.0, build(EncoderDecoder(**SHAPE, dropout=0.4)).train()
    learned = objectives.build(resolve("vaswani-tiny", [f"objective.r_drop={alpha}"]), RunFolder("nowhere"))
    mask = torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1]], dtype=torch.bool)
    rows = batch(torch.arange(12).view(2, 6) % 11, mask)
    rows = replace(rows, source=Source(rows.tokens.flip(1), torch.ones_like(mask)), keys=row_keys(5, torch.arange(2)))
    loss, _, _ = learned.loss(model, model.read(rows), rows)
    assert rows.keys is not None
    p, q = (model.head(model.read(replace(rows, keys=keys))).log_softmax(-1)[mask] for keys in (rows.keys, ~rows.keys))
    assert not torch.allclose(p, q)
    likelihood = F.nll_loss(p, rows.targets[mask], reduction="sum") + F.nll_loss(q, rows.targets[mask], reduction="sum")
    divergence = F.kl_div(p, q, reduction="sum", log_target=True) + F.kl_div(q, p, reduction="sum", log_target=True)
    torch.testing.assert_close(loss, (likelihood + alpha / 2 * divergence) / 2)
    loss, _, extras = learned.loss(model.eval(), model.read(rows), rows)
    assert loss == extras["nll"]


@pytest.mark.parametrize("name", ["chat", "masked", "tag"])
def test_without_targets_there_is_no_gradient(name: str) -> None:
    model = build(MODELS[name])
    empty = batch(torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.bool))
    assert all(not bool(g.any()) for g in gradient(model, objective(name), empty))
