"""Anthropic's Messages API, for text."""

import asyncio
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.serve.events import Events, event
from weft.serve.input_size import check_size
from weft.serve.library import ServedModel
from weft.serve.schema import CountBody, MessagesBody, Turn
from weft.serve.server import Server, server_of
from weft.serve.text_generation import TextGeneration, TextOutput, respond
from weft.serve.text_request import TextRequest, conversation, sampling_for

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
        prompt, _ = await asyncio.to_thread(conversation, model.run, _turns(body), limits, max_tokens=1)
    return {"input_tokens": len(prompt.ids)}


def model_list(models: Sequence[ServedModel]) -> dict[str, Any]:
    """List models in Anthropic's format, on one page."""
    rows = [
        {
            "type": "model",
            "id": model.name,
            "display_name": model.name,
            "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        }
        for model in models
    ]
    ends = {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]} if rows else {"first_id": None, "last_id": None}
    return {"data": rows, "has_more": False, **ends}


def _turns(body: CountBody) -> list[Turn]:
    turns = [Turn(role=turn.role, content=turn.content) for turn in body.messages]
    return turns if body.system is None else [Turn(role="system", content=body.system), *turns]


def _text_request(server: Server, model: ServedModel, body: MessagesBody) -> TextRequest:
    turns, run, limits = _turns(body), model.run, server.limits
    prompt, max_tokens = conversation(run, turns, limits, max_tokens=min(body.max_tokens, limits.max_tokens))
    stop = tuple(body.stop_sequences) if body.stop_sequences else None
    settings = sampling_for(body, run, limits, chat=True, max_tokens=max_tokens, stop=stop)
    return TextRequest(model=model, prompts=[prompt], texts=[turns[-1].content], settings=settings)


def _message_object(request: TextRequest, text: TextOutput | None) -> dict[str, Any]:
    """Return the message object; without a text, as it is when the text begins."""
    content = [] if text is None else [{"type": "text", "text": text.text}]
    head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": request.model.name}
    usage = {"input_tokens": request.prompt_tokens, "output_tokens": 0 if text is None else text.tokens}
    return {**head, "content": content, **_stop_reason(text or TextOutput()), "usage": usage}


def _stop_reason(text: TextOutput) -> dict[str, str | None]:
    """Return why a text ended; the model's own end-of-turn token is no stop sequence."""
    reasons = {"length": "max_tokens", None: None}
    reason = "stop_sequence" if text.stopped is not None else reasons.get(text.finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": text.stopped}


def _whole(body: MessagesBody, request: TextRequest, texts: list[TextOutput]) -> dict[str, Any]:
    return _message_object(request, texts[0])


def _event(kind: str, **content: Any) -> bytes:
    return event({"type": kind, **content}, kind)


async def _events(body: MessagesBody, generation: TextGeneration) -> Events:
    begun, text = False, TextOutput()
    async for delta in generation.deltas():
        if not begun:
            begun = True
            yield _event("message_start", message=_message_object(generation.request, None))
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        text.add(delta)
        if delta.text:
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
    yield _event("content_block_stop", index=0)
    yield _event("message_delta", delta=_stop_reason(text), usage={"output_tokens": text.tokens})
    yield _event("message_stop")
