"""A server in a thread of the test's process, over the small runs of `tests/api/runs-0.1`."""

import json
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
from weft.serve.model_thread import ModelThread

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

    def thread(self, name: str) -> ModelThread:
        return self.library.models[name].loaded_thread

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def json(self, path: str, **body: Any) -> Any:
        """Return the JSON of a response to a body, which must succeed."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, body: Any = None, status: int = 400, **options: Any) -> str:
        """Return the message of an error response, which must be in the format of its API."""
        response = self.post(path, body, **options)
        assert response.status_code == status, response.text
        return refusal(response)

    def raw(self, request: bytes) -> bytes:
        """Send bytes and return the response until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(request)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
            return b"".join(parts)

    @contextmanager
    def connected(self, body: Any, path: str = "/v1/completions", buffer: int = 0) -> Iterator[socket.socket]:
        """A connection over which a body has been sent; it is dropped at the end of the `with` block."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.socket() as connection:
            if buffer:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            connection.connect(("127.0.0.1", self.port))
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            yield connection


@contextmanager
def served(
    *paths: Path,
    serving: Serving | None = None,
    port: int = 0,
    may_be_empty: bool = False,
    show_errors: bool = False,
    **limits: Any,
) -> Iterator[Served]:
    """A server of these runs, or folders of runs."""
    serving = serving or Serving(limits=Limits(**{"max_tokens": 512, **limits}))
    names = [str(path) for path in paths]
    library = Library(names, None, serving.limits, may_be_empty=may_be_empty, show_errors=show_errors)
    server = uvicorn.Server(uvicorn_config(make_app(library, serving), serving))
    listener = socket.create_server(("127.0.0.1", port), backlog=2048)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        until(lambda: server.started)
        port = listener.getsockname()[1]
        # verify=False: no certificates to read
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as http:
            yield Served(port, library, http)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()


def refusal(response: httpx.Response) -> str:
    """Return the message of an error response, which must be in the format of its API."""
    error = response.json()["error"]
    if response.request.url.path.startswith("/v1/messages"):
        assert response.json()["type"] == "error" and set(error) == {"type", "message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def idle(thread: ModelThread) -> bool:
    return not thread.active and not thread.waiting


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)
