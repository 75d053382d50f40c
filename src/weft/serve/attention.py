"""Routes of the Explorer's view of attention: all heads of a text, and the text without some of them."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.run import Run
from weft.explain import views
from weft.explain.reading import Reading
from weft.serve.errors import RefusedError
from weft.serve.own import MAX_EXPLAINED, as_json, ask
from weft.serve.schema import ExplainBody, WithoutHeadsBody

router = APIRouter()


@router.post("/v1/explain/maps")
async def maps(request: Request, body: ExplainBody) -> Response:
    """The attention of all heads, packed as a page needs it, and those that do one thing, by name."""
    return await _of_reading(request, body, lambda reading: {"maps": views.heads.named_maps(reading).packed()})


@router.post("/v1/explain/without_heads")
async def without_heads(request: Request, body: WithoutHeadsBody) -> Response:
    """The surprise of each token of a text while some heads give zeros, and what the model writes then."""

    def function(reading: Reading) -> dict[str, Any]:
        return {"without_heads": views.ablation.without_heads(reading, body.heads)}

    return await _of_reading(request, body, function)


async def _of_reading(request: Request, body: ExplainBody, function: Callable[[Reading], dict[str, Any]]) -> Response:
    for name, text in (("input", body.input), ("target", body.target)):
        if len(text or "") > MAX_EXPLAINED:
            raise RefusedError(400, f"{name}: at most {MAX_EXPLAINED} characters can be looked at", param=name)

    def read(run: Run) -> Any:
        return as_json(function(run.explain.reading(body.input, body.target)))

    return await ask(request, body, read)
