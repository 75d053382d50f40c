"""The process that renders chat templates: a line of JSON in, a line of JSON out, within bounds of time and memory.

The environment is that of transformers: Jinja's sandbox with raise_exception, strftime_now, a tojson that leaves JSON
as it is, and a tag that marks the assistant's turns.
"""

import json
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.text.template import LARGEST, MEMORY, SECONDS

try:
    import resource
except ImportError:  # Windows, where nothing bounds a process
    resource = None  # type: ignore[assignment]


def serve() -> None:
    """Answer every line of standard input, until it ends."""
    if resource is not None:
        _limit(resource.RLIMIT_AS, MEMORY)
        _limit(resource.RLIMIT_CORE, 0)
    for line in sys.stdin.buffer:
        if resource is not None:  # beyond it the system ends this process, whatever it does
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + SECONDS)
        sys.stdout.buffer.write(json.dumps(_answer(line)).encode() + b"\n")
        sys.stdout.buffer.flush()


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer(line: bytes) -> dict[str, Any]:
    """The text, or why there is none; `spent` where this process should not be asked again."""
    try:
        question = json.loads(line)
        return {"text": _render(question["template"], question["given"])}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MiB of memory", "spent": True}
    except Exception as error:  # it may fail in any way that a program can
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}


def _render(template: str, given: Mapping[str, Any]) -> str:
    parts, length = [], 0
    for part in _compiled(template).generate(given):
        length += len(part)
        if length > LARGEST:
            raise ValueError(f"it writes more than {LARGEST:,} characters")
        parts.append(part)
    return "".join(parts)


@lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    """A chat template, compiled once: that takes a hundred times as long as rendering it."""
    return SANDBOX.from_string(text)


class Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks the assistant's turns, changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes what HTML would."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


SANDBOX = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
)
SANDBOX.filters["tojson"] = _to_json
SANDBOX.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
