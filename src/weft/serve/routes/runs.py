"""Routes about the folders of a server: runs with their curves, events and samples; comparisons and scaling laws.

A request names a run by its name in these folders, never by a path. Damaged files are skipped and reported.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from weft.compare.studies import read_study, studies
from weft.config import flat
from weft.costs.count import count
from weft.errors import WeftError
from weft.figures.plot import thin
from weft.recipe.metrics import metric
from weft.runs.folder import RunFolder
from weft.runs.lines import LineChunk, read, read_after
from weft.runs.listing import RunRow
from weft.serve.errors import RefusedError
from weft.serve.events import encoded_response
from weft.serve.library import Library
from weft.serve.server import server_of

MAX_JOURNAL_BYTES = 4 << 20  # of a journal read for one response; the page requests the rest
MAX_SINCE = 64  # characters of a position in the journals
MAX_POINTS = 2000  # of a series in one response
MAX_EVENTS = 2000  # the latest ones
MAX_SAMPLED_STEPS = 500  # steps whose samples are returned
MAX_SAMPLE_CHARACTERS = 4000
MAX_EVENT_CHARACTERS = 400  # of a text in an event
NOT_SERIES = ("step", "steps")  # keys of a metrics line
PRIVATE = ("command", "corpus", "check")  # keys of an event that hold paths of this machine
STUDY_SUMMARY = ("name", "kind", "title", "result", "finished", "problem")  # keys of a comparison in the list

router = APIRouter()


def run_named(request: Request, name: str) -> Iterator[RunFolder]:
    """Yield the run of this name; an error while it is used is reported with the name instead of the path."""
    library = server_of(request).library
    run = library.run_folders().get(name)
    if run is None:
        raise RefusedError(404, f"run '{name[:60]}': no such run on this server, or no longer", param="name")
    try:
        library.check_links(run.path)
        yield run
    except (WeftError, OSError) as error:
        raise RefusedError(409, f"run '{name[:60]}': {_reason(error, run.path, name)}") from None


NamedRun = Annotated[RunFolder, Depends(run_named)]


@router.get("/v1/runs")
def runs(request: Request) -> Response:
    """List all runs, the latest changed first, including those in training and, with the problem, damaged ones."""
    rows = sorted(map(_run_summary, server_of(request).library.run_rows()), key=lambda row: -row["changed"])
    return encoded_response({"now": time.time(), "runs": rows})


def _run_summary(row: RunRow) -> dict[str, Any]:
    summary = asdict(row)
    if row.problem:
        summary["problem"] = row.problem.replace(row.path, row.name)
    if row.best is not None and row.metric is not None:
        summary["best_text"] = f"{metric(row.metric).title} {metric(row.metric).text(row.best)}"
    return {key: value for key, value in summary.items() if key not in ("path", "data")}


@router.get("/v1/runs/{name}/metrics")
def metrics(
    request: Request, name: str, run: NamedRun, *, since: Annotated[str, Query(max_length=MAX_SINCE)] = ""
) -> Response:
    """Return the metrics logged after `since`, the `next` of an earlier response: steps and values of each series,
    thinned to minima and maxima.

    `seconds` count from the first of these lines. If `reset`, the run was rolled back, and these lines replace all
    earlier ones; if `more`, request the rest with `next`.
    """
    paths, positions = (run.metrics, run.timings), [*since.split(","), ""][:2] if since else ["", ""]
    chunks = [_read_journal(path, position) for path, position in zip(paths, positions, strict=True)]
    if reset := any(chunk.restarted for chunk in chunks):
        chunks = [_read_journal(path, "") for path in paths]
    seconds, lines = 0.0, [dict(line) for chunk in chunks for line in chunk.lines]
    for line in lines:
        if "seconds" in line:
            seconds = line["seconds"] = seconds + line["seconds"]
    content = {
        "name": name,
        "series": _series(lines),
        "flops_per_token": _flops(server_of(request).library, run),
        "damaged": sum(chunk.damaged for chunk in chunks),
        "next": ",".join(chunk.end for chunk in chunks),
        "reset": reset,
        "more": any(chunk.more for chunk in chunks),
    }
    return encoded_response(content)


def _read_journal(path: Path, position: str) -> LineChunk:
    try:
        return read_after(path, position, MAX_JOURNAL_BYTES)
    except FileNotFoundError:
        return LineChunk([], damaged=0, end="", restarted=bool(position), more=False)


def _series(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    series: dict[str, dict[str, list[float | None]]] = defaultdict(lambda: {"steps": [], "values": []})
    for line in lines:
        for key in line.keys() - NOT_SERIES:
            series[key]["steps"].append(line["step"])
            series[key]["values"].append(line[key])
    kept = {key: thin(columns["values"], MAX_POINTS) for key, columns in series.items()}
    return {
        key: {name: [column[index] for index in kept[key]] for name, column in columns.items()}
        for key, columns in sorted(series.items())
    }


def _flops(library: Library, run: RunFolder) -> float | None:
    """Return the training FLOPs per token, or None if the recipe cannot be read."""
    try:
        recipe = library.recipe(run)
        return count(recipe.model, recipe.batch.length, recipe.adapter).training(recipe.batch.recompute) or None
    except (WeftError, OSError):
        return None


@router.get("/v1/runs/{name}/events")
def events(name: str, run: NamedRun) -> Response:
    """Return the events of a run: start, evaluations, rollbacks, resumes, warnings, result."""
    lines, damage = read(run.events)
    shown = [_short_event(line, run) for line in lines if line["event"] not in ("samples", "files")]
    damage = damage and damage.replace(str(run.path), run.path.name)
    left_out = max(0, len(shown) - MAX_EVENTS)
    return encoded_response({"name": name, "events": shown[-MAX_EVENTS:], "left_out": left_out, "damage": damage})


def _short_event(line: Mapping[str, Any], run: RunFolder) -> dict[str, Any]:
    """Return an event's numbers and texts, without its tables and without paths of this machine."""
    public = {key: value for key, value in line.items() if key not in PRIVATE}
    texts = {key: value for key, value in public.items() if isinstance(value, str)}
    words = {key: text.replace(str(run.path), run.path.name)[:MAX_EVENT_CHARACTERS] for key, text in texts.items()}
    numbers = {key: value for key, value in public.items() if isinstance(value, int | float)}
    steps = {"steps": line["steps"][:MAX_SAMPLED_STEPS]} if isinstance(line.get("steps"), list) else {}
    return {**words, **numbers, **steps}


@router.get("/v1/runs/{name}/samples")
def samples(name: str, run: NamedRun) -> Response:
    """Return the texts that a run wrote at its evaluations, and at its end."""
    lines, _ = read(run.events)
    by_step = {line["step"]: line["texts"] for line in lines if line["event"] == "samples"}  # the latest of each step
    final = next((line.get("samples") for line in reversed(lines) if line["event"] == "result"), None) or []
    latest = [(step, by_step[step]) for step in sorted(by_step)[-MAX_SAMPLED_STEPS:]]
    rows = [{"step": step, "texts": [text[:MAX_SAMPLE_CHARACTERS] for text in texts]} for step, texts in latest]
    return encoded_response({"name": name, "samples": rows, "final": [text[:MAX_SAMPLE_CHARACTERS] for text in final]})


@router.get("/v1/runs/{name}/recipe")
def recipe(request: Request, name: str, run: NamedRun) -> Response:
    """Return a run's settings, nested and by dotted keys."""
    settings = server_of(request).library.recipe(run).model_dump(mode="json", exclude_none=True)
    return encoded_response({"name": name, "recipe": settings, "flat": flat(settings)})


def _reason(error: Exception, path: Path, name: str) -> str:
    """Return an error's message with the name instead of the path on this machine."""
    return getattr(error, "strerror", None) or str(error).replace(str(path), name)


@router.get("/v1/comparisons")
def comparisons(request: Request) -> Response:
    """List all comparisons and scaling laws with their results; damaged ones with the problem."""
    library = server_of(request).library
    all_studies = [_study(library, name, folder) for name, folder in studies(library.paths).items()]
    summaries = [{key: study[key] for key in STUDY_SUMMARY if key in study} for study in all_studies]
    return encoded_response({"data": summaries})


@router.get("/v1/comparisons/{name}")
def comparison(request: Request, name: str) -> Response:
    """Return the result of `weft compare` or `weft scale`: texts, tables, and the values of charts."""
    library = server_of(request).library
    folder = studies(library.paths).get(name)
    if folder is None:
        raise RefusedError(404, f"comparison '{name[:60]}': no such comparison on this server", param="name")
    study = _study(library, name, folder)
    if "problem" in study:
        raise RefusedError(409, study["problem"])
    return encoded_response(study)


def _study(library: Library, name: str, folder: Path) -> dict[str, Any]:
    try:
        library.check_links(folder)
        return {"name": name, **read_study(folder)}
    except (WeftError, OSError) as error:
        return {"name": name, "problem": _reason(error, folder, f"comparison '{name}'")}
