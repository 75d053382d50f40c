"""weft's backward passes of GELU give PyTorch's gradients, for large inputs too, and save as little."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from weft.nn import activations as gelu


def with_gradient(function: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = function(x)
    return y, torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize(("ours", "approximate"), [(gelu.gelu, "none"), (gelu.gelu_tanh, "tanh")])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_values_and_gradients_are_torchs(ours: Any, approximate: str, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001, dtype=dtype), torch.tensor([0.0, -1e10, 1e10], dtype=dtype)])
    x.requires_grad_()
    expected = with_gradient(lambda x: F.gelu(x, approximate=approximate), x)
    for function in (ours, lambda x: gelu._GELU.apply(x, approximate == "none")):
        torch.testing.assert_close(with_gradient(function, x), expected, rtol=1e-6, atol=tolerance)
    assert torch.equal(ours(x.detach()), F.gelu(x.detach(), approximate=approximate))  # nothing to train


def test_the_form_for_compilers_is_the_same_function() -> None:
    x = torch.linspace(-30, 30, 4001, requires_grad=True)
    expected = with_gradient(lambda x: F.gelu(x, approximate="tanh"), x)
    torch.testing.assert_close(with_gradient(gelu.gelu_by_sigmoid, x), expected, rtol=1e-5, atol=2e-6)
    assert gelu.gelu_by_sigmoid(x.detach().bfloat16()).dtype == torch.bfloat16


def test_two_tensors_are_saved_one_of_them_the_output() -> None:
    y = gelu._GELU.apply(torch.randn(6, requires_grad=True), False)
    saved = [tensor.data_ptr() for tensor in y.grad_fn.saved_tensors]
    assert len(saved) == 2 and y.data_ptr() in saved
