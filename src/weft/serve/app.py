"""The server: all routes behind the gate, over a library of models."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from weft import __version__
from weft.errors import WeftError
from weft.serve.config import Serving
from weft.serve.errors import RefusedError, on_http, on_invalid, on_refused
from weft.serve.gate import App, Gate, Message, Receive, Scope, Send
from weft.serve.library import Library
from weft.serve.page import POLICY, routes_page
from weft.serve.routes import anthropic, explorer, openai, own, responses, runs, tokens
from weft.serve.server import Metrics, Server

log = logging.getLogger("weft.serve")


def make_app(library: Library, serving: Serving) -> App:
    """Return the ASGI application of a server: its routes behind the gate."""
    metrics = Metrics(library)
    gate: App = Gate(make_routes(library, serving, metrics), serving)
    if serving.origins:  # outside the gate: a browser sends its preflight request without a key
        gate = CORSMiddleware(gate, list(serving.origins), allow_methods=["*"], allow_headers=["*"])
    return _with_metrics(gate, metrics)


def make_routes(library: Library, serving: Serving, metrics: Metrics) -> FastAPI:
    """Return all routes; `openapi()` describes them."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        preparation = asyncio.create_task(library.prepare())
        yield
        preparation.cancel()
        library.close()

    app = FastAPI(title="weft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = Server(library, metrics, serving)
    for routes in (openai, responses, anthropic, own, tokens, runs, explorer):
        app.include_router(routes.router)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Report that the server is running."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """Report whether the first model is loaded (503 until then), and which models are."""
        loaded = [name for name, model in library.models.items() if model.thread is not None]
        return JSONResponse({"ready": library.ready, "loaded": loaded}, 200 if library.ready else 503)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(routes_page(app.openapi()), headers={"Content-Security-Policy": POLICY})

    @app.get("/metrics")
    async def counters() -> Response:
        """Return counters and latencies for Prometheus."""
        return PlainTextResponse(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    for kind in (RefusedError, WeftError, Exception):
        app.add_exception_handler(kind, on_refused)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_invalid)
    return app


def _with_metrics(app: App, metrics: Metrics) -> App:
    """Wrap an application to count and log each request, and to send an id with each response."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        status, start = 499, time.monotonic()  # 499: disconnected before a response
        id = f"req_{uuid.uuid4().hex}".encode()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (b"x-request-id", b"request-id")  # OpenAI's and Anthropic's
                message = {**message, "headers": [*message["headers"], *((name, id) for name in names)]}
            await send(message)

        try:
            await app(scope, receive, send_and_note)
        finally:
            path = getattr(scope.get("route"), "path", "other")  # not the requested path, which may be anything
            metrics.requests.labels(path, str(status)).inc()
            log.info("%s %s %d %.3f s", scope["method"], path, status, time.monotonic() - start)

    return counted
