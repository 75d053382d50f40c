"""State that all routes share: the models, the metrics for Prometheus, and the settings of a server."""

from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request

from weft.serve.config import Limits, Serving
from weft.serve.library import Library

BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds
GAUGES = {
    "loaded": "1 if the model is loaded.",
    "requests_waiting": "Requests that wait for the model.",
    "texts_writing": "Texts in progress.",
    "cache_blocks_used": "KV blocks in use.",
    "cache_blocks": "KV blocks in all.",
    "shared_prefix_tokens": "Prompt tokens not read again, because another text has the same prefix.",
    "preempted": "Times that a text was preempted to free KV blocks for others.",
}


class Metrics:
    """Counters, histograms and gauges of one server."""

    def __init__(self, library: Library):
        self.library, self.registry = library, CollectorRegistry()
        shared: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("weft_requests", "Requests by path and status.", ["path", "status"], **shared)
        shared["labelnames"] = ["model"]
        self.prompt_tokens = Counter("weft_prompt_tokens", "Tokens of prompts.", **shared)
        self.written_tokens = Counter("weft_written_tokens", "Tokens generated.", **shared)
        self.first_token = Histogram(
            "weft_time_to_first_token_seconds", "From a request to its first token.", buckets=BUCKETS, **shared
        )
        self.between_tokens = Histogram(
            "weft_time_between_tokens_seconds", "From one token to the next.", buckets=BUCKETS, **shared
        )
        self.gauges = {name: Gauge(f"weft_{name}", description, **shared) for name, description in GAUGES.items()}

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        for name, model in self.library.models.items():
            thread = model.thread
            values = {"loaded": int(thread is not None)}
            if thread is not None:
                used, blocks = thread.blocks
                values |= {"requests_waiting": thread.waiting, "texts_writing": thread.active}
                values |= {"cache_blocks_used": used, "cache_blocks": blocks}
                values |= {"shared_prefix_tokens": thread.counts.shared, "preempted": thread.counts.preempted}
            for gauge, metric in self.gauges.items():
                metric.labels(name).set(values.get(gauge, 0))
        return generate_latest(self.registry)


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
