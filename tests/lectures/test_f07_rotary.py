"""F7: the product of a rotated query and a rotated key depends on their distance only, in both pair layouts.

python -m pytest tests/lectures/test_f07_rotary.py
"""

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.nn.position import build
from weft.nn.position_config import Rotary, Sizes


def rotated(x: torch.Tensor, m: int, pairs: Literal["adjacent", "halves"]) -> torch.Tensor:
    module = build(Rotary(pairs=pairs), Sizes(d_model=16, heads=1, d_head=16, context=4096, causal=True, layers=1))
    angles = module.angles(torch.tensor([[m]]), m + 1, x.dtype)
    assert angles is not None
    return module.rotate(x.view(1, 1, 1, 16), angles).flatten()


@pytest.mark.parametrize("pairs", ["adjacent", "halves"])
@settings(max_examples=25, deadline=None)
@given(m=st.integers(0, 500), n=st.integers(0, 500), shift=st.integers(0, 2000), seed=st.integers(0, 1000))
def test_only_the_distance_matters(pairs: Literal["adjacent", "halves"], m: int, n: int, shift: int, seed: int) -> None:
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    product = rotated(q, m, pairs) @ rotated(k, n, pairs)
    shifted = rotated(q, m + shift, pairs) @ rotated(k, n + shift, pairs)
    assert abs(product - shifted) <= 1e-5


def test_adjacent_pairs_are_the_slides_formula() -> None:
    """x ⊗ cos mθ + (−x₂, x₁, −x₄, x₃, …) ⊗ sin mθ."""
    x = torch.arange(1.0, 17.0, dtype=torch.float64)
    theta = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angle = (3 * theta).repeat_interleave(2)
    swapped = torch.stack((-x[1::2], x[0::2]), dim=-1).flatten()
    torch.testing.assert_close(rotated(x, 3, "adjacent"), x * angle.cos() + swapped * angle.sin(), atol=1e-5, rtol=1e-5)


def test_layouts_are_one_rotation_of_reordered_coordinates() -> None:
    x = torch.randn(16, dtype=torch.float64)
    order = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))  # evens, then odds
    torch.testing.assert_close(rotated(x, 7, "adjacent")[order], rotated(x[order], 7, "halves"))
