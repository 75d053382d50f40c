"""Where a server listens: uvicorn, with patience for connections that neither ask nor read."""

from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from weft.serve.config import Serving
from weft.serve.gate import App

DRAIN_SECONDS = 30  # that texts have to end after SIGTERM
PATIENCE_SECONDS = 20.0  # within which a request has to begin, and some of an answer has to be fetched
MAX_HEADER_BYTES = 1 << 16

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:
    Protocol = AutoHTTPProtocol  # httptools where it is installed


class PatientProtocol(Protocol):
    """Closes a connection on which no request comes, or whose answer nobody fetches: uvicorn would wait for ever."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._header_bytes, self._seen, self._unsent = 0, self.cycle, 0
        self._watch = self.loop.call_later(PATIENCE_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        self._header_bytes = self._header_bytes + len(data) if self._idle and self.cycle is before else 0
        if self._header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _look(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        unread = self.flow.write_paused and unsent == self._unsent
        if self.transport.is_closing() or unread or (self._idle and self.cycle is self._seen):
            self.transport.abort()
            return
        self._seen, self._unsent = self.cycle, unsent
        self._watch = self.loop.call_later(PATIENCE_SECONDS, self._look)


def uvicorn_config(app: App, serving: Serving, **where: Any) -> uvicorn.Config:
    """How uvicorn runs the application; `where` are its own settings of sockets and certificates."""
    return uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        root_path=serving.root_path,
        **where,
    )
