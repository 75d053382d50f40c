"""The Explorer: a page that looks inside the models of this server, and what it has to know of each of them.

What a model is made of follows from its settings. No weights are loaded for it, so every preset can be looked at.
"""

import asyncio
import threading
from functools import lru_cache
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.explain import Explain, architecture
from weft.costs.count import count
from weft.errors import WeftError, suggestion
from weft.explain import views
from weft.figures.page import web_file, web_files
from weft.models.config import Bahdanau, EncoderDecoder, NGram, Recurrent
from weft.models.presets import PRESETS
from weft.models.presets import preset as preset_named
from weft.recipe.config import Recipe
from weft.runs.folder import RunFolder
from weft.serve.errors import RefusedError
from weft.serve.events import answered, server_of
from weft.serve.schema import Name

# scripts and styles are files of this server, and nothing else is loaded, framed or sent elsewhere
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
View = Literal["anatomy", "costs", "growth", "graph"]
KEPT = 64  # answers that are kept; a graph of many layers takes seconds
_turn = threading.Lock()  # one is drawn at a time: however many ask, a processor is left for the models

router = APIRouter()


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The Explorer."""
    return Response(web_file("explorer.html"), media_type="text/html", headers=HEADERS)


@router.get("/web/{name}", include_in_schema=False)
async def file(name: str) -> Response:
    """A file of the page: a request chooses among them, and names no path."""
    suffix = name[name.rfind(".") :]
    if suffix not in TYPES or name not in web_files():
        raise RefusedError(404, "there is no such file")
    return Response(web_file(name), media_type=TYPES[suffix], headers=HEADERS)


def described(folder: RunFolder) -> dict[str, Any] | None:
    """What the page has to know of a model before it is loaded; None where its recipe can't be read."""
    try:
        return _described(folder, folder.config.stat().st_mtime_ns)
    except (WeftError, OSError):
        return None


@lru_cache(maxsize=1024)
def _described(folder: RunFolder, _changed: int) -> dict[str, Any]:
    recipe = folder.recipe()
    model, objective = recipe.model, recipe.objective
    writes = isinstance(model, EncoderDecoder | Bahdanau)
    return {
        "kind": model.kind,
        "objective": objective.kind,
        "makes": objective.makes,
        "continues": objective.continues,
        "writes": writes,
        "words": objective.continues or writes or objective.kind in ("masked", "masked+next"),
        "parameters": count(model).parameters,
        "layers": getattr(model, "layers", None),
        "heads": None if isinstance(model, Recurrent | Bahdanau | NGram) else model.attention.heads,
        "context": getattr(model, "context", None),
        "vocab_size": getattr(model, "vocab_size", None),
        "chat": objective.kind == "chat" or _has_template(folder),
    }


def _has_template(folder: RunFolder) -> bool:
    """Whether the tokenizer brings the words around a conversation."""
    try:
        return "chat_template" in (folder.path / "tokenizer_config.json").read_text("utf-8")
    except OSError:
        return False


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
