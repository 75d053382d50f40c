"""Responses: whole, or as server-sent events that are sent while a text is written."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from weft.serve.errors import as_refused, error_body, speaks_anthropic
from weft.serve.gate import Receive, Scope, Send

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not buffer the stream
DONE = b"data: [DONE]\n\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
MAX_INLINE_VALUES = 10_000  # of a response that is encoded faster than a thread starts
DISCONNECTED = 499  # status in the log; nobody receives it
Events = AsyncGenerator[bytes, None]
T = TypeVar("T")


def encoded(value: Any) -> bytes:
    return ENCODER.encode(value).encode("utf-8", "replace")


def event(value: Any, name: str | None = None) -> bytes:
    """Encode a server-sent event."""
    return (b"" if name is None else f"event: {name}\n".encode()) + b"data: " + encoded(value) + b"\n\n"


class EventStream(Response):
    """A response of events that ends when the client disconnects. Later errors are sent as an event."""

    def __init__(self, first: bytes, events: Events, *, anthropic: bool):
        super().__init__(media_type="text/event-stream", headers=HEADERS)
        del self.headers["content-length"]
        self.first, self.events, self.anthropic = first, events, anthropic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self.events) as events:
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
            try:
                async for content in events:
                    await send({"type": "http.response.body", "body": content, "more_body": True})
            except Exception as error:
                refused = as_refused(error)
                content = event(error_body(self.anthropic, refused.status, refused.message), "error")
                await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream_response(request: Request, events: Events) -> Response:
    """Respond with a stream of events; an error before the first event becomes an ordinary error response."""
    first = await until_disconnect(request.receive, anext(events))
    if first is None:
        return Response(status_code=DISCONNECTED)
    return EventStream(first, events, anthropic=speaks_anthropic(request))


async def json_response(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """Respond with the result of `work` as JSON; cancel it if the client disconnects."""
    value = await until_disconnect(request.receive, work)
    if value is None:
        return Response(status_code=DISCONNECTED)
    if _count(value, MAX_INLINE_VALUES) > 0:
        return encoded_response(value)
    # value by value: the encoder in C would keep all threads waiting until it is done
    parts = await asyncio.to_thread(lambda: "".join(ENCODER.iterencode(value)).encode("utf-8", "replace"))
    return Response(parts, media_type="application/json")


def _count(value: Any, left: int) -> int:
    """Return how many more values than those in `value` may follow; 0 or less as soon as there are too many."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        left = _count(each, left - 1)
        if left <= 0:
            break
    return left


def encoded_response(value: Any) -> Response:
    return Response(encoded(value), media_type="application/json")


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or cancel it and return None as soon as the client disconnects."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
