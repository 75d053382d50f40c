"""Training runs of a comparison: which jobs are needed, given the outcomes so far, and what they measured.

A job is one training run: a contender, a share of the budget, a learning rate and a seed. Its outcome is a line of
results.jsonl: the cost of the same held-out text, section by section, so that the difference of two contenders can be
resampled over sections. There is no state: the needed jobs follow from the outcomes, so an interrupted comparison
resumes where it stopped, and a finished job is never run again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from weft.compare.config import RATE_RATIO, RUNG_RATIO
from weft.config import Config

TIE_RATIO = 1.005  # losses within this factor don't clearly differ
MAX_WIDENINGS = 4  # learning rates that a round may try beyond its ends


@dataclass(frozen=True)
class Job:
    """One training run: a contender, a share of the budget, a learning rate and a seed."""

    contender: str
    share: float
    lr: float | None
    seed: int

    @property
    def folder(self) -> str:
        """Unique name of its folder."""
        rate = "" if self.lr is None else f"-lr{self.lr:.3g}"
        return f"{self.contender}-{self.share:.4f}{rate}-seed{self.seed}"

    @property
    def kept(self) -> bool:
        """Whether its model is kept: that of the whole budget and the first seed."""
        return self.share == 1 and self.seed == 0

    def __str__(self) -> str:
        rate = "" if self.lr is None else f", learning rate {self.lr:.3g}"
        return f"{self.contender}, {share_text(self.share)}{rate}, seed {self.seed}"


def share_text(share: float) -> str:
    if not share:
        return "a few steps to measure the time per step"
    return "the whole budget" if share == 1 else f"{fraction(share)} of the budget"


def fraction(share: float) -> str:
    """Format a share of the budget: 1/27, 1."""
    return "1" if share == 1 else f"1/{round(1 / share)}"


class Outcome(Config):
    """Outcome of a finished job."""

    contender: str
    share: float  # of the budget
    lr: float | None  # None for an n-gram model
    seed: int
    steps: int
    tokens: int
    flops: float
    seconds: float
    parameters: int
    multiplied: int = 0  # parameters that each token is multiplied by: all but embeddings that are only looked up
    nats: tuple[float, ...] = ()  # of each section of the held-out text, with 8 bits for every unspelled byte
    bytes: tuple[float, ...] = ()  # sizes of the sections
    progress: tuple[tuple[int, float], ...] = ()  # evaluations during training, as (tokens read, bits per byte)
    sample: str = ""
    failed: str = ""  # why a job diverged, which has no sections

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte over all sections; infinite for a failed job."""
        return sum(self.nats) / math.log(2) / sum(self.bytes) if self.nats else math.inf

    @property
    def job(self) -> Job:
        return Job(self.contender, self.share, self.lr, seed=self.seed)


@dataclass(frozen=True)
class Result:
    """Outcomes of a contender at every share of the budget with every seed, and those of its sweep."""

    name: str
    recipe: str
    outcomes: tuple[Outcome, ...]
    sweep: tuple[Outcome, ...] = ()
    changes: Mapping[str, object] | None = None  # settings that differ from its recipe
    levels: Mapping[str, str] | None = None  # values of the varied settings
    year: int | None = None
    about: str = ""

    @property
    def shares(self) -> list[float]:
        """Shares of the budget with a finished job, ascending."""
        return sorted({outcome.share for outcome in self.outcomes if outcome.nats})

    def at(self, share: float) -> list[Outcome]:
        """Return the finished outcomes at a share, by seed."""
        finished = [outcome for outcome in self.outcomes if outcome.share == share and outcome.nats]
        return sorted(finished, key=lambda outcome: outcome.seed)

    @property
    def rate(self) -> float | None:
        """Learning rate at the largest share."""
        return max(self.outcomes, key=lambda outcome: outcome.share).lr if self.outcomes else None


def best_sizes(name: str, sizes: Sequence[Result]) -> Result:
    """Return a contender that has the best of its sizes at every share of the budget, by the mean over seeds."""
    chosen = dict[float, Result]()
    for result in sizes:
        for share in result.shares:
            best = chosen.setdefault(share, result)
            chosen[share] = min(best, result, key=lambda each: _mean_bits(each, share))
    outcomes = [
        outcome for share, result in sorted(chosen.items()) for outcome in result.outcomes if outcome.share == share
    ]
    last = chosen[max(chosen)] if chosen else sizes[0]
    return replace(last, name=name, outcomes=tuple(outcomes) or last.outcomes)


def _mean_bits(result: Result, share: float) -> float:
    bits = [outcome.bits_per_byte for outcome in result.at(share)]
    return sum(bits) / len(bits) if bits else math.inf


@dataclass(frozen=True)
class Comparison:
    """Results of a comparison."""

    title: str
    command: str
    baseline: str
    contenders: tuple[Result, ...]
    facts: Mapping[str, str]  # on the text, the budget and the machine, by topic
    notes: Sequence[str] = ()  # remarks on the method
    varied: Mapping[str, tuple[str, ...]] | None = None  # settings of an ablation with their values, the base's first
    flops: float | None = None  # of the whole budget, if it is given in FLOPs


@dataclass(frozen=True)
class Sweep:
    """Jobs of a contender: a search for the learning rate if there are several, then all `shares` with all `seeds`."""

    contender: str
    rates: tuple[float, ...]  # with which the search starts
    rounds: tuple[float, ...]  # shares of the budget, each with its own rate: longer training needs a lower one
    shares: tuple[float, ...]
    seeds: tuple[int, ...]

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """Return the jobs whose learning rates are known by now, including finished ones."""
        jobs, rates = self._search(outcomes)
        for share in self.shares:
            rate, known = self._rate(share, rates)
            if known:
                jobs += [Job(self.contender, share, rate, seed=seed) for seed in self.seeds]
        return list(dict.fromkeys(jobs))

    def planned(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """Return all jobs, including finished ones, assuming that the middle rate is best where nothing is measured."""
        known, middle = dict(outcomes), self.rates[len(self.rates) // 2] if self.rates else 1.0
        best = dict[float, float]()
        for job, outcome in outcomes.items():
            if job.contender == self.contender and outcome.nats:
                best[job.share] = min(outcome.bits_per_byte, best.get(job.share, math.inf))
        while waiting := [job for job in self.jobs(known) if job not in known]:
            for job in waiting:
                distance = abs(math.log2((job.lr or middle) / middle))
                nats = best.get(job.share, 1.0) * math.log(2) * (0.98 + 0.1 * distance)
                cost = {"steps": 0, "tokens": 0, "flops": 0.0, "seconds": 0.0, "parameters": 0}
                known[job] = Outcome(**asdict(job), **cost, nats=(nats,), bytes=(1.0,))
        return self.jobs(known)

    def rate(self, share: float, outcomes: Mapping[Job, Outcome]) -> tuple[float | None, bool]:
        """Return the learning rate for a share of the budget, and whether it is known yet."""
        return self._rate(share, self._search(outcomes)[1])

    def _rate(self, share: float, rates: Sequence[float | None]) -> tuple[float | None, bool]:
        """Return the rate of the longest round that isn't longer than `share`, or of the first round."""
        if len(self.rates) <= 1:
            return (self.rates[0] if self.rates else None), True
        number = max((n for n, length in enumerate(self.rounds) if length <= share * 1.001), default=0)
        return (rates[number], True) if number < len(rates) else (None, False)

    def _search(self, outcomes: Mapping[Job, Outcome]) -> tuple[list[Job], list[float | None]]:
        """Return the jobs of the search so far, and the best rate of each finished round.

        Successive halving (Jamieson and Talwalkar 2016): the best third of the rates enters the second round, and the
        best of those the third. If the largest rate is the best of one of the first two rounds, the next higher one is
        tried too. If no rate is clearly better than the smallest of any round, the next lower one is tried, because a
        short run tolerates, or fails to learn at, rates where a long one doesn't.
        """
        if len(self.rates) <= 1:
            return [], []
        jobs, best_rates, rates = list[Job](), list[float | None](), list(self.rates)
        for number, share in enumerate(self.rounds):
            tried, finished = self._round(share, rates, outcomes)
            jobs += tried
            if not finished:
                break
            ranked = _by_loss(tried, outcomes)
            best_rates.append(ranked[0].lr)
            survivors = ranked[: -(-len(ranked) // RUNG_RATIO)] if number == 0 else ranked[:1]
            rates = sorted({*(job.lr or 0.0 for job in survivors), _lowest_tied(tried, outcomes)})
            if number > 0 and len(rates) == 1:
                rates = [rounded(rates[0] / RATE_RATIO), *rates]
        return jobs, best_rates

    def _round(self, share: float, rates: Sequence[float], outcomes: Mapping[Job, Outcome]) -> tuple[list[Job], bool]:
        """Return the jobs of one round, widened at its ends as needed, and whether all of them have finished."""
        rates = sorted(rates)
        for _ in range(MAX_WIDENINGS + 1):
            jobs = [Job(self.contender, share, rate, seed=self.seeds[0]) for rate in rates]
            if not all(job in outcomes for job in jobs):
                return jobs, False
            if _lowest_tied(jobs, outcomes) == rates[0]:
                rates = [rounded(rates[0] / RATE_RATIO), *rates]
            elif share != self.rounds[-1] and _by_loss(jobs, outcomes)[0].lr == rates[-1]:
                rates = [*rates, rounded(rates[-1] * RATE_RATIO)]
            else:
                break
        return [job for job in jobs if job in outcomes], True


def rates_around(centre: float, count: int) -> tuple[float, ...]:
    """Return `count` learning rates, each twice the one below, with `centre` in the middle."""
    return tuple(rounded(centre * RATE_RATIO ** (number - count // 2)) for number in range(count))


def rounded(rate: float) -> float:
    """Round to three digits, so that equal rates compare equal."""
    return float(f"{rate:.3g}")


def _lowest_tied(jobs: Sequence[Job], outcomes: Mapping[Job, Outcome]) -> float:
    """Return the lowest learning rate whose loss ties with the best."""
    best = min(outcomes[job].bits_per_byte for job in jobs)
    return min(job.lr or 0.0 for job in jobs if outcomes[job].bits_per_byte <= TIE_RATIO * best)


def _by_loss(jobs: Sequence[Job], outcomes: Mapping[Job, Outcome]) -> list[Job]:
    return sorted(jobs, key=lambda job: (outcomes[job].bits_per_byte, job.lr or 0.0))
