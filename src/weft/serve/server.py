"""State that all routes share."""

from dataclasses import dataclass

from starlette.requests import Request

from weft.serve.config import Limits, Serving
from weft.serve.library import Library
from weft.serve.metrics import Metrics


@dataclass(frozen=True)
class Server:
    """The models, metrics and settings of one server."""

    library: Library
    metrics: Metrics
    serving: Serving

    @property
    def limits(self) -> Limits:
        return self.serving.limits


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def client_of(request: Request) -> str:
    return str(request.state.client)
