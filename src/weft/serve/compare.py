"""Comparisons and scaling laws among the folders that a server was given.

One is asked for by its name, which is one of those found there: no path comes from a request.
"""

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.compare.studies import read_study, studies
from weft.errors import WeftError
from weft.serve.errors import RefusedError
from weft.serve.events import answered, server_of

TOLD = ("kind", "title", "result", "finished", "problem")

router = APIRouter()


@router.get("/v1/comparisons")
async def comparisons(request: Request) -> Response:
    """All comparisons and scaling laws, with what came out; damaged ones with why."""
    places = server_of(request).library.places

    def work() -> dict[str, Any]:
        each = ({"name": name, **_read(name, folder)} for name, folder in studies(places).items())
        return {"data": [{key: one[key] for key in ("name", *TOLD) if key in one} for one in each]}

    return await answered(request, asyncio.to_thread(work))


@router.get("/v1/comparisons/{name}")
async def comparison(request: Request, name: str) -> Response:
    """What `weft compare` or `weft scale` found: texts, tables, and charts as numbers."""
    places = server_of(request).library.places

    def work() -> dict[str, Any]:
        folder = studies(places).get(name)
        if folder is None:
            raise RefusedError(404, f"comparison '{name[:60]}': there is no such comparison here", param="name")
        found = _read(name, folder)
        if "problem" in found:
            raise RefusedError(409, found["problem"])
        return {"name": name, **found}

    return await answered(request, asyncio.to_thread(work))


def _read(name: str, folder: Path) -> dict[str, Any]:
    try:
        return read_study(folder)
    except (WeftError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).replace(str(folder), f"comparison '{name}'")
        return {"problem": reason}
