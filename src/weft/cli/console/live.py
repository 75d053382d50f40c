"""The progress of a comparison, as a live table on a terminal or a line per finished run, and its result."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.console.terminal import echo, print_json
from weft.errors import counted
from weft.progress import log_to_stderr
from weft.storage.files import write_text

if TYPE_CHECKING:
    from rich.console import Group

    from weft.compare.page import ComparisonPage
    from weft.compare.runner import Progress, Watch
    from weft.compare.scale import ScalingPage


NOW = "now: share of the budget · step · loss"
MIN_PROGRESS = 0.02  # share of the work after which the remaining time is estimated


def show(page: "ComparisonPage | ScalingPage", paths: Mapping[str, Path], as_json: bool) -> None:
    """Write the page and its figures; print the result and the paths."""
    page.save(paths["page"])
    page.save_figures(paths["page"].parent / "figures")
    write_text(paths["page"].with_suffix(".json"), json.dumps(page.data(), allow_nan=False) + "\n")
    if as_json:
        print_json(page.record())
        return
    echo(page.text())
    echo("")
    for name, path in paths.items():
        echo(f"{name:9}{path}")


@contextmanager
def live() -> Iterator["Watch"]:
    """Yield a function to call with a comparison's progress."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.live import Live

    estimate = _TimeEstimate()
    with Live(console=Console(stderr=True), refresh_per_second=2, transient=True) as display:
        yield lambda progress: display.update(_table(progress, estimate))


class _TimeEstimate:
    """Estimates the remaining time of a comparison from its speed since the first update."""

    def __init__(self) -> None:
        self.start, self._first = time.monotonic(), -1.0

    def update(self, progress: "Progress") -> tuple[float, float, str]:
        """Return the elapsed seconds, the share of all FLOPs that is done, and the remaining time in words."""
        cost = sum(progress.wanted.values())
        spent = sum(flops for job, flops in progress.wanted.items() if job in progress.outcomes)
        spent += sum(progress.wanted.get(job, 0.0) * step / steps for job, (step, steps, _) in progress.running.items())
        share, seconds = spent / cost if cost else 0.0, time.monotonic() - self.start
        self._first = share if self._first < 0 else self._first
        done = share - self._first
        left = f", about {_time(seconds * (1 - share) / done)} left" if done > MIN_PROGRESS and share < 1 else ""
        return seconds, share, left


class _Lines:
    """Logs a line for each run that has finished since the last call."""

    def __init__(self) -> None:
        self._logged: set[object] | None = None
        self._estimate = _TimeEstimate()

    def __call__(self, progress: "Progress") -> None:
        left = self._estimate.update(progress)[2]
        if self._logged is None:
            self._logged = set(progress.outcomes)
            if self._logged:
                log_to_stderr(f"{counted(len(self._logged), 'run')} already finished")
        for job, outcome in progress.outcomes.items():
            if job not in self._logged:
                self._logged.add(job)
                result = f"{outcome.bits_per_byte:.4f} bits per byte" if outcome.nats else "diverged"
                if not job.share:
                    result = f"{outcome.seconds / outcome.steps:.3f} s per step"
                done = sum(planned in progress.outcomes for planned in progress.wanted)
                runs = f"{done} of {len(progress.wanted)} runs{left}"
                log_to_stderr(f"{job}: {result}, {outcome.seconds:.0f} s ({runs})")


def _table(progress: "Progress", estimate: _TimeEstimate) -> "Group":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=False)
    for title in ("contender", "runs", "best so far", NOW):
        table.add_column(title, justify="left" if title in ("contender", NOW) else "right", no_wrap=True)
    for name in dict.fromkeys(job.contender for job in progress.wanted):
        jobs = [job for job in progress.wanted if job.contender == name]
        done = [progress.outcomes[job] for job in jobs if job in progress.outcomes]
        best = min((outcome.bits_per_byte for outcome in done if outcome.nats), default=None)
        now = []
        for job, (step, steps, loss) in progress.running.items():
            # for a budget in minutes, the first steps only measure the speed
            part = "timing" if not job.share else "whole" if job.share == 1 else f"1/{round(1 / job.share)}"
            if job.contender == name:
                now.append(f"{part} · {step:,}/{steps:,}" + ("" if loss is None else f" · {loss:.2f}"))
        table.add_row(Text(name), f"{len(done)}/{len(jobs)}", "" if best is None else f"{best:.3f}", "; ".join(now[:2]))
    seconds, share, left = estimate.update(progress)
    line = f"{share:.0%} after {_time(seconds)}{left}. Ctrl-C saves; the same command resumes."
    return Group(table, Text(line, style="dim"))


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
