"""Routes of the Explorer's view of attention: all heads of a text, and the text without some of them."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.run import Run
from weft.explain import views
from weft.figures.page import as_json
from weft.serve.own import ask, check_length
from weft.serve.schema import ReadingBody, WithoutHeadsBody

Reads = Callable[["views.reading.Reading"], dict[str, Any]]

router = APIRouter()


@router.post("/v1/explain/maps")
async def maps(request: Request, body: ReadingBody) -> Response:
    """The attention of all heads, packed as a page needs it, and those that do one thing, by name."""
    return await _of_reading(request, body, lambda reading: {"maps": views.heads.named_maps(reading).packed()})


@router.post("/v1/explain/without_heads")
async def without_heads(request: Request, body: WithoutHeadsBody) -> Response:
    """The surprise of each token of a text while some heads give zeros, and what the model writes then."""

    def function(reading: "views.reading.Reading") -> dict[str, Any]:
        return {"without_heads": views.ablation.without_heads(reading, body.heads)}

    return await _of_reading(request, body, function)


async def _of_reading(request: Request, body: ReadingBody, function: Reads) -> Response:
    check_length(body)

    def read(run: Run) -> Any:
        return as_json(function(run.explain.reading(body.input, body.target)))

    return await ask(request, body, read)
