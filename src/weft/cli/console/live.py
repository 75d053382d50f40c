"""A comparison on the terminal: a table that follows it, elsewhere a line for each run that ends, and what came out."""

import json
import shlex
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


def command_line() -> str:
    """The command that was typed, as the page of a comparison shows it."""
    return shlex.join(["weft", *sys.argv[1:]])


def show(page: "ComparisonPage | ScalingPage", places: Mapping[str, Path], as_json: bool) -> None:
    """Write the page and its figures, and print what it says and where everything is."""
    page.save(places["page"])
    page.save_figures(places["page"].parent / "figures")
    write_text(places["page"].with_suffix(".json"), json.dumps(page.data(), allow_nan=False) + "\n")
    if as_json:
        print_json(page.record())
        return
    echo(page.text())
    echo("")
    for what, place in places.items():
        echo(f"{what:9}{place}")


@contextmanager
def live() -> Iterator["Watch"]:
    """What is called with a comparison's progress as it runs."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.live import Live

    clock = _Clock()
    with Live(console=Console(stderr=True), refresh_per_second=2, transient=True) as shown:
        yield lambda progress: shown.update(_table(progress, clock))


class _Clock:
    """How much of a comparison is done, and how long the rest takes at the speed since the first look."""

    def __init__(self) -> None:
        self.began, self._first = time.monotonic(), -1.0

    def look(self, progress: "Progress") -> tuple[float, float, str]:
        """The seconds that it has run, the share of all operations that is done, and what is left in words."""
        cost = sum(progress.wanted.values())
        spent = sum(cost_of for job, cost_of in progress.wanted.items() if job in progress.outcomes)
        spent += sum(progress.wanted.get(job, 0.0) * step / steps for job, (step, steps, _) in progress.running.items())
        share, seconds = spent / cost if cost else 0.0, time.monotonic() - self.began
        self._first = share if self._first < 0 else self._first
        done = share - self._first
        left = f", about {_time(seconds * (1 - share) / done)} left" if done > 0.02 and share < 1 else ""
        return seconds, share, left


class _Lines:
    """A line for each run that ended since the last look."""

    def __init__(self) -> None:
        self._seen: set[object] | None = None
        self._clock = _Clock()

    def __call__(self, progress: "Progress") -> None:
        left = self._clock.look(progress)[2]
        if self._seen is None:
            self._seen = set(progress.outcomes)
            if self._seen:
                log_to_stderr(f"{counted(len(self._seen), 'run')} finished already")
        for job, outcome in progress.outcomes.items():
            if job not in self._seen:
                self._seen.add(job)
                reached = f"{outcome.bits_per_byte:.4f} bits per byte" if outcome.nats else "diverged"
                if not job.share:
                    reached = f"{outcome.seconds / outcome.steps:.3f} s a step"
                done = sum(wanted in progress.outcomes for wanted in progress.wanted)
                runs = f"{done} of {len(progress.wanted)} runs{left}"
                log_to_stderr(f"{job}: {reached}, {outcome.seconds:.0f} s ({runs})")


def _table(progress: "Progress", clock: _Clock) -> "Group":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=False)
    for title in ("contender", "runs", "best so far", NOW):
        table.add_column(title, justify="left" if title in ("contender", NOW) else "right", no_wrap=True)
    for name in dict.fromkeys(job.contender for job in progress.wanted):
        mine = [job for job in progress.wanted if job.contender == name]
        done = [progress.outcomes[job] for job in mine if job in progress.outcomes]
        best = min((outcome.bits_per_byte for outcome in done if outcome.nats), default=None)
        now = []
        for job, (step, steps, loss) in progress.running.items():
            # the first steps of a budget in minutes are taken to time them
            part = "timing" if not job.share else "whole" if job.share == 1 else f"1/{round(1 / job.share)}"
            if job.contender == name:
                now.append(f"{part} · {step:,}/{steps:,}" + ("" if loss is None else f" · {loss:.2f}"))
        table.add_row(Text(name), f"{len(done)}/{len(mine)}", "" if best is None else f"{best:.3f}", "; ".join(now[:2]))
    seconds, share, left = clock.look(progress)
    line = f"{share:.0%} after {_time(seconds)}{left}. Ctrl-C saves, the same command continues."
    return Group(table, Text(line, style="dim"))


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
