"""Responses with generated texts: whole, or as events while the model writes them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

from starlette.requests import Request
from starlette.responses import Response

from weft.decode.beam import search_texts
from weft.decode.config import Beam, Sampling
from weft.decode.text import Chunk, Finish, token_spelling
from weft.decode.tool_calls import CallArguments, CallParser, CallStart, ReplyPart, ReplyText
from weft.evaluate.perplexity import prompt_logprobs
from weft.serve.errors import RefusedError
from weft.serve.events import Events, json_response, stream_response
from weft.serve.input_size import check_size
from weft.serve.library import ServedModel
from weft.serve.model_thread import late
from weft.serve.server import Server, client_of, server_of
from weft.serve.tasks import Outputs, TextTask
from weft.serve.text_request import TextRequest, writes_from_source
from weft.storage.untrusted import printable

GRACE_SECONDS = 0.5  # by which a model's thread may be late to report that the time is over
MAX_INLINE_SCORES = 1000  # log-probabilities that are converted faster than a thread starts
MIN_LOGPROB = -9999.0  # reported for tokens that the model excludes: JSON has no −∞
log = logging.getLogger("weft.serve")


class ScoredToken(NamedTuple):
    """A token with its log-probability, and the likeliest tokens at its position."""

    token: bytes
    logprob: float | None  # None for the first token of a prompt
    top: list[tuple[bytes, float]]


class TextDelta(NamedTuple):
    """An addition to one of the texts."""

    row: int
    text: str
    tokens: int
    finish: Finish | None
    scored: Sequence[ScoredToken] = ()
    stopped: str | None = None  # the stop string that ended the text
    chunks: Sequence[Chunk] = ()  # token by token; empty if the whole text comes in one delta
    parts: Sequence[CallStart | CallArguments] = ()  # of tool calls, after the text


@dataclass
class TextOutput:
    """The sum of a text's deltas."""

    text: str = ""
    tokens: int = 0
    finish: Finish | None = None
    scored: list[ScoredToken] = field(default_factory=list)
    stopped: str | None = None
    echoed: int = 0  # tokens of the prompt in `scored`
    calls: list[tuple[str, str]] = field(default_factory=list)  # names and arguments of tool calls

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.echoed += 0 if delta.tokens else len(delta.scored)
        self.finish, self.stopped = delta.finish or self.finish, delta.stopped or self.stopped
        self.scored += delta.scored
        for part in delta.parts:
            if isinstance(part, CallStart):
                self.calls.append((part.name, ""))
            else:
                name, arguments = self.calls[-1]
                self.calls[-1] = name, arguments + part.text

    @property
    def mean_logprob(self) -> float:
        logprobs = [token.logprob or 0.0 for token in self.scored[self.echoed :]]
        return sum(logprobs) / max(1, len(logprobs))


class TextGeneration:
    """The generation of the requested texts. Leaving its `async with` block cancels unfinished texts."""

    def __init__(self, server: Server, request: TextRequest, client: str):
        self.server, self.request, self.client = server, request, client
        self.thread = request.model.loaded_thread
        self.tasks: list[TextTask] = []
        self._timer: asyncio.TimerHandle | None = None
        self._parsers: dict[int, CallParser] = {}  # of replies that may call tools

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.thread.cancel(self.tasks)

    async def collect(self) -> list[TextOutput]:
        """Return all texts in order, once they are finished."""
        texts = [TextOutput() for _ in range(len(self.request.prompts) * self.request.n)]
        async for delta in self.deltas():
            texts[delta.row].add(delta)
        return texts

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """Yield additions to the texts while they are written."""
        request, metrics, name = self.request, self.server.metrics, self.request.model.folder.path.resolve().name
        if self.server.serving.log_prompts:
            for text in request.texts:
                log.info("%s: %s", name, printable(text))
        metrics.prompt_tokens.labels(name).inc(request.prompt_tokens)
        first, between = metrics.first_token.labels(name), metrics.between_tokens.labels(name)
        generated = metrics.written_tokens.labels(name)
        if request.echoed is not None or not request.writes:
            for delta in await self._prompt_deltas():
                yield delta
            if not request.writes:
                return
        if isinstance(request.settings, Beam) or (request.source is None and writes_from_source(request.model.run)):
            for delta in await self.thread.call(partial(_whole_texts, request), self.client):
                generated.inc(delta.tokens)
                yield delta
            return
        outputs = self._submit(request.settings)
        unfinished, last, begun = {task.index for task in self.tasks}, time.monotonic(), False
        while unfinished:
            batch = [await outputs.get()]
            while not outputs.empty():
                batch.append(outputs.get_nowait())
            chunks: dict[int, list[Chunk]] = {}
            for index, output in batch:
                if isinstance(output, RefusedError):
                    raise output
                chunks.setdefault(index, []).append(output)
            now = time.monotonic()
            if not begun:
                first.observe(now - last)
            else:  # one delivery may hold several tokens of a text
                between.observe((now - last) / max(map(len, chunks.values())))
            last, begun = now, True
            generated.inc(len(batch))
            for index, text_chunks in chunks.items():
                if text_chunks[-1].finish is not None:
                    unfinished.remove(index)
                yield self._delta(index, text_chunks)

    async def _prompt_deltas(self) -> list[TextDelta]:
        """Return the beginning of each text: its prompt, if that is echoed; the whole text if nothing is written."""
        request, scores = self.request, [list[ScoredToken]() for _ in self.request.prompts]
        if request.echoed is not None and (top := request.echo_logprobs) is not None:
            model = request.model.run.model
            logprobs = await self.thread.call(
                lambda: [prompt_logprobs(model, each, top) for each in request.prompts], self.client
            )
            scores = await asyncio.to_thread(self._echoed_scores, logprobs, request.echoed)
        texts = [""] * len(scores) if request.echoed is None else request.texts
        finish: Finish | None = None if request.writes else "length"
        rows = [row for row in range(len(scores)) for _ in range(request.n)]
        return [TextDelta(n, texts[row], 0, finish, scores[row]) for n, row in enumerate(rows)]

    def _echoed_scores(self, logprobs: Sequence[Any], echoed: Sequence[int]) -> list[list[ScoredToken]]:
        scores = []
        for prompt, values, count in zip(self.request.prompts, logprobs, echoed, strict=True):
            tokens = list(zip(prompt.ids, values, strict=True))[len(prompt.ids) - count :]
            scores.append([self._scored_token(id, value, top) for id, (value, top) in tokens])
        return scores

    def _submit(self, settings: Sampling) -> Outputs:
        """Submit a task for each text to the model's thread; return the queue of their outputs."""
        request, outputs = self.request, Outputs()
        self.tasks = [
            TextTask(
                index=index,
                prompt=request.prompts[index // request.n],
                settings=settings,
                seed=(settings.seed + index) % 2**63,
                client=self.client,
                outputs=outputs,
                loop=asyncio.get_running_loop(),
                source=request.source,
            )
            for index in range(request.n * len(request.prompts))
        ]
        self.thread.submit(self.tasks)
        limits = self.server.limits  # the model's thread refuses late texts between its steps; this, during a long one
        refused = (0, late("done", limits))
        self._timer = asyncio.get_running_loop().call_later(limits.seconds + GRACE_SECONDS, outputs.put_nowait, refused)
        return outputs

    def _delta(self, index: int, chunks: list[Chunk]) -> TextDelta:
        text = chunks[0].text if len(chunks) == 1 else "".join(chunk.text for chunk in chunks)
        scored = () if chunks[0].logprob is None else self._scored(chunks)
        delta = TextDelta(index, text, len(chunks), chunks[-1].finish, scored, chunks[-1].stopped, chunks)
        if self.request.calls is None:
            return delta
        parser = self._parsers.get(index) or CallParser(self.request.model.run.tokenizer, self.request.calls)
        self._parsers[index] = parser
        parts = [part for chunk in chunks for part in parser.push(chunk.id, chunk.text)]
        parts += parser.end() if delta.finish is not None else []
        return delta._replace(
            text="".join(part.text for part in parts if isinstance(part, ReplyText)), parts=_calls(parts)
        )

    def _scored(self, chunks: Sequence[Chunk]) -> list[ScoredToken]:
        scored = [chunk for chunk in chunks if chunk.logprob is not None and chunk.finish != "eos"]
        return [self._scored_token(chunk.id, chunk.logprob, chunk.top) for chunk in scored]

    def _scored_token(self, id: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> ScoredToken:
        tokenizer = self.request.model.run.tokenizer
        likeliest = [(token_spelling(tokenizer, token), max(MIN_LOGPROB, value)) for token, value in top]
        return ScoredToken(
            token_spelling(tokenizer, id), None if logprob is None else max(MIN_LOGPROB, logprob), likeliest
        )


def _calls(parts: Iterable[ReplyPart]) -> list[CallStart | CallArguments]:
    """Return the parts of tool calls, with consecutive pieces of arguments joined."""
    calls: list[CallStart | CallArguments] = []
    for part in parts:
        if isinstance(part, CallArguments) and calls and isinstance(calls[-1], CallArguments):
            calls[-1] = CallArguments(calls[-1].text + part.text)
        elif not isinstance(part, ReplyText):
            calls.append(part)
    return calls


async def respond(
    request: Request,
    body: Any,
    build: Callable[[Server, ServedModel, Any], TextRequest],
    *,
    whole: Callable[[Any, TextRequest, list[TextOutput]], Any] | None,
    events: Callable[[Any, TextGeneration], Events],
    inline: bool = False,
) -> Response:
    """Respond with the texts that `build` requests of the model that a body names.

    Without `whole`, or if the body asks for a stream, the response consists of `events`. `build` runs in another thread
    unless it is fast enough to be called `inline`.
    """
    server, client = server_of(request), client_of(request)

    @asynccontextmanager
    async def texts() -> AsyncIterator[TextGeneration]:
        async with server.library.use(body.model) as model:
            await check_size(body, model.run.tokenizer, server.limits)
            try:
                async with asyncio.timeout(server.limits.seconds):  # a grammar may be compiled for longer
                    arguments = (server, model, body)
                    prepared = build(*arguments) if inline else await asyncio.to_thread(build, *arguments)
            except TimeoutError:
                raise late("begun", server.limits) from None
            async with TextGeneration(server, prepared, client) as generation:
                yield generation

    async def stream() -> Events:
        async with texts() as generation, aclosing(events(body, generation)) as contents:
            async for content in contents:
                yield content

    if whole is None or body.stream:
        return await stream_response(request, stream())

    async def collect() -> Any:
        async with texts() as generation:
            outputs = await generation.collect()
            if sum(len(text.scored) for text in outputs) <= MAX_INLINE_SCORES:
                return whole(body, generation.request, outputs)
            return await asyncio.to_thread(whole, body, generation.request, outputs)

    return await json_response(request, collect())


def _whole_texts(request: TextRequest) -> list[TextDelta]:
    """Run a beam search, or a model that writes one text from another."""
    run, settings = request.model.run, request.settings
    if writes_from_source(run):
        if request.n > 1 or getattr(settings, "logprobs", None) is not None:
            raise RefusedError(400, "n and logprobs: not available for a model that writes one text from another")
        search = settings if isinstance(settings, Beam) else None
        translations = run.translate(request.texts, search)
        return [TextDelta(row, text, len(run.tokenizer.encode(text)), "eos") for row, text in enumerate(translations)]
    assert isinstance(settings, Beam)
    by_prompt = search_texts(run.model, list(request.prompts), settings)
    texts = [text for candidates in by_prompt for text in candidates[: request.n]]
    return [TextDelta(row, text.text, text.tokens, text.finish) for row, text in enumerate(texts)]
