"""A server in a thread of the test's own process, over the small runs of `tests/api/runs-0.1`."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from weft.serve.app import make_app
from weft.serve.config import Limits, Serving
from weft.serve.library import Library
from weft.serve.listen import uvicorn_config
from weft.serve.worker import Worker

RUNS = Path(__file__).parents[1] / "api" / "runs-0.1"


@dataclass
class Served:
    port: int
    library: Library
    http: httpx.Client

    def get(self, path: str, headers: Any = None) -> httpx.Response:
        return self.http.get(path, headers=headers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def worker(self, name: str) -> Worker:
        worker = self.library.shelves[name].worker
        assert worker is not None
        return worker

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def raw(self, sent: bytes) -> bytes:
        """What comes back to these bytes until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(sent)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
            return b"".join(parts)


@contextmanager
def served(
    *places: Path, serving: Serving | None = None, port: int = 0, may_be_empty: bool = False, **limits: Any
) -> Iterator[Served]:
    """A server of these runs, or folders of runs."""
    serving = serving or Serving(limits=Limits(**{"max_tokens": 512, **limits}))
    library = Library([str(place) for place in places], None, serving.limits, may_be_empty=may_be_empty)
    server = uvicorn.Server(uvicorn_config(make_app(library, serving), serving))
    listener = socket.create_server(("127.0.0.1", port), backlog=2048)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        until(lambda: server.started)
        port = listener.getsockname()[1]
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False
        ) as http:  # no certificates to read
            yield Served(port, library, http)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()


def idle(worker: Worker) -> bool:
    return not worker.active and not worker.waiting


def until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)
