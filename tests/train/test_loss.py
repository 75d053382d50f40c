"""The chunked loss against the plain one, and the plain one against torch's."""

import pytest
import torch
from torch.nn import functional as F

from weft.train.loss import cross_entropy, linear_cross_entropy


def test_plain_loss_is_torchs() -> None:
    logits, targets = torch.randn(9, 11), torch.randint(11, (9,))
    assert torch.allclose(cross_entropy(logits, targets), F.cross_entropy(logits, targets, reduction="none"), atol=1e-6)


def test_smoothing_is_torchs() -> None:
    logits, targets = torch.randn(9, 11), torch.randint(11, (9,))
    expected = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    assert torch.allclose(cross_entropy(logits, targets, smoothing=0.1), expected, atol=1e-6)


def test_z_loss_adds_the_squared_normaliser() -> None:
    logits, targets = torch.randn(9, 11), torch.randint(11, (9,))
    difference = cross_entropy(logits, targets, z_loss=0.5) - cross_entropy(logits, targets)
    assert torch.allclose(difference, 0.5 * logits.logsumexp(-1).square(), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 7, 1000])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_loss_equals_plain(rows: int, smoothing: float, z_loss: float, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    N, D, V = 17, 5, 13
    features, weight, bias = (
        torch.randn(shape, generator=generator, requires_grad=True) for shape in ((N, D), (V, D), (V,))
    )
    targets, mask = torch.randint(V, (N,), generator=generator), torch.rand(N, generator=generator) < 0.7
    given = bias if with_bias else None
    leaves = [features, weight, bias] if with_bias else [features, weight]

    losses = cross_entropy(F.linear(features, weight, given), targets, smoothing, z_loss)
    expected = losses[mask].sum()
    expected_gradients = torch.autograd.grad(expected * 0.3, leaves)

    loss, nll = linear_cross_entropy(features, weight, given, targets, mask, smoothing, z_loss, rows)
    gradients = torch.autograd.grad(loss * 0.3, leaves)

    assert torch.allclose(loss, expected, rtol=1e-5)
    plain = F.cross_entropy(F.linear(features, weight, given), targets, reduction="none")[mask].sum()
    assert torch.allclose(nll, plain, rtol=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_masked_places_give_no_gradient_even_where_their_loss_is_infinite() -> None:
    features = torch.tensor([[1.0], [float("inf")]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss, _ = linear_cross_entropy(
        features.nan_to_num(posinf=1e30), weight, None, torch.tensor([0, 1]), torch.tensor([True, False])
    )
    (gradient,) = torch.autograd.grad(loss, weight)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_logits_of_the_whole_batch_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor with as many elements as batch × vocabulary is made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    N, D, V, rows = 256, 4, 512, 16
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    features, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    with Watch():
        loss, _ = linear_cross_entropy(features, weight, None, torch.randint(V, (N,)), rows=rows)
        loss.backward()
    assert rows * V <= largest < N * V // 8
