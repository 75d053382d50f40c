"""Checks before a request is parsed: its host, its key, and the size of its body."""

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from weft.serve.config import Serving
from weft.serve.errors import error_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = {"/health", "/ready", "/"}  # need no key: a load balancer's checks, and the page, hold no secrets
OPEN_FOLDER = "/web/"
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s\[\]:/@]+))(?::\d*)?")
BODY_SECONDS = 30.0  # time limit for receiving a body


class Gate:
    """Refuses requests with an unknown host, a wrong key, or a body that is too large or too slow."""

    def __init__(self, app: App, serving: Serving):
        self.app, self.serving = app, serving
        self.hosts = {_host_name(f"[{host}]" if host.count(":") > 1 else host) for host in serving.hosts}
        self.keys = [hashlib.sha256(key.encode()).digest() for key in serving.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path = scope["path"].removeprefix(self.serving.root_path)

        async def refuse(status: int, message: str, close: bool = False) -> None:
            content = json.dumps(error_body(path, status, message)).encode()
            answer = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
            answer += [(b"connection", b"close")] * close + [(b"www-authenticate", b"Bearer")] * (status == 401)
            await send({"type": "http.response.start", "status": status, "headers": answer})
            await send({"type": "http.response.body", "body": content})

        if "*" not in self.hosts and _host_name(headers.get(b"host", b"").decode("latin-1")) not in self.hosts:
            await refuse(421, "this server does not answer to the requested host name; --allow-host adds one")
            return
        client = self._client(headers)
        if client is None and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            await refuse(401, "a key is required: Authorization: Bearer KEY, or x-api-key: KEY")
            return
        scope.setdefault("state", {})["client"] = client or "anybody"
        limit = self.serving.limits.body_bytes
        too_large = f"the body is too large; at most {limit} bytes are accepted"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            await refuse(413, too_large, close=True)
            return
        content = bytearray()
        if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    while True:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            return
                        content += message.get("body", b"")
                        if len(content) > limit:
                            await refuse(413, too_large, close=True)
                            return
                        if not message.get("more_body"):
                            break
            except TimeoutError:
                await refuse(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds", close=True)
                return
        await self.app(scope, _replay(bytes(content), receive), send)

    def _client(self, headers: dict[bytes, bytes]) -> str | None:
        """Return the number of the request's key, or None for a wrong key; "anybody" if the server has no keys."""
        if not self.keys:
            return "anybody"
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        key = headers.get(b"x-api-key") or (bearer.strip() if scheme.lower() == b"bearer" else b"")
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.keys]  # compare all, in constant time
        return f"key {matches.index(True) + 1}" if any(matches) else None


def _host_name(host: str) -> str:
    """Return a Host header without its port; "" if it is malformed."""
    match = HOST.fullmatch(host.strip().lower())
    return "" if match is None else match[1] or match[2]


def _replay(content: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first yields the body, which has been read already."""
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": content, "more_body": False}

    return replayed
