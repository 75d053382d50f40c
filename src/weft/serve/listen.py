"""The server process: uvicorn, with time limits on idle connections, and the interpreter's settings."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from weft.serve.app import make_app
from weft.serve.config import Serving
from weft.serve.gate import App
from weft.serve.library import Library

DRAIN_SECONDS = 30  # time that texts in progress have to finish after SIGTERM
REFUSE_SECONDS = 2  # time for the others' refusals to be sent after that
ABANDON_SECONDS = 5.0  # time that a thread has to return then; compiling a large grammar can't be interrupted
IDLE_SECONDS = 20.0  # close a connection that sends no request, or reads none of its response, for this long
MAX_HEADER_BYTES = 1 << 16
SWITCH_SECONDS = 0.001  # interpreter's switch interval: a model's thread gets its turn soon, beside many streams
GC_THRESHOLD = 50_000  # new objects that trigger a garbage collection of the youngest generation

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:
    Protocol = AutoHTTPProtocol  # httptools where it is installed


class IdleTimeoutProtocol(Protocol):
    """Closes connections that send no request, or whose response is not read; uvicorn would wait forever."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._header_bytes, self._last_cycle, self._unsent = 0, self.cycle, 0
        self._timer = self.loop.call_later(IDLE_SECONDS, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        super().data_received(data)
        self._header_bytes = self._header_bytes + len(data) if self._idle and self.cycle is cycle else 0
        if self._header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _close_if_idle(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        unread = self.flow.write_paused and unsent == self._unsent
        if self.transport.is_closing() or unread or (self._idle and self.cycle is self._last_cycle):
            self.transport.abort()
            return
        self._last_cycle, self._unsent = self.cycle, unsent
        self._timer = self.loop.call_later(IDLE_SECONDS, self._close_if_idle)


def uvicorn_config(app: App, serving: Serving, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration; `options` are its settings of sockets and certificates."""
    return uvicorn.Config(
        app,
        http=IdleTimeoutProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS + REFUSE_SECONDS,
        root_path=serving.root_path,
        **options,
    )


class DrainingServer(uvicorn.Server):
    """Ends calls as soon as the process is to stop; texts in progress have some time to finish.

    asyncio would then wait for its threads without end, so the process exits `patience` seconds later.
    """

    def __init__(self, config: uvicorn.Config, library: Library, patience: float = ABANDON_SECONDS):
        super().__init__(config)
        self.library, self.patience = library, patience

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.library.refuse_calls()
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, lambda: self.library.close())
        timer = threading.Timer(
            self.patience + (self.config.timeout_graceful_shutdown or 0), os._exit, [128 + signal.SIGTERM]
        )
        timer.daemon = True
        timer.start()
        await super().shutdown(sockets)


def run_server(library: Library, serving: Serving, listener: socket.socket | None, **options: Any) -> None:
    """Serve until the process is ended."""
    config = uvicorn_config(make_app(library, serving), serving, **options)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    configure_interpreter()
    DrainingServer(config, library).run(None if listener is None else [listener])


def configure_interpreter() -> None:
    """Set the thread switching and the garbage collection of this process for serving."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(GC_THRESHOLD, 10, 10)


def freeze_loaded() -> None:
    """Collect garbage once and exempt all living objects from later collections, which would stop all threads."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
