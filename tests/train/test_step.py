"""One step: cutting a batch never changes its gradient, matrices decay and vectors don't, clipping clips."""

from dataclasses import replace

import pytest
import torch

from weft.train.config import SGD, AdamW, NextToken
from weft.train.feed import feed
from weft.train.objective import next_token
from weft.train.optimizer import decay_groups
from weft.train.step import backward, optimisation_step

CPU = torch.device("cpu")


def gradients(model, objective, parts):  # type: ignore[no-untyped-def]
    model.zero_grad()
    loss, _, count = backward(model, objective, parts, "fp32", CPU)
    return loss, count, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_splitting_a_batch_never_changes_the_gradient(recipe, corpus, parts, masked) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    settings = recipe("model.dropout=0.0")
    model = settings.model.build()
    (batch,) = feed(settings, corpus).parts(1)
    if masked:  # very unequal parts: the last row counts once, the others almost fully
        mask = torch.rand(batch.tokens.shape) < 0.8
        mask[-1] = False
        mask[-1, 0] = True
        batch = replace(batch, loss_mask=mask)
    objective = next_token(NextToken(smoothing=0.1, z_loss=1e-3))
    whole_loss, whole_count, whole = gradients(model, objective, [batch])
    cut_loss, cut_count, cut = gradients(model, objective, batch.split(parts))
    assert cut_count == whole_count
    assert torch.allclose(cut_loss, whole_loss, atol=1e-6)
    for ours, theirs in zip(cut, whole, strict=True):
        assert (ours - theirs).abs().max() <= 1e-6


def test_a_model_without_a_readout_learns_the_same(recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    """The loss through logits and the chunked loss agree."""
    settings = recipe("model.dropout=0.0")
    model = settings.model.build()
    (batch,) = feed(settings, corpus).parts(1)
    objective = next_token(NextToken(smoothing=0.1))

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def features(self, tokens, **given):  # type: ignore[no-untyped-def]
            return self.inner.features(tokens, **given)

        def head(self, features):  # type: ignore[no-untyped-def]
            return self.inner.head(features)

    loss, _, expected = gradients(model, objective, [batch])
    plain_loss, _, plain = gradients(Plain(), objective, [batch])
    assert torch.allclose(loss, plain_loss, atol=1e-5)
    for ours, theirs in zip(plain, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_matrices_decay_and_vectors_do_not(recipe) -> None:  # type: ignore[no-untyped-def]
    model = recipe().model.build()
    decaying, fixed = decay_groups(model, 0.5)
    assert decaying["weight_decay"] == 0.5
    assert fixed["weight_decay"] == 0.0
    assert all(p.dim() >= 2 for p in decaying["params"])
    assert all(p.dim() < 2 for p in fixed["params"])
    assert sum(len(group["params"]) for group in (decaying, fixed)) == len(list(model.parameters()))


def test_decay_shrinks_matrices_that_get_no_gradient() -> None:
    model = torch.nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = AdamW(weight_decay=0.1).build(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    optimizer.step()
    assert torch.allclose(model.weight, before["weight"] * (1 - 0.5 * 0.1))
    assert torch.equal(model.bias, before["bias"])


def test_clipping_bounds_the_update_and_reports_the_norm_before(recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("model.dropout=0.0")
    model = settings.model.build()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = SGD(momentum=0.0, weight_decay=0.0).build(model)
    objective = next_token(NextToken())
    result = optimisation_step(model, optimizer, objective, feed(settings, corpus).parts(1), 1.0, 0.01, "fp32", CPU)
    moved = torch.stack([(p - q).norm() for p, q in zip(model.parameters(), before, strict=True)]).norm()
    assert float(result.gradient_norm) > 0.01
    assert float(moved.detach()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bf16_is_close_to_fp32(recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("model.dropout=0.0")
    model = settings.model.build()
    parts = feed(settings, corpus).parts(1)
    exact, _, _ = backward(model, next_token(NextToken()), parts, "fp32", CPU)
    rough, _, _ = backward(model, next_token(NextToken()), parts, "bf16", CPU)
    assert float(rough) == pytest.approx(float(exact), rel=0.02)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
