"""Anthropic's Messages API, for text."""

import asyncio
import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.run import Run
from weft.decode.prompt import Prompt
from weft.decode.tool_calls import CallStart, Tool, call_format
from weft.serve.config import Limits
from weft.serve.errors import RefusedError
from weft.serve.events import Events, event
from weft.serve.input_size import check_size
from weft.serve.library import ServedModel
from weft.serve.schema import CountBody, MessagesBody
from weft.serve.server import Server, server_of
from weft.serve.text_generation import TextGeneration, TextOutput, respond
from weft.serve.text_request import TextRequest, ToolUse, conversation, sampling_for, tool_use
from weft.serve.turns import MessagesToolChoice

router = APIRouter()


@router.post("/v1/messages")
async def messages(request: Request, body: MessagesBody) -> Response:
    """Reply to a conversation (Anthropic's format)."""
    return await respond(request, body, _text_request, whole=_whole, events=_events)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountBody) -> dict[str, int]:
    """Count the tokens of a conversation (Anthropic's format)."""
    limits = server_of(request).limits
    async with server_of(request).library.use(body.model) as model:
        await check_size(body, model.run.tokenizer, limits)
        prompt, _ = await asyncio.to_thread(_prompt, model.run, body, limits, max_tokens=1)
    return {"input_tokens": len(prompt.ids)}


def model_object(model: ServedModel) -> dict[str, str]:
    """Describe a model in Anthropic's format."""
    created = datetime.fromtimestamp(model.created, UTC).isoformat()
    return {"type": "model", "id": model.name, "display_name": model.name, "created_at": created}


def model_list(models: Sequence[ServedModel]) -> dict[str, Any]:
    """List models in Anthropic's format, on one page."""
    rows = list(map(model_object, models))
    ends = {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]} if rows else {"first_id": None, "last_id": None}
    return {"data": rows, "has_more": False, **ends}


def _prompt(run: Run, body: CountBody, limits: Limits, *, max_tokens: int) -> tuple[Prompt, int]:
    """Return the prompt of a conversation; a last turn of the assistant's is the beginning of the reply."""
    messages = [message for turn in body.messages for message in turn.messages()]
    continues_last = messages[-1]["role"] == "assistant"
    if continues_last and (messages[-1]["content"].rstrip() != messages[-1]["content"] or "tool_calls" in messages[-1]):
        message = "messages: a reply to continue is text and cannot end with white space"
        raise RefusedError(400, message, param="messages")
    if body.system is not None:
        messages.insert(0, {"role": "system", "content": body.system})
    use = _tool_use(body)
    return conversation(run, messages, limits, max_tokens=max_tokens, use=use, continues_last=continues_last)


def _tool_use(body: CountBody) -> ToolUse | None:
    tools = [Tool(each.name, each.description or "", each.input_schema) for each in body.tools or ()]
    choice = body.tool_choice or MessagesToolChoice(type="auto")
    kind = "required" if choice.type == "any" else choice.type
    return tool_use(tools, kind, name=choice.name, several=not choice.disable_parallel_tool_use)


def _text_request(server: Server, model: ServedModel, body: MessagesBody) -> TextRequest:
    run, limits = model.run, server.limits
    prompt, max_tokens = _prompt(run, body, limits, max_tokens=min(body.max_tokens, limits.max_tokens))
    stop = tuple(body.stop_sequences) if body.stop_sequences else None
    settings = sampling_for(body, run, limits, chat=True, max_tokens=max_tokens, stop=stop)
    calls = None if _tool_use(body) is None else call_format(run.tokenizer)
    text = body.messages[-1].messages()[-1]["content"]
    return TextRequest(model, [prompt], [text], settings=settings, calls=calls)


def _message_object(request: TextRequest, text: TextOutput | None) -> dict[str, Any]:
    """Return the message object; without a text, as it is when the text begins."""
    content: list[dict[str, Any]] = []
    if text is not None:
        content = [{"type": "text", "text": text.text}] if text.text or not text.calls else []
        content += [_tool_block(name, _parsed(arguments)) for name, arguments in text.calls]
    head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": request.model.name}
    text = text or TextOutput()
    return {**head, "content": content, **_stop_reason(text), "usage": _usage(request, text)}


def _usage(request: TextRequest, text: TextOutput) -> dict[str, int]:
    return {"input_tokens": request.prompt_tokens, "output_tokens": text.tokens}


def _stop_reason(text: TextOutput) -> dict[str, str | None]:
    """Return why a text ended; the model's own end-of-turn token is no stop sequence."""
    reasons = {"length": "max_tokens", None: None}
    reason = "stop_sequence" if text.stopped is not None else reasons.get(text.finish, "end_turn")
    reason = "tool_use" if text.calls and reason == "end_turn" else reason
    return {"stop_reason": reason, "stop_sequence": text.stopped}


def _tool_block(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": arguments}


def _parsed(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; none if its end was cut off by `max_tokens`."""
    try:
        parsed: dict[str, Any] = json.loads(arguments)
        return parsed
    except ValueError:
        return {}


def _whole(body: MessagesBody, request: TextRequest, texts: list[TextOutput]) -> dict[str, Any]:
    return _message_object(request, texts[0])


def _event(kind: str, **content: Any) -> bytes:
    return event({"type": kind, **content}, kind)


async def _events(body: MessagesBody, generation: TextGeneration) -> Events:
    begun, text, block = False, TextOutput(), -1  # the index of the open content block
    async for delta in generation.deltas():
        if not begun:
            begun = True
            yield _event("message_start", message=_message_object(generation.request, None))
        text.add(delta)
        if block < 0 and (delta.text or (delta.finish is not None and not text.calls)):
            block = 0
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        if delta.text:
            yield _event("content_block_delta", index=block, delta={"type": "text_delta", "text": delta.text})
        for part in delta.parts:
            if isinstance(part, CallStart):
                if block >= 0:
                    yield _event("content_block_stop", index=block)
                block += 1
                yield _event("content_block_start", index=block, content_block=_tool_block(part.name, {}))
            else:
                content = {"type": "input_json_delta", "partial_json": part.text}
                yield _event("content_block_delta", index=block, delta=content)
    yield _event("content_block_stop", index=block)
    yield _event("message_delta", delta=_stop_reason(text), usage=_usage(generation.request, text))
    yield _event("message_stop")
