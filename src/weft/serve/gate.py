"""Checks before a request is parsed: its host, its key, and the size of its body."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from weft.serve.config import Serving
from weft.serve.errors import RefusedError, error_body, speaks_anthropic

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = {"/health", "/ready", "/"}  # need no key: a load balancer's checks, and the page, hold no secrets
OPEN_FOLDER = "/web/"
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s\[\]:/@]+))(?::\d*)?")
VALUES_PER_TOKEN = 2  # values of a body are parsed in the event loop; this many times the bound in tokens are accepted
BODY_SECONDS = 30.0  # time limit for receiving a body
CLOSE = {"Connection": "close"}  # the rest of the body is not read
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: CLOSE, 413: CLOSE}  # of refusals, by status


class Gate:
    """Refuses requests with an unknown host, a wrong key, or a body that is too large or too slow."""

    def __init__(self, app: App, serving: Serving):
        self.app, self.serving = app, serving
        self.hosts = {_host_name(f"[{host}]" if host.count(":") > 1 else host) for host in serving.hosts}
        self.max_values = VALUES_PER_TOKEN * serving.limits.max_input_tokens
        self.keys = [hashlib.sha256(key.encode()).digest() for key in serving.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(self.serving.root_path)
        try:
            self._check_headers(scope, path, dict(scope["headers"]))
            content = await self._read_body(scope, receive)
        except RefusedError as refused:
            body = error_body(speaks_anthropic(Request(scope)), refused.status, refused.message)
            await JSONResponse(body, refused.status, HEADERS.get(refused.status))(scope, receive, send)
            return
        if content is None:
            return
        messages = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def replay() -> Message:
            """Return the body, which has been read already, and then later messages."""
            return next(messages, None) or await receive()

        await self.app(scope, replay, send)

    def _check_headers(self, scope: Scope, path: str, headers: dict[bytes, bytes]) -> None:
        if "*" not in self.hosts and _host_name(headers.get(b"host", b"").decode("latin-1")) not in self.hosts:
            raise RefusedError(421, "this server does not answer to the requested host name; --allow-host adds one")
        client = self._client(headers)
        if client is None and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            raise RefusedError(401, "a key is required: Authorization: Bearer KEY, or x-api-key: KEY")
        scope.setdefault("state", {})["client"] = client or "anybody"
        length = headers.get(b"content-length", b"0")
        self._check_size(int(length) if length.isdigit() else None)

    def _check_size(self, size: int | None) -> None:
        limit = self.serving.limits.body_bytes
        if size is None or size > limit:
            raise RefusedError(413, f"the body is too large; at most {limit} bytes are accepted")

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body of a request; None if the client disconnects before its end."""
        content, more = bytearray(), scope["method"] in ("POST", "PUT", "PATCH", "DELETE")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    content += message.get("body", b"")
                    self._check_size(len(content))
                    more = message.get("more_body", False)
        except TimeoutError:
            raise RefusedError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None
        values = count_values(content)
        if values > self.max_values:
            most = f"this server reads at most {self.max_values:,} in one request"
            raise RefusedError(413, f"the body has {values:,} values; {most}")
        return bytes(content)

    def _client(self, headers: dict[bytes, bytes]) -> str | None:
        """Return the number of the request's key, or None for a wrong key; "anybody" if the server has no keys."""
        if not self.keys:
            return "anybody"
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        key = headers.get(b"x-api-key") or (bearer.strip() if scheme.lower() == b"bearer" else b"")
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.keys]  # compare all, in constant time
        return f"key {matches.index(True) + 1}" if any(matches) else None


def count_values(content: bytes | bytearray) -> int:
    """Return how many values a JSON text separates by commas, much faster than they are parsed."""
    outside = content.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]  # of strings
    return 1 + sum(part.count(b",") for part in outside)


def _host_name(host: str) -> str:
    """Return a Host header without its port; "" if it is malformed."""
    match = HOST.fullmatch(host.strip().lower())
    return "" if match is None else match[1] or match[2]
