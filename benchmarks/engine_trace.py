"""Break down the time of an engine's steps, on the host and on the GPU; used by `engine.py`."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft.decode.engine import engine as steps
from weft.decode.engine.engine import Engine

BANDS = (1, 33, 65, 129, 193, 257)  # lower bounds of groups of steps, in rows


class Trace:
    """Time each part of an engine's steps by wrapping the functions it calls, until `end`."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.host: Counter[str] = Counter()
        self.gpu = engine.device.type == "cuda"
        self.steps: list[dict[str, Any]] = []
        self._undo: list[Callable[[], None]] = []
        manager = engine.manager
        self._timed(engine.scheduler, "schedule", "schedule")
        self._timed(manager, "read", "launch the model")
        self._timed(engine, "_run_ahead", "launch sampling")
        self._timed(engine, "_catch_up", "texts")
        fetch_tokens = steps.fetch_tokens
        self._replace(steps, "fetch_tokens", lambda tokens: self._marked_end(fetch_tokens(tokens)))
        if self.gpu and manager.graphs is not None:
            self._events(manager.graphs, "step", "decode", lambda args: sum(args[1]), lambda args: len(args[0]))
            if manager.graphs.kernels is not None:
                self._events(manager.graphs.kernels, "read", "prefill", _keys, _tokens)
            self._events(engine.model, "head", "head")
            self._events(steps, "choose_tokens", "sampling")

    def begin(self) -> None:
        """Start the record of a step."""
        self.steps.append({"rows": 0, "tokens": 0, "start": self._event(), "spans": []})

    def end(self) -> None:
        """Finish, and restore the wrapped functions."""
        if self.gpu:
            torch.cuda.synchronize()
        for undo in self._undo:
            undo()

    # ---- wrapping

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        defined_here, before = name in vars(owner), getattr(owner, name)
        setattr(owner, name, replacement)
        self._undo.append(lambda: setattr(owner, name, before) if defined_here else delattr(owner, name))

    def _timed(self, owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any) -> Any:
            with self._clock(label):
                return inner(*args)

        self._replace(owner, name, timed)

    @contextmanager
    def _clock(self, label: str) -> Iterator[None]:
        """Count the time spent inside, without nested parts that are timed separately."""
        began, others = time.perf_counter(), self.host.total()
        yield
        self.host[label] += time.perf_counter() - began - (self.host.total() - others)

    def _event(self) -> Any:
        if not self.gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _events(self, owner: Any, name: str, label: str, *counts: Callable[[Any], int]) -> None:
        inner = getattr(owner, name)

        def marked(*args: Any) -> Any:
            began = self._event()
            result = inner(*args)
            keys, rows = [count(args) for count in counts] or [0, 0]
            self.steps[-1]["spans"].append((label, began, self._event(), keys, rows))
            return result

        self._replace(owner, name, marked)

    def _marked_end(self, arrived: Callable[[], list[int]]) -> Callable[[], list[int]]:
        self.steps[-1]["end"] = self._event()

        def wait() -> list[int]:
            with self._clock("wait for the GPU"):
                return arrived()

        return wait

    # ---- report

    def report(self, weights: int, read: int, cache: int, wall: float) -> None:
        """Print the times. `weights` is the number of parameters a token is multiplied with, `read` their bytes,
        `cache` the bytes of KV cache per token."""
        spent = {**self.host, "other": wall - self.host.total()}
        print("  host, s: " + ", ".join(f"{label} {seconds:.2f}" for label, seconds in spent.items()))
        if not self.gpu:
            return
        steps = [_Step(step, read, cache) for step in self.steps if step["spans"]]
        first, last = self.steps[0]["start"], next(step["end"] for step in reversed(self.steps) if "end" in step)
        span = first.elapsed_time(last) / 1e3
        total: Counter[str] = Counter()
        for step in steps:
            total.update(step.seconds)
        busy = sum(total[label] for label in ("decode alone", "prefill alone", "both", "head", "sampling"))
        print(f"  GPU, s of {span:.2f}: " + ", ".join(f"{label} {seconds:.2f}" for label, seconds in total.items()))
        print(f"  GPU idle, or between parts of a step: {span - busy:.2f} s ({1 - busy / span:.1%})")
        by_kind: dict[tuple[bool, int], list[_Step]] = defaultdict(list)
        for step in steps:
            if step.rows:
                by_kind[step.tokens > 0, max(band for band in BANDS if band <= step.rows)].append(step)
        for (beside, rows), group in sorted(by_kind.items()):
            milliseconds = 1e3 * sum(step.decode for step in group) / len(group)
            read = sum(step.bytes for step in group) / sum(step.decode for step in group) / 1e12
            print(
                f"  decode, {rows}+ rows{', prefill beside' if beside else ''}: {len(group)} steps, "
                f"{milliseconds:.2f} ms each, weights and cache read at {read:.2f} TB/s"
            )
        for beside in (False, True):
            group = [step for step in steps if step.tokens and bool(step.rows) == beside]
            if group:
                seconds, tokens = sum(step.prefill for step in group), sum(step.tokens for step in group)
                speed = 2e-12 * weights * tokens / seconds
                print(
                    f"  prefill{', decode beside' if beside else ''}: {len(group)} steps, {tokens / len(group):.0f} "
                    f"tokens and {1e3 * seconds / len(group):.1f} ms each, {speed:.0f} TFLOP/s"
                )


class _Step:
    """Seconds of one step, by part."""

    def __init__(self, step: dict[str, Any], read: int, cache: int):
        self.rows = self.tokens = self.bytes = 0
        self.seconds: Counter[str] = Counter()
        within: dict[str, tuple[float, float]] = {}
        for label, began, ended, keys, count in step["spans"]:
            span = step["start"].elapsed_time(began) / 1e3, step["start"].elapsed_time(ended) / 1e3
            if label == "decode":
                self.rows, self.bytes = count, read + keys * cache
            if label == "prefill":
                self.tokens = count
            if label in ("decode", "prefill"):
                within[label] = span
            else:
                self.seconds[label] += span[1] - span[0]
        decode, prefill = within.get("decode", (0.0, 0.0)), within.get("prefill", (0.0, 0.0))
        both = max(0.0, min(decode[1], prefill[1]) - max(decode[0], prefill[0]))
        self.decode, self.prefill = decode[1] - decode[0], prefill[1] - prefill[0]
        self.seconds["decode alone"] += self.decode - both
        self.seconds["prefill alone"] += self.prefill - both
        self.seconds["both"] += both


def _keys(args: Any) -> int:
    return sum(chunk.read + len(chunk.ids) for chunk in args[0])


def _tokens(args: Any) -> int:
    return sum(len(chunk.ids) for chunk in args[0])


def kernels_of(work: Callable[[], None], limit: int = 24) -> None:
    """Print the kernels that take the most GPU time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in events)
    print(f"  kernels, {total / 1e3:.1f} ms in all:")
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:limit]:
        share = event.self_device_time_total / total
        print(f"    {share:6.1%} {event.self_device_time_total / 1e3:9.2f} ms {event.count:6} × {event.key[:90]}")
