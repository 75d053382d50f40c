"""Routes that speak in tokens: a text as it is written, what may come next, masked places, and how texts are cut."""

import asyncio
import base64
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from fastapi import APIRouter, Request
from starlette.responses import Response
from torch import Tensor

from weft.api.run import Run
from weft.api.settings import beam, sampling
from weft.decode.beam import beam_search
from weft.decode.config import Sampling
from weft.decode.generate import prefill
from weft.decode.prompt import Prompt, check_prompts, context_window, output_vocab_size
from weft.errors import WeftError
from weft.explain import views
from weft.models.base import Source, evaluating
from weft.models.hidden import context_of
from weft.models.transformer import Transformer
from weft.serve.errors import RefusedError
from weft.serve.events import DONE, Events, answered, client_of, event, server_of, streamed
from weft.serve.library import Shelf
from weft.serve.own import as_json, ask
from weft.serve.schema import BeamsBody, Begun, CutBody, FillBody, NextBody, WriteBody
from weft.serve.writing import NEVER, Asked, Server, Writing, as_given, conversation, writes_from_source
from weft.text.config import Byte, Char, Word
from weft.text.tokenizer import FILE, Tokenizer, TokenSpan, build_tokenizer

Names = Callable[[Tokenizer, Sequence[int]], list[str]]
MAX_PIECES = 500  # of a cut text that are told one by one

router = APIRouter()


def _begun(run: Run, body: Begun, server: Server) -> tuple[Prompt, Source | None]:
    """What a text is written after: a prompt, and a source where the model writes one text from another."""
    size = output_vocab_size(run.model, run.tokenizer.vocab_size)
    if body.tokens and max(body.tokens) >= size:
        raise RefusedError(400, f"tokens: {max(body.tokens)} is no token's id; there are {size}", param="tokens")
    if body.messages is not None and not writes_from_source(run):
        return conversation(run, body.messages, None, server.limits)[0], None
    text = body.input if body.messages is None else body.messages[-1].content
    if writes_from_source(run):
        reading = run.explain.reading(text, "")
        return Prompt.of(reading.tokenizer, list(reading.ids)), reading.given["source"]
    if not run.config.objective.continues:
        raise run.objective.cannot("write")
    return Prompt.of(run.tokenizer, text), None


def _scored(names: Sequence[str], ids: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities."""
    rows = zip(ids, names, logprobs, strict=True)
    return [{"id": id, "text": text, "logprob": max(NEVER, value)} for id, text, value in rows]


def _likeliest(tokenizer: Tokenizer, log_p: Tensor, top: int, names: Names | None = None) -> list[dict[str, Any]]:
    """The likeliest tokens of log p (V,)."""
    best, found = log_p.topk(min(top, len(log_p)))
    ids = found.tolist()
    return _scored((names or views.reading.pieces)(tokenizer, ids), ids, best.tolist())


def _entries(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Tokens as a person reads them; words and parts of words, which bring no spaces, as the vocabulary spells them."""
    words = tokenizer.kind in ("word", "wordpiece")
    return [tokenizer.token(id) for id in ids] if words else views.reading.pieces(tokenizer, ids)


# ---- what may come next


@router.post("/v1/next")
async def next_token(request: Request, body: NextBody) -> Response:
    """What may come after a text and tokens: the likeliest tokens, as the model gives them before any setting."""
    server = server_of(request)

    @torch.inference_mode()
    def function(run: Run) -> dict[str, Any]:
        prompt, source = _begun(run, body, server)
        prompt = replace(prompt, ids=[*prompt.ids, *body.tokens])
        check_prompts(run.model, [prompt], [Sampling(slide=source is None)])
        read, _ = prompt.fit(context_window(run.model) if source is None else None)
        logits = prefill(run.model, [read], len(read), source=source)[1]
        log_p = logits[0, : output_vocab_size(run.model, prompt.vocab_size)].float().log_softmax(dim=-1)
        entropy = float(torch.special.entr(log_p.exp()).sum())
        packed = base64.b64encode(log_p.cpu().numpy().astype("<f4").tobytes()).decode() if body.logprobs else None
        tokens = _likeliest(run.tokenizer, log_p, body.top)
        return {"tokens": tokens, "vocab_size": len(log_p), "entropy": entropy, "logprobs": packed}

    return await ask(request, body, function)


@router.post("/v1/fill")
async def fill(request: Request, body: FillBody) -> Response:
    """The tokens of a text, as many as the model can read; for each that is masked, what it expects there."""
    return await ask(request, body, lambda run: _filled(run, body.input, body.top))


@torch.inference_mode()
def _filled(run: Run, text: str, top: int) -> dict[str, Any]:
    model, tokenizer = run.model, run.tokenizer
    if not views.surprise.predicts_masked(model):
        raise run.objective.cannot("fill in masked words")
    assert isinstance(model, Transformer)
    mask, framed = tokenizer.need("mask"), run.explain.reading(text[:1])  # for what stands around a text
    before, after = framed.ids[: framed.before], framed.ids[framed.before + len(tokenizer.encode(text[:1])) :]
    window = context_of(model)
    room = None if window is None else max(0, window - len(before) - len(after))
    rows = _shown(tokenizer, tokenizer.token_spans(text, specials=True)[:room])
    reading = replace(framed, ids=(*before, *(row["id"] for row in rows), *after))
    with evaluating(model):
        features = model.features(reading.tokens)[0]
        for place, row in enumerate(rows, start=framed.before):
            if row["id"] == mask:
                log_p = model.readout(features[place : place + 1]).logits()[0].float().log_softmax(dim=-1)
                row["top"] = _likeliest(tokenizer, log_p[: tokenizer.vocab_size], top, _entries)
    return {"mask": tokenizer.roles["mask"], "tokens": rows}


# ---- writing


@router.post("/v1/write")
async def write(request: Request, body: WriteBody) -> Response:
    """A text as events, one a token: its id, what it adds to the text, and the likeliest in its place.

    Those in `tokens` come first in any case. Random numbers belong to places, so what follows them is drawn with the
    same numbers as without them.
    """
    return await streamed(request, _written(server_of(request), body, client_of(request)))


def _asked(server: Server, shelf: Shelf, body: WriteBody, client: str) -> Asked:
    run = shelf.run
    prompt, source = _begun(run, body, server)
    rules = {"forced": tuple(body.tokens), "stop_ids": run.defaults.get("stop_ids"), "logprobs": body.top}
    settings = sampling(**as_given(body, server.limits, max_tokens=body.max_tokens, **rules))
    return Asked(shelf, [prompt], [body.input], settings, 1, client, source)


async def _written(server: Server, body: WriteBody, client: str) -> Events:
    async with server.library.lent(body.model) as shelf:
        asked = await asyncio.to_thread(_asked, server, shelf, body, client)
        tokenizer = shelf.run.tokenizer
        yield event({"model": shelf.name, "prompt_tokens": asked.prompt_tokens})
        async with Writing(server, asked) as writing:
            async for some in writing:
                for chunk in (chunk for piece in some for chunk in piece.chunks):
                    assert chunk.logprob is not None
                    ids, values = [chunk.id, *(id for id, _ in chunk.top)], [chunk.logprob, *(p for _, p in chunk.top)]
                    row, *top = _scored(views.reading.pieces(tokenizer, ids), ids, values)
                    yield event({**row, "adds": chunk.text, "top": top, "finish": chunk.finish, "slid": chunk.slid})
        yield DONE


@router.post("/v1/beams")
async def beams(request: Request, body: BeamsBody) -> Response:
    """The likeliest texts that beam search finds after a text and tokens, best first: log p of what is found, and the
    score that its length makes of it."""
    server = server_of(request)

    def function(run: Run) -> dict[str, Any]:
        prompt, source = _begun(run, body, server)
        prompt = replace(prompt, ids=[*prompt.ids, *body.tokens])
        left = max(1, min(body.max_tokens, server.limits.max_tokens) - len(body.tokens))
        rules = {"stop_ids": run.defaults.get("stop_ids"), "max_tokens": left}
        found = beam_search(run.model, [prompt], beam(beams=body.beams, n=body.beams, **rules), source=source)[0]
        return {"texts": as_json(found)}

    return await ask(request, body, function)


# ---- how texts are cut


@router.post("/v1/tokenizers")
async def tokenizers(request: Request, body: CutBody) -> Response:
    """How every tokenizer that is served cuts a text, each once, and those that need no training."""
    shelves = list(server_of(request).library.shelves.values())
    return await answered(request, asyncio.to_thread(_cuts, shelves, body.input))


def _cuts(shelves: Sequence[Shelf], text: str) -> dict[str, Any]:
    named: dict[str, tuple[list[str], Tokenizer]] = {}
    for shelf in shelves:
        source = shelf.folder.source_tokenizer
        for place, name in ((shelf.folder.path, shelf.name), (source, f"{shelf.name}, source")):
            with suppress(WeftError, OSError):  # a run may have gone, and few have a second one
                tokenizer = _loaded(place, (place / FILE).stat().st_mtime_ns)
                named.setdefault(tokenizer.fingerprint, ([], tokenizer))[0].append(name)
    rows = [{"models": names, **_cut(tokenizer, text)} for names, tokenizer in named.values()]
    plain = (Byte(), Char(), Word(split="punctuation"))
    return {
        "tokenizers": [*rows, *({"models": [], **_cut(build_tokenizer(each, [text, "a"]), text)} for each in plain)]
    }


@lru_cache(maxsize=64)
def _loaded(place: Path, changed: int) -> Tokenizer:
    """A run's tokenizer, as its file was when it `changed` last."""
    return Tokenizer.load(place)


def _cut(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    of = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "unknown": tokenizer.unk_id}
    try:
        spans = tokenizer.token_spans(text)
    except WeftError as error:
        return {**of, "error": str(error), "count": 0, "tokens": []}
    return {**of, "count": len(spans), "tokens": _shown(tokenizer, spans[:MAX_PIECES])}


def _shown(tokenizer: Tokenizer, spans: Sequence[TokenSpan]) -> list[dict[str, Any]]:
    """Tokens of a text, as a person reads them, with their bytes."""
    rows = zip(spans, _entries(tokenizer, [span.id for span in spans]), strict=True)
    return [{**s._asdict(), "text": name, "bytes": tokenizer.token_bytes(s.id).hex()} for s, name in rows]
