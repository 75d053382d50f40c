"""Chat templates: programs in a tokenizer's file, which may write text and do nothing else, and not forever.

They are Jinja's, and run in its sandbox, where no file, no module and no attribute of Python's own is in reach.
Besides, whatever takes a turn or grows a value is counted: a template that somebody else wrote can't hold up the
process or fill its memory. Templates find what transformers gives them.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from weft.errors import TokenizerError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

T = TypeVar("T")

LARGEST = 2**24  # characters of a conversation, and of each value on the way to it
WORK = 2**22  # turns of a loop, or copies of 64 characters, in one rendering
CALL = 256  # what a call costs, in characters
BITS = 2**12  # of a number
NARROW = 2**10  # columns that a text may be filled up to

_work: ContextVar[list[int]] = ContextVar("work")  # what is left of it

# a field of thousands of columns, or of as many as another value says: in str.format and after a percent sign
_WIDTHS = re.compile(r"\{[^{}]*:[^{}]*(?:\d{4}|\{)")
_PERCENT_WIDTHS = re.compile(r"(?<!%)(?:%%)*%(?:\([^)]*\))?[-#0 +]*\d*\.?(?:\*|\d{4})")
# filters of no use to a conversation that make much of little
_UNUSED_FILTERS = ("batch", "center", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
_TEXT_FILTERS = (
    *("capitalize", "e", "escape", "forceescape", "format", "indent", "join", "lower", "replace", "string"),
    *("striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount"),
)
_WALKING_FILTERS = (
    *("dictsort", "groupby", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr"),
    *("sort", "sum", "unique"),
)


def render(template: str, given: Mapping[str, Any]) -> str:
    """The text that a template makes of `given`; whatever goes wrong with it is told in one line."""
    started = _work.set([WORK])
    parts, length = [], 0
    try:
        for part in _template_of(template).generate(given):
            length += len(part)
            _spend(_bounded(length) and len(part))
            parts.append(part)
    except Exception as error:  # it may fail in any way that a program can
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TokenizerError(f"the chat template cannot be rendered: {reason[:300]}") from None
    finally:
        _work.reset(started)
    return "".join(parts)


@lru_cache(maxsize=8)
def _template_of(text: str) -> "Template":
    """A chat template, compiled once: that takes a hundred times as long as rendering it."""
    return _sandbox().from_string(text)


@lru_cache(maxsize=1)
def _sandbox() -> "ImmutableSandboxedEnvironment":
    """Where templates are rendered: Jinja's sandbox, in which whatever grows a value or takes a turn is counted.

    Templates find there what transformers gives them: raise_exception, strftime_now, tojson and the generation tag.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Counting(NodeTransformer):
        """Has the sandbox asked about loops, slices and `~`, of which it is told nothing otherwise."""

        def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
            written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            self.generic_visit(node)
            node.iter = self._asked("turns", node.iter, nodes.Const(1 + written // 64))
            return node

        def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            return self._asked("cut", node) if isinstance(node.arg, nodes.Slice) else node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            return self._asked("joined", *node.nodes)

        def _asked(self, name: str, *given: Any) -> nodes.Call:
            line = given[0].lineno
            return nodes.Call(nodes.EnvironmentAttribute(name), list(given), [], None, None, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            return Counting().visit(super()._parse(source, name, filename))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            _spend(CALL)
            method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
            owner = getattr(method, "__self__", None)
            if isinstance(owner, str | bytes | int) and not isinstance(owner, bool):
                args = _check_text(method.__name__, owner, args, kwargs)
            result = super().call(__context, __obj, *args, **kwargs)
            _spend(64 * len(result) if isinstance(result, range) else 0)
            return result

        def turns(self, values: Iterable[Any], weight: int) -> Collection[Any]:
            found: Any = values if hasattr(values, "__len__") else list(values)
            _spend(64 * weight * len(found))
            return found

        def cut(self, values: T) -> T:
            _spend(len(values) if isinstance(values, Collection) else 0)
            return values

        def joined(self, *values: Any) -> str:
            _spend(_size(values))
            return "".join(map(str, values))

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}`, which marks what the assistant says, leaves it as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def shown(value: Any) -> Any:
        _spend(_size(value))
        return value

    sandbox = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation], finalize=shown
    )
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    del sandbox.globals["lipsum"]
    sandbox.filters |= {"tojson": _to_json}
    for name in _UNUSED_FILTERS:
        del sandbox.filters[name]
    for name in (*_TEXT_FILTERS, "round"):
        sandbox.filters[name] = _checked(name, sandbox.filters[name])
    for name in _WALKING_FILTERS:
        sandbox.filters[name] = _walked(sandbox.filters[name])
    return sandbox


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes what HTML would; here, as in transformers, JSON is left as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _spend(characters: int) -> None:
    """Take one turn, and what copying so many characters costs, from the work that is left."""
    left = _work.get()
    left[0] -= 1 + characters // 64
    if left[0] < 0:
        raise ValueError("it takes too long; a conversation needs no such work")


def _bounded(length: int) -> int:
    if length > LARGEST:
        raise ValueError(f"it makes a text or a list of more than {LARGEST:,} entries")
    return length


def _size(value: Any) -> int:
    """How many characters a value has as text, by and large; what a list holds twice counts twice."""
    total, rest = 0, [value]
    while rest:
        each = rest.pop()
        each = getattr(each, "_Namespace__attrs", each)  # a namespace shows what it holds
        total += 16
        if isinstance(each, str | bytes):
            total += len(each)
        elif isinstance(each, Mapping):
            rest += [*each.keys(), *each.values()]
        elif isinstance(each, Collection) and not isinstance(each, range):
            rest += each
        _bounded(total)
    return total


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse what would become too large, before it does."""
    sized = [side for side in (left, right) if isinstance(side, str | bytes | list | tuple)]
    whole = [side for side in (left, right) if isinstance(side, int)]
    if operator == "+" and len(sized) == 2:
        _spend(_bounded(len(left) + len(right)))
    elif operator == "*" and sized and whole:
        _spend(_bounded(len(sized[0]) * max(0, whole[0])))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, _PERCENT_WIDTHS, left.count("%"), right)
    elif operator in ("*", "**") and len(whole) == 2:
        bits = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > BITS:
            raise ValueError(f"it makes a number of more than {BITS} bits")


def _check_format(text: str, widths: re.Pattern[str], fields: int, values: Any) -> None:
    if widths.search(text):
        raise ValueError("it fills up a text to a width of thousands, or to one that is not written down")
    _spend(_bounded(len(text) + fields * (NARROW + _size(values))))


def _check_text(name: str, text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Refuse a method of a text or a number whose result would be too large; its arguments, which may be read once."""
    length = len(text) if isinstance(text, str | bytes) else 0
    match name:
        case "format" | "format_map":
            _check_format(text, _WIDTHS, text.count("{"), [*args, *kwargs.values()])
        case "replace" if len(args) > 1:
            length += text.count(args[0]) * len(args[1])
        case "join":
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
            length = _size(args) + sum(len(each) for each in args) * length
        case "center" | "ljust" | "rjust" | "zfill" | "expandtabs" | "to_bytes":
            _check_narrow([*args, *kwargs.values()])
            length *= NARROW if name == "expandtabs" else 1
        case "translate" | "maketrans":
            raise ValueError(f"it asks for {name}, which no conversation needs")
    _spend(_bounded(length))
    return args


def _check_narrow(values: Iterable[Any]) -> None:
    if any(isinstance(each, int) and abs(each) > NARROW for each in values):
        raise ValueError(f"it fills up a text, or rounds a number, to more than {NARROW:,} places")


def _first(filter: Callable[..., Any]) -> int:
    """Where a filter's value stands among its arguments: after Jinja's own, where it asks for that."""
    return 1 if hasattr(filter, "jinja_pass_arg") else 0


def _walked(filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at every entry of a value, with the work that this is."""
    at = _first(filter)

    @wraps(filter)
    def walked(*args: Any, **kwargs: Any) -> Any:
        _spend(64 * len(args[at]) if isinstance(args[at], Collection) else 0)
        return filter(*args, **kwargs)

    return walked


def _checked(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses what would make its result too large."""
    at = _first(filter)

    @wraps(filter)
    def checked(*args: Any, **kwargs: Any) -> Any:
        first, value, others = args[:at], args[at], [*args[at + 1 :], *kwargs.values()]
        value = list(value) if name == "join" and isinstance(value, Iterator) else value
        length, longest = _size(value), max((len(each) for each in others if isinstance(each, str)), default=0)
        if name == "format":
            _check_format(str(value), _PERCENT_WIDTHS, str(value).count("%"), others)
        elif name in ("round", "indent", "tojson"):
            _check_narrow(others)
        if name == "replace" and len(args) > at + 1:
            length += str(value).count(str(args[at + 1])) * longest
        elif name == "join":
            length += len(value) * longest
        elif name == "indent":
            length += (str(value).count("\n") + 1) * max([longest, *(n for n in others if isinstance(n, int))])
        elif name == "tojson":
            length *= 1 if not others else 1 + max(_size(others), *(n for n in others if isinstance(n, int)), 0)
        _spend(_bounded(length))
        return filter(*first, value, *args[at + 1 :], **kwargs)

    return checked
