"""Messages about wrong fields: the field, what was expected and what came, in the API's terms instead of Python's."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from tests.spread import spread

from weft.serve import schema
from weft.serve.errors import described

BODIES = [kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, schema.Strict)]
WRONG: dict[str, Any] = {
    "null": None,
    "text": "wrong",
    "no text": "",
    "a long text": "x" * 200_000,
    "a number": 10**30,
    "a fraction": -1.5,
    "a list": [1, "a", None],
    "an empty list": [],
    "lists": [[["a"]]],
    "an object": {"wrong": {"a": [1]}},
    "objects": [{"role": 7, "type": "wrong", "text": 1, "function": [], "name": "?", "content": [{"type": "wrong"}]}],
    "an object of a type": {"type": "function", "function": {"name": 1}},
    "another object of a type": {"type": "json_schema", "json_schema": {"schema": []}, "schema": 3, "include_usage": 2},
    "a tool": [{"type": "function", "function": {"name": "a b", "parameters": [], "strict": 1, "extra": 0}}],
    "a turn": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 3, "content": [{"type": "x"}]}]}],
}
PYTHON = re.compile(
    r"Input|should|validation|valid (?:string|integer|number|list|dictionary|boolean|tuple)|dictionary|tuple|instance|"
    r"None\b|NoneType|True|False|subscriptable|discriminator|type=|[gl][et]=|Value error|Error\b|Python|pydantic|"
    r"\b(?:str|int|dict|float)\b|NamedTool|list\[|__|attribute|keyword|argument\b|parse"
)


def messages(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield each field, and the message about a body in which it is wrong."""
    bodies = [
        (name, {field.alias or name: value}) for name, field in kind.model_fields.items() for value in WRONG.values()
    ]
    bodies += [("wrong", {"wrong": value}) for value in WRONG.values()]
    for name, body in bodies:
        try:
            kind.model_validate(body)
        except ValidationError as error:
            problems = [
                problem for problem in error.errors() if problem["type"] != "missing" or problem["loc"][0] == name
            ]
            if problems:
                key, message = described(problems)
                yield kind.model_fields[name].alias or name if name in kind.model_fields else name, f"{key}: {message}"


@pytest.mark.parametrize("kind", spread(BODIES, 10), ids=lambda kind: kind.__name__)
def test_messages_name_the_field_and_the_value_without_pythons_terms(kind: type[BaseModel]) -> None:
    found = list(messages(kind))
    assert len(found) >= len(WRONG)
    for name, message in found:
        assert message.startswith(name), message
        assert PYTHON.search(re.sub(r"'[^']*'", "", message)) is None, message
        assert len(message) < 400 and "\n" not in message
