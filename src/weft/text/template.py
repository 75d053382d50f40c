"""Chat templates: programs in a tokenizer's file, which may write text and do nothing else.

They are Jinja's, and run in its sandbox, where no file, no module and no attribute of Python's own is in reach. The
environment is that of transformers: raise_exception, strftime_now, a tojson that leaves JSON as it is, and a tag that
marks the assistant's turns. How much a template may do, hold and write is bounded, so that a faulty one ends: every
value is weighed before something is made of it.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.errors import TokenizerError
from weft.untrusted import bound

MAX_STEPS = 400_000  # operations of one rendering; the longest conversations take some thousands
MAX_CHARACTERS = 1 << 24  # of a conversation, or of anything on the way to it
ITEM_CHARACTERS = 64  # that an item of a list counts as
STEP_CHARACTERS = 1 << 14  # that are a step's work

INSIDE = (Environment, EvalContext, Context)  # what Jinja hands to a filter besides values

_work: ContextVar["_Work"] = ContextVar("work")


def render(template: str, given: Mapping[str, Any]) -> str:
    """The text that a template makes of `given`; an error in it, whatever its kind, becomes one line."""
    work = _Work(given)
    _work.set(work)
    parts, length = [], 0
    try:
        for part in _compiled(template).generate(given):
            length += len(part)
            if length > work.max_characters:
                raise ValueError(f"it writes more than {work.max_characters:,} characters")
            parts.append(part)
    except Exception as error:  # it may fail in any way that a program can
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise TokenizerError(f"the chat template cannot be rendered: {reason}") from None
    return "".join(parts)


class _Work:
    """What one rendering has done, and the sizes of the values it has seen.

    A size is about the characters of a value as text, all that is in it counted as often as it is in it; and beside it
    how many of these the template has made. Going through a long conversation once more is no work of the template's.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.steps, self.max_steps, self.max_characters = 0, bound(MAX_STEPS), bound(MAX_CHARACTERS)
        self.known: dict[int, tuple[Any, int, int]] = {}  # with the value, which can't change: no other takes its id
        for value in given.values():
            self.size(value, given=True)

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > self.max_steps:
            raise ValueError(f"it takes more than {self.max_steps:,} steps")

    def size(self, value: Any, given: bool = False) -> tuple[int, int]:
        known = self.known.get(id(value))
        if known is not None:
            return known[1:]
        if isinstance(value, str | bytes):
            text = own = len(value)
            if not given or text < STEP_CHARACTERS:  # going through it is hardly any work
                return text, own
        elif isinstance(value, list | tuple | dict | set):
            items = [*value, *value.values()] if isinstance(value, dict) else value
            sizes = [self.size(item, given) for item in items]
            text, own = (ITEM_CHARACTERS * len(sizes) + sum(each[kind] for each in sizes) for kind in (0, 1))
        else:
            return 1, 1
        self.known[id(value)] = value, text, 0 if given else own
        return self.known[id(value)][1:]

    def weigh(self, *values: Any) -> None:
        """Count an operation; refuse it where the two largest of its values, a size or a factor each, could make a text
        that is too large: a replacement, a separator, a width."""
        first, second, work = 1, 1, 0
        for value in values:
            size, own = (value, 1) if isinstance(value, int) else self.size(value)
            work += own
            if size > second:
                first, second = max(first, size), min(first, size)
        if first > self.max_characters or first * second > 16 * self.max_characters:
            raise ValueError(f"it makes more than {self.max_characters:,} characters")
        self.step(1 + work // STEP_CHARACTERS)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    work = _work.get()
    for item in items:
        work.step()
        yield item


def _weighed(value: Any) -> Any:
    work = _work.get()
    if isinstance(value, int) or (isinstance(value, str) and len(value) < STEP_CHARACTERS):
        work.step()
    else:
        work.weigh(value)
    return value


def _stream(items: Iterable[Any], factor: int = 1) -> Iterator[Any]:
    """The items, as long as all of them together, each with a text of `factor` characters, aren't too large."""
    work, total = _work.get(), 0
    for item in items:
        total += work.size(item)[0] + factor
        work.weigh(total)
        yield item


# a format may name the width of a value, or take it from another value: '%99999d', '%*d', '{:>99999}', '{:>{}}'
WIDE = re.compile(r"%(\([^)]*\))?[-#0 +]*(\d*\.)?(\d{5}|\*)")
WIDE_FIELD = re.compile(r"{[^{}]*(:[^{}]*\d{5}|{)")


def _check_format(form: Any, wide: re.Pattern[str]) -> None:
    plain = form.replace("{{", "").replace("}}", "") if isinstance(form, str) else ""
    if wide.search(plain):
        raise ValueError("it formats a value wider than 9,999 characters, or as wide as another value says")


def _filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def weighed(*given: Any, **named: Any) -> Any:
        values = [each for each in (*given, *named.values()) if not isinstance(each, INSIDE)]
        if function.__name__ == "do_format":
            _check_format(values[0], WIDE)
        work = _work.get()
        work.weigh(*(value for place, value in enumerate(values) if place or not isinstance(value, int)))
        factor = max(work.size(value)[0] for value in values)
        given = tuple(_stream(each, factor) if isinstance(each, Iterator) else each for each in given)
        return _weighed(function(*given, **named))

    return weighed


class _Code(CodeGenerator):
    """Code in which lists, comparisons and `a ~ b` are weighed too."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 — Jinja's names
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._weighed(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._weighed(super().visit_Tuple, node, frame)
        else:  # names that are set
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._weighed(super().visit_Dict, node, frame)

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        self.write(f" {operators[node.op]} ")
        self._weighed(self.visit, node.expr, frame)

    def _weighed(self, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.weighed(")
        visit(node, frame)
        self.write(")")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with every call and operation weighed."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Code
    concat = staticmethod(lambda values: "".join(map(str, _stream(values))))
    weighed = staticmethod(_weighed)

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # str.format is wrapped
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):  # join takes a stream
            args = tuple(_stream(each, len(owner)) if isinstance(each, Iterator) else each for each in args)
        if name in ("format", "format_map"):
            _check_format(owner, WIDE_FIELD)
        _work.get().weigh(None if isinstance(owner, int) else owner, *args, *named.values())
        return _weighed(super().call(context, function, *args, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * (right if operator == "**" else 1) + right.bit_length() > 1 << 14:
                raise ValueError("it computes a number of more than 4,900 digits")
        elif operator == "%":
            _check_format(left, WIDE)
        elif operator == "*":
            _work.get().weigh(left, right)
        return _weighed(super().call_binop(context, operator, left, right))


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
SANDBOX.filters |= {"tojson": _to_json}
SANDBOX.filters = {name: _filter(function) for name, function in SANDBOX.filters.items()} | {"counted": _counted}
SANDBOX.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
