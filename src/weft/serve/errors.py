"""Error responses, in the format of the API that the client speaks."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from weft.config import expected
from weft.errors import WeftError, out_of_memory

OPENAI = {401: "authentication_error", 429: "rate_limit_error"}
ANTHROPIC = {**OPENAI, 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
PROBLEMS = {"missing": "this field is required", "extra_forbidden": "unknown field; /docs lists those of this route"}
UNION_MEMBERS = ("str", "int", "float", "bool", "constrained-str", "NamedTool")  # in pydantic's locations
TAGS = ("text", "tool_use", "tool_result")  # of members, after the index of a block
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


def speaks_anthropic(request: Request) -> bool:
    """Return whether a request is in Anthropic's format, of the paths that two APIs share by its version header."""
    path = path_of(request)
    return path.startswith("/v1/messages") or (path.startswith("/v1/models") and "anthropic-version" in request.headers)


def error_body(
    anthropic: bool, status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error response in Anthropic's or OpenAI's format."""
    if anthropic:
        kind = ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(request: Request, refused: RefusedError) -> JSONResponse:
    headers = {} if refused.retry_after is None else {"Retry-After": str(refused.retry_after)}
    content = error_body(
        speaks_anthropic(request), refused.status, refused.message, param=refused.param, code=refused.code
    )
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
        return error_response(request, RefusedError(400, f"the body is not valid JSON: character {first['loc'][1]}"))
    key, message = described([{**problem, "loc": problem["loc"][1:]} for problem in error.errors()])
    return error_response(request, RefusedError(400, f"{key}: {message}" if key else message, param=key or None))


def described(problems: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the key of the first wrong field, and what is wrong with it.

    A value that fits no member of a union has a problem for each: those of its innermost part are named together.
    """
    keys = [_key(problem["loc"]) for problem in problems]
    key = max((each for each in keys if each[:1] == keys[0][:1]), key=len)
    found = [problem for each, problem in zip(keys, problems, strict=True) if each == key]
    for problem in found:
        if problem["type"] == "value_error":
            return ".".join(key), str(problem["ctx"]["error"])
        if problem["type"] in PROBLEMS:
            return ".".join(key), PROBLEMS[problem["type"]]
    words = " or ".join(dict.fromkeys(map(expected, found))).replace("a table", "an object")
    return ".".join(key), f"expected {words}, not {shown(found[0]['input'])}"


def _key(location: Sequence[int | str]) -> tuple[str, ...]:
    """Return the keys in pydantic's location, without the members of unions, such as "str", "list[int]" or a tag."""
    parts = [part for part in location if part not in UNION_MEMBERS and "[" not in str(part)]
    tagged = [False, *(isinstance(part, int) for part in parts)]  # the part before it is an index
    return tuple(str(part) for part, after in zip(parts, tagged, strict=False) if not (after and part in TAGS))


def shown(value: Any) -> str:
    """Return a wrong value as JSON for a message, cut off if it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "…"
