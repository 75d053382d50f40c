"""Tool calls: their format in a model's chat template, the grammar of replies that may have them, and their parser."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from weft.config import read_toml
from weft.decode.constrain import Grammar, schema_source
from weft.errors import ConfigError
from weft.text.tokenizer import Tokenizer

MAX_CALLS = 16  # in one reply
HEAD = re.compile(r'\{"name": "([^"]*)", "(?:arguments|parameters)": ')


class Tool(NamedTuple):
    """A function that a model may call: `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def definition(self) -> dict[str, Any]:
        """Return the definition that chat templates take."""
        return {"type": "function", "function": self._asdict()}


@dataclass(frozen=True)
class CallFormat:
    """The format in which a family of models writes tool calls (`tool_calls.toml`)."""

    name: str
    marker: str
    trigger: str
    open: Sequence[str]
    close: str
    arguments: str
    other: str | None = None
    separator: str | None = None
    id_length: int | None = None

    def call_id(self, id: str) -> str:
        """Return the id of a call as the template expects it."""
        return id if self.id_length is None else hashlib.sha256(id.encode()).hexdigest()[: self.id_length]


FORMATS = [CallFormat(**row) for row in read_toml(Path(__file__).with_suffix(".toml"))["format"]]


def call_format(tokenizer: Tokenizer) -> CallFormat | None:
    """Return the format of tool calls in a tokenizer's chat template; None if it has no tools."""
    template = tokenizer.chat_template or ""
    fits = (each for each in FORMATS if each.marker in template and not (each.other and each.other in template))
    return next(fits, None) if "tools" in template else None


def call_grammar(
    tokenizer: Tokenizer, format: CallFormat, tools: Sequence[Tool], *, required: bool, several: bool
) -> Grammar:
    """Return the grammar of replies with calls of `tools`, whose arguments follow their schemas.

    Unless a call is `required`, the reply may also be any text, or a text before the calls.
    """

    def literal(text: str) -> str:
        """Return a text in Lark's syntax, with its special tokens by id."""
        special = tokenizer.special_tokens
        parts = re.split("|".join(f"({re.escape(token)})" for token in special if token in text) or "(?!)", text)
        return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)

    rules = {}
    for number, tool in enumerate(tools):
        head = literal(f'{{"name": {json.dumps(tool.name)}, {json.dumps(format.arguments)}: ')
        rules[f"call_{number}"] = f'{head} arguments_{number} "}}"'
        try:
            rules[f"arguments_{number}"] = f"%json {schema_source(tool.parameters)}"
        except ConfigError as error:
            raise ConfigError(f"tools: {tool.name}: {error}") from None
    rules["call"] = " | ".join(f"call_{number}" for number in range(len(tools)))
    repeated = ""
    if several and format.separator is not None:
        repeated = f"({literal(format.separator)} call){{0,{MAX_CALLS - 1}}}"
    opened = " | ".join(literal(text) for text in format.open)
    rules["calls"] = f"{f'({opened})' if opened else ''} call {repeated} {literal(format.close)}"
    if required:
        rules["start"] = f"{literal(format.trigger)} calls"
    elif not format.trigger:
        rules |= {"start": "calls | TEXT?", "TEXT": r"/[^{](.|\n)*/"}
    elif format.trigger in tokenizer.special_tokens:
        rules |= {"start": f"TEXT {literal(format.trigger)} calls | TEXT", "TEXT": r"/(.|\n)*/"}
    else:
        rules |= {"start": "triggered calls | TEXT", "TEXT": r"/(.|\n)*/"}
        rules["triggered[lazy]"] = f"TEXT {literal(format.trigger)}"
    lark = "\n".join(f"{name}: {rule}" for name, rule in rules.items())
    return Grammar(tokenizer, lark, "the tools", notes={"tools": [tool.name for tool in tools]})


class ReplyText(NamedTuple):
    """Text of a reply."""

    text: str


class CallStart(NamedTuple):
    """The beginning of a tool call."""

    name: str


class CallArguments(NamedTuple):
    """A part of the JSON of the arguments of the last call that began."""

    text: str


ReplyPart = ReplyText | CallStart | CallArguments


class CallParser:
    """Splits one reply, token by token, into text and tool calls that follow the grammar."""

    def __init__(self, tokenizer: Tokenizer, format: CallFormat):
        self.format, self._trigger_id = format, tokenizer.special_tokens.get(format.trigger)
        self._pending, self._state, self._begun = "", "text", False
        self._depth, self._in_string, self._escaped = 0, False, False  # position in the JSON of arguments

    def push(self, id: int, text: str) -> list[ReplyPart]:
        """Add a token and the text it adds; return the parts that are known now."""
        self._pending += text
        if id == self._trigger_id and self._state == "text":  # not part of the text
            parts: list[ReplyPart] = [ReplyText(self._pending.rstrip())] if self._pending.strip() else []
            self._pending, self._state = "", "calls"
            return parts
        return list(self._parts())

    def end(self) -> list[ReplyPart]:
        """Return the last part of a reply: text that could have been the beginning of a call."""
        return [ReplyText(self._pending)] if self._state == "text" and self._pending else []

    def _parts(self) -> Iterator[ReplyPart]:
        while self._pending:
            before = self._pending, self._state
            if self._state == "text":
                yield from self._text()
            elif self._state == "calls":
                if (head := HEAD.search(self._pending)) is not None:
                    self._pending, self._state = self._pending[head.end() :], "arguments"
                    yield CallStart(head[1])
            else:
                yield from self._arguments()
            if (self._pending, self._state) == before:
                return

    def _text(self) -> Iterator[ReplyPart]:
        trigger, pending = self.format.trigger, self._pending
        if not trigger:
            start = 0 if pending.startswith("{") and not self._begun else -1
        else:
            start = pending.find(trigger) if self._trigger_id is None else -1
        if start >= 0:
            self._pending, self._state = pending[start + len(trigger) :], "calls"
            shown = len(pending[:start].rstrip())
        else:  # keep what may be the beginning of the trigger, and white space that may precede it
            partial = (size for size in range(len(trigger) - 1, 0, -1) if pending.endswith(trigger[:size]))
            shown = len(pending[: len(pending) - next(partial, 0)].rstrip()) if trigger else len(pending)
            self._pending = pending[shown:]
        self._begun = True
        if shown:
            yield ReplyText(pending[:shown])

    def _arguments(self) -> Iterator[ReplyPart]:
        for index, character in enumerate(self._pending):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{}[]":
                self._depth += 1 if character in "{[" else -1
                if not self._depth:
                    text, self._pending, self._state = self._pending[: index + 1], self._pending[index + 1 :], "calls"
                    yield CallArguments(text)
                    return
        text, self._pending = self._pending, ""
        yield CallArguments(text)
