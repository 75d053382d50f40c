"""Products with weights that oneDNN has packed: for a few rows at a time, as beams are, up to twice as fast.

A packed matrix is a copy, and for a single row the plain one is faster: so packing is for many rows over many steps.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.machine import best_of

ROWS = 25  # about as many as are multiplied at a time
GAIN = 1.25  # packed products are used where they are so much faster that every measurement shows it


class _Packed(NamedTuple):
    """A weight as oneDNN wants it, and what it was made of."""

    numbers: Tensor
    weight: "ReferenceType[Tensor]"
    version: tuple[int, int]


_held: WeakKeyDictionary[nn.Module, _Packed] = WeakKeyDictionary()  # a model answers many batches of lines


def packed_product(part: nn.Module, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x (batch, K) → x Wᵀ + b (batch, N) for a weight (N, K) in float32 on a CPU, which `part` multiplies by.

    The packed weight is kept with `part`, until the weight is another or has been changed.
    """
    version = weight.data_ptr(), 0 if weight.is_inference() else weight._version
    held = _held.get(part)
    if held is None or held.weight() is not weight or held.version != version:
        held = _Packed(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS), ref(weight), version)
        _held[part] = held
    times, numbers = torch.ops.mkldnn._linear_pointwise.default, held.numbers
    return lambda x: times(x, numbers, bias, "none", [], "")


@cache
@torch.inference_mode()
def packing_pays() -> bool:
    """Whether packed products are faster on this machine, as measured in some milliseconds, and give the same."""
    if not torch.backends.mkldnn.is_available():
        return False
    rng = torch.Generator().manual_seed(0)
    weight, x = torch.randn(1024, 512, generator=rng), torch.randn(ROWS, 512, generator=rng)
    try:
        ours = packed_product(nn.Module(), weight, None)
        if not torch.allclose(ours(x), F.linear(x, weight), atol=1e-3):
            return False
    except (RuntimeError, AttributeError):  # no such operation here
        return False
    taken = best_of({"plain": lambda: F.linear(x, weight), "packed": lambda: ours(x)}, 0.01)
    return taken["plain"] > GAIN * taken["packed"]
