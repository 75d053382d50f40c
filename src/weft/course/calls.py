"""Calling a student's function: what it returns, and what it does besides, such as changing its arguments.

Runs in the process of a notebook, and in the limited process that a file is checked in.
"""

import io
import linecache
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.course.values import Value, map_leaves, map_tensors, parts, same, to_tensor

MAX_PRINTED = 2000  # characters of output that are kept
MAX_TRACED = 400  # values of variables that are kept
MAX_COUNTED_LINES = 2_000_000


class CallRequest(NamedTuple):
    """Arguments of a call; `watch` are variables to record, `gradients` arguments to differentiate by."""

    arguments: dict[str, Value]
    gradients: Sequence[str] = ()
    watch: Sequence[str] = ()
    repeat: bool = False  # call it twice, with different states of the global random-number generators
    count_lines: bool = False


class TracedValue(NamedTuple):
    """Value that a line gave to a variable."""

    name: str
    line: int
    text: str
    value: Value


class CallResult(NamedTuple):
    """Result of a call; `error` and its line if it raised, `gradients` by argument if the result is differentiable."""

    value: Value = None
    gradients: dict[str, Value] = {}  # noqa: RUF012
    error: str = ""
    line: int = 0
    text: str = ""
    changed: tuple[str, ...] = ()  # arguments that were changed in place
    random: bool = False
    steps: tuple[TracedValue, ...] = ()
    lines: int = 0
    printed: str = ""
    weak: tuple[str, ...] = ()  # limits that the system did not enforce

    def named(self, outputs: Sequence[str]) -> dict[str, Any]:
        """Name the outputs and the gradients."""
        return parts(self.value, outputs) | {f"∂/∂{name}": each for name, each in self.gradients.items()}


class _Bounded(io.StringIO):
    def write(self, text: str) -> int:
        return super().write(text[: max(0, MAX_PRINTED - self.tell())])


def call(function: Callable[..., Any], request: CallRequest, file: str, *, seed: int = 1) -> CallResult:
    """Call a function whose code is in `file`; `seed` is that of the global random-number generators."""
    arguments, printed = map_tensors(request.arguments, Tensor.clone), _Bounded()
    tracer = _Tracer(file, request.watch)
    with _global_seeds(seed), redirect_stdout(printed), redirect_stderr(printed):
        try:
            if request.watch or request.count_lines:
                sys.settrace(tracer)
            value = map_leaves(function(*arguments.values()), to_tensor)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            sys.settrace(None)
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")
            line, text = _line_of(error, file)
            return CallResult(error=message, line=line, text=text, steps=tracer.found, printed=printed.getvalue())
        finally:
            sys.settrace(None)
        gradients = _gradients(function, request)
    again = call(function, CallRequest(request.arguments), file, seed=2) if request.repeat else None
    return CallResult(
        map_tensors(value, Tensor.detach),
        gradients,
        changed=tuple(name for name, before in request.arguments.items() if not same(before, arguments[name])),
        random=again is not None and not again.error and same(value, value) and not same(value, again.value),
        steps=tracer.found,
        lines=tracer.lines,
        printed=printed.getvalue(),
    )


def _gradients(function: Callable[..., Any], request: CallRequest) -> dict[str, Tensor]:
    """Differentiate a weighted sum of all outputs, with fixed weights; nothing if an output isn't differentiable."""
    leaves = {name: request.arguments[name].clone().requires_grad_() for name in request.gradients}
    if not leaves:
        return {}
    try:
        found: list[Tensor] = []
        map_tensors(function(*map_tensors(request.arguments | leaves, Tensor.clone).values()), found.append)
        if not found or not all(each.requires_grad for each in found):
            return {}
        weighted = [each * torch.arange(1, each.numel() + 1).cos().reshape(each.shape).to(each) for each in found]
        total = torch.stack([each.nan_to_num(0.0, 0.0, 0.0).sum().double() for each in weighted]).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    except Exception:  # such as a call of .numpy(), which is no mistake
        return {}
    return dict(zip(leaves, gradients, strict=True))


@contextmanager
def _global_seeds(seed: int) -> Iterator[None]:
    """Seed the global generators inside the context, and restore them."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _line_of(error: BaseException, file: str) -> tuple[int, str]:
    """Return the last line of a file that an error passed through, or where its syntax is wrong."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno or 0, (error.text or "").strip()
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return (lines[-1].lineno or 0, lines[-1].line or "") if lines else (0, "")


class _Tracer:
    """Records the values that lines of a file give to watched variables, and counts the lines."""

    def __init__(self, file: str, watch: Sequence[str]) -> None:
        self.file, self.watch = file, set(watch)
        self.lines, self.found = 0, tuple[TracedValue, ...]()
        self._last: dict[tuple[int, str], Any] = {}
        self._lines: dict[int, int] = {}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename != self.file:
            return None
        key = id(frame)
        if event == "call":
            self._lines[key] = frame.f_lineno
            self._last = {each: value for each, value in self._last.items() if each[0] != key}
            for name in self.watch & frame.f_locals.keys():
                self._last[key, name] = _mark(frame.f_locals[name]), frame.f_locals[name]
            return self
        self.lines += 1
        if self.lines > MAX_COUNTED_LINES:
            raise TimeoutError(f"it executes more than {MAX_COUNTED_LINES:,} lines")
        for name in self.watch & frame.f_locals.keys() if event != "exception" else ():
            mark, value = _mark(frame.f_locals[name]), frame.f_locals[name]
            if self._last.get((key, name), (None,))[0] != mark and len(self.found) < MAX_TRACED:
                self._last[key, name] = mark, value  # kept, so that no other value gets its id
                self._record(name, self._lines[key], value)
        self._lines[key] = frame.f_lineno if event != "exception" else self._lines[key]
        if event == "return" and self.watch:
            self._record("return", frame.f_lineno, None)
        return self

    def _record(self, name: str, line: int, value: Any) -> None:
        text = linecache.getline(self.file, line).strip()
        self.found += (TracedValue(name, line, text, map_tensors(value, lambda each: each.detach().clone())),)


def _mark(value: Any) -> Any:
    """Return what changes when a variable is assigned, or its tensor is changed in place."""
    return (id(value), value._version) if isinstance(value, Tensor) else (id(value), repr(value)[:1000])
