"""GELU's own backward pass gives PyTorch's numbers, far out on both sides too, and keeps as little."""

import pytest
import torch
from torch.nn import functional as F

from weft.nn import activations as gelu

PAIRS = [(gelu.gelu, gelu._Exact, "none"), (gelu.gelu_tanh, gelu._Tanh, "tanh")]


@pytest.mark.parametrize(("ours", "by_hand", "approximate"), PAIRS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_values_and_gradients_are_torchs(ours, by_hand, approximate, dtype, tolerance) -> None:  # type: ignore[no-untyped-def]
    x = torch.cat([torch.linspace(-30, 30, 4001, dtype=dtype), torch.tensor([0.0, -1e10, 1e10], dtype=dtype)])
    x.requires_grad_()
    expected = F.gelu(x, approximate=approximate)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    for function in (ours, by_hand.apply):
        y = function(x)
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.allclose(y, expected, rtol=1e-6, atol=tolerance)
        assert torch.allclose(found, slope, rtol=1e-6, atol=tolerance)


def test_the_compiled_form_is_the_same_function() -> None:
    x = torch.linspace(-30, 30, 4001, requires_grad=True)
    y, expected = gelu.by_sigmoid(x), F.gelu(x, approximate="tanh")
    (found,), (slope,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x)
    assert torch.allclose(y, expected, atol=2e-6)
    assert torch.allclose(found, slope, atol=2e-6)
    assert gelu.by_sigmoid(x.detach().bfloat16()).dtype == torch.bfloat16


def test_nothing_is_kept_where_nothing_is_learned() -> None:
    x = torch.randn(5)
    assert torch.equal(gelu.gelu(x), F.gelu(x))
    assert torch.equal(gelu.gelu_tanh(x), F.gelu(x, approximate="tanh"))


def test_two_tensors_are_kept_one_of_them_the_output() -> None:
    kept = []
    x = torch.randn(6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = gelu._Tanh.apply(x)
    assert len(kept) == 2
    assert y.data_ptr() in kept
