"""A competition: runs ranked by a metric, each verified from its folder, and on request by training it again."""

import math
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.api.train import train
from weft.errors import ConfigError, WeftError, suggestion
from weft.figures.tables import Table
from weft.recipe.metrics import METRICS, metric
from weft.runs.folder import RunFolder, changed_files, open_run
from weft.runs.lines import read, read_lines
from weft.storage.files import read_text

COSTS = ("parameters", "seconds", "steps")  # ranked like metrics; less is better


class BoardEntry(NamedTuple):
    """Run on the board. `problems` are reasons why it doesn't count, `difference` what a replay found."""

    run: str
    value: float | None
    values: dict[str, float]
    text: str  # hash of the training text
    device: str
    problems: tuple[str, ...] = ()
    difference: str = ""


def rank(
    runs: Sequence[Path], by: str, *, within: float | None = None, at_least: str | None = None, replay: bool = False
) -> list[BoardEntry]:
    """Rank runs by a metric, the best first; those that don't count come last."""
    condition = _condition(at_least) if at_least else None
    entries = [_entry(open_run(path), by, within=within, condition=condition) for path in runs]
    common, _ = Counter(entry.text for entry in entries).most_common(1)[0]
    for number, entry in enumerate(entries):
        other = () if entry.text == common else ("trained on another text",)
        difference = _replay(Path(entry.run), entry) if replay else ""
        entries[number] = entry._replace(problems=(*other, *entry.problems), difference=difference)
    sign = 1 if by in COSTS or metric(by).lower_is_better else -1
    return sorted(entries, key=lambda entry: (bool(entry.problems or entry.difference), (entry.value or 0.0) * sign))


def _condition(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        raise ConfigError(f"--at-least {text}: expected METRIC=NUMBER, for instance accuracy=0.99") from None


def _entry(run: RunFolder, by: str, *, within: float | None, condition: tuple[str, float] | None) -> BoardEntry:
    (events, *_), damage = zip(*map(read, (run.events, run.metrics)), strict=True)
    problems = [re.sub(r"^.*/|; left out$", "", message) for message in damage if message]
    values = {key: float(value) for key, value in run.results().items() if isinstance(value, int | float)}
    last = {event["event"]: event for event in events}
    finished = [float(event["seconds"]) for event in events if event["event"] == "finish"]
    if finished:
        values |= {"seconds": sum(finished), "steps": float(last["finish"]["step"])}
    if model := last.get("model"):
        values["parameters"] = float(model["parameters"])
    try:
        run.settled_recipe()
    except WeftError:
        problems.append("its recipe is not complete")
    problems += [line.rpartition(": ")[2] for line in changed_files(run)]
    if by not in values and by not in METRICS and by not in COSTS:
        raise ConfigError(f"--by {by}: no such metric; {suggestion(by, [*values, *COSTS])}")
    recipes = {event["sha256"].get("config.toml") for event in events if event["event"] == "files"}
    timed = bool(finished) and within is not None
    unknown = timed and len(finished) < sum(event["event"] in ("start", "resume") for event in events)
    name, least = condition or (by, -math.inf)
    reasons = {
        "it was resumed with another recipe": len(recipes) > 1,
        "it has not finished": not finished,
        "it was interrupted, so its time is not known": unknown,
        f"it took {sum(finished):,.0f} s": timed and not unknown and sum(finished) > (within or 0.0),
        f"its {name} is {values.get(name, math.nan):g}": values.get(name, -1.0) < least,
        f"it has no {by}": by not in values,
    }
    problems += [reason for reason, holds in reasons.items() if holds]
    start = last.get("start", {})
    text, device = " ".join(start.get("corpus", [])), start.get("device", "")
    return BoardEntry(str(run.path), values.get(by), values, text, device, tuple(problems))


def _replay(path: Path, entry: BoardEntry) -> str:
    """Train a run again from its recipe; return the first step that differs, or nothing."""
    with tempfile.TemporaryDirectory(prefix="weft-replay-") as folder:
        try:
            train(path / "config.toml", run=Path(folder) / "run", log=lambda _: None)
        except WeftError as error:
            return f"it cannot be trained again: {error}"
        again = RunFolder(Path(folder) / "run")
        ours, theirs = _steps(again), _steps(RunFolder(path))
        values = {key: value for key, value in again.results().items() if key in entry.values}
        start = next((event for event in read_lines(again.events) if event["event"] == "start"), {})
    where = "" if start.get("device", "") == entry.device else f" ({entry.device} then, {start.get('device')} now)"
    for step in sorted({*ours, *theirs}):
        if ours.get(step) != theirs.get(step):
            return f"differs from step {step:,} on{where}"
    differing = [key for key, value in values.items() if value != entry.values[key]]
    return f"its final {differing[0]} differs{where}" if differing else ""


def _steps(run: RunFolder) -> dict[int, list[str]]:
    """Return the lines of metrics.jsonl by step, as text: bit for bit. A damaged line counts as step 0."""
    steps: dict[int, list[str]] = {}
    for line in read_text(run.metrics).splitlines() if run.metrics.exists() else ():
        match = re.search(r'"step": (\d+)', line)
        steps.setdefault(int(match[1]) if match else 0, []).append(line)
    return steps


def board_table(entries: Sequence[BoardEntry], by: str) -> Table:
    """Return the board as a table."""

    def shown(name: str, value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if name in COSTS else metric(name).text(value)

    rows: list[tuple[Any, ...]] = []
    for entry in entries:
        reasons = (*entry.problems, *filter(None, [entry.difference]))
        place = "" if reasons else str(len([row for row in rows if row[0]]) + 1)
        costs = [shown(name, entry.values.get(name)) for name in COSTS]
        rows.append((place, entry.run, shown(by, entry.value) if by not in COSTS else "", *costs, "; ".join(reasons)))
    header = ("", "run", metric(by).title if by not in COSTS else "", *COSTS, "not counted because")
    return Table(header, rows, text=(1, 6))
