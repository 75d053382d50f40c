"""Where the time of an engine's steps goes, on the host and on the GPU; used by `engine.py`."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft.decode.engine import engine as steps
from weft.decode.engine.engine import Engine

BANDS = (1, 33, 65, 129, 193, 257)  # rows of a step


class Trace:
    """Times each part of an engine's steps. It wraps what the engine calls, and is undone at the end."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.host: Counter[str] = Counter()
        self.gpu = engine.device.type == "cuda"
        self.steps: list[dict[str, Any]] = []
        self._undo: list[Callable[[], None]] = []
        manager = engine.manager
        self._timed(engine.scheduler, "schedule", "schedule")
        self._timed(manager, "read", "launch the model")
        self._timed(engine, "_run_ahead", "launch the choice")
        self._timed(engine, "_catch_up", "texts")
        fetch_tokens = steps.fetch_tokens
        self._replace(steps, "fetch_tokens", lambda tokens: self._marked_end(fetch_tokens(tokens)))
        if self.gpu and manager.graphs is not None:
            self._events(manager.graphs, "step", "decode", lambda given: sum(given[1]), lambda given: len(given[0]))
            if manager.graphs.kernels is not None:
                self._events(manager.graphs.kernels, "read", "prefill", _seen, _tokens)
            self._events(engine.model, "head", "head")
            self._events(steps, "choose_tokens", "choice")

    def begin(self) -> None:
        """A step begins."""
        self.steps.append({"rows": 0, "tokens": 0, "start": self._event(), "spans": []})

    def end(self) -> None:
        """All is done; what was wrapped is as it was."""
        if self.gpu:
            torch.cuda.synchronize()
        for undo in self._undo:
            undo()

    # ---- wrapping

    def _replace(self, owner: Any, name: str, by: Any) -> None:
        own, before = name in vars(owner), getattr(owner, name)
        setattr(owner, name, by)
        self._undo.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))

    def _timed(self, owner: Any, name: str, what: str) -> None:
        inner = getattr(owner, name)

        def timed(*given: Any) -> Any:
            with self._clock(what):
                return inner(*given)

        self._replace(owner, name, timed)

    @contextmanager
    def _clock(self, what: str) -> Iterator[None]:
        """Time that is spent in here, less what is spent in parts of it that are timed themselves."""
        began, others = time.perf_counter(), self.host.total()
        yield
        self.host[what] += time.perf_counter() - began - (self.host.total() - others)

    def _event(self) -> Any:
        if not self.gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _events(self, owner: Any, name: str, what: str, *counts: Callable[[Any], int]) -> None:
        inner = getattr(owner, name)

        def marked(*given: Any) -> Any:
            began = self._event()
            found = inner(*given)
            seen, rows = [count(given) for count in counts] or [0, 0]
            self.steps[-1]["spans"].append((what, began, self._event(), seen, rows))
            return found

        self._replace(owner, name, marked)

    def _marked_end(self, arrived: Callable[[], list[int]]) -> Callable[[], list[int]]:
        self.steps[-1]["end"] = self._event()

        def wait() -> list[int]:
            with self._clock("wait for the GPU"):
                return arrived()

        return wait

    # ---- what was found

    def report(self, weights: int, read: int, cache: int, wall: float) -> None:
        """Print it. `weights` are the parameters that a token is multiplied with, `read` their bytes, `cache` the bytes
        a token leaves."""
        spent = {**self.host, "other": wall - self.host.total()}
        print("  host, s: " + ", ".join(f"{what} {seconds:.2f}" for what, seconds in spent.items()))
        if not self.gpu:
            return
        found = [_Step(step, read, cache) for step in self.steps if step["spans"]]
        first, last = self.steps[0]["start"], next(step["end"] for step in reversed(self.steps) if "end" in step)
        span = first.elapsed_time(last) / 1e3
        total: Counter[str] = Counter()
        for step in found:
            total.update(step.seconds)
        busy = sum(total[what] for what in ("decode alone", "prefill alone", "both", "head", "choice"))
        print(f"  GPU, s of {span:.2f}: " + ", ".join(f"{what} {seconds:.2f}" for what, seconds in total.items()))
        print(f"  GPU idle, or between parts of a step: {span - busy:.2f} s ({1 - busy / span:.1%})")
        by_kind: dict[tuple[bool, int], list[_Step]] = defaultdict(list)
        for step in found:
            if step.rows:
                by_kind[step.tokens > 0, max(band for band in BANDS if band <= step.rows)].append(step)
        for (beside, rows), some in sorted(by_kind.items()):
            milliseconds = 1e3 * sum(step.decode for step in some) / len(some)
            read = sum(step.bytes for step in some) / sum(step.decode for step in some) / 1e12
            print(
                f"  decode, {rows}+ rows{', prefill beside' if beside else ''}: {len(some)} steps, "
                f"{milliseconds:.2f} ms each, weights and cache read at {read:.2f} TB/s"
            )
        for beside in (False, True):
            some = [step for step in found if step.tokens and bool(step.rows) == beside]
            if some:
                seconds, tokens = sum(step.prefill for step in some), sum(step.tokens for step in some)
                speed = 2e-12 * weights * tokens / seconds
                print(
                    f"  prefill{', decode beside' if beside else ''}: {len(some)} steps, {tokens / len(some):.0f} "
                    f"tokens and {1e3 * seconds / len(some):.1f} ms each, {speed:.0f} TFLOP/s"
                )


class _Step:
    """One step's seconds."""

    def __init__(self, step: dict[str, Any], read: int, cache: int):
        self.rows = self.tokens = self.bytes = 0
        self.seconds: Counter[str] = Counter()
        within: dict[str, tuple[float, float]] = {}
        for what, began, ended, seen, count in step["spans"]:
            span = step["start"].elapsed_time(began) / 1e3, step["start"].elapsed_time(ended) / 1e3
            if what == "decode":
                self.rows, self.bytes = count, read + seen * cache
            if what == "prefill":
                self.tokens = count
            if what in ("decode", "prefill"):
                within[what] = span
            else:
                self.seconds[what] += span[1] - span[0]
        decode, prefill = within.get("decode", (0.0, 0.0)), within.get("prefill", (0.0, 0.0))
        both = max(0.0, min(decode[1], prefill[1]) - max(decode[0], prefill[0]))
        self.decode, self.prefill = decode[1] - decode[0], prefill[1] - prefill[0]
        self.seconds["decode alone"] += self.decode - both
        self.seconds["prefill alone"] += self.prefill - both
        self.seconds["both"] += both


def _seen(given: Any) -> int:
    return sum(chunk.read + len(chunk.ids) for chunk in given[0])


def _tokens(given: Any) -> int:
    return sum(len(chunk.ids) for chunk in given[0])


def kernels_of(work: Callable[[], None], most: int = 24) -> None:
    """Print the kernels that some work spends the GPU's time on."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in events)
    print(f"  kernels, {total / 1e3:.1f} ms in all:")
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:most]:
        share = event.self_device_time_total / total
        print(f"    {share:6.1%} {event.self_device_time_total / 1e3:9.2f} ms {event.count:6} × {event.key[:90]}")
