"""The gated layer's gradient kernel on a GPU."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from weft.nn import config, feedforward


@pytest.mark.gpu
def test_a_compiled_gated_layer_has_the_right_gradient() -> None:
    torch.manual_seed(0)
    layer = feedforward.build(config.Gated(d_ff=3000, activation="silu", bias=False), 256).cuda()
    exact = copy.deepcopy(layer).double()
    x, upstream = torch.randn(2, 3, 50, 256, device="cuda").unbind(0)
    assert layer.swiglu is not None

    def gradients(module: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = run(x)
        y.backward(upstream.to(y.dtype))
        return [y, x.grad, *(parameter.grad for parameter in module.parameters())]  # type: ignore[list-item]

    with torch.autocast("cuda", torch.bfloat16):
        found = gradients(layer, x, torch.compile(layer))
    expected = gradients(exact, x.double(), exact)
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 0.01
