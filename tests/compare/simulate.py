"""Contenders whose curves are known: loss E + A·C^-a bits per byte, with the noise of seeds and of sections."""

from dataclasses import dataclass

import numpy as np

from weft.compare.multiplier import Curve

RUNGS = np.array([1 / 27, 1 / 9, 1 / 3, 1.0])


@dataclass(frozen=True)
class World:
    """`falls` is the part of the loss, at one whole budget, that more compute would take away.

    A seed moves the loss of a run by `seed_noise` of it. A section is harder or easier for everybody by `difficulty`,
    and for one run by `section_noise`.
    """

    floor: float = 0.8
    falls: float = 0.5
    exponent: float = 0.15
    seed_noise: float = 0.005
    section_noise: float = 0.05
    difficulty: float = 0.2
    seeds: int = 3
    sections: int = 100

    def loss(self, amount: np.ndarray | float) -> np.ndarray | float:
        return self.floor + self.falls * amount**-self.exponent

    def curves(self, times: float, rng: np.random.Generator) -> tuple[Curve, Curve]:
        """A contender that is so many times as efficient, and the baseline."""
        sizes = rng.integers(500, 2000, size=self.sections).astype(float)
        hard = np.exp(self.difficulty * rng.normal(size=self.sections))
        hard /= (hard * sizes).sum() / sizes.sum()
        return self.curve(times, sizes, hard, rng), self.curve(1.0, sizes, hard, rng)

    def curve(self, times: float, sizes: np.ndarray, hard: np.ndarray, rng: np.random.Generator) -> Curve:
        shape = (len(RUNGS), self.seeds, self.sections)
        loss = self.loss(RUNGS * times)[:, None, None] * hard
        loss = loss * (1 + self.seed_noise * rng.normal(size=(*shape[:2], 1)))
        # a contender is better at some sections than at others, whatever the seed
        loss = loss * (1 + self.section_noise * rng.normal(size=(shape[0], 1, shape[2])))
        return Curve(RUNGS * 1e15, loss * sizes * np.log(2), sizes)
