"""The child process that renders chat templates: Jinja's sandbox, with limited time and memory.

A template can't reach files, modules or Python's attributes. The environment is that of Transformers: raise_exception,
strftime_now, a tojson that doesn't escape HTML, and a tag that marks the assistant's turns.
"""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from types import FrameType
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.workers import respond

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

GRACE = 1.2  # times the limit, after which the system kills a process that can't be interrupted


class OverdueError(Exception):
    """A template took too long."""


@contextmanager
def limit_resources(seconds: float, max_bytes: int) -> Iterator[None]:
    """Limit the CPU time and the memory of this process inside the context."""
    if resource is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, GRACE * seconds)  # its signal has no handler and kills the process
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def render(template: str, variables: dict[str, Any], max_characters: int) -> str:
    """Return the text that a template renders from variables."""
    parts, length = list[str](), 0
    for part in _compile(template).generate(variables):
        length += len(part)
        if length > max_characters:
            raise ValueError(f"it writes more than {max_characters:,} characters")
        parts.append(part)
    return "".join(parts)


@lru_cache(maxsize=8)
def _compile(text: str) -> Template:
    """Compile a chat template once, which takes a hundred times as long as rendering it."""
    return SANDBOX.from_string(text)


def line_of(error: BaseException) -> str:
    """Return the line of the template that raised an error as a prefix "line N: ", or an empty string."""
    line, trace = error.lineno if isinstance(error, TemplateSyntaxError) else None, error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<template>" else line
        trace = trace.tb_next
    return "" if line is None else f"line {line}: "


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks the assistant's turns, renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Serialise without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


SANDBOX = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
)
SANDBOX.filters["tojson"] = _to_json
SANDBOX.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}


def _overdue(_number: int, _frame: FrameType | None) -> None:
    raise OverdueError


def main() -> None:
    """Answer each line of standard input, until it ends."""
    if resource is not None:
        signal.signal(signal.SIGPROF, _overdue)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            with limit_resources(request["seconds"], request["bytes"]):
                result = {"text": render(request["template"], request["variables"], request["characters"])}
        except OverdueError as error:
            result = {"error": f"{line_of(error)}it takes more than {request['seconds']:g} seconds"}
        except MemoryError as error:
            result = {"error": f"{line_of(error)}it takes more than {request['bytes'] >> 20:,} MiB of memory"}
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error)[:10_000].split())[:300] or type(error).__name__
            result = {"error": line_of(error) + reason}
        respond(result)


if __name__ == "__main__":
    main()
