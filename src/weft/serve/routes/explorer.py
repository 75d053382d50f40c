"""The Explorer: a page that looks inside the models of this server, and the facts that it shows about each.

A model's architecture follows from its settings. No weights are loaded for it, so presets can be shown as well.
"""

import json
import threading
import tomllib
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.explain import Explain, architecture
from weft.costs.count import count
from weft.errors import WeftError, suggestion
from weft.explain import views
from weft.figures.page import explorer_page, web_file, web_files
from weft.models.config import Bahdanau, EncoderDecoder, TransformerConfig
from weft.models.presets import PRESETS
from weft.models.presets import preset as preset_named
from weft.recipe.config import Recipe
from weft.runs.folder import RunFolder
from weft.serve.errors import RefusedError, UnknownModelError
from weft.serve.events import encoded_response
from weft.serve.library import Library, ServedModel
from weft.serve.server import server_of
from weft.serve.stories import stories
from weft.serve.turns import Name

HEADERS = {
    # only scripts and styles of this server are loaded; nothing is framed or sent elsewhere
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
View = Literal["anatomy", "costs", "growth", "graph"]
MAX_CACHED_VIEWS = 64  # a graph of many layers takes seconds to draw
_drawing = threading.Lock()  # one view is drawn at a time, which leaves the other processors to the models

router = APIRouter()


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """Return the Explorer's page."""
    return Response(web_file("explorer.html"), media_type="text/html", headers=HEADERS)


@router.get("/web/glossary.json", include_in_schema=False)
async def glossary() -> Response:
    """Return the glossary: its terms, the terms of each view, and the titles of the lectures."""
    return Response(_glossary(), media_type="application/json", headers=HEADERS)


@cache
def _glossary() -> bytes:
    text = (resources.files("weft.explain") / "glossary.toml").read_text("utf-8")
    return json.dumps(tomllib.loads(text), ensure_ascii=False).encode()


@router.get("/web/{name}", include_in_schema=False)
async def file(name: str) -> Response:
    """Return one of the page's files; a request cannot name any other path."""
    suffix = name[name.rfind(".") :]
    if suffix not in TYPES or name not in web_files():
        raise RefusedError(404, f"/web/{name[:60]}: no such file")
    return Response(web_file(name), media_type=TYPES[suffix], headers=HEADERS)


def model_facts(library: Library, served: ServedModel) -> dict[str, Any]:
    """Return the facts that the page shows about a model before it is loaded, under 'weft', and a 'problem' if it is
    known that the model cannot be loaded; without a valid recipe there are no facts."""
    folder = served.folder
    try:
        library.check_links(folder.path)
        facts = _model_facts(folder, folder.config.stat().st_mtime_ns)
    except (WeftError, OSError) as error:
        return {"weft": None, "problem": library.reason(folder, error, "its recipe cannot be read")}
    drawn = facts["kind"] != "ngram" and not facts["imported"]  # from weights that can be drawn again
    problem = {} if served.problem is None else {"problem": served.problem}
    return {"weft": {**facts, "checkpoints": [*([0] if drawn else []), *folder.steps()]}, **problem}


@lru_cache(maxsize=1024)
def _model_facts(folder: RunFolder, _modified: int) -> dict[str, Any]:
    recipe = folder.recipe()
    model, objective = recipe.model, recipe.objective
    writes = isinstance(model, EncoderDecoder | Bahdanau)
    tokenizer = folder.path / "tokenizer_config.json"
    tokenizer_config = tokenizer.read_text("utf-8") if tokenizer.is_file() else ""
    return {
        "kind": model.kind,
        "cell": getattr(model, "cell", None),
        "objective": objective.kind,
        "makes": objective.makes,
        "continues": objective.continues,
        "inputs": list(objective.input_columns),
        "imported": folder.origin.is_dir(),
        "writes": writes,
        "words": objective.continues or writes or objective.kind in ("masked", "masked+next"),
        "parameters": count(model).parameters,
        "layers": getattr(model, "layers", None),
        "heads": model.attention.heads if isinstance(model, TransformerConfig) else None,
        "experts": getattr(getattr(model, "feedforward", None), "experts", None),
        "context": getattr(model, "context", None),
        "vocab_size": getattr(model, "vocab_size", None),
        "chat": objective.kind == "chat" or "chat_template" in tokenizer_config,
    }


@router.get("/v1/presets")
async def presets() -> dict[str, list[dict[str, str]]]:
    """List the names and kinds of weft's presets."""
    return {"data": [{"name": name, "kind": preset_named(name).kind} for name in PRESETS]}


@router.get("/v1/stories")
async def story_list(request: Request) -> dict[str, dict[str, Any]]:
    """Return the stories that the Explorer can play, by name."""
    told = {**stories(), **server_of(request).serving.stories}
    return {"data": {name: story.data() for name, story in told.items()}}


@router.get("/v1/stories/page", include_in_schema=False)
async def story_page() -> dict[str, str]:
    """Return the Explorer as one file, into which the page puts the responses that a story needs."""
    return {"page": explorer_page()}


@router.get("/v1/architecture/{view}")
def architecture_view(
    request: Request, view: View, *, model: Name | None = None, preset: Name | None = None
) -> Response:
    """Return a view of `weft explain` of a model's architecture, or of a preset's, without its weights."""
    recipe = _recipe(request, model, preset)
    with _drawing:
        return encoded_response(_draw(recipe, view))


def _recipe(request: Request, model: str | None, preset: str | None) -> Recipe:
    if (model is None) == (preset is None):
        raise RefusedError(400, "give either model or preset", param="model")
    if preset is not None:
        if preset not in PRESETS:  # `architecture` would also take a file's path
            raise RefusedError(404, f"preset '{preset[:60]}': {suggestion(preset[:60], PRESETS)}", param="preset")
        return architecture(preset).recipe
    library = server_of(request).library
    served = library.models.get(model or "")
    if served is None:
        raise UnknownModelError(model or "", "no such model on this server")
    try:
        return library.recipe(served.folder)
    except WeftError as error:
        raise RefusedError(409, str(error).replace(str(served.folder.path), f"model '{served.name}'")) from None


@lru_cache(maxsize=MAX_CACHED_VIEWS)
def _draw(recipe: Recipe, view: View) -> dict[str, Any]:
    picture = getattr(Explain(recipe), view)()
    tables = picture.tables() if isinstance(picture, views.costs.Costs | views.growth.Growth) else ()
    head = {"title": picture.title, "about": picture.about}
    return {**head, **picture.data(), "tables": [table._asdict() for table in tables]}
