"""Messages of conversations in OpenAI's and Anthropic's formats, with tools, their calls and their results."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from weft.serve.errors import RefusedError, shown

MAX_FIELDS = 100  # of an object, known and unknown ones
MAX_TURNS = 10_000  # messages in one request, or blocks in one message
MAX_TOOLS = 128  # tools in one request, or calls in one message
ROLES = {"developer": "system"}  # newer OpenAI clients' name → the usual one
Message = dict[str, Any]  # of a conversation, as chat templates take it
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


def at_most(limit: int, what: str) -> BeforeValidator:
    """Return a check of the size of a list or an object, before its items are validated one by one."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"{len(value):,} {what}; at most {limit:,} are accepted")
        return value

    return BeforeValidator(check)


class Strict(BaseModel):
    """Base of all bodies and their parts: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"{len(value):,} fields; /docs lists those of this route")
        return value


def _refused(reason: str) -> BeforeValidator:
    """Return the check of a field that is refused for this reason, unless it asks for nothing."""

    def check(value: Any) -> None:
        if value not in (None, [], {}, {"type": "disabled"}, "none", "auto", False):
            raise ValueError(f"{reason}; leave it out")

    return BeforeValidator(check)


def _join_parts(value: Any) -> Any:
    """Join a content in parts to one text."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            raise ValueError(f"weft reads only text, not {shown(kind)}")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type 'text' needs a 'text'")
        texts.append(part["text"])
    return "".join(texts)


Unsupported = Annotated[Any, _refused("not supported by weft's models"), Field(description="Refused.")]
Content = Annotated[str, BeforeValidator(_join_parts)]
Ignored = Annotated[Any, Field(description="Ignored.")]  # identifies or bills the caller


class FunctionCall(Strict):
    name: ToolName
    arguments: str = Field(description="JSON.")


class ToolCall(Strict):
    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored = None


class ChatTurn(Strict):
    """One message of a conversation with tools: of a person, of the assistant, or the result of a tool."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, at_most(MAX_TOOLS, "tool calls")] = None
    tool_call_id: Name | None = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Unsupported = None
    function_call: Unsupported = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a message of role '{self.role}' needs a 'content'")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: only the assistant calls tools, not the role '{self.role}'")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id: a message of role 'tool' needs one, and no other has one")
        return self

    def messages(self) -> list[Message]:
        """Return the message as chat templates take it."""
        message: Message = {"role": ROLES.get(self.role, self.role), "content": self.content or ""}
        if self.tool_calls:
            calls = [(call.id, call.function) for call in self.tool_calls]
            message["tool_calls"] = [called_tool(id, each.name, parsed_arguments(each)) for id, each in calls]
        if self.tool_call_id is not None:
            message |= {"tool_call_id": self.tool_call_id} | ({} if self.name is None else {"name": self.name})
        return [message]


def parsed_arguments(call: FunctionCall, field: str = "messages") -> dict[str, Any]:
    """Return the arguments of an earlier call in `field` of a body, which must be a JSON object."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        message = f"{field}: the arguments of the call of '{call.name}' are not a JSON object"
        raise RefusedError(400, message, param=field)
    return arguments


def called_tool(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call as chat templates take it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments.")
    strict: Ignored = None


class FunctionTool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: ToolName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ResponsesTool(Function):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f"only tools of type 'function' are called, not {shown(kind)}")
        return value


class ResponsesToolChoice(NamedFunction):
    type: Literal["function"]


class ResponsesItem(Strict):
    """One item of a conversation in OpenAI's Responses format: a message, a call of a tool, or its result."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: Name | None = None
    name: ToolName | None = None
    arguments: str | None = Field(default=None, description="JSON.")
    output: Content | None = None
    id: Ignored = None
    status: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """A client's dump of a received item has all fields of the client's version."""
        return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        missing = next((field for field in ITEM_FIELDS[self.type] if getattr(self, field) is None), None)
        if missing is not None:
            raise ValueError(f"an item of type '{self.type}' needs '{missing}'")
        return self

    def messages(self) -> list[Message]:
        """Return the item as chat templates take it."""
        if self.type == "message":
            assert self.role is not None
            return [{"role": ROLES.get(self.role, self.role), "content": self.content}]
        if self.type == "function_call_output":
            return [{"role": "tool", "content": self.output, "tool_call_id": self.call_id}]
        assert self.call_id is not None and self.name is not None and self.arguments is not None
        call = FunctionCall(name=self.name, arguments=self.arguments)
        called = called_tool(self.call_id, call.name, parsed_arguments(call, "input"))
        return [{"role": "assistant", "content": "", "tool_calls": [called]}]


ITEM_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class ContentText(Strict):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ToolUseBlock(Strict):
    """A tool call of an earlier reply."""

    type: Literal["tool_use"]
    id: Name
    name: ToolName
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None


class ToolResultBlock(Strict):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Content = ""
    is_error: bool | None = None
    cache_control: Ignored = None


def _check_blocks(value: Any) -> Any:
    for block in value if isinstance(value, list) else []:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in ("text", "tool_use", "tool_result"):
            raise ValueError(f"weft reads only text, tool calls and their results, not {shown(kind)}")
    return value


Block = Annotated[ContentText | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
Blocks = Annotated[list[Block], Field(fail_fast=True)]


class MessagesTurn(Strict):
    role: Literal["user", "assistant"]
    content: Annotated[str | Blocks, BeforeValidator(_check_blocks), at_most(MAX_TURNS, "blocks")]

    def messages(self) -> list[Message]:
        """Return the turn as chat templates take it: the results of tools, then its text and tool calls."""
        blocks = [ContentText(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
        texts = [block.text for block in blocks if isinstance(block, ContentText)]
        if (results and self.role != "user") or (calls and self.role != "assistant"):
            kind = "tool_result" if results else "tool_use"
            raise RefusedError(400, f"messages: a block '{kind}' in a turn of role '{self.role}'", param="messages")
        messages: list[Message] = [
            {"role": "tool", "content": block.content, "tool_call_id": block.tool_use_id} for block in results
        ]
        if texts or calls or not results:
            message: Message = {"role": self.role, "content": "".join(texts)}
            if calls:
                message["tool_calls"] = [called_tool(block.id, block.name, block.input) for block in calls]
            messages.append(message)
        return messages


class MessagesTool(Strict):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON schema of the arguments.")
    cache_control: Ignored = None
    strict: Ignored = None


class MessagesToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None
