"""The progress of a comparison on the terminal and in a log."""

import io

import pytest
from rich.console import Console

from weft.cli.console.live import _Lines, _table, _TimeEstimate
from weft.compare.jobs import Job, Outcome
from weft.compare.runner import Progress

SEARCH, RUNG, TIMED = Job("gpt", 1 / 27, 0.01, 0), Job("gpt", 1 / 9, 0.01, 1), Job("lstm", 0.0, 0.01, 0)
WHOLE = Job("lstm", 1.0, 0.01, 0)


def outcome(job: Job, nats: tuple[float, ...]) -> Outcome:
    known = {"tokens": 1, "flops": 1.0, "seconds": 4.0, "parameters": 1}
    own = {"contender": job.contender, "share": job.share, "lr": job.lr, "seed": job.seed, "steps": 20}
    return Outcome.model_validate({**own, **known, "nats": nats, "bytes": nats and (2.0,)})


def test_a_row_shows_the_share_of_the_budget() -> None:
    running = {RUNG: (30, 100, 2.5), SEARCH: (1, 33, None), TIMED: (5, 20, 4.0), WHOLE: (9, 900, 3.25)}
    console = Console(width=100, file=io.StringIO(), record=True)
    estimate = _TimeEstimate()
    estimate.update(Progress({}, {}, dict.fromkeys(running, 1.0)))
    estimate.start -= 60
    console.print(_table(Progress({}, running, dict.fromkeys(running, 1.0)), estimate))
    header, gpt, lstm, end, *_ = console.export_text().splitlines()
    assert header.rstrip().endswith("now: share of the budget · step · loss")
    assert "0/2" in gpt and "1/9 · 30/100 · 2.50; 1/27 · 1/33" in gpt
    assert "timing · 5/20 · 4.00; whole · 9/900 · 3.25" in lstm
    assert "15% after 1:00, about 5:47 left" in end  # (0.3 + 1/33 + 0.25 + 0.01) / 4 of the work is done
    assert len(gpt.rstrip()) <= 80


def test_without_a_terminal_each_finished_run_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines, wanted = _Lines(), dict.fromkeys((SEARCH, RUNG, TIMED), 1.0)
    lines(Progress({SEARCH: outcome(SEARCH, (2.0,))}, {}, wanted))
    lines(Progress({job: outcome(job, (1.3862944,) if job == RUNG else ()) for job in wanted}, {}, wanted))
    assert capsys.readouterr().err.splitlines() == [
        "1 run already finished",
        "gpt, 1/9 of the budget, learning rate 0.01, seed 1: 1.0000 bits per byte, 4 s (3 of 3 runs)",
        "lstm, a few steps to measure the time per step, learning rate 0.01, seed 0: "
        "0.200 s per step, 4 s (3 of 3 runs)",
    ]


def test_runs_finished_earlier_do_not_shorten_the_estimate() -> None:
    estimate, wanted = _TimeEstimate(), dict.fromkeys((SEARCH, RUNG, TIMED, WHOLE), 1.0)
    done = {SEARCH: outcome(SEARCH, (2.0,)), RUNG: outcome(RUNG, (2.0,))}
    estimate.update(Progress(done, {}, wanted))
    estimate.start -= 60
    assert estimate.update(Progress(done | {TIMED: outcome(TIMED, ())}, {}, wanted))[2] == ", about 1:00 left"
