"""Calling a student's function: what it returns, and what it does besides, such as changing its arguments.

Runs in the process of a notebook, and in the limited process that a file is checked in.
"""

import ast
import io
import linecache
import random
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from operator import itemgetter
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.course.repairs import MAX_EDITS, edited
from weft.course.values import MismatchError, Value, map_leaves, map_tensors, parts, same, to_tensor

MAX_PRINTED = 2000  # characters of output that are kept
MAX_TRACED = 400  # values of variables that are kept
MAX_EDITED_LINES = 300_000  # that edited functions execute, where compiling one counts as COMPILED_LINES
COMPILED_LINES = 30
MAX_VERIFIED = 24  # edits of a cost that are tried on all cases
SIGNAL_SECONDS = 0.1  # between signals to a function that catches all exceptions
LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Case(NamedTuple):
    """Arguments of a call; `watch` are variables to record, `gradients` arguments to differentiate by.

    Several with `expected` results, each with its tolerance, ask for edits of the function that give them.
    """

    arguments: dict[str, Value]
    gradients: Sequence[str] = ()
    watch: Sequence[str] = ()
    repeat: bool = False  # call it twice, with different states of the global random-number generators
    count_lines: bool = False
    expected: dict[str, Value] = {}  # noqa: RUF012
    tolerances: dict[str, float] = {}  # noqa: RUF012
    line: int = 0  # whose edits come first
    name: str = ""

    @property
    def size(self) -> int:
        return sum(value.numel() for value in self.arguments.values() if isinstance(value, Tensor))

    def holds(self, name: str, given: Any) -> bool:
        """Return whether an output has the expected value."""
        return same(self.expected[name], given, self.tolerances[name])

    def accepts(self, result: "CallResult") -> bool:
        """Return whether a result is the expected one."""
        try:
            given = result.named([name for name in self.expected if name[0] != "∂"])
        except MismatchError:
            return False
        right = (name not in given or self.holds(name, given[name]) for name in self.expected)
        return not (result.error or result.changed or result.random) and all(right)


class TracedValue(NamedTuple):
    """Value that a line gave to a variable; `uses` are the other local variables in the line."""

    name: str
    line: int
    text: str
    value: Value
    uses: tuple[str, ...] = ()


class CallResult(NamedTuple):
    """Result of a call; `error` and its line if it raised, `gradients` by argument if the result is differentiable."""

    value: Value = None
    gradients: dict[str, Value] = {}  # noqa: RUF012
    error: str = ""
    line: int = 0
    text: str = ""
    late: bool = False  # it took too long; its line is that of the loop it was in
    loaded: bool = True  # or the error is that of loading the file
    changed: tuple[str, ...] = ()  # arguments that were changed in place
    random: bool = False
    steps: tuple[TracedValue, ...] = ()
    lines: int = 0
    printed: str = ""

    def named(self, outputs: Sequence[str]) -> dict[str, Any]:
        """Name the outputs and the gradients."""
        return parts(self.value, outputs) | {f"∂/∂{name}": each for name, each in self.gradients.items()}


class TimeUpError(BaseException):
    """The time of a check is up. `except Exception` does not catch it."""


class _Bounded(io.StringIO):
    def write(self, text: str) -> int:
        return super().write(text[: max(0, MAX_PRINTED - self.tell())])


def call(function: Callable[..., Any], case: Case, file: str, *, seed: int = 1) -> CallResult:
    """Call a function whose code is in `file`; `seed` is that of the global random-number generators."""
    printed, tracer = _Bounded(), _Tracer(file, case.watch)
    with _global_seeds(seed), redirect_stdout(printed), redirect_stderr(printed):
        result = _outcome(function, case, tracer if case.watch or case.count_lines else None, file=file)
    if case.repeat and not result.error and same(result.value, result.value):
        again = call(function, Case(case.arguments), file, seed=2)
        result = result._replace(random=not again.error and not same(result.value, again.value))
    return result._replace(steps=tracer.found, lines=tracer.lines, printed=printed.getvalue())


def _outcome(function: Callable[..., Any], case: Case, tracer: "_Tracer | None", *, file: str) -> CallResult:
    """Call a function for its result, the gradients, and what it changes."""
    arguments = map_tensors(case.arguments, Tensor.clone)
    try:
        try:
            sys.settrace(tracer)
            value = map_leaves(function(*arguments.values()), to_tensor)
        finally:
            sys.settrace(None)
        gradients = _gradients(function, case)
    except (Exception, SystemExit, KeyboardInterrupt, TimeUpError) as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")
        frames = traceback.walk_tb(error.__traceback__)
        lines = [number for frame, number in frames if frame.f_code.co_filename == file][::-1]
        if isinstance(error, TimeUpError):
            return late(str(error), lines, "".join(linecache.getlines(file)))
        if isinstance(error, SyntaxError) and error.filename == file:
            lines = [error.lineno or 0]
        line = next(iter(lines), 0)
        return CallResult(error=message, line=line, text=_text(file, line))
    changed = tuple(name for name, before in case.arguments.items() if not same(before, arguments[name]))
    return CallResult(map_tensors(value, Tensor.detach), gradients, changed=changed)


def _text(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


def late(reason: str, numbers: Sequence[int], source: str) -> CallResult:
    """Return the result of a call that took too long, with the loop that it was in.

    `numbers` are those of the lines that ran when the time was up, the innermost first.
    """
    line, what = next(_running(numbers, source))
    text = "".join(source.splitlines()[line - 1 : line]).strip()
    where = f" and was still in the {what} “{text}”" if text else ""
    return CallResult(error=f"{reason}{where}", line=line, text=text, late=True)


def _running(numbers: Sequence[int], source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of the innermost loop around one of these lines, and then the first of them."""
    with suppress(SyntaxError, ValueError, RecursionError):
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, LOOPS)]
        for depth, number in enumerate(numbers):
            if number in numbers[:depth]:
                yield number, "recursion"
            if around := [node for node in nodes if node.lineno <= number <= (node.end_lineno or 0)]:
                # those of `for` end, so that one that takes too long has others inside
                endless = [node for node in reversed(around) if isinstance(node, ast.While)]
                yield (endless or around)[0].lineno, "loop"
    yield next(iter(numbers), 0), "line"


@contextmanager
def time_limit(seconds: float, file: str) -> Iterator[None]:
    """Stop a file's functions after this many seconds: in the main thread, and not on Windows, which has no timers."""

    def stop(_signal: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != file:
            frame = frame.f_back if frame.f_code is not _outcome.__code__ else None  # whose caller may be in the file
        if frame is not None:  # else the next signal finds one, or nothing is left to stop
            raise TimeUpError(f"it takes more than {seconds:g} seconds")

    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, seconds, SIGNAL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def repairs(function: Callable[..., Any], cases: Sequence[Case], file: str) -> CallResult:
    """Return as steps the smallest edits of a function that give what all cases expect, the nearest to a line first.

    Of the cases that count lines, edits are tried on the one that executes the fewest. What bounds them is a number of
    lines rather than a time, so that an answer does not depend on the machine.
    """
    found, left, most = list[TracedValue](), MAX_EDITED_LINES, MAX_EDITED_LINES // 32

    def run(called: Callable[..., Any], case: Case, max_lines: int) -> tuple[int, CallResult]:
        tracer = _Tracer(file, max_lines=max_lines)
        result = _outcome(called, case, tracer, file=file)
        return tracer.lines + COMPILED_LINES, result

    with _global_seeds(1), redirect_stdout(_Bounded()), redirect_stderr(_Bounded()):
        warnings.simplefilter("ignore")  # in a copy of the process
        lines, first = min(
            ((run(function, each, most)[0], each) for each in cases if each.count_lines), key=itemgetter(0)
        )
        usual = 2 * lines + 2000 if lines < most else most // 20  # it may never end
        for cost in MAX_EDITS:
            verified = 0
            for edit, changed in edited(function, cost, first.line):
                executed, result = run(changed, first, min(usual, left))
                left -= executed
                if left <= 0:
                    return CallResult(steps=tuple(found))
                if first.accepts(result) and verified < MAX_VERIFIED:
                    verified += 1
                    if all(each.accepts(call(changed, each, file)) for each in cases):
                        found.append(TracedValue(edit.kind, edit.line, _text(file, edit.line), None))
            if found:
                break
    return CallResult(steps=tuple(found))


def _gradients(function: Callable[..., Any], case: Case) -> dict[str, Tensor]:
    """Differentiate a weighted sum of all outputs, with fixed weights; nothing if an output isn't differentiable."""
    leaves = {name: case.arguments[name].clone().requires_grad_() for name in case.gradients}
    if not leaves:
        return {}
    try:
        found: list[Tensor] = []
        map_tensors(function(*map_tensors(case.arguments | leaves, Tensor.clone).values()), found.append)
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
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        for seeded in (random.seed, np.random.seed, torch.default_generator.manual_seed):
            seeded(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


class _Tracer:
    """Records the values that lines of a file give to watched variables, and counts the lines."""

    def __init__(self, file: str, watch: Sequence[str] = (), *, max_lines: int = 2_000_000) -> None:
        self.file, self.watch, self.max_lines = file, set(watch), max_lines
        self.lines, self.found = 0, tuple[TracedValue, ...]()
        self._last: dict[tuple[int, str], Any] = {}
        self._lines: dict[int, int] = {}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename != self.file:
            return None
        if event != "call":
            self.lines += 1
            if self.lines > self.max_lines:
                raise TimeoutError(f"it executes more than {self.max_lines:,} lines")
        if not self.watch:
            return self
        key = id(frame)
        if event == "call":
            self._lines[key] = frame.f_lineno
            self._last = {each: value for each, value in self._last.items() if each[0] != key}
            for name in self.watch & frame.f_locals.keys():
                self._last[key, name] = _mark(frame.f_locals[name]), frame.f_locals[name]
            return self
        for name in self.watch & frame.f_locals.keys() if event != "exception" else ():
            mark, value = _mark(frame.f_locals[name]), frame.f_locals[name]
            if self._last.get((key, name), (None,))[0] != mark and len(self.found) < MAX_TRACED:
                self._last[key, name] = mark, value  # kept, so that no other value gets its id
                self._record(name, value, frame, line=self._lines[key])
        self._lines[key] = frame.f_lineno if event != "exception" else self._lines[key]
        if event == "return":
            self._record("return", None, frame, line=frame.f_lineno)
        return self

    def _record(self, name: str, value: Any, frame: FrameType, *, line: int) -> None:
        text, code = _text(self.file, line), frame.f_code
        local = set(code.co_varnames[code.co_argcount :] + code.co_cellvars) - {name}
        uses = tuple(each for each in dict.fromkeys(re.findall(r"\w+", text)) if each in local)
        self.found += (TracedValue(name, line, text, map_tensors(value, lambda each: each.detach().clone()), uses),)


def _mark(value: Any) -> Any:
    """Return what changes when a variable is assigned, or its tensor is changed in place."""
    return (id(value), value._version) if isinstance(value, Tensor) else (id(value), repr(value)[:1000])
