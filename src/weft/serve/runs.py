"""What the folders hold that a server was given: runs, their curves as they grow and what happened in them; and
comparisons and scaling laws.

One is asked for by its name, which is one of those found there: no path comes from a request. What is damaged is left
out and told, and a run that has gone is not found.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from weft.compare.studies import read_study, studies
from weft.config import flat
from weft.costs.count import count
from weft.errors import WeftError
from weft.figures.plot import thinned
from weft.recipe.metrics import metric
from weft.runs.folder import RunFolder
from weft.runs.lines import LineChunk, read, read_after
from weft.runs.listing import RunRow
from weft.serve.errors import RefusedError
from weft.serve.events import answered, server_of

MAX_STRETCH_BYTES = 4 << 20  # of a journal in one answer; the page asks for the rest
MAX_SINCE = 64  # characters
MAX_POINTS = 2000  # of a series in one answer
MAX_EVENTS = 2000  # the last ones
MAX_SAMPLES = 500  # steps
MAX_TEXT = 4000  # characters
MAX_WORDS = 400  # characters of a text in an event
OWN = ("step", "steps")  # of a line, what is no series
PRIVATE = ("command", "corpus", "check")  # of an event: where things lie on this machine
STUDY = ("name", "kind", "title", "result", "finished", "problem")  # of a comparison, at a glance

router = APIRouter()


@router.get("/v1/runs")
async def runs(request: Request) -> Response:
    """All runs at a glance, the one that changed last first; those that train now, and damaged ones, with why."""
    library = server_of(request).library

    def work() -> dict[str, Any]:
        rows = sorted(map(_told, library.run_rows()), key=lambda row: -row["changed"])
        return {"now": time.time(), "runs": rows}

    return await answered(request, asyncio.to_thread(work))


def _told(row: RunRow) -> dict[str, Any]:
    told = asdict(row)
    if row.problem:
        told["problem"] = row.problem.replace(row.path, row.name)
    if row.best is not None and row.metric is not None:
        told["best_text"] = f"{metric(row.metric).title} {row.best:{metric(row.metric).format}}"
    return {key: value for key, value in told.items() if key not in ("path", "data")}


@router.get("/v1/runs/{name}/metrics")
async def metrics(request: Request, name: str, since: Annotated[str, Query(max_length=MAX_SINCE)] = "") -> Response:
    """What was logged after `since`, the `next` of an earlier answer: by series its steps and values, thinned to their
    lowest and highest. `seconds` count from the first of these lines. Where `reset`, the run has gone back, and these
    lines take the place of all earlier ones; where there is `more`, it follows after `next`."""
    return await _about(request, name, partial(_metrics, since=since))


def _metrics(run: RunFolder, since: str) -> dict[str, Any]:
    paths, places = (run.metrics, run.timings), [*since.split(","), ""][:2] if since else ["", ""]
    found = [_stretch(path, after) for path, after in zip(paths, places, strict=True)]
    if reset := any(each.restarted for each in found):
        found = [_stretch(path, "") for path in paths]
    seconds, lines = 0.0, [dict(line) for each in found for line in each.lines]
    for line in lines:
        if "seconds" in line:
            seconds = line["seconds"] = seconds + line["seconds"]
    return {
        "series": _series(lines),
        "flops_per_token": _flops(run),
        "damaged": sum(each.damaged for each in found),
        "next": ",".join(each.end for each in found),
        "reset": reset,
        "more": any(each.more for each in found),
    }


def _stretch(path: Any, after: str) -> LineChunk:
    try:
        return read_after(path, after, MAX_STRETCH_BYTES)
    except FileNotFoundError:
        return LineChunk([], damaged=0, end="", restarted=bool(after), more=False)


def _series(lines: list[dict[str, Any]]) -> dict[str, list[list[float | None]]]:
    series: dict[str, list[list[float | None]]] = defaultdict(lambda: [[], []])
    for line in lines:
        for key in line.keys() - OWN:
            series[key][0].append(line["step"])
            series[key][1].append(line[key])
    kept = {key: thinned(ys, MAX_POINTS) for key, (_, ys) in series.items()}
    return {key: [[each[at] for at in kept[key]] for each in both] for key, both in sorted(series.items())}


def _flops(run: RunFolder) -> float | None:
    """Operations that a token takes in training, where the recipe says so."""
    try:
        recipe = run.recipe()
        return count(recipe.model, recipe.batch.length, recipe.adapter).training(recipe.batch.recompute) or None
    except (WeftError, OSError):
        return None


@router.get("/v1/runs/{name}/events")
async def events(request: Request, name: str) -> Response:
    """What happened in a run: its start, evaluations, rollbacks, resumes, warnings, its end."""
    return await _about(request, name, _events)


def _events(run: RunFolder) -> dict[str, Any]:
    lines, damage = read(run.events)
    shown = [_short(line, run) for line in lines if line["event"] not in ("samples", "files")]
    told = damage and damage.replace(str(run.path), run.path.name)
    return {"events": shown[-MAX_EVENTS:], "left_out": max(0, len(shown) - MAX_EVENTS), "damage": told}


def _short(line: Mapping[str, Any], run: RunFolder) -> dict[str, Any]:
    """An event's numbers and words, and none of its tables; a run's place on this machine is nobody's business."""
    some = {key: value for key, value in line.items() if key not in PRIVATE}
    texts = {key: each for key, each in some.items() if isinstance(each, str)}
    words = {key: text.replace(str(run.path), run.path.name)[:MAX_WORDS] for key, text in texts.items()}
    numbers = {key: each for key, each in some.items() if isinstance(each, int | float)}
    steps = {"steps": line["steps"][:MAX_SAMPLES]} if isinstance(line.get("steps"), list) else {}
    return {**words, **numbers, **steps}


@router.get("/v1/runs/{name}/samples")
async def samples(request: Request, name: str) -> Response:
    """What a run wrote at its evaluations, and at its end."""
    return await _about(request, name, _samples)


def _samples(run: RunFolder) -> dict[str, Any]:
    lines, _ = read(run.events)
    by_step = {line["step"]: line["texts"] for line in lines if line["event"] == "samples"}  # the later of two
    final = next((line.get("samples") for line in reversed(lines) if line["event"] == "result"), None) or []
    steps = sorted(by_step)[-MAX_SAMPLES:]
    cut = {step: [text[:MAX_TEXT] for text in by_step[step]] for step in steps}
    return {
        "samples": [{"step": step, "texts": texts} for step, texts in cut.items()],
        "final": [text[:MAX_TEXT] for text in final],
    }


@router.get("/v1/runs/{name}/recipe")
async def recipe(request: Request, name: str) -> Response:
    """A run's settings, nested and by dotted keys."""
    return await _about(request, name, _recipe)


def _recipe(run: RunFolder) -> dict[str, Any]:
    settings = run.recipe().model_dump(mode="json", exclude_none=True)
    return {"recipe": settings, "flat": flat(settings)}


async def _about(request: Request, name: str, function: Callable[[RunFolder], dict[str, Any]]) -> Response:
    """What a function tells of the run of this name."""
    library = server_of(request).library

    def work() -> dict[str, Any]:
        run = library.run_folders().get(name)
        if run is None:
            raise RefusedError(404, f"run '{name[:60]}': there is no such run here, or it has gone", param="name")
        try:
            return {"name": name, **function(run)}
        except (WeftError, OSError) as error:
            raise RefusedError(409, f"run '{name[:60]}': {_reason(error, run.path, name)}") from None

    return await answered(request, asyncio.to_thread(work))


def _reason(error: Exception, place: Path, name: str) -> str:
    """What is wrong, without the place on this machine."""
    return getattr(error, "strerror", None) or str(error).replace(str(place), name)


@router.get("/v1/comparisons")
async def comparisons(request: Request) -> Response:
    """All comparisons and scaling laws, with what came out; damaged ones with why."""
    places = server_of(request).library.places

    def work() -> dict[str, Any]:
        each = [_study(name, folder) for name, folder in studies(places).items()]
        return {"data": [{key: one[key] for key in STUDY if key in one} for one in each]}

    return await answered(request, asyncio.to_thread(work))


@router.get("/v1/comparisons/{name}")
async def comparison(request: Request, name: str) -> Response:
    """What `weft compare` or `weft scale` found: texts, tables, and charts as numbers."""
    places = server_of(request).library.places

    def work() -> dict[str, Any]:
        folder = studies(places).get(name)
        if folder is None:
            raise RefusedError(404, f"comparison '{name[:60]}': there is no such comparison here", param="name")
        found = _study(name, folder)
        if "problem" in found:
            raise RefusedError(409, found["problem"])
        return found

    return await answered(request, asyncio.to_thread(work))


def _study(name: str, folder: Path) -> dict[str, Any]:
    try:
        return {"name": name, **read_study(folder)}
    except (WeftError, OSError) as error:
        return {"name": name, "problem": _reason(error, folder, f"comparison '{name}'")}
