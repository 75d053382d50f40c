"""Error responses, in the format of the API that the client speaks."""

import json
import logging
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from weft.errors import WeftError, out_of_memory

OPENAI = {401: "authentication_error", 429: "rate_limit_error"}
ANTHROPIC = {**OPENAI, 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
PROBLEMS = {"missing": "this field is required", "extra_forbidden": "unknown field; /docs lists those of this route"}
UNION_MEMBERS = ("str", "int", "float", "bool")  # in pydantic's locations
MAX_MESSAGE_CHARACTERS = 400
MAX_VALUE_CHARACTERS = 60  # of a wrong value that a message quotes
log = logging.getLogger("weft.serve")


class RefusedError(Exception):
    """A request that is answered with an error; it may be repeated after `retry_after` seconds."""

    code: str | None = None  # in OpenAI's format

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.message = status, message[:MAX_MESSAGE_CHARACTERS]
        self.param, self.retry_after = param, retry_after
        self.headers: dict[str, str] = {}  # of the response


class UnknownModelError(RefusedError):
    """A request for a model that is not served here."""

    code = "model_not_found"

    def __init__(self, name: str, hint: str):
        super().__init__(404, f"model '{name[:MAX_VALUE_CHARACTERS]}': {hint}", param="model")


def path_of(request: Request) -> str:
    """Return a request's path without the prefix that a proxy adds."""
    return request.url.path.removeprefix(request.scope.get("root_path", ""))


def error_body(
    path: str, status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error response in the format of the API that `path` belongs to."""
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(request: Request, refused: RefusedError) -> JSONResponse:
    headers = {} if refused.retry_after is None else {"Retry-After": str(refused.retry_after)}
    content = error_body(path_of(request), refused.status, refused.message, param=refused.param, code=refused.code)
    return JSONResponse(content, refused.status, headers | refused.headers)


def as_refused(error: BaseException) -> RefusedError:
    """Turn any error into a refusal: mistakes in the request are quoted, the server's internals are not."""
    if isinstance(error, RefusedError):
        return error
    if out_of_memory(error.__cause__ or error):
        return RefusedError(503, "not enough memory for this request beside the others", retry_after=1)
    if isinstance(error, WeftError):
        return RefusedError(400, " ".join(str(error).split()))
    return RefusedError(500, "internal server error; the server's log has the details")


def logged(name: str, error: BaseException) -> RefusedError:
    """Turn an error into a refusal, and log it under a name if it is not the client's mistake."""
    if not isinstance(error, WeftError | RefusedError):
        log.exception("%s", name, exc_info=error)
    return as_refused(error)


async def on_refused(request: Request, error: Exception) -> JSONResponse:
    return error_response(request, as_refused(error))


async def on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    messages = {
        400: "the body is not valid JSON",
        404: f"{path_of(request)}: no such path; /docs lists the routes",
        405: f"{request.method} is not allowed for this path",
    }
    message = messages.get(error.status_code, str(error.detail))
    refused = RefusedError(error.status_code, message)
    refused.headers |= error.headers or {}  # Allow, of status 405
    return error_response(request, refused)


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    """Respond with the first problem in a body, and where it is."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if first["loc"] == ("body",) and kind not in ("", "application/json"):  # curl -d sends a form's
        message = f"the body is read as JSON only with the header Content-Type: application/json, not {kind[:60]!r}"
        return error_response(request, RefusedError(415, message))
    if first["type"] == "json_invalid":
        return error_response(request, RefusedError(400, f"the body is not valid JSON: {first['ctx']['error']}"))
    # a part such as "str" or "list[int]" names a member of a union, not a key of the body
    key = ".".join(str(part) for part in first["loc"][1:] if part not in UNION_MEMBERS and "[" not in str(part))
    message = PROBLEMS.get(first["type"], first["msg"].removeprefix("Value error, ").replace("Input should", "must"))
    if first["type"] not in (*PROBLEMS, "value_error"):
        message += f", not {_shown(first['input'])}"
    return error_response(request, RefusedError(400, f"{key}: {message}" if key else message, param=key or None))


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "…"
