"""OpenAI's Responses API, for text and tool calls."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.decode.tool_calls import CallStart, call_format
from weft.serve.events import Events, event
from weft.serve.library import ServedModel
from weft.serve.schema import ResponsesBody
from weft.serve.server import Server
from weft.serve.text_generation import TextGeneration, TextOutput, respond
from weft.serve.text_request import TextRequest, conversation, function_use, grammar, sampling_for
from weft.serve.turns import Message, ResponsesItem, ResponsesToolChoice

Item = dict[str, Any]  # of a response: a message or a tool call

router = APIRouter()


@router.post("/v1/responses")
async def responses(request: Request, body: ResponsesBody) -> Response:
    """Reply to a text or a conversation (OpenAI's Responses format)."""
    return await respond(request, body, _text_request, whole=_whole, events=_events)


def _text_request(server: Server, model: ServedModel, body: ResponsesBody) -> TextRequest:
    items = [ResponsesItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = list[Message]()
    for message in (message for item in items for message in item.messages()):
        if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":  # one message has all calls
            called = [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]
            messages[-1] = {**messages[-1], "tool_calls": called}
        else:
            messages.append(message)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    run, limits = model.run, server.limits
    pattern, requested = grammar(None if body.text is None else body.text.format, run), body.max_output_tokens
    choice, several = body.tool_choice, body.parallel_tool_calls
    name = choice.name if isinstance(choice, ResponsesToolChoice) else None
    use = function_use(body.tools or (), choice if isinstance(choice, str) else None, name=name, several=several)
    prompt, max_tokens = conversation(run, messages, limits, max_tokens=requested, pattern=pattern, use=use)
    settings = sampling_for(body, run, limits, chat=True, max_tokens=max_tokens)
    calls, texts = None if use is None else call_format(run.tokenizer), [messages[-1]["content"]]
    return TextRequest(model=model, prompts=[prompt], texts=texts, settings=settings, calls=calls)


def _response_object(
    body: ResponsesBody, request: TextRequest, id: str, *, text: TextOutput | None, output: Sequence[Item] = ()
) -> dict[str, Any]:
    """Return the response object; without a text, as it is while the text is written."""
    truncated = text is not None and text.finish == "length"
    read, written = request.prompt_tokens, 0 if text is None else text.tokens
    usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    usage_details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    choice = body.tool_choice or ("auto" if body.tools else "none")
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress" if text is None else "incomplete" if truncated else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": request.model.name,
        "output": list(output),
        "parallel_tool_calls": bool(body.tools) and body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None if text is None else usage | usage_details,
    }


def _message() -> Item:
    """Return a message without its text."""
    head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "status": "in_progress", "role": "assistant"}
    return {**head, "content": []}


def _call(name: str) -> Item:
    """Return a tool call without its arguments."""
    ids = {"id": f"fc_{uuid.uuid4().hex}", "call_id": f"call_{uuid.uuid4().hex[:24]}"}
    return {**ids, "type": "function_call", "status": "in_progress", "name": name, "arguments": ""}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _finished(item: Item, text: str, status: str = "completed") -> Item:
    """Return a message with its text, or a tool call with its arguments."""
    content = {"content": [_output_text(text)]} if item["type"] == "message" else {"arguments": text}
    return {**item, **content, "status": status}


def _whole(body: ResponsesBody, request: TextRequest, texts: list[TextOutput]) -> dict[str, Any]:
    text, items = texts[0], list[Item]()
    if text.text or not text.calls:
        items.append(_finished(_message(), text.text))
    items += [_finished(_call(name), arguments) for name, arguments in text.calls]
    if text.finish == "length":
        items[-1]["status"] = "incomplete"
    return _response_object(body, request, f"resp_{uuid.uuid4().hex}", text=text, output=items)


class _Stream:
    """Events of one response: items begin, grow and end one after another."""

    def __init__(self) -> None:
        self.sent, self.items, self.text = 0, list[Item](), ""  # the last item is open, with this text or arguments
        self.open = False

    def event(self, kind: str, **content: Any) -> bytes:
        self.sent += 1
        return event({"type": f"response.{kind}", "sequence_number": self.sent - 1, **content}, f"response.{kind}")

    @property
    def place(self) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place | ({"content_index": 0} if self.is_message else {})

    @property
    def is_message(self) -> bool:
        return bool(self.items[-1]["type"] == "message")

    def begin(self, item: Item) -> Iterator[bytes]:
        yield from self.end()
        self.items.append(item)
        self.text, self.open = "", True
        yield self.event("output_item.added", output_index=len(self.items) - 1, item=item)
        if self.is_message:
            yield self.event("content_part.added", **self.place, part=_output_text(""))

    def grow(self, text: str) -> bytes:
        self.text += text
        if self.is_message:
            return self.event("output_text.delta", **self.place, delta=text, logprobs=[])
        return self.event("function_call_arguments.delta", **self.place, delta=text)

    def end(self, status: str = "completed") -> Iterator[bytes]:
        if not self.open:
            return
        item = self.items[-1] = _finished(self.items[-1], self.text, status)
        if self.is_message:
            yield self.event("output_text.done", **self.place, text=self.text, logprobs=[])
            yield self.event("content_part.done", **self.place, part=item["content"][0])
        else:
            yield self.event("function_call_arguments.done", **self.place, name=item["name"], arguments=self.text)
        yield self.event("output_item.done", output_index=len(self.items) - 1, item=item)
        self.open = False


async def _events(body: ResponsesBody, generation: TextGeneration) -> Events:
    request, id, text, stream = generation.request, f"resp_{uuid.uuid4().hex}", TextOutput(), _Stream()
    async for delta in generation.deltas():
        if not stream.sent:
            for kind in ("created", "in_progress"):
                yield stream.event(kind, response=_response_object(body, request, id, text=None))
        text.add(delta)
        ended = delta.finish is not None and not text.calls
        if not stream.items and (delta.text or request.calls is None or ended):
            for content in stream.begin(_message()):
                yield content
        if delta.text:
            yield stream.grow(delta.text)
        for part in delta.parts:
            if isinstance(part, CallStart):
                for content in stream.begin(_call(part.name)):
                    yield content
            else:
                yield stream.grow(part.text)
    status = "incomplete" if text.finish == "length" else "completed"
    for content in stream.end(status):
        yield content
    yield stream.event(status, response=_response_object(body, request, id, text=text, output=stream.items))
