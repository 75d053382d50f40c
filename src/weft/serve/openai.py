"""OpenAI's routes: models, completions, chats and embeddings."""

import asyncio
import base64
import time
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from weft import __version__
from weft.decode.config import Beam
from weft.decode.prompt import Prompt, output_vocab_size
from weft.serve import explorer
from weft.serve.errors import RefusedError
from weft.serve.events import DONE, Events, answered, client_of, event, respond, server_of
from weft.serve.library import Shelf
from weft.serve.schema import ChatBody, CompletionBody, EmbeddingsBody
from weft.serve.writing import (
    Asked,
    Scored,
    Server,
    Writing,
    conversation,
    drawn,
    grammar,
    rules,
    searched,
    whole,
    writes_from_source,
)

FINISH = {"eos": "stop", "stop": "stop", "length": "length", None: None}
DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
MAX_AT_ONCE = 4096  # characters or tokens that are read sooner than a thread starts

router = APIRouter()


# ---- models


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The models that are served, in OpenAI's words."""
    library = server_of(request).library
    await library.refresh()
    return {"object": "list", "data": [_described(shelf) for shelf in library.shelves.values()]}


@router.get("/v1/models/{name}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One of them."""
    library = server_of(request).library
    await library.refresh()
    shelf = library.shelves.get(name)
    if shelf is None:
        raise RefusedError(404, f"model '{name[:60]}' is not served here", param="model")
    return _described(shelf)


def _described(shelf: Shelf) -> dict[str, Any]:
    known = {"id": shelf.name, "object": "model", "created": shelf.created, "owned_by": "weft"}
    return {**known, "weft": explorer.described(shelf.folder)}


def _head(shelf: Shelf, kind: str, prefix: str) -> dict[str, Any]:
    of = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": shelf.name}
    return {**of, "system_fingerprint": f"weft-{__version__}"}


# ---- completions


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionBody) -> Response:
    """Texts that continue a prompt, in OpenAI's words."""
    most = server_of(request).limits.choices
    if body.echo and body.logprobs is not None:
        raise RefusedError(400, "echo: the log-probabilities of a prompt are at /v1/score", param="echo")
    n, best_of = body.n or 1, body.best_of or body.n or 1
    if best_of < n or best_of > most:
        raise RefusedError(400, f"best_of = {best_of}: expected {n} … {most}", param="best_of")
    if best_of > n and (body.stream or body.beams):
        raise RefusedError(400, "best_of: whole texts are compared; leave out stream and beams", param="best_of")
    return await respond(request, body, _completion, _completion_events)


def _asked(server: Server, shelf: Shelf, body: CompletionBody, client: str) -> Asked:
    run, pattern, given = shelf.run, grammar(body.response_format, shelf.run), _several(body.prompt)
    if not run.config.objective.continues and not writes_from_source(run):
        raise run.objective.cannot("write")
    _check_ids(given, output_vocab_size(run.model, run.tokenizer.vocab_size), "prompt")
    prompts = [Prompt.of(run.tokenizer, each, pattern) for each in given]
    texts = [each if isinstance(each, str) else run.tokenizer.decode(each) for each in given]
    best_of = body.best_of or body.n or 1
    logprobs = 0 if body.logprobs is None and best_of > (body.n or 1) else body.logprobs
    more = {"logprobs": logprobs, **rules(body, run, server.limits)}
    tokens = body.max_tokens or DEFAULT_TOKENS
    settings = searched(body, drawn(body, run, server.limits, chat=False, max_tokens=tokens, **more))
    if isinstance(settings, Beam) and body.logprobs is not None:
        raise RefusedError(400, "logprobs: a beam search reports none", param="logprobs")
    return Asked(shelf, prompts, texts, settings, best_of, client)


async def _prepared(server: Server, shelf: Shelf, body: CompletionBody, client: str) -> Asked:
    """The same, beside other requests where it may take long: a long text to tokenize, or a grammar to compile."""
    if body.response_format is None and sum(map(len, _several(body.prompt))) <= MAX_AT_ONCE:
        return _asked(server, shelf, body, client)
    return await asyncio.to_thread(_asked, server, shelf, body, client)


def _several(given: Any) -> Sequence[Any]:
    """One text or list of ids, or several."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def _check_ids(given: Sequence[Any], most: int, param: str) -> None:
    for ids in given:
        if not isinstance(ids, str) and max(ids) >= most:
            raise RefusedError(400, f"{param}: {max(ids)} is no token's id; there are {most}", param=param)


async def _completion(server: Server, body: CompletionBody, client: str) -> dict[str, Any]:
    async with server.library.lent(body.model) as shelf:
        asked = await _prepared(server, shelf, body, client)
        texts, n = await whole(server, asked), body.n or 1
    rows: list[dict[str, Any]] = []
    for number, before in enumerate(asked.texts):
        own = texts[number * asked.n : (number + 1) * asked.n]
        for text in sorted(own, key=lambda text: -text.likelihood)[:n] if asked.n > n else own:
            row = {"index": len(rows), "text": (before if body.echo else "") + text.text}
            row["logprobs"] = None if body.logprobs is None else _offsets(text.scored, 0)
            rows.append({**row, "finish_reason": FINISH[text.finish]})
    used = usage(asked, sum(text.tokens for text in texts))
    return {**_head(shelf, "text_completion", "cmpl"), "choices": rows, "usage": used}


async def _completion_events(server: Server, body: CompletionBody, client: str) -> Events:
    async with server.library.lent(body.model) as shelf:
        asked = await _prepared(server, shelf, body, client)
        of, written, sizes = _head(shelf, "text_completion", "cmpl"), 0, [0] * (len(asked.prompts) * asked.n)
        shown = {index: asked.texts[index // asked.n] for index in range(len(sizes))} if body.echo else {}
        async with Writing(server, asked) as writing:
            async for pieces in writing:
                for piece in pieces:
                    written += piece.tokens
                    text = shown.pop(piece.row, "") + piece.text
                    if not text and piece.finish is None and not piece.scored:
                        continue  # a character that is not whole yet
                    logprobs = _offsets(piece.scored, sizes[piece.row]) if piece.scored else None
                    sizes[piece.row] += len(piece.text)
                    row = {"index": piece.row, "text": text, "logprobs": logprobs}
                    yield event({**of, "choices": [{**row, "finish_reason": FINISH[piece.finish]}]})
        if _wants_usage(body):
            yield event({**of, "choices": [], "usage": usage(asked, written)})
        yield DONE


# ---- chats


@router.post("/v1/chat/completions")
async def chats(request: Request, body: ChatBody) -> Response:
    """A reply to a conversation, in OpenAI's words."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RefusedError(400, "top_logprobs: needs logprobs = true", param="top_logprobs")
    return await respond(request, body, _chat, _chat_events)


def _asked_in_chat(server: Server, shelf: Shelf, body: ChatBody, client: str) -> Asked:
    run, wanted, pattern = shelf.run, body.max_completion_tokens or body.max_tokens, body.response_format
    prompt, most = conversation(run, body.messages, wanted, server.limits, grammar(pattern, run))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    more = {"logprobs": logprobs, **rules(body, run, server.limits)}
    settings = searched(body, drawn(body, run, server.limits, chat=True, max_tokens=most, **more))
    if isinstance(settings, Beam) and body.logprobs:
        raise RefusedError(400, "logprobs: a beam search reports none", param="logprobs")
    return Asked(shelf, [prompt], [body.messages[-1].content], settings, body.n or 1, client)


async def _chat(server: Server, body: ChatBody, client: str) -> dict[str, Any]:
    async with server.library.lent(body.model) as shelf:
        asked = await asyncio.to_thread(_asked_in_chat, server, shelf, body, client)
        texts = await whole(server, asked)
    rows = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text.text, "refusal": None},
            "logprobs": {"content": _contents(text.scored), "refusal": None} if body.logprobs else None,
            "finish_reason": FINISH[text.finish],
        }
        for index, text in enumerate(texts)
    ]
    used = usage(asked, sum(text.tokens for text in texts))
    return {**_head(shelf, "chat.completion", "chatcmpl"), "choices": rows, "usage": used}


async def _chat_events(server: Server, body: ChatBody, client: str) -> Events:
    async with server.library.lent(body.model) as shelf:
        asked = await asyncio.to_thread(_asked_in_chat, server, shelf, body, client)
        of, written, begun = _head(shelf, "chat.completion.chunk", "chatcmpl"), 0, set[int]()
        async with Writing(server, asked) as writing:
            async for pieces in writing:
                for piece in pieces:
                    written += piece.tokens
                    first = piece.row not in begun
                    if not (piece.text or piece.finish or piece.scored or first):
                        continue  # a character that is not whole yet
                    begun.add(piece.row)
                    delta = {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
                    logprobs = {"content": _contents(piece.scored), "refusal": None} if piece.scored else None
                    row = {"index": piece.row, "delta": delta, "logprobs": logprobs}
                    yield event({**of, "choices": [{**row, "finish_reason": FINISH[piece.finish]}]})
        if _wants_usage(body):
            yield event({**of, "choices": [], "usage": usage(asked, written)})
        yield DONE


# ---- embeddings


@router.post("/v1/embeddings")
async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
    """A vector for each text, in OpenAI's words."""
    return await answered(request, _embeddings(server_of(request), body, client_of(request)))


async def _embeddings(server: Server, body: EmbeddingsBody, client: str) -> dict[str, Any]:
    async with server.library.lent(body.model) as shelf:
        run, given = shelf.run, _several(body.input)
        _check_ids(given, run.tokenizer.vocab_size, "input")
        texts = [each if isinstance(each, str) else run.tokenizer.decode(each) for each in given]
        assert shelf.worker is not None
        vectors = await shelf.worker.ask(partial(run.embed, texts), client)
        tokens = sum(len(run.tokenizer.encode(text)) for text in texts)
    if body.dimensions is not None and body.dimensions != vectors.shape[1]:
        raise RefusedError(400, f"dimensions = {body.dimensions}: these have {vectors.shape[1]}", param="dimensions")
    rows = [
        {"object": "embedding", "index": index, "embedding": _packed(vector, body.encoding_format == "base64")}
        for index, vector in enumerate(vectors)
    ]
    counted = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": rows, "model": shelf.name, "usage": counted}


def _packed(vector: Any, as_base64: bool) -> Any:
    if as_base64:
        return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
    return vector.tolist()


# ---- what they share


def usage(asked: Asked, written: int) -> dict[str, int]:
    read = asked.prompt_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _wants_usage(body: CompletionBody | ChatBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _offsets(scored: Iterable[Scored], offset: int) -> dict[str, Any]:
    rows: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in scored:
        rows["tokens"].append(each.token)
        rows["token_logprobs"].append(each.logprob)
        rows["top_logprobs"].append(dict(each.top))
        rows["text_offset"].append(offset)
        offset += len(each.token)
    return rows


def _contents(scored: Iterable[Scored]) -> list[dict[str, Any]]:
    return [
        {**_content(each.token, each.logprob), "top_logprobs": [_content(*other) for other in each.top]}
        for each in scored
    ]


def _content(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "bytes": list(token.encode("utf-8", "replace")), "logprob": logprob}
