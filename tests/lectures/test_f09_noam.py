"""F9: lrate = d_model^−0.5 · min(step^−0.5, step · warmup^−1.5).

See it: python -c "from weft.training.schedule import build, noam; print(noam(4000, 512, 4000))"
"""

import pytest

from weft.recipe.optimizer import Noam
from weft.training.schedule import build, noam


def test_peak_is_the_papers_at_warmup() -> None:
    rates = [noam(step, 512, 4000) for step in range(1, 12001)]
    assert rates.index(max(rates)) + 1 == 4000
    assert max(rates) == pytest.approx(6.99e-4, abs=5e-7)


@pytest.mark.parametrize("step", [1, 7, 3999, 4000, 4001, 100_000])
def test_is_the_formula(step: int) -> None:
    expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
    assert build(Noam(warmup=4000), 0.0, 100_000, d_model=512)(step) == pytest.approx(expected, rel=1e-12)
