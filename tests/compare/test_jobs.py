"""The next jobs of a comparison follow from the outcomes so far."""

import math
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from weft.compare.jobs import Job, Outcome, Sweep, rates_around

SHARES = (1 / 27, 1 / 9, 1 / 3, 1.0)
SWEEP = Sweep("a", rates_around(0.01, 5), SHARES[:3], shares=SHARES, seeds=(0, 1, 2))


def outcome(job: Job, best: float, failed: str = "") -> Outcome:
    """Return an outcome whose loss is lowest at the rate `best`, and falls with the budget."""
    loss = 2 + abs(math.log(job.lr or best) - math.log(best)) + 0.1 / job.share + 0.001 * job.seed
    known = {"steps": 1, "tokens": 1, "flops": 1.0, "seconds": 1.0, "parameters": 1}
    nats = () if failed else (loss * math.log(2),)
    return Outcome(**asdict(job), nats=nats, bytes=nats and (1,), failed=failed, **known)


def simulate(result: Callable[[Job], Outcome]) -> dict[Job, Outcome]:
    """Run all jobs of the sweep."""
    outcomes = dict[Job, Outcome]()
    while waiting := [job for job in SWEEP.jobs(outcomes) if job not in outcomes]:
        outcomes |= {job: result(job) for job in waiting}
    return outcomes


def finish(sweep: Sweep, best: float, seed: int = 0) -> tuple[dict[Job, Outcome], list[Job]]:
    """Run all jobs, one at a time in random order."""
    rng, outcomes, order = random.Random(seed), dict[Job, Outcome](), list[Job]()
    while waiting := [job for job in sweep.jobs(outcomes) if job not in outcomes]:
        job = rng.choice(waiting)
        outcomes[job] = outcome(job, best)
        order.append(job)
    return outcomes, order


def test_the_search_finds_the_best_rate_and_every_rung_has_every_seed() -> None:
    outcomes, order = finish(SWEEP, 0.01)
    assert [SWEEP.rate(share, outcomes) for share in SHARES] == [(0.01, True)] * 4
    assert len(order) == len(set(order))
    # five rates in the first round, the best two and one below in the second, the best and its half in the third; three
    # of them are rungs as well
    assert len(order) == 5 + 3 + 2 + 12 - 3
    assert {(job.share, job.seed) for job in order if job.lr == 0.01} == {(s, n) for s in SHARES for n in range(3)}


def test_the_search_is_widened_at_its_ends_and_does_not_depend_on_the_order() -> None:
    for best in (0.0006, 0.16):
        outcomes, _ = finish(SWEEP, best)
        found, done = SWEEP.rate(1.0, outcomes)
        assert done and found is not None and abs(math.log2(found / best)) <= 1
    first = finish(SWEEP, 0.022, seed=1)[0]
    for seed in range(2, 6):
        again = finish(SWEEP, 0.022, seed=seed)[0]
        assert again.keys() == first.keys()
        assert [SWEEP.rate(share, again) for share in SHARES] == [SWEEP.rate(share, first) for share in SHARES]


def test_longer_training_may_have_a_lower_rate() -> None:
    # the best rate is 0.04 at first, a quarter of it from the third share on
    outcomes = simulate(lambda job: outcome(job, 0.04 if job.share < 0.2 else 0.01))
    assert [SWEEP.rate(share, outcomes)[0] for share in SHARES] == [0.04, 0.04, 0.01, 0.01]
    assert {job.lr for job in outcomes if job.share == 1} == {0.01}


def test_a_plateau_of_short_runs_does_not_hide_the_rate_of_long_ones() -> None:
    """At first no rate learns more than token frequencies; later only small ones do."""

    def result(job: Job) -> Outcome:
        learns = job.share > 0.2 and (job.lr or 0) < 0.002
        return outcome(job, job.lr or 0.0).replace(nats=(3.0 if learns else 4.83 - 0.1 * (job.lr or 0),))

    assert (SWEEP.rate(1.0, simulate(result))[0] or 1) < 0.002


def test_a_rate_that_diverges_is_not_chosen() -> None:
    outcomes = simulate(lambda job: outcome(job, 0.04, failed="diverged" if (job.lr or 0) > 0.02 else ""))
    assert SWEEP.rate(1.0, outcomes) == (0.02, True)


def test_without_a_search_only_the_rungs_are_run() -> None:
    single = Sweep("a", (0.01,), SHARES[:3], shares=(1.0,), seeds=(0, 1))
    assert single.jobs({}) == [Job("a", 1.0, 0.01, 0), Job("a", 1.0, 0.01, 1)]
    ngram = Sweep("n", (), SHARES[:3], shares=SHARES, seeds=(0,))
    assert [job.lr for job in ngram.jobs({})] == [None] * 4


def test_no_two_jobs_share_a_folder() -> None:
    _, order = finish(SWEEP, 0.16)
    order += [Job(name, 1.0, rate, 0) for name in ("a,b", "a-b", "a=b", "a-1.0000") for rate in (None, 0.01)]
    assert len({job.folder for job in order}) == len(order)
    assert all(Path(job.folder).name == job.folder for job in order)


def test_the_number_of_runs_is_known_from_the_start() -> None:
    outcomes, order = finish(SWEEP, SWEEP.rates[len(SWEEP.rates) // 2])
    assert len(SWEEP.planned({})) == len(order)
    for number in range(len(order)):  # and stays the same while they finish
        assert len(SWEEP.planned({job: outcomes[job] for job in order[:number]})) == len(order)
    single = Sweep("a", (0.01,), SHARES[:3], shares=SHARES, seeds=(0, 1))
    assert single.planned({}) == single.jobs({})
