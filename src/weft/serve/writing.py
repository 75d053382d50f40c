"""The texts of one request: what was asked for as weft's own settings, and what is written, piece by piece."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import BaseModel

from weft.api.run import Run
from weft.api.settings import beam, sampling, with_defaults
from weft.decode.beam import search_texts
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import Grammar
from weft.decode.prompt import Prompt, chat_prompt, context_window, max_prompt_tokens
from weft.decode.text import Chunk, Finish, spell_token
from weft.models.base import Source
from weft.objectives.pairs import Pairs
from weft.objectives.spans import Spans
from weft.serve.config import Limits, Serving
from weft.serve.errors import RefusedError
from weft.serve.gate import Receive
from weft.serve.library import Library, Shelf
from weft.serve.metrics import Metrics
from weft.serve.schema import Format, OpenAI, Turn
from weft.serve.worker import Arrived, Ticket
from weft.storage.untrusted import printable

JSON_OBJECT = {"type": "object", "additionalProperties": True}
ROLES = {"developer": "system"}  # what newer clients call it
NEVER = -9999.0  # the log-probability of what a model excludes, for JSON has no −∞
T = TypeVar("T")
log = logging.getLogger("weft.serve")


@dataclass(frozen=True)
class Server:
    """What every route needs."""

    library: Library
    metrics: Metrics
    serving: Serving

    @property
    def limits(self) -> Limits:
        return self.serving.limits


class Scored(NamedTuple):
    """A token with its log-probability, and the likeliest in its place."""

    token: str
    logprob: float
    top: list[tuple[str, float]]


class Piece(NamedTuple):
    """What comes next of one of the texts."""

    row: int
    text: str
    tokens: int
    finish: Finish | None
    scored: Sequence[Scored] = ()
    stopped: str | None = None  # the stop string that ended it
    chunks: Sequence[Chunk] = ()  # the same, token by token; none where whole texts come


@dataclass
class Written:
    """A whole text."""

    text: str = ""
    tokens: int = 0
    finish: Finish | None = None
    scored: tuple[Scored, ...] = ()
    stopped: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish, self.stopped = piece.finish or self.finish, piece.stopped or self.stopped
        self.scored += tuple(piece.scored)

    @property
    def likelihood(self) -> float:
        """Mean log-probability of a token."""
        return sum(each.logprob for each in self.scored) / max(1, len(self.scored))


@dataclass(frozen=True)
class Asked:
    """What a request asks of a model: prompts, of each of which `n` texts are written."""

    shelf: Shelf
    prompts: Sequence[Prompt]
    texts: Sequence[str]  # the same as text, for models that write one text from another
    settings: Sampling | Beam
    n: int
    client: str
    source: Source | None = None  # of a model that writes one text from another, token by token

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


def writes_from_source(run: Run) -> bool:
    return isinstance(run.objective, Pairs | Spans)


def cuts(body: BaseModel) -> dict[str, Any]:
    """A request's top_k and top_p; none where they would keep all tokens, or where nothing is drawn."""
    top_k, top_p, temperature = (getattr(body, key, None) for key in ("top_k", "top_p", "temperature"))
    greedy = temperature == 0
    # −1 and 0: as others say all of them
    return {"top_k": None if greedy or top_k in (-1, 0) else top_k, "top_p": None if greedy or top_p == 1 else top_p}


def drawn(body: BaseModel, run: Run, limits: Limits, *, chat: bool, max_tokens: int, **more: Any) -> Sampling:
    """A request's settings; what it leaves out is as the checkpoint's makers have it."""
    given = as_given(body, limits, max_tokens=max_tokens, **more)
    return sampling(**with_defaults(given, run.chat_defaults if chat else run.defaults))


def as_given(body: BaseModel, limits: Limits, *, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A request's settings in weft's own words, and no others."""
    if max_tokens > limits.max_tokens:
        raise RefusedError(400, f"max_tokens = {max_tokens}: this server writes at most {limits.max_tokens}")
    given: dict[str, Any] = {"temperature": getattr(body, "temperature", None), **cuts(body)}
    given["min_p"] = (getattr(body, "min_p", None) or None) if given["temperature"] != 0 else None
    given |= {"seed": secrets.randbits(62) if (seed := getattr(body, "seed", None)) is None else seed % 2**63}
    return given | {"max_tokens": max_tokens, **more}


def rules(body: OpenAI, run: Run, limits: Limits) -> dict[str, Any]:
    """Stops, penalties and biases of an OpenAI request."""
    if (body.n or 1) > limits.choices:
        raise RefusedError(400, f"n = {body.n}: this server writes at most {limits.choices}", param="n")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    given: dict[str, Any] = {key: getattr(body, key) for key in names}
    bias: dict[int, float] = {}
    for key, value in (body.logit_bias or {}).items():
        if not key.isdecimal() or int(key) >= run.tokenizer.vocab_size:
            raise RefusedError(400, f"logit_bias: {key[:20]!r} is no token's id", param="logit_bias")
        bias[int(key)] = value
    return {**given, "stop": tuple(stop) if stop else None, "logit_bias": bias or None}


def grammar(asked: Format | None, run: Run) -> Grammar | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "regex":
        return run.pattern(_needed(asked.pattern, "pattern", asked.type))
    if asked.type == "grammar":
        return run.grammar(_needed(asked.grammar, "grammar", asked.type))
    if asked.type == "json_object":
        return run.schema(JSON_OBJECT)
    schema = asked.json_schema.schema_ if asked.json_schema is not None else asked.schema_
    return run.schema(_needed(schema, "json_schema", asked.type))


def _needed(value: T | None, name: str, kind: str) -> T:
    if value is None:
        raise RefusedError(400, f"response_format: type '{kind}' needs '{name}'", param="response_format")
    return value


def searched(body: OpenAI, settings: Sampling) -> Sampling | Beam:
    """The same as beam search, where that is asked for."""
    if body.beams is None:
        return settings
    if body.n is not None and body.n > body.beams:
        raise RefusedError(400, f"n = {body.n}: a beam of {body.beams} holds at most {body.beams} texts", param="n")
    shared = {key: value for key, value in settings.model_dump(exclude_unset=True).items() if key in Beam.model_fields}
    return beam(**shared, beams=body.beams, n=body.n or 1)


def conversation(
    run: Run, turns: Sequence[Turn], wanted: int | None, limits: Limits, pattern: Grammar | None = None
) -> tuple[Prompt, int]:
    """A conversation as a prompt, and how many tokens a reply may have.

    A model that writes one text from another reads the last turn alone.
    """
    messages = [{"role": ROLES.get(turn.role, turn.role), "content": turn.content} for turn in turns]
    if writes_from_source(run):
        return Prompt.of(run.tokenizer, messages[-1]["content"], pattern), wanted or limits.max_tokens
    if not run.config.objective.continues:
        raise run.objective.cannot("chat")
    window = context_window(run.model)
    room = limits.max_tokens if window is None else max(1, window // 2)
    most = min(wanted or room, limits.max_tokens)
    prompt = chat_prompt(run.tokenizer, messages, max_prompt_tokens(window, most))
    if wanted is None and window is not None:
        most = max(1, min(window - len(prompt.ids), limits.max_tokens))
    return replace(prompt, grammar=pattern), most


class Writing:
    """The texts that were asked for, piece by piece, inside a `with`; leaving it cancels what is not yet written."""

    def __init__(self, server: Server, asked: Asked):
        self.server, self.asked = server, asked
        self.tickets: list[Ticket] = []
        assert asked.shelf.worker is not None
        self.worker = asked.shelf.worker
        self.left = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.left = True
        self.worker.cancel(self.tickets)

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        asked, name = self.asked, self.asked.shelf.name
        if self.server.serving.log_prompts:
            for text in asked.texts:
                log.info("%s: %s", name, printable(text))
        self.server.metrics.prompt_tokens.labels(name).inc(asked.prompt_tokens)
        if isinstance(asked.settings, Beam) or (asked.source is None and writes_from_source(asked.shelf.run)):
            whole = await self.worker.ask(partial(_whole, asked, self._go_on), asked.client)
            self.server.metrics.written_tokens.labels(name).inc(sum(piece.tokens for piece in whole))
            yield whole
            return
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Arrived]]()
        for index in range(asked.n * len(asked.prompts)):
            seed = (asked.settings.seed + index) % 2**63
            prompt = asked.prompts[index // asked.n]
            self.tickets.append(Ticket(index, prompt, asked.settings, seed, asked.client, queue, loop, asked.source))
        self.worker.write(self.tickets)
        async for some in self._arriving(queue):
            yield some

    def _go_on(self, *_: object) -> None:
        if self.left:
            raise RefusedError(499, "nobody waits for it")

    async def _arriving(self, queue: "asyncio.Queue[tuple[int, Arrived]]") -> AsyncIterator[list[Piece]]:
        name, metrics = self.asked.shelf.name, self.server.metrics
        first, between = metrics.first_token.labels(name), metrics.between_tokens.labels(name)
        written = metrics.written_tokens.labels(name)
        left, before, begun = {ticket.index for ticket in self.tickets}, time.monotonic(), False
        while left:
            some = [await queue.get()]
            while not queue.empty():
                some.append(queue.get_nowait())
            chunks: dict[int, list[Chunk]] = {}
            for index, arrived in some:
                if isinstance(arrived, RefusedError):
                    raise arrived
                chunks.setdefault(index, []).append(arrived)
            now = time.monotonic()
            if not begun:
                first.observe(now - before)
            else:  # several tokens of a text may come at a time
                between.observe((now - before) / max(map(len, chunks.values())))
            before, begun = now, True
            written.inc(len(some))
            pieces = [self._piece(index, own) for index, own in chunks.items()]
            left -= {piece.row for piece in pieces if piece.finish is not None}
            yield pieces

    def _piece(self, index: int, chunks: list[Chunk]) -> Piece:
        text = chunks[0].text if len(chunks) == 1 else "".join(chunk.text for chunk in chunks)
        scored = () if chunks[0].logprob is None else self._scored(chunks)
        return Piece(index, text, len(chunks), chunks[-1].finish, scored, chunks[-1].stopped, chunks)

    def _scored(self, chunks: Sequence[Chunk]) -> list[Scored]:
        tokenizer = self.asked.shelf.run.tokenizer
        return [
            Scored(
                spell_token(tokenizer, chunk.id),
                max(NEVER, chunk.logprob),
                [(spell_token(tokenizer, id), max(NEVER, value)) for id, value in chunk.top],
            )
            for chunk in chunks
            if chunk.logprob is not None and chunk.finish != "eos"
        ]


async def whole(server: Server, asked: Asked) -> list[Written]:
    """All texts that were asked for, in order."""
    texts = [Written() for _ in range(len(asked.prompts) * asked.n)]
    async with Writing(server, asked) as writing:
        async for pieces in writing:
            for piece in pieces:
                texts[piece.row].add(piece)
    return texts


def _whole(asked: Asked, go_on: Callable[..., None]) -> list[Piece]:
    """What a beam search finds, or a model writes from its source: whole texts. `go_on` raises when nobody waits."""
    run, settings = asked.shelf.run, asked.settings
    if writes_from_source(run):
        if asked.n > 1 or getattr(settings, "logprobs", None) is not None:
            raise RefusedError(400, "this model writes one text from another: n and logprobs are not for it")
        chosen = settings if isinstance(settings, Beam) else None
        found = run.translate(asked.texts, chosen, progress=go_on)
        return [Piece(index, text, len(run.tokenizer.encode(text)), "eos") for index, text in enumerate(found)]
    assert isinstance(settings, Beam)
    several = search_texts(run.model, list(asked.prompts), settings, on_step=go_on)
    texts = [text for some in several for text in some[: asked.n]]
    return [Piece(index, text.text, text.tokens, text.finish) for index, text in enumerate(texts)]


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    """What the work gives; or None, and the work ends, as soon as nobody waits for it any more."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
