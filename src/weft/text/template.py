"""Chat templates: programs in a tokenizer's file, which may write text and do nothing else.

They are Jinja's, and run in its sandbox, where no file, no module and no attribute of Python's own is in reach. The
environment is that of transformers: raise_exception, strftime_now, a tojson that leaves JSON as it is, and a tag that
marks the assistant's turns. How much a template may do and write is bounded, so that a faulty one ends.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from itertools import count
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.errors import TokenizerError

STEPS = 1_000_000  # rounds of loops and calls in one rendering; the longest conversations take some thousands
LARGEST = 1 << 24  # characters of a conversation

_steps: ContextVar[Iterator[int]] = ContextVar("steps")


def render(template: str, given: Mapping[str, Any]) -> str:
    """The text that a template makes of `given`; an error in it, whatever its kind, becomes one line."""
    _steps.set(count(1))
    parts, length = [], 0
    try:
        for part in _compiled(template).generate(given):
            length += len(part)
            if length > LARGEST:
                raise ValueError(f"it writes more than {LARGEST:,} characters")
            parts.append(part)
    except Exception as error:  # it may fail in any way that a program can
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise TokenizerError(f"the chat template cannot be rendered: {reason}") from None
    return "".join(parts)


def _step() -> None:
    if next(_steps.get()) > STEPS:
        raise ValueError(f"it takes more than {STEPS:,} steps")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _step()
        yield item


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with every call counted."""

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        _step()
        return super().call(context, function, *args, **named)


@lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    """A chat template with its loops counted, compiled once: that takes a hundred times as long as rendering it."""
    tree = SANDBOX.parse(text)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
    return SANDBOX.from_string(tree)


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


SANDBOX = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
SANDBOX.filters |= {"tojson": _to_json, "counted": _counted}
SANDBOX.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
