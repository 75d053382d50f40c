"""OpenAI's Responses, for text."""

import asyncio
import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.serve.events import Events, event, respond
from weft.serve.library import Shelf
from weft.serve.schema import ResponsesBody, Turn
from weft.serve.writing import Asked, Server, Writing, Written, conversation, drawn, grammar, whole

router = APIRouter()


@router.post("/v1/responses")
async def responses(request: Request, body: ResponsesBody) -> Response:
    """A reply to a text or a conversation, in the words of OpenAI's newer API."""
    return await respond(request, body, _response, _events)


def _asked(server: Server, shelf: Shelf, body: ResponsesBody, client: str) -> Asked:
    turns = [Turn(role="user", content=body.input)] if isinstance(body.input, str) else list(body.input)
    if body.instructions is not None:
        turns.insert(0, Turn(role="system", content=body.instructions))
    run = shelf.run
    pattern = grammar(None if body.text is None else body.text.format, run)
    prompt, most = conversation(run, turns, body.max_output_tokens, server.limits, pattern)
    settings = drawn(body, run, server.limits, chat=True, max_tokens=most)
    return Asked(shelf, [prompt], [turns[-1].content], settings, 1, client)


def _object(body: ResponsesBody, shelf: Shelf, id: str, text: Written | None, asked: Asked | None) -> dict[str, Any]:
    """The response, while it is written (no text) or whole."""
    cut = text is not None and text.finish == "length"
    value: dict[str, Any] = {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress" if text is None else "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": shelf.name,
        "output": [] if text is None else [_message(id, text.text, "incomplete" if cut else "completed")],
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }
    if text is not None and asked is not None:
        read = asked.prompt_tokens
        value["usage"] = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": text.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + text.tokens,
        }
    return value


def _message(id: str, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {
        "id": id.replace("resp", "msg"),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [] if status == "in_progress" else content,
    }


async def _response(server: Server, body: ResponsesBody, client: str) -> dict[str, Any]:
    async with server.library.lent(body.model) as shelf:
        asked = await asyncio.to_thread(_asked, server, shelf, body, client)
        text = (await whole(server, asked))[0]
        return _object(body, shelf, f"resp_{uuid.uuid4().hex}", text, asked)


async def _events(server: Server, body: ResponsesBody, client: str) -> Events:
    number = 0

    def told(kind: str, **more: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number - 1, **more}, kind)

    async with server.library.lent(body.model) as shelf:
        asked = await asyncio.to_thread(_asked, server, shelf, body, client)
        id, text = f"resp_{uuid.uuid4().hex}", Written()
        place = {"item_id": id.replace("resp", "msg"), "output_index": 0, "content_index": 0}
        async with Writing(server, asked) as writing:
            async for pieces in writing:
                if not number:
                    for kind in ("created", "in_progress"):
                        yield told(f"response.{kind}", response=_object(body, shelf, id, None, None))
                    yield told("response.output_item.added", output_index=0, item=_message(id, "", "in_progress"))
                    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                    yield told("response.content_part.added", **place, part=empty)
                for piece in pieces:
                    text.add(piece)
                    if piece.text:
                        yield told("response.output_text.delta", **place, delta=piece.text, logprobs=[])
        done = _object(body, shelf, id, text, asked)
        yield told("response.output_text.done", **place, text=text.text, logprobs=[])
        yield told("response.content_part.done", **place, part=done["output"][0]["content"][0])
        yield told("response.output_item.done", output_index=0, item=done["output"][0])
        yield told(f"response.{done['status']}", response=done)
