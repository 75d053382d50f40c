"""F6: sinusoidal positions in both layouts.

python -c "import torch; from weft.nn.position import sinusoids; print(sinusoids(torch.arange(3), 4))"
"""

import torch

from weft.nn.position import build, sinusoids
from weft.nn.position_config import Sinusoidal, Sizes

POSITIONS = torch.arange(3)


def test_formula_of_the_lectures() -> None:
    """Sines and cosines interleaved: position 1 is (0.84, 0.54, 0.01, 1.00)."""
    table = sinusoids(POSITIONS, 4)
    torch.testing.assert_close(table[1], torch.tensor([0.84, 0.54, 0.01, 1.00]).double(), atol=5e-3, rtol=0)
    angles = POSITIONS[:, None].double() / 10000 ** (torch.tensor([0.0, 2.0]).double() / 4)
    torch.testing.assert_close(table[:, 0::2], angles.sin(), atol=1e-12, rtol=0)
    torch.testing.assert_close(table[:, 1::2], angles.cos(), atol=1e-12, rtol=0)


def test_layout_of_the_figure() -> None:
    """Sines first, with a slowest wavelength of exactly 2π · 10000, as in the figure."""
    drawn = torch.tensor([[0, 0, 1, 1], [0.84, 0.0001, 0.54, 1], [0.91, 0.0002, -0.42, 1]]).double()
    table = sinusoids(POSITIONS, 4, "tensor2tensor")
    torch.testing.assert_close(table, drawn, atol=5e-3, rtol=0)
    torch.testing.assert_close(table[:, 1], drawn[:, 1], atol=1e-8, rtol=1e-6)


def test_the_formula_is_the_default() -> None:
    assert Sinusoidal().layout == "interleaved"
    module = build(Sinusoidal(), Sizes(d_model=4, heads=1, d_head=4, context=8, causal=True, layers=1))
    added = module.embed(torch.zeros(1, 3, 4), POSITIONS[None])
    torch.testing.assert_close(added[0], sinusoids(POSITIONS, 4).float())
