"""The process in which chat templates are rendered: Jinja's sandbox, with a limit on its time and its memory.

No file, no module and no attribute of Python's own is in a template's reach. The environment is that of transformers:
raise_exception, strftime_now, a tojson that leaves JSON as it is, and a tag that marks the assistant's turns.
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

GRACE = 1.2  # times as many seconds for what can't be interrupted, before the system ends the process


class OverdueError(Exception):
    """A template took too long."""


@contextmanager
def limited(seconds: float, most_bytes: int) -> Iterator[None]:
    """In here, this process may take so many seconds of a processor, and have so many bytes of memory."""
    if resource is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, GRACE * seconds)  # whose signal nobody handles: it ends the process
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def rendered(template: str, given: dict[str, Any], most_characters: int) -> str:
    """The text that a template makes of `given`."""
    parts, length = list[str](), 0
    for part in _compiled(template).generate(given):
        length += len(part)
        if length > most_characters:
            raise ValueError(f"it writes more than {most_characters:,} characters")
        parts.append(part)
    return "".join(parts)


@lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    """A chat template, compiled once: that takes a hundred times as long as rendering it."""
    return SANDBOX.from_string(text)


def place(error: BaseException) -> str:
    """The line of the template at which an error arose, as far as it is known."""
    line, trace = error.lineno if isinstance(error, TemplateSyntaxError) else None, error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<template>" else line
        trace = trace.tb_next
    return "" if line is None else f"line {line}: "


class Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks the assistant's turns, changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own escapes what HTML would."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


SANDBOX = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
)
SANDBOX.filters["tojson"] = _to_json
SANDBOX.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}


def _overdue(_number: int, _frame: FrameType | None) -> None:
    raise OverdueError


def main() -> None:
    """Answers each line of standard input, until it ends."""
    if resource is not None:
        signal.signal(signal.SIGPROF, _overdue)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            with limited(asked["seconds"], asked["bytes"]):
                found = {"text": rendered(asked["template"], asked["given"], asked["characters"])}
        except OverdueError as error:
            found = {"error": f"{place(error)}it takes more than {asked['seconds']:g} seconds"}
        except MemoryError as error:
            found = {"error": f"{place(error)}it takes more than {asked['bytes'] >> 20:,} MiB of memory"}
        except Exception as error:  # it may fail in any way that a program can
            reason = " ".join(str(error)[:10_000].split())[:300] or type(error).__name__
            found = {"error": place(error) + reason}
        respond(found)


if __name__ == "__main__":
    main()
