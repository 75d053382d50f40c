"""What a client reads when something is wrong, in the shape of the API that it speaks."""

import json
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from weft.errors import WeftError, out_of_memory

OPENAI = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC = {**OPENAI, 413: "request_too_large", 500: "api_error"}
MAX_MESSAGE = 400  # characters


class RefusedError(Exception):
    """A request that is answered with an error; `retry_after` are seconds after which it may be tried again."""

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message[:MAX_MESSAGE], param, retry_after


def path_of(request: Request) -> str:
    """The path without what a proxy puts before it."""
    return request.url.path.removeprefix(request.scope.get("root_path", ""))


def body(path: str, status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error as the API of this path gives it."""
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def answer(path: str, refused: RefusedError) -> JSONResponse:
    headers = {} if refused.retry_after is None else {"Retry-After": str(refused.retry_after)}
    content = body(path, refused.status, refused.message, refused.param)
    return JSONResponse(content, refused.status, headers)


def as_refused(error: BaseException) -> RefusedError:
    """What is said of an error: mistakes of the request in their own words, and nothing of the server's inside."""
    if isinstance(error, RefusedError):
        return error
    if out_of_memory(error.__cause__ or error):
        return RefusedError(503, "there is not enough memory for this request beside the others", retry_after=1)
    if isinstance(error, WeftError):
        return RefusedError(400, " ".join(str(error).split()))
    return RefusedError(500, "the server failed; its log says why")


async def on_refused(request: Request, error: Exception) -> JSONResponse:
    return answer(path_of(request), as_refused(error))


async def on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    said = {400: "the body is not JSON", 404: f"{path_of(request)}: no such path"}
    said |= {405: f"{request.method} is not allowed here"}
    return answer(path_of(request), RefusedError(error.status_code, said.get(error.status_code, str(error.detail))))


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    """The first thing that is wrong with a body, and where."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return answer(path_of(request), RefusedError(400, f"the body is not JSON: {first['ctx']['error']}"))
    place = ".".join(str(part) for part in first["loc"][1:] if not _names_a_type(part))
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] not in ("missing", "extra_forbidden", "value_error"):
        said += f", not {_shown(first['input'])}"
    return answer(path_of(request), RefusedError(400, f"{place}: {said}" if place else said, param=place or None))


def _names_a_type(part: Any) -> bool:
    """Whether it says which of several types was tried, rather than where in the body."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
