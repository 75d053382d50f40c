"""The Explorer: a page that looks inside the models of this server, and what it has to know of each of them."""

from functools import lru_cache
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from weft.costs.count import count
from weft.errors import WeftError
from weft.figures.page import web_file, web_files
from weft.models.config import Bahdanau, EncoderDecoder, NGram, Recurrent
from weft.runs.folder import RunFolder
from weft.serve.errors import RefusedError

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

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    """The Explorer."""
    return Response(web_file("explorer.html"), media_type="text/html", headers=HEADERS)


@router.get("/web/{name}")
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
