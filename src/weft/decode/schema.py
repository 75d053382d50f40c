"""JSON Schema to a regular expression: what a text must look like to be valid JSON of that shape.

Members come in the schema's order, with one space after each comma and colon. What a regular expression cannot hold,
such as a schema that contains itself, is refused by name; so is every keyword that would otherwise be ignored.
"""

import json
from typing import Any

from weft.decode.pattern import Choice, Node, Ranges, Repeat, Sequence, Set, inverse, parse
from weft.errors import ConfigError

CHARACTER = r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})'
INTEGER = r"-?(?:0|[1-9][0-9]*)"
NUMBER = INTEGER + r"(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?"
SAYS_NOTHING = {"title", "description", "default", "examples", "$schema", "$id", "$defs", "definitions", "$comment"}
UNQUOTABLE: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
MOST_DIGITS = 18  # of a bound
LONGEST = 1_000_000  # characters of an expression
KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


def schema_pattern(schema: Any) -> str:
    """The regular expression of a schema, given as JSON values."""
    try:
        return _Compiler(schema).of(schema, "the schema", ())
    except RecursionError:
        raise ConfigError("the schema: nested too deeply") from None


def literal(text: str) -> str:
    """A regular expression that matches this text alone."""
    return "".join(f"\\{letter}" if letter in r"\.^$*+?{}[]()|-" else letter for letter in text)


def _quotable(node: Node, where: str) -> str:
    """A pattern again as text, less the characters that JSON can't hold in a string as they are."""
    match node:
        case Set(ranges):
            kept = inverse((*inverse(ranges), *UNQUOTABLE))
            if not kept:
                raise ConfigError(f'{where}: ", \\ and control characters are not supported in the pattern of a string')
            return "[" + "".join(f"{_in_class(low)}-{_in_class(high)}" for low, high in kept) + "]"
        case Sequence(parts):
            return "".join(f"(?:{_quotable(part, where)})" for part in parts)
        case Choice(options):
            return "|".join(_quotable(option, where) for option in options)
        case Repeat(part, least, most):
            return f"(?:{_quotable(part, where)}){{{least},{'' if most is None else most}}}"


def _in_class(point: int) -> str:
    letter = chr(point)
    return letter if letter.isalnum() else f"\\{letter}"


def integers(low: int | None, high: int | None) -> list[str]:
    """Expressions that together match the integers low … high; None is no bound."""
    found: list[str] = []
    if high is None or high >= 0:
        found += _from_to(max(low or 0, 0), high)
    if low is None or low < 0:
        least = 1 if high is None else max(1, -high)
        found += [f"-{each}" for each in _from_to(least, None if low is None else -low)]
    return found


def _from_to(low: int, high: int | None) -> list[str]:
    """The same for integers of which none is negative: those of as many digits at a time."""
    found: list[str] = []
    longest = len(str(low if high is None else high))
    for digits in range(len(str(low)), longest + 1):
        first, last = 10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1
        found += _same_digits(str(max(low, first)), str(last if high is None else min(high, last)))
    return found if high is not None else [*found, f"[1-9][0-9]{{{longest},}}"]


def _same_digits(low: str, high: str) -> list[str]:
    if low[0] == high[0]:
        return [low[0] + rest for rest in (_same_digits(low[1:], high[1:]) if low[1:] else [""])]
    free = len(low) - 1
    first, last = int(low[0]), int(high[0])
    found: list[str] = []
    if low[1:] != "0" * free:
        found += [low[0] + rest for rest in _same_digits(low[1:], "9" * free)]
        first += 1
    if high[1:] != "9" * free:
        found += [high[0] + rest for rest in _same_digits("0" * free, high[1:])]
        last -= 1
    return [*found, f"[{first}-{last}]" + "[0-9]" * free] if first <= last else found


def _whole(value: Any, where: str) -> int:
    """A bound of integers."""
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole or isinstance(value, bool) or abs(value) >= 10**MOST_DIGITS:
        raise ConfigError(f"{where} = {value!r}: expected a whole number of at most {MOST_DIGITS} digits")
    return int(value)


class _Compiler:
    def __init__(self, root: Any):
        self.root = root

    def of(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        """The expression of a part of the schema; one array in another makes it twice as long."""
        found = self._expression(schema, where, inside)
        if len(found) > LONGEST:
            raise ConfigError("the schema: too large, or nested too deeply, for one expression")
        return found

    def _expression(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        if schema is True or not isinstance(schema, dict):
            raise ConfigError(f"{where}: expected a schema with a type, got {json.dumps(schema)[:40]}")
        if "$ref" in schema:
            self._only(schema, {"$ref"}, where)
            return self._reference(schema["$ref"], where, inside)
        if "const" in schema:
            self._only(schema, {"const", "type"}, where)
            return self._value(schema["const"])
        if "enum" in schema:
            self._only(schema, {"enum", "type"}, where)
            return self._either([self._value(value) for value in self._list(schema, "enum", where)])
        for word in ("anyOf", "oneOf"):
            if word in schema:
                self._only(schema, {word}, where)
                options = self._list(schema, word, where)
                return self._either([self.of(each, f"{where}.{word}[{i}]", inside) for i, each in enumerate(options)])
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            kinds = [{**schema, "type": each} for each in kind]
            plain = [
                {k: v for k, v in each.items() if k == "type" or k in KEYWORDS.get(each["type"], ())} for each in kinds
            ]
            return self._either([self.of(each, where, inside) for each in plain])
        if not isinstance(kind, str) or kind not in KEYWORDS:
            raise ConfigError(f"{where}.type = {kind!r}: expected one of {', '.join(KEYWORDS)}")
        self._only(schema, {"type", *KEYWORDS[kind]}, where)
        match kind:
            case "string":
                return self._string(schema, where)
            case "array":
                return self._array(schema, where, inside)
            case "object":
                return self._object(schema, where, inside)
            case "integer":
                return self._integer(schema, where)
        return {"number": NUMBER, "boolean": "(?:true|false)", "null": "null"}[kind]

    def _only(self, schema: dict[str, Any], known: set[str], where: str) -> None:
        other = sorted(set(schema) - known - SAYS_NOTHING)
        if other:
            kind = f" for a {schema['type']}" if isinstance(schema.get("type"), str) else ""
            raise ConfigError(f"{where}.{other[0]}: not supported{kind}; supported here: {', '.join(sorted(known))}")

    def _list(self, schema: dict[str, Any], word: str, where: str) -> list[Any]:
        values = schema[word]
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}.{word}: expected a list that is not empty")
        return values

    def _reference(self, name: Any, where: str, inside: tuple[str, ...]) -> str:
        if not isinstance(name, str) or not name.startswith("#/"):
            raise ConfigError(f"{where}.$ref = {name!r}: only references like #/$defs/name are supported")
        if name in inside:
            raise ConfigError(f"{where}.$ref = {name!r}: a schema that contains itself is not supported")
        target = self.root
        for part in name[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        if target is None:
            raise ConfigError(f"{where}.$ref = {name!r}: not in the schema")
        return self.of(target, name, (*inside, name))

    def _value(self, value: Any) -> str:
        return literal(json.dumps(value, ensure_ascii=False))

    def _either(self, options: list[str]) -> str:
        return f"(?:{'|'.join(options)})"

    def _bounds(self, schema: dict[str, Any], least: str, most: str, where: str) -> tuple[int, int | None]:
        low, high = schema.get(least, 0), schema.get(most)
        for word, value in ((least, low), (most, high)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ConfigError(f"{where}.{word} = {value!r}: expected a whole number")
        if high is not None and high < low:
            raise ConfigError(f"{where}.{most} = {high}: less than {least} = {low}")
        return low, high

    def _string(self, schema: dict[str, Any], where: str) -> str:
        if "pattern" in schema:
            self._only(schema, {"type", "pattern"}, where)
            inner = schema["pattern"]
            if not isinstance(inner, str):
                raise ConfigError(f"{where}.pattern = {inner!r}: expected a regular expression")
            inner = inner.removeprefix("^").removesuffix("$")
            return f'"(?:{_quotable(parse(inner), f"{where}.pattern")})"'
        low, high = self._bounds(schema, "minLength", "maxLength", where)
        return f'"{CHARACTER}{{{low},{"" if high is None else high}}}"'

    def _integer(self, schema: dict[str, Any], where: str) -> str:
        def given(word: str, more: int) -> list[int]:
            return [_whole(schema[word], f"{where}.{word}") + more] if word in schema else []

        low = max([*given("minimum", 0), *given("exclusiveMinimum", 1)], default=None)
        high = min([*given("maximum", 0), *given("exclusiveMaximum", -1)], default=None)
        if low is not None and high is not None and low > high:
            raise ConfigError(f"{where}: no integer lies between its bounds")
        return INTEGER if low is high is None else self._either(integers(low, high))

    def _array(self, schema: dict[str, Any], where: str, inside: tuple[str, ...]) -> str:
        if "items" not in schema:
            raise ConfigError(f"{where}.items: missing; it says what the array holds")
        item = self.of(schema["items"], f"{where}.items", inside)
        low, high = self._bounds(schema, "minItems", "maxItems", where)
        if high == 0:
            return r"\[\]"
        more = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        some = f"(?:{item})(?:, (?:{item})){more}"
        return rf"\[{some}\]" if low else rf"\[(?:{some})?\]"

    def _object(self, schema: dict[str, Any], where: str, inside: tuple[str, ...]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ConfigError(f"{where}: properties is an object and required a list")
        unknown = [name for name in required if name not in properties]
        if unknown:
            raise ConfigError(f"{where}.required: {unknown[0]!r} is not among the properties")
        if schema.get("additionalProperties", False) is not False:
            raise ConfigError(f"{where}.additionalProperties: only false is supported")
        members = [
            (f"{self._value(name)}: (?:{self.of(inner, f'{where}.{name}', inside)})", name in required)
            for name, inner in properties.items()
        ]
        return rf"\{{{self._members(members, started=False)}\}}"

    def _members(self, members: list[tuple[str, bool]], started: bool) -> str:
        """The members from here on; a comma stands before each but the first that is there."""
        if not members:
            return ""
        (member, required), rest = members[0], members[1:]
        if started:
            return f"(?:, {member}){'' if required else '?'}" + self._members(rest, True)
        here = member + self._members(rest, True)
        return here if required else self._either([here, self._members(rest, False)])
