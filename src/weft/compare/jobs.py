"""Which training runs a comparison needs, given what has been measured so far.

Nothing here remembers anything: what is wanted follows from the outcomes, so a comparison that was interrupted goes on
where it was, and a finished job is never run again.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from weft.compare.config import RATIO, STEP
from weft.compare.results import Outcome

WIDENED = 4  # so often the sweep goes on beyond its first rates when the best lies at the end


@dataclass(frozen=True)
class Job:
    """One training run: a contender with a share of the budget, at a learning rate, with a seed."""

    contender: str
    share: float
    lr: float | None
    seed: int

    @property
    def folder(self) -> str:
        """A name for its folder, which no other job has."""
        rate = "" if self.lr is None else f"-lr{self.lr:.3g}"
        return f"{re.sub(r'[^A-Za-z0-9._+=-]', '-', self.contender)}-{self.share:.4f}{rate}-seed{self.seed}"

    def __str__(self) -> str:
        rate = "" if self.lr is None else f", learning rate {self.lr:.3g}"
        return f"{self.contender}, {share_text(self.share)}{rate}, seed {self.seed}"


def share_text(share: float) -> str:
    """A share of the budget in words."""
    return "the whole budget" if share == 1 else f"1/{round(1 / share)} of the budget"


@dataclass(frozen=True)
class Sweep:
    """What a contender is put through: the `rates` it begins with, and which shares and seeds follow.

    `rates` of one value, or none, need no search.
    """

    contender: str
    rates: tuple[float, ...]
    rounds: tuple[float, ...]  # shares of the budget: all rates at the first, the best third at the second
    shares: tuple[float, ...]
    seeds: tuple[int, ...]

    def wanted(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """The jobs that can be named by now, finished ones among them."""
        jobs, rate, found = self._search(outcomes)
        if not found:
            return jobs
        rungs = [Job(self.contender, share, rate, seed) for share in self.shares for seed in self.seeds]
        return list(dict.fromkeys([*jobs, *rungs]))

    def rate(self, outcomes: Mapping[Job, Outcome]) -> tuple[float | None, bool]:
        """The learning rate that the search found, and whether it is over."""
        return self._search(outcomes)[1:]

    def _search(self, outcomes: Mapping[Job, Outcome]) -> tuple[list[Job], float | None, bool]:
        """The jobs of the search so far, the rate it found, and whether it is over.

        Successive halving (Jamieson and Talwalkar 2016): of all rates after a short training the best third goes on
        for longer. Where the best rate is the smallest or the largest, the next one beyond is tried first.
        """
        if len(self.rates) <= 1:
            return [], self.rates[0] if self.rates else None, True
        seed = self.seeds[0]
        rates = list(self.rates)
        jobs = [Job(self.contender, self.rounds[0], rate, seed) for rate in rates]
        for _ in range(WIDENED):
            if not _finished(jobs, outcomes):
                return jobs, None, False
            best = _best(jobs, outcomes)[0].lr
            if best == rates[0]:
                rates.insert(0, rounded(rates[0] / STEP))
                jobs.append(Job(self.contender, self.rounds[0], rates[0], seed))
            elif best == rates[-1]:
                rates.append(rounded(rates[-1] * STEP))
                jobs.append(Job(self.contender, self.rounds[0], rates[-1], seed))
            else:
                break
        if not _finished(jobs, outcomes):
            return jobs, None, False
        kept = _best(jobs, outcomes)[: -(-len(jobs) // RATIO)]
        again = [Job(self.contender, self.rounds[1], job.lr, seed) for job in kept]
        jobs += again
        if not _finished(again, outcomes):
            return jobs, None, False
        return jobs, _best(again, outcomes)[0].lr, True


def rates_around(centre: float, count: int) -> tuple[float, ...]:
    """`count` learning rates, each twice the one before it, with `centre` in the middle."""
    return tuple(rounded(centre * STEP ** (place - count // 2)) for place in range(count))


def rounded(rate: float) -> float:
    """Three digits are enough for a rate, and are written alike wherever they are computed."""
    return float(f"{rate:.3g}")


def _finished(jobs: Collection[Job], outcomes: Mapping[Job, Outcome]) -> bool:
    return all(job in outcomes for job in jobs)


def _best(jobs: Sequence[Job], outcomes: Mapping[Job, Outcome]) -> list[Job]:
    """Best first; of equals the slower one."""
    return sorted(jobs, key=lambda job: (outcomes[job].bits_per_byte, job.lr or 0.0))
