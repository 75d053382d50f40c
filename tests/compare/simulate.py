"""Contenders with known curves: loss E + A·C^-a bits per byte, with noise of seeds and of sections."""

from dataclasses import dataclass

import numpy as np

from weft.compare.multiplier import Curve

RUNGS = np.array([1 / 27, 1 / 9, 1 / 3, 1.0])


@dataclass(frozen=True)
class World:
    """Curves that approach `floor`; `falls` is the reducible loss at the whole budget.

    `seed_noise`, `section_noise` and `difficulty` are relative: per run, per section of a run, and per section of all.
    """

    floor: float = 0.8
    falls: float = 0.5
    exponent: float = 0.15
    seed_noise: float = 0.005
    section_noise: float = 0.05
    difficulty: float = 0.2
    seeds: int = 3
    sections: int = 100

    def curves(self, times: float, rng: np.random.Generator) -> tuple[Curve, Curve]:
        """Return a contender that is `times` as efficient, and the baseline."""
        sizes = rng.integers(500, 2000, size=self.sections).astype(float)
        hard = np.exp(self.difficulty * rng.normal(size=self.sections))
        hard /= (hard * sizes).sum() / sizes.sum()
        return self.curve(times, sizes, hard, rng=rng), self.curve(1.0, sizes, hard, rng=rng)

    def curve(self, times: float, sizes: np.ndarray, hard: np.ndarray, *, rng: np.random.Generator) -> Curve:
        shape = (len(RUNGS), self.seeds, self.sections)
        loss = (self.floor + self.falls * (RUNGS * times) ** -self.exponent)[:, None, None] * hard
        loss = loss * (1 + self.seed_noise * rng.normal(size=(*shape[:2], 1)))
        # a contender is better at some sections than at others, regardless of the seed
        loss = loss * (1 + self.section_noise * rng.normal(size=(shape[0], 1, shape[2])))
        return Curve(RUNGS * 1e15, loss * sizes * np.log(2), sizes)
