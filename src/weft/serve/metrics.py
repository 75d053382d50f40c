"""What a server counts, for Prometheus."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weft.serve.library import Library

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters of one server."""

    def __init__(self, library: Library):
        self.library, self.registry = library, CollectorRegistry()
        of: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("weft_requests", "Requests by path and status.", ["path", "status"], **of)
        self.prompt_tokens = Counter("weft_prompt_tokens", "Tokens of prompts.", ["model"], **of)
        self.written_tokens = Counter("weft_written_tokens", "Tokens written.", ["model"], **of)
        self.first_token = Histogram(
            "weft_time_to_first_token_seconds", "From a request to its first token.", ["model"], buckets=SECONDS, **of
        )
        self.between_tokens = Histogram(
            "weft_time_between_tokens_seconds", "From one token to the next.", ["model"], buckets=SECONDS, **of
        )
        of_models = {
            "loaded": "1 where the model is loaded.",
            "requests_waiting": "Requests that wait for the model.",
            "texts_writing": "Texts that are being written.",
            "cache_blocks_used": "Blocks of keys and values in use.",
            "cache_blocks": "All blocks of keys and values.",
            "shared_prefix_tokens": "Tokens of prompts that need not be read: another text has the same prefix.",
            "preempted": "Times that a text made room for others.",
        }
        self.gauges = {name: Gauge(f"weft_{name}", words, ["model"], **of) for name, words in of_models.items()}

    def text(self) -> bytes:
        """All of them, in Prometheus's format."""
        for name, shelf in self.library.shelves.items():
            worker = shelf.worker
            values = {"loaded": int(worker is not None)}
            if worker is not None:
                used, blocks = worker.blocks
                values |= {"requests_waiting": worker.waiting, "texts_writing": worker.active}
                values |= {"cache_blocks_used": used, "cache_blocks": blocks}
                values |= {"shared_prefix_tokens": worker.counts.shared, "preempted": worker.counts.preempted}
            for gauge, metric in self.gauges.items():
                metric.labels(name).set(values.get(gauge, 0))
        return generate_latest(self.registry)
