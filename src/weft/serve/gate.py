"""Who is let in, and how much a request may weigh: before any of it is read as JSON."""

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from weft.serve.config import Serving
from weft.serve.errors import body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = {"/health", "/ready", "/"}  # neither what a load balancer asks for nor the page has secrets
OPEN_FOLDER = "/web/"
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s\[\]:/@]+))(?::\d*)?")
BODY_SECONDS = 30.0  # within which a body has to arrive


class Gate:
    """Refuses a foreign host, a wrong key and a body that is too large or never ends."""

    def __init__(self, app: App, serving: Serving):
        self.app, self.serving = app, serving
        self.hosts = {_bare(f"[{host}]" if host.count(":") > 1 else host) for host in serving.hosts}
        self.keys = [hashlib.sha256(key.encode()).digest() for key in serving.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path = scope["path"].removeprefix(self.serving.root_path)
        if "*" not in self.hosts and _bare(headers.get(b"host", b"").decode("latin-1")) not in self.hosts:
            await _refuse(send, path, 421, "this server has another name; --allow-host adds one")
            return
        client = self._client(headers)
        if client is None and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            await _refuse(send, path, 401, "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
            return
        scope.setdefault("state", {})["client"] = client or "anybody"
        limit = self.serving.limits.body_bytes
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            await _refuse(send, path, 413, f"a body has at most {limit} bytes", close=True)
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
                            await _refuse(send, path, 413, f"a body has at most {limit} bytes", close=True)
                            return
                        if not message.get("more_body"):
                            break
            except TimeoutError:
                await _refuse(send, path, 408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds", close=True)
                return
        await self.app(scope, _replay(bytes(content), receive), send)

    def _client(self, headers: dict[bytes, bytes]) -> str | None:
        """Whose key it is, by its number; None for a wrong one. Anybody, where there are no keys."""
        if not self.keys:
            return "anybody"
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = headers.get(b"x-api-key") or (bearer.strip() if scheme.lower() == b"bearer" else b"")
        digest = hashlib.sha256(given).digest()
        same = [hmac.compare_digest(digest, key) for key in self.keys]  # all of them, whichever it is
        return f"key {same.index(True) + 1}" if any(same) else None


def _bare(host: str) -> str:
    """A host without its port; nothing where it is no host."""
    found = HOST.fullmatch(host.strip().lower())
    return "" if found is None else found[1] or found[2]


def _replay(content: bytes, receive: Receive) -> Receive:
    """What was read already, and then whatever comes."""
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": content, "more_body": False}

    return replayed


async def _refuse(send: Send, path: str, status: int, message: str, close: bool = False) -> None:
    content = json.dumps(body(path, status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers += [(b"connection", b"close")] * close + [(b"www-authenticate", b"Bearer")] * (status == 401)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
