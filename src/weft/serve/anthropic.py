"""Anthropic's Messages, for text."""

import asyncio
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.serve.events import Events, event, respond, server_of
from weft.serve.library import Shelf
from weft.serve.schema import CountBody, MessagesBody, Turn
from weft.serve.writing import Asked, Server, Writing, Written, conversation, drawn, whole

router = APIRouter()


@router.post("/v1/messages")
async def messages(request: Request, body: MessagesBody) -> Response:
    """A reply to a conversation, in Anthropic's words."""
    return await respond(request, body, _message, _events)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountBody) -> dict[str, int]:
    """How many tokens a conversation is."""
    server = server_of(request)
    async with server.library.lent(body.model) as shelf:
        prompt, _ = await asyncio.to_thread(conversation, shelf.run, _turns(body), 1, server.limits)
    return {"input_tokens": len(prompt.ids)}


def _turns(body: CountBody) -> list[Turn]:
    turns = [Turn(role=turn.role, content=turn.content) for turn in body.messages]
    return turns if body.system is None else [Turn(role="system", content=body.system), *turns]


def _asked(server: Server, shelf: Shelf, body: MessagesBody, client: str) -> Asked:
    turns, run = _turns(body), shelf.run
    prompt, most = conversation(run, turns, min(body.max_tokens, server.limits.max_tokens), server.limits)
    stop = tuple(body.stop_sequences) if body.stop_sequences else None
    settings = drawn(body, run, server.limits, chat=True, max_tokens=most, stop=stop)
    return Asked(shelf, [prompt], [turns[-1].content], settings, 1, client)


def _object(asked: Asked, id: str, text: Written | None) -> dict[str, Any]:
    """The message, as it begins (no text) or whole."""
    content = [] if text is None else [{"type": "text", "text": text.text}]
    value = {"id": id, "type": "message", "role": "assistant", "model": asked.shelf.name, "content": content}
    used = {"input_tokens": asked.prompt_tokens, "output_tokens": 0 if text is None else text.tokens}
    return {**value, **_ended(text or Written()), "usage": used}


def _ended(text: Written) -> dict[str, str | None]:
    """Why it ended: a model's own sign that its turn is over is no stop sequence."""
    reasons = {"length": "max_tokens", None: None}
    reason = "stop_sequence" if text.stopped is not None else reasons.get(text.finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": text.stopped}


async def _message(server: Server, body: MessagesBody, client: str) -> dict[str, Any]:
    async with server.library.lent(body.model) as shelf:
        asked = await asyncio.to_thread(_asked, server, shelf, body, client)
        return _object(asked, f"msg_{uuid.uuid4().hex}", (await whole(server, asked))[0])


def _told(kind: str, **more: Any) -> bytes:
    return event({"type": kind, **more}, kind)


async def _events(server: Server, body: MessagesBody, client: str) -> Events:
    async with server.library.lent(body.model) as shelf:
        asked, begun, text = await asyncio.to_thread(_asked, server, shelf, body, client), False, Written()
        async with Writing(server, asked) as writing:
            async for pieces in writing:
                if not begun:
                    begun = True
                    yield _told("message_start", message=_object(asked, f"msg_{uuid.uuid4().hex}", None))
                    yield _told("content_block_start", index=0, content_block={"type": "text", "text": ""})
                for piece in pieces:
                    text.add(piece)
                    if piece.text:
                        yield _told("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})
        yield _told("content_block_stop", index=0)
        yield _told("message_delta", delta=_ended(text), usage={"output_tokens": text.tokens})
        yield _told("message_stop")
