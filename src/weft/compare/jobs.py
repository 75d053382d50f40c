"""The training runs of a comparison: which are needed, given what has been measured so far, and what they measured.

A job is one training run: a contender, a part of the budget, a learning rate and a seed. What it ends with is a line of
results.jsonl: the cost of the same held-out text, section by section, so that the difference of two contenders can be
resampled over sections. Nothing here remembers anything: which jobs are wanted follows from the outcomes, so a
comparison that was interrupted goes on where it was, and a finished job is never run again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from weft.compare.config import RATIO, STEP
from weft.config import Config

TIE = 1.005  # times a loss: no clear difference
WIDENED = 4  # so often a round goes on beyond its rates when the best lies at an end


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
        return f"{self.contender}-{self.share:.4f}{rate}-seed{self.seed}"

    @property
    def kept(self) -> bool:
        """Whether its model stays: the one that has the whole budget and the first seed."""
        return self.share == 1 and self.seed == 0

    def __str__(self) -> str:
        rate = "" if self.lr is None else f", learning rate {self.lr:.3g}"
        return f"{self.contender}, {share_text(self.share)}{rate}, seed {self.seed}"


def share_text(share: float) -> str:
    if not share:
        return "a few steps to see how long they take"
    return "the whole budget" if share == 1 else f"{fraction(share)} of the budget"


def fraction(share: float) -> str:
    """A share of the budget as a person writes it: 1/27, 1."""
    return "1" if share == 1 else f"1/{round(1 / share)}"


class Outcome(Config):
    """A finished job.

    `nats` is the cost of each section of the held-out text, with 8 bits for every byte that no token spells, and
    `bytes` are the sections' sizes. `progress` has (tokens read, bits per byte) of the evaluations during training.
    Of its `parameters` each token is multiplied by `multiplied`: all but a table that is only looked up in. A job that
    `failed` says why, and has no sections.
    """

    contender: str
    share: float  # of the budget
    lr: float | None  # None for what is counted, not trained
    seed: int
    steps: int
    tokens: int
    flops: float
    seconds: float
    parameters: int
    multiplied: int = 0
    nats: tuple[float, ...] = ()
    bytes: tuple[float, ...] = ()
    progress: tuple[tuple[int, float], ...] = ()
    sample: str = ""
    failed: str = ""

    @property
    def bits_per_byte(self) -> float:
        """Over all sections; infinite for a job that failed."""
        return sum(self.nats) / math.log(2) / sum(self.bytes) if self.nats else math.inf

    @property
    def job(self) -> Job:
        return Job(self.contender, self.share, self.lr, self.seed)


@dataclass(frozen=True)
class Result:
    """What a contender reached: its outcomes at every share of the budget with every seed, and those of the search for
    its rate.

    `changes` are the settings in which it differs from the recipe it is named after. `levels` says which value it has
    of each setting that is varied.
    """

    name: str
    recipe: str
    outcomes: tuple[Outcome, ...]
    sweep: tuple[Outcome, ...] = ()
    changes: Mapping[str, object] | None = None
    levels: Mapping[str, str] | None = None

    @property
    def shares(self) -> list[float]:
        """The parts of the budget it was trained with, ascending."""
        return sorted({outcome.share for outcome in self.outcomes if outcome.nats})

    def at(self, share: float) -> list[Outcome]:
        """The outcomes at one share, seed by seed."""
        found = [outcome for outcome in self.outcomes if outcome.share == share and outcome.nats]
        return sorted(found, key=lambda outcome: outcome.seed)

    @property
    def rate(self) -> float | None:
        """The learning rate at the largest share."""
        return max(self.outcomes, key=lambda outcome: outcome.share).lr if self.outcomes else None


@dataclass(frozen=True)
class Comparison:
    """Everything that a page tells: what was asked, on which text and machine, and what each contender reached.

    `facts` are lines about the text, the budget and the machine by what they are about; `notes` is what a reader has to
    know besides. `varied` names the settings of an ablation with their values, the base's first.
    """

    title: str
    command: str
    baseline: str
    contenders: tuple[Result, ...]
    facts: Mapping[str, str]
    notes: Sequence[str] = ()
    varied: Mapping[str, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Sweep:
    """What a contender is put through: the `rates` it begins with, and which shares and seeds follow.

    Longer training wants a lower rate, so each of the search's `rounds`, shares of the budget, finds one of its own.
    `rates` of one value, or none, need no search.
    """

    contender: str
    rates: tuple[float, ...]
    rounds: tuple[float, ...]
    shares: tuple[float, ...]
    seeds: tuple[int, ...]

    def wanted(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """The jobs that can be named by now, finished ones among them."""
        jobs, found = self._search(outcomes)
        for share in self.shares:
            rate, known = self._rate(share, found)
            if known:
                jobs += [Job(self.contender, share, rate, seed) for seed in self.seeds]
        return list(dict.fromkeys(jobs))

    def planned(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """All jobs, finished ones among them, if what isn't measured yet is best at the middle one of the rates."""
        known, middle = dict(outcomes), self.rates[len(self.rates) // 2] if self.rates else 1.0
        best = dict[float, float]()
        for job, outcome in outcomes.items():
            if job.contender == self.contender and outcome.nats:
                best[job.share] = min(outcome.bits_per_byte, best.get(job.share, math.inf))
        while waiting := [job for job in self.wanted(known) if job not in known]:
            for job in waiting:
                away = abs(math.log2((job.lr or middle) / middle))
                nats = best.get(job.share, 1.0) * math.log(2) * (0.98 + 0.1 * away)
                cost = {"steps": 0, "tokens": 0, "flops": 0.0, "seconds": 0.0, "parameters": 0}
                known[job] = Outcome(**asdict(job), **cost, nats=(nats,), bytes=(1.0,))
        return self.wanted(known)

    def rate(self, share: float, outcomes: Mapping[Job, Outcome]) -> tuple[float | None, bool]:
        """The learning rate for a share of the budget, and whether it is known."""
        return self._rate(share, self._search(outcomes)[1])

    def _rate(self, share: float, found: Sequence[float | None]) -> tuple[float | None, bool]:
        """That of the longest round which isn't longer; the first round's for what is shorter than all of them."""
        if len(self.rates) <= 1:
            return (self.rates[0] if self.rates else None), True
        own = max((n for n, length in enumerate(self.rounds) if length <= share * 1.001), default=0)
        return (found[own], True) if own < len(found) else (None, False)

    def _search(self, outcomes: Mapping[Job, Outcome]) -> tuple[list[Job], list[float | None]]:
        """The jobs of the search so far, and the rates that its finished rounds found.

        Successive halving (Jamieson and Talwalkar 2016): of all rates the best third goes on to the second round, and
        the best of them to the third. Where the best of the first two is the largest, the next one above is tried as
        well, and in each the next one below where nothing is clearly better than the smallest: a short training
        tolerates rates, or learns nothing at rates, that a long one doesn't.
        """
        if len(self.rates) <= 1:
            return [], []
        jobs, found, rates = list[Job](), list[float | None](), list(self.rates)
        for number, share in enumerate(self.rounds):
            tried, over = self._round(share, rates, outcomes)
            jobs += tried
            if not over:
                break
            best = _best(tried, outcomes)
            found.append(best[0].lr)
            kept = best[: -(-len(best) // RATIO)] if number == 0 else best[:1]
            rates = sorted({*(job.lr or 0.0 for job in kept), _careful(tried, outcomes)})
            if number > 0 and len(rates) == 1:
                rates = [rounded(rates[0] / STEP), *rates]
        return jobs, found

    def _round(self, share: float, rates: Sequence[float], outcomes: Mapping[Job, Outcome]) -> tuple[list[Job], bool]:
        rates = sorted(rates)
        for _ in range(WIDENED + 1):
            jobs = [Job(self.contender, share, rate, self.seeds[0]) for rate in rates]
            if not all(job in outcomes for job in jobs):
                return jobs, False
            if _careful(jobs, outcomes) == rates[0]:
                rates = [rounded(rates[0] / STEP), *rates]
            elif share != self.rounds[-1] and _best(jobs, outcomes)[0].lr == rates[-1]:
                rates = [*rates, rounded(rates[-1] * STEP)]
            else:
                break
        return [job for job in jobs if job in outcomes], True


def rates_around(centre: float, count: int) -> tuple[float, ...]:
    """`count` learning rates, each twice the one before it, with `centre` in the middle."""
    return tuple(rounded(centre * STEP ** (place - count // 2)) for place in range(count))


def rounded(rate: float) -> float:
    """Three digits are enough for a rate, and are written alike wherever they are computed."""
    return float(f"{rate:.3g}")


def _careful(jobs: Sequence[Job], outcomes: Mapping[Job, Outcome]) -> float:
    best = min(outcomes[job].bits_per_byte for job in jobs)
    return min(job.lr or 0.0 for job in jobs if outcomes[job].bits_per_byte <= TIE * best)


def _best(jobs: Sequence[Job], outcomes: Mapping[Job, Outcome]) -> list[Job]:
    return sorted(jobs, key=lambda job: (outcomes[job].bits_per_byte, job.lr or 0.0))
