"""OpenAI's Responses API, for text."""

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.serve.events import Events, event
from weft.serve.library import ServedModel
from weft.serve.schema import ResponsesBody
from weft.serve.server import Server
from weft.serve.text_generation import TextGeneration, TextOutput, respond
from weft.serve.text_request import TextRequest, conversation, grammar, sampling_for
from weft.serve.turns import Turn

router = APIRouter()


@router.post("/v1/responses")
async def responses(request: Request, body: ResponsesBody) -> Response:
    """Reply to a text or a conversation (OpenAI's Responses format)."""
    return await respond(request, body, _text_request, whole=_whole, events=_events)


def _text_request(server: Server, model: ServedModel, body: ResponsesBody) -> TextRequest:
    turns = [Turn(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = [message for turn in turns for message in turn.messages()]
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    run, limits = model.run, server.limits
    pattern = grammar(None if body.text is None else body.text.format, run)
    prompt, max_tokens = conversation(run, messages, limits, max_tokens=body.max_output_tokens, pattern=pattern)
    settings = sampling_for(body, run, limits, chat=True, max_tokens=max_tokens)
    return TextRequest(model=model, prompts=[prompt], texts=[messages[-1]["content"]], settings=settings)


def _response_object(body: ResponsesBody, request: TextRequest, id: str, *, text: TextOutput | None) -> dict[str, Any]:
    """Return the response object; without a text, as it is while the text is written."""
    truncated = text is not None and text.finish == "length"
    read, written = request.prompt_tokens, 0 if text is None else text.tokens
    usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    usage_details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
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
        "output": [] if text is None else [_message(id, text.text, "incomplete" if truncated else "completed")],
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None if text is None else usage | usage_details,
    }


def _message(id: str, text: str, status: str) -> dict[str, Any]:
    head = {"id": id.replace("resp", "msg"), "type": "message", "status": status, "role": "assistant"}
    return {**head, "content": [] if status == "in_progress" else [_output_text(text)]}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _whole(body: ResponsesBody, request: TextRequest, texts: list[TextOutput]) -> dict[str, Any]:
    return _response_object(body, request, f"resp_{uuid.uuid4().hex}", text=texts[0])


async def _events(body: ResponsesBody, generation: TextGeneration) -> Events:
    request, sent = generation.request, 0

    def next_event(kind: str, **content: Any) -> bytes:
        nonlocal sent
        sent += 1
        return event({"type": kind, "sequence_number": sent - 1, **content}, kind)

    id, text = f"resp_{uuid.uuid4().hex}", TextOutput()
    part = {"item_id": id.replace("resp", "msg"), "output_index": 0, "content_index": 0}
    async for delta in generation.deltas():
        if not sent:
            for kind in ("created", "in_progress"):
                yield next_event(f"response.{kind}", response=_response_object(body, request, id, text=None))
            yield next_event("response.output_item.added", output_index=0, item=_message(id, "", "in_progress"))
            yield next_event("response.content_part.added", **part, part=_output_text(""))
        text.add(delta)
        if delta.text:
            yield next_event("response.output_text.delta", **part, delta=delta.text, logprobs=[])
    done = _response_object(body, request, id, text=text)
    yield next_event("response.output_text.done", **part, text=text.text, logprobs=[])
    yield next_event("response.content_part.done", **part, part=done["output"][0]["content"][0])
    yield next_event("response.output_item.done", output_index=0, item=done["output"][0])
    yield next_event(f"response.{done['status']}", response=done)
