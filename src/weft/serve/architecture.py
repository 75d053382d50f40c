"""What a model is made of, from its settings alone: parts, costs, how they grow, and the computation graph.

No weights are loaded for it, so that every preset can be looked at as well.
"""

import asyncio
import threading
from functools import lru_cache
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.explain import Explain, architecture
from weft.errors import suggestion
from weft.explain import views
from weft.models.presets import PRESETS
from weft.models.presets import preset as preset_named
from weft.recipe.config import Recipe
from weft.serve.errors import RefusedError
from weft.serve.events import answered, server_of
from weft.serve.schema import Name

View = Literal["anatomy", "costs", "growth", "graph"]
KEPT = 64  # answers that are kept; a graph of many layers takes seconds

router = APIRouter()
_turn = threading.Lock()  # one is drawn at a time: however many ask, a processor is left for the models


@router.get("/v1/presets")
async def presets() -> dict[str, list[dict[str, str]]]:
    """The names and kinds of the architectures that weft knows."""
    return {"data": [{"name": name, "kind": preset_named(name).kind} for name in PRESETS]}


@router.get("/v1/architecture/{view}")
async def architecture_view(
    request: Request, view: View, model: Name | None = None, preset: Name | None = None
) -> Response:
    """What `weft explain` shows of a model, or of a preset, without its weights."""
    recipe = await asyncio.to_thread(_recipe, request, model, preset)
    return await answered(request, asyncio.to_thread(_waited, recipe, view))


def _recipe(request: Request, model: str | None, preset: str | None) -> Recipe:
    if (model is None) == (preset is None):
        raise RefusedError(400, "give a model or a preset", param="model")
    if preset is not None:
        if preset not in PRESETS:  # a recipe may be a file; a request names none
            raise RefusedError(404, f"preset '{preset[:60]}': {suggestion(preset[:60], PRESETS)}", param="preset")
        return architecture(preset).recipe
    shelf = server_of(request).library.shelves.get(model or "")
    if shelf is None:
        raise RefusedError(404, f"model '{(model or '')[:60]}': there is no such model here", param="model")
    return shelf.folder.recipe()


def _waited(recipe: Recipe, view: View) -> dict[str, Any]:
    with _turn:
        return _drawn(recipe, view)


@lru_cache(maxsize=KEPT)
def _drawn(recipe: Recipe, view: View) -> dict[str, Any]:
    picture = getattr(Explain(recipe), view)()
    tables = picture.tables() if isinstance(picture, views.costs.Costs | views.growth.Growth) else ()
    told = {"title": picture.title, "about": picture.about}
    return {**told, **picture.data(), "tables": [table._asdict() for table in tables]}
