"""OpenAI's routes: models, completions, chat completions and embeddings."""

import asyncio
import base64
import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from weft import __version__
from weft.api.run import Run
from weft.decode.prompt import Prompt, output_vocab_size
from weft.decode.text import Finish
from weft.decode.tool_calls import CallStart, call_format
from weft.serve.errors import RefusedError, UnknownModelError, speaks_anthropic
from weft.serve.events import DONE, Events, event, json_response
from weft.serve.input_size import as_list, check_ids, check_size
from weft.serve.library import Library, ServedModel
from weft.serve.routes import anthropic, explorer
from weft.serve.schema import ChatBody, CompletionBody, EmbeddingsBody, OpenAIBody
from weft.serve.server import Server, client_of, server_of
from weft.serve.text_generation import ScoredToken, TextGeneration, TextOutput, respond
from weft.serve.text_request import (
    TextRequest,
    ToolUse,
    conversation,
    function_use,
    grammar,
    openai_settings,
    writes_from_source,
)
from weft.serve.turns import NamedTool

FINISH = {"eos": "stop", "stop": "stop", "length": "length", None: None}
DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API
MAX_INLINE_SIZE = 4096  # characters or tokens of a prompt that are tokenized faster than a thread starts

router = APIRouter()


# ---- models


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the models of this server (OpenAI's format; Anthropic's for its clients, by their version header)."""
    library = server_of(request).library
    await library.refresh()
    served = list(library.models.values())
    if speaks_anthropic(request):
        return anthropic.model_list(served)
    return {
        "object": "list",
        "data": await asyncio.to_thread(lambda: [_model_object(library, each) for each in served]),
    }


@router.get("/v1/models/{name}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """Describe one model (OpenAI's format; Anthropic's for its clients, by their version header)."""
    library = server_of(request).library
    await library.refresh()
    served = library.models.get(name)
    if served is None:
        raise UnknownModelError(name, "not served here; /v1/models lists the models")
    if speaks_anthropic(request):
        return anthropic.model_object(served)
    return await asyncio.to_thread(_model_object, library, served)


def _model_object(library: Library, model: ServedModel) -> dict[str, Any]:
    facts = {"id": model.name, "object": "model", "created": model.created, "owned_by": "weft"}
    return {**facts, **explorer.model_facts(library, model)}


def _response_head(model: ServedModel, kind: str, prefix: str) -> dict[str, Any]:
    head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model.name}
    return {**head, "system_fingerprint": f"weft-{__version__}"}


# ---- completions


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionBody) -> Response:
    """Continue prompts (OpenAI's format)."""
    limit = server_of(request).limits.choices
    n, best_of = body.n or 1, body.best_of or body.n or 1
    if best_of < n or best_of > limit:
        raise RefusedError(400, f"best_of = {best_of}: expected {n} … {limit}", param="best_of")
    if best_of > n and (body.stream or body.beams):
        raise RefusedError(400, "best_of: compares whole texts; leave out stream and beams", param="best_of")
    # an executor thread is worthwhile for a long text to tokenize, or a grammar to compile
    inline = body.response_format is None and sum(map(len, as_list(body.prompt))) <= MAX_INLINE_SIZE
    build, whole, events = _completion_request, _completion, _completion_events
    return await respond(request, body, build, whole=whole, events=events, inline=inline)


def _completion_request(server: Server, model: ServedModel, body: CompletionBody) -> TextRequest:
    run, pattern, inputs = model.run, grammar(body.response_format, model.run), as_list(body.prompt)
    if not writes_from_source(run):
        run.objective.check_continues("write")
    check_ids(inputs, output_vocab_size(run.model, run.tokenizer.vocab_size), "prompt")
    best_of = body.best_of or body.n or 1
    logprobs = 0 if body.logprobs is None and best_of > (body.n or 1) else body.logprobs
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    settings = openai_settings(body, run, server.limits, chat=False, max_tokens=max(1, max_tokens), logprobs=logprobs)
    if body.echo and body.logprobs is not None and writes_from_source(run):
        raise RefusedError(400, "echo with logprobs: this model writes one text from another", param="echo")
    prompts = [Prompt.of(run.tokenizer, each, pattern) for each in inputs]
    likeliest = sum(len(prompt.ids) for prompt in prompts) * (body.logprobs or 0)
    if body.echo and likeliest > server.limits.max_input_tokens:
        most = f"this server returns at most {server.limits.max_input_tokens:,}; send fewer prompts, or logprobs = 1"
        raise RefusedError(413, f"logprobs: {likeliest:,} likeliest tokens of prompts; {most}", param="logprobs")
    # tokens that the tokenizer puts before a text are no part of it
    ids = [
        prompt.ids[len(run.tokenizer.leading) :] if isinstance(each, str) else prompt.ids
        for prompt, each in zip(prompts, inputs, strict=True)
    ]
    echoed = [len(tokens) if each else 0 for tokens, each in zip(ids, inputs, strict=True)]
    return TextRequest(
        model,
        prompts,
        _as_texts(run, inputs),
        settings=settings,
        n=best_of,
        writes=max_tokens > 0,
        echoed=echoed if body.echo else None,
        echo_logprobs=body.logprobs,
    )


def _as_texts(run: Run, inputs: Sequence[Any]) -> list[str]:
    return [each if isinstance(each, str) else run.tokenizer.decode(each) for each in inputs]


def _completion(body: CompletionBody, request: TextRequest, texts: list[TextOutput]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    n = body.n or 1
    for number in range(len(request.prompts)):
        candidates = texts[number * request.n : (number + 1) * request.n]
        if request.n > n:
            candidates = sorted(candidates, key=lambda text: -text.mean_logprob)[:n]
        for text in candidates:
            row = {"index": len(rows), "text": text.text}
            row["logprobs"] = None if body.logprobs is None else _completion_logprobs(text.scored, 0)
            rows.append({**row, "finish_reason": FINISH[text.finish]})
    usage = _usage(request, sum(text.tokens for text in texts))
    return {**_response_head(request.model, "text_completion", "cmpl"), "choices": rows, "usage": usage}


async def _completion_events(body: CompletionBody, generation: TextGeneration) -> Events:
    request = generation.request
    head, tokens = _response_head(request.model, "text_completion", "cmpl"), 0
    offsets = [0] * (len(request.prompts) * request.n)
    async for delta in generation.deltas():
        tokens += delta.tokens
        if not delta.text and delta.finish is None and not delta.scored:
            continue  # an incomplete character
        logprobs = _completion_logprobs(delta.scored, offsets[delta.row]) if delta.scored else None
        offsets[delta.row] += len(delta.text)
        row = {"index": delta.row, "text": delta.text, "logprobs": logprobs}
        yield event({**head, "choices": [{**row, "finish_reason": FINISH[delta.finish]}]})
    if _includes_usage(body):
        yield event({**head, "choices": [], "usage": _usage(request, tokens)})
    yield DONE


# ---- chat completions


@router.post("/v1/chat/completions")
async def chats(request: Request, body: ChatBody) -> Response:
    """Reply to a conversation (OpenAI's format)."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RefusedError(400, "top_logprobs: requires logprobs = true", param="top_logprobs")
    return await respond(request, body, _chat_request, whole=_chat, events=_chat_events)


def _chat_request(server: Server, model: ServedModel, body: ChatBody) -> TextRequest:
    run, limits = model.run, server.limits
    requested = body.max_completion_tokens or body.max_tokens
    pattern, use = grammar(body.response_format, run), _tool_use(body)
    if use is not None and body.beams is not None:
        raise RefusedError(400, "beams: not available with tools", param="beams")
    messages = [message for turn in body.messages for message in turn.messages()]
    prompt, max_tokens = conversation(run, messages, limits, max_tokens=requested, pattern=pattern, use=use)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    settings = openai_settings(body, run, limits, chat=True, max_tokens=max_tokens, logprobs=logprobs)
    calls, texts = None if use is None else call_format(run.tokenizer), [messages[-1]["content"]]
    return TextRequest(model, [prompt], texts, settings=settings, n=body.n or 1, calls=calls)


def _tool_use(body: ChatBody) -> ToolUse | None:
    functions, choice = [tool.function for tool in body.tools or ()], body.tool_choice
    if isinstance(choice, NamedTool):
        return function_use(functions, None, name=choice.function.name, several=False)
    return function_use(functions, choice, name=None, several=body.parallel_tool_calls)


def _chat(body: ChatBody, request: TextRequest, texts: list[TextOutput]) -> dict[str, Any]:
    rows = [
        {
            "index": index,
            "message": _message(text),
            "logprobs": {"content": _chat_logprobs(text.scored), "refusal": None} if body.logprobs else None,
            "finish_reason": _finish(text.finish, bool(text.calls)),
        }
        for index, text in enumerate(texts)
    ]
    usage = _usage(request, sum(text.tokens for text in texts))
    return {**_response_head(request.model, "chat.completion", "chatcmpl"), "choices": rows, "usage": usage}


def _message(text: TextOutput) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text.text, "refusal": None}
    if text.calls:
        calls = [(f"call_{uuid.uuid4().hex[:24]}", name, arguments) for name, arguments in text.calls]
        message |= {"content": text.text or None, "tool_calls": [_tool_call(*call) for call in calls]}
    return message


def _tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish(finish: Finish | None, called: bool) -> str | None:
    return "tool_calls" if called and finish not in (None, "length") else FINISH[finish]


async def _chat_events(body: ChatBody, generation: TextGeneration) -> Events:
    request = generation.request
    head, tokens, calls = _response_head(request.model, "chat.completion.chunk", "chatcmpl"), 0, dict[int, int]()
    async for delta in generation.deltas():
        tokens += delta.tokens
        first = delta.row not in calls
        if not (delta.text or delta.finish or delta.scored or delta.parts or first):
            continue  # an incomplete character
        content: dict[str, Any] = {"role": "assistant"} if first else {}
        if delta.text or not delta.parts:
            content["content"] = delta.text
        calls.setdefault(delta.row, 0)
        if delta.parts:
            content["tool_calls"] = list[dict[str, Any]]()
        for part in delta.parts:
            if isinstance(part, CallStart):
                calls[delta.row] += 1
                call = _tool_call(f"call_{uuid.uuid4().hex[:24]}", part.name, "")
            else:
                call = {"function": {"arguments": part.text}}
            content["tool_calls"].append({"index": calls[delta.row] - 1, **call})
        logprobs = {"content": _chat_logprobs(delta.scored), "refusal": None} if delta.scored else None
        row = {"index": delta.row, "delta": content, "logprobs": logprobs}
        yield event({**head, "choices": [{**row, "finish_reason": _finish(delta.finish, calls[delta.row] > 0)}]})
    if _includes_usage(body):
        yield event({**head, "choices": [], "usage": _usage(request, tokens)})
    yield DONE


# ---- embeddings


@router.post("/v1/embeddings")
async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
    """Embed texts, each as a vector (OpenAI's format)."""
    return await json_response(request, _embeddings(server_of(request), body, client_of(request)))


async def _embeddings(server: Server, body: EmbeddingsBody, client: str) -> dict[str, Any]:
    async with server.library.use(body.model) as model:
        run, inputs = model.run, as_list(body.input)
        await check_size(body, run.tokenizer, server.limits)
        check_ids(inputs, run.tokenizer.vocab_size, "input")
        texts = await asyncio.to_thread(_as_texts, run, inputs)
        tokens = await asyncio.to_thread(lambda: sum(map(len, run.tokenizer.encode_batch(texts))))
        vectors = await model.loaded_thread.call(partial(run.embed, texts), client)
    dimensions, width = body.dimensions, vectors.shape[1]
    if dimensions is not None and dimensions > width:
        raise RefusedError(400, f"dimensions = {dimensions}: this model's vectors have {width}", param="dimensions")
    if dimensions is not None and dimensions < width:
        vectors = vectors[:, :dimensions]  # the first ones, scaled to length 1 (Kusupati et al. 2022)
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    encoded = vectors.tolist()
    if body.encoding_format == "base64":
        encoded = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    rows = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(encoded)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": rows, "model": model.name, "usage": usage}


# ---- parts of several responses


def _usage(request: TextRequest, tokens: int) -> dict[str, int]:
    read = request.prompt_tokens
    return {"prompt_tokens": read, "completion_tokens": tokens, "total_tokens": read + tokens}


def _includes_usage(body: OpenAIBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _completion_logprobs(scored: Iterable[ScoredToken], offset: int) -> dict[str, Any]:
    """Return log-probabilities in the format of completions; the first token begins at `offset` characters."""
    rows: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    decoder = getincrementaldecoder("utf-8")("replace")
    for token in scored:
        likeliest: dict[str, float | None] = {}
        for key, value in [*token.top, (token.token, token.logprob)]:
            likeliest.setdefault(_shown(key), value)  # of two that look alike, the likelier one
        rows["tokens"].append(_shown(token.token))
        rows["token_logprobs"].append(token.logprob)
        rows["top_logprobs"].append(None if token.logprob is None else likeliest)
        rows["text_offset"].append(offset)
        offset += len(decoder.decode(token.token))
    return rows


def _shown(token: bytes) -> str:
    """Return a token as text; its bytes, as OpenAI's API does, if it is a part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _chat_logprobs(scored: Iterable[ScoredToken]) -> list[dict[str, Any]]:
    """Return log-probabilities in the format of chat completions."""

    def entry(token: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": _shown(token), "bytes": list(token), "logprob": logprob}

    return [{**entry(each.token, each.logprob), "top_logprobs": [entry(*top) for top in each.top]} for each in scored]
