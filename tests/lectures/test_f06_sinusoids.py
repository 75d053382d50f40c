"""F6: sinusoidal positions in both layouts.

python -c "import torch; from weft.nn.position import sinusoids; print(sinusoids(torch.arange(3), 4))"
"""

import torch

from weft.nn.position import build, sinusoids
from weft.nn.position_config import Sinusoidal, Sizes

PLACES = torch.arange(3)


def test_formula_of_the_lectures() -> None:
    """Sines and cosines interleaved: position 1 is (0.84, 0.54, 0.01, 1.00)."""
    table = sinusoids(PLACES, 4)
    torch.testing.assert_close(table[1], torch.tensor([0.84, 0.54, 0.01, 1.00]).double(), atol=5e-3, rtol=0)
    for place in range(3):
        for i in range(2):
            angle = torch.tensor(place / 10000 ** (2 * i / 4), dtype=torch.float64)
            assert abs(table[place, 2 * i] - angle.sin()) < 1e-12
            assert abs(table[place, 2 * i + 1] - angle.cos()) < 1e-12


def test_layout_of_the_figure() -> None:
    """Sines first, the slowest wavelength exactly 10000, as the figure draws it."""
    drawn = torch.tensor([[0, 0, 1, 1], [0.84, 0.0001, 0.54, 1], [0.91, 0.0002, -0.42, 1]]).double()
    table = sinusoids(PLACES, 4, "tensor2tensor")
    torch.testing.assert_close(table, drawn, atol=5e-3, rtol=0)
    torch.testing.assert_close(table[:, 1], drawn[:, 1], atol=1e-8, rtol=1e-6)


def test_the_formula_is_the_default() -> None:
    assert Sinusoidal().layout == "interleaved"
    module = build(Sinusoidal(), Sizes(4, 1, 4, 8, causal=True, layers=1))
    added = module.embed(torch.zeros(1, 3, 4), PLACES[None])
    torch.testing.assert_close(added[0], sinusoids(PLACES, 4).float())
