"""Feed-forward layers by their formula, and the gated layer's gradient kernel on a GPU."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from weft.nn import config, feedforward


@pytest.mark.parametrize("beta", [0.1, 1.0, 2.5])
def test_swish_is_x_times_the_sigmoid_of_beta_x(beta: float) -> None:
    torch.manual_seed(0)
    plain = feedforward.build(config.Plain(d_ff=7, activation="silu", beta=beta), 5)
    gated = feedforward.build(config.Gated(d_ff=7, beta=beta), 5)
    assert isinstance(plain, feedforward.Plain) and isinstance(gated, feedforward.Gated)
    for parameter in (*plain.parameters(), *gated.parameters()):
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, 5)
    h = plain.up(x)
    torch.testing.assert_close(plain(x), plain.down(h / (1 + torch.exp(-beta * h))))
    gate, up = gated.gate_up(x).chunk(2, dim=-1)
    torch.testing.assert_close(gated(x), gated.down(gate / (1 + torch.exp(-beta * gate)) * up))


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
