"""Answers: whole, or as server-sent events that go to the client as they come."""

import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.serve.errors import as_refused, body, path_of
from weft.serve.gate import Receive, Scope, Send
from weft.serve.writing import Server, unless_gone

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # a proxy must not hold it back
DONE = b"data: [DONE]\n\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
Events = AsyncGenerator[bytes, None]


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def client_of(request: Request) -> str:
    return str(request.state.client)


def encoded(value: Any) -> bytes:
    return ENCODER.encode(value).encode("utf-8", "replace")


def event(value: Any, name: str | None = None) -> bytes:
    return (b"" if name is None else f"event: {name}\n".encode()) + b"data: " + encoded(value) + b"\n\n"


class EventStream(Response):
    """A response of events, which ends when the client goes. What fails after the first one is told as an event."""

    def __init__(self, first: bytes, events: Events, path: str):
        super().__init__(media_type="text/event-stream", headers=HEADERS)
        del self.headers["content-length"]
        self.first, self.events, self.path = first, events, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self.events) as events:
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
            try:
                async for each in events:
                    await send({"type": "http.response.body", "body": each, "more_body": True})
            except Exception as error:
                refused = as_refused(error)
                told = event(body(self.path, refused.status, refused.message), "error")
                await send({"type": "http.response.body", "body": told, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def streamed(request: Request, events: Events) -> Response:
    """A stream of events. What is refused before the first one is an error like any other."""
    first = await unless_gone(request.receive, anext(events))
    return Response(status_code=499) if first is None else EventStream(first, events, path_of(request))


async def respond(
    request: Request, body: Any, whole: Callable[..., Coroutine[Any, Any, Any]], events: Callable[..., Events]
) -> Response:
    """What a body asks for, `whole` or as `events`: both are given the server, the body and the client."""
    given = server_of(request), body, client_of(request)
    return await streamed(request, events(*given)) if body.stream else await answered(request, whole(*given))


async def answered(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """What the work gives, as JSON."""
    value = await unless_gone(request.receive, work)
    return Response(status_code=499) if value is None else Response(encoded(value), media_type="application/json")
