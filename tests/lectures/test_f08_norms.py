"""F8: LayerNorm and RMSNorm are the slides' formulas; σ is the population deviation.

python -c "import torch; from weft.nn import config, norm; print(norm.build(config.RMSNorm(), 4)(torch.arange(4.)))"
"""

from typing import Any

import pytest
import torch

from weft.nn.config import LayerNorm, RMSNorm
from weft.nn.norm import build

X = torch.randn(5, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 2


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias: bool) -> None:
    module: Any = build(LayerNorm(eps=1e-30, bias=bias), 12).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    mu = X.mean(-1, keepdim=True)
    sigma = ((X - mu) ** 2).mean(-1, keepdim=True).sqrt()
    expected = module.weight / sigma * (X - mu) + (module.bias if bias else 0)
    torch.testing.assert_close(module(X), expected, atol=1e-12, rtol=1e-12)


def test_rms_norm() -> None:
    module = build(RMSNorm(eps=1e-30), 12).double()
    assert module.weight is not None
    torch.nn.init.normal_(module.weight)
    expected = X / (X**2).mean(-1, keepdim=True).sqrt() * module.weight
    torch.testing.assert_close(module(X), expected, atol=1e-12, rtol=1e-12)
    # eps is inside the root
    tiny = torch.full((1, 4), 1e-4, dtype=torch.float64)
    expected = tiny / (tiny**2 + 1e-5).sqrt()
    torch.testing.assert_close(build(RMSNorm(eps=1e-5), 4).double()(tiny), expected)
