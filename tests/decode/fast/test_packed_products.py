"""Products with packed weights are the plain ones, whatever has happened to the weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from weft.decode.fast import cpu
from weft.decode.fast.cpu import packed_product

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


def test_what_is_packed_is_kept_until_the_weight_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "unpacked_pays", lambda: False)
    torch.manual_seed(0)
    part, x = nn.Linear(48, 40), torch.randn(7, 48)
    seen: list[int] = []
    pack = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda *given: seen.append(1) or pack(*given), raising=False
    )

    def same() -> None:
        found = packed_product(part, part.weight, part.bias)(x)
        torch.testing.assert_close(found, F.linear(x, part.weight, part.bias), atol=1e-5, rtol=1e-5)

    with torch.no_grad():
        same()
        same()
        assert len(seen) == 1
        part.weight.mul_(2.0)  # as an optimizer's step does
        same()
        assert len(seen) == 2
        part.weight = nn.Parameter(torch.randn(40, 48))
        same()
        assert len(seen) == 3
        other = nn.Linear(48, 40)
        packed_product(other, other.weight, None)
        assert len(seen) == 4
