"""Routes about single tokens: texts token by token, predictions, masked positions, and tokenizations."""

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

from weft.api.settings import beam, sampling, with_defaults
from weft.decode.beam import beam_search
from weft.decode.config import Beam, Rules, Sampling
from weft.decode.generate import prefill
from weft.decode.prompt import Prompt, check_prompts, context_window, output_vocab_size
from weft.decode.translate import LENGTH_RATIO, max_answer_tokens
from weft.errors import WeftError
from weft.explain import views
from weft.models.base import EncoderInput, evaluating
from weft.models.hidden import context_of
from weft.models.transformer import Transformer
from weft.serve.events import DONE, Events, encoded_response, event
from weft.serve.input_size import check_ids
from weft.serve.library import ServedModel
from weft.serve.routes.own import as_json, model_route
from weft.serve.schema import BeamsBody, FillBody, NextBody, PrefixBody, TokenizersBody, WriteBody
from weft.serve.server import Server, server_of
from weft.serve.text_generation import MIN_LOGPROB, TextGeneration, respond
from weft.serve.text_request import TextRequest, conversation, requested_settings, writes_from_source
from weft.text.config import Byte, Char, Word
from weft.text.tokenizer import FILE, Tokenizer, TokenSpan, build_tokenizer

Spell = Callable[[Tokenizer, Sequence[int]], list[str]]
MAX_LISTED_TOKENS = 500  # of a tokenized text; the count is of all

router = APIRouter()


def _prompt(model: ServedModel, body: PrefixBody) -> tuple[Prompt, EncoderInput | None]:
    """Return the prompt of a text, and the source if the model writes one text from another; without `body.tokens`."""
    run = model.run
    check_ids([body.tokens], output_vocab_size(run.model, run.tokenizer.vocab_size), "tokens")
    if body.messages is not None and not writes_from_source(run):
        messages = [message for turn in body.messages for message in turn.messages()]
        return conversation(run, messages, model.loaded_thread.limits, max_tokens=None)[0], None
    text = body.input if body.messages is None else body.messages[-1].content or ""
    if writes_from_source(run):
        reading = run.explain.reading(text, "")
        return Prompt.of(reading.tokenizer, list(reading.ids)), reading.model_kwargs["source"]
    run.objective.check_continues("write")
    return Prompt.of(run.tokenizer, text), None


def _forced(forced: Sequence[int], prompt: Prompt, *, source: EncoderInput | None, written: int) -> tuple[int, ...]:
    """Return the forced tokens of a text of which `written` tokens exist; a source's prompt may contain the first."""
    return tuple(forced[written + (0 if source is None else len(prompt.ids) - 1) :])


def _token_rows(names: Sequence[str], ids: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
    rows = zip(ids, names, logprobs, strict=True)
    return [{"id": id, "text": text, "logprob": max(MIN_LOGPROB, value)} for id, text, value in rows]


def _likeliest(tokenizer: Tokenizer, log_p: Tensor, *, top: int, spell: Spell) -> list[dict[str, Any]]:
    """Return the `top` likeliest tokens of log p (V,)."""
    best, indices = log_p.topk(min(top, len(log_p)))
    ids = indices.tolist()
    return _token_rows(spell(tokenizer, ids), ids, best.tolist())


def _vocabulary_entries(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Spell tokens for a reader; words and subwords, which carry no spaces, as the vocabulary has them."""
    words = tokenizer.kind in ("word", "wordpiece")
    return [tokenizer.token(id) for id in ids] if words else views.reading.pieces(tokenizer, ids)


# ---- predictions


@model_route(router, "/v1/next")
@torch.inference_mode()
def next_token(model: ServedModel, body: NextBody) -> dict[str, Any]:
    """Return the likeliest tokens after a text and tokens, from the model's distribution before any setting."""
    run, (prompt, source) = model.run, _prompt(model, body)
    prompt = replace(prompt, ids=[*prompt.ids, *body.tokens])
    check_prompts(run.model, [prompt], [Sampling(slide=source is None)])
    ids, _ = prompt.fit(context_window(run.model) if source is None else None)
    logits = prefill(run.model, [ids], len(ids), source=source)[1]
    log_p = logits[0, : output_vocab_size(run.model, prompt.vocab_size)].float().log_softmax(dim=-1)
    entropy = float(torch.special.entr(log_p.exp()).sum())
    packed = base64.b64encode(log_p.cpu().numpy().astype("<f4").tobytes()).decode() if body.logprobs else None
    tokens = _likeliest(run.tokenizer, log_p, top=body.top, spell=views.reading.pieces)
    return {"tokens": tokens, "vocab_size": len(log_p), "entropy": entropy, "logprobs": packed}


@model_route(router, "/v1/fill")
@torch.inference_mode()
def fill(served: ServedModel, body: FillBody) -> dict[str, Any]:
    """Return the tokens of a text, up to the model's window, with the predictions at masked positions."""
    run, text = served.run, body.input
    model, tokenizer = run.model, run.tokenizer
    if not views.surprise.predicts_masked(model):
        raise run.objective.cannot("fill in masked words")
    assert isinstance(model, Transformer)
    mask, framed = tokenizer.need("mask"), run.explain.reading(text[:1])  # shows the special tokens around a text
    before, after = framed.ids[: framed.before], framed.ids[framed.before + len(tokenizer.encode(text[:1])) :]
    window = context_of(model)
    max_tokens = None if window is None else max(0, window - len(before) - len(after))
    rows = _span_rows(tokenizer, tokenizer.token_spans(text, specials=True)[:max_tokens])
    reading = replace(framed, ids=(*before, *(row["id"] for row in rows), *after))
    with evaluating(model):
        features = model.features(reading.tokens)[0]
        for position, row in enumerate(rows, start=framed.before):
            if row["id"] == mask:
                log_p = model.readout(features[position : position + 1]).logits()[0].float().log_softmax(dim=-1)
                log_p = log_p[: tokenizer.vocab_size]
                row["top"] = _likeliest(tokenizer, log_p, top=body.top, spell=_vocabulary_entries)
    return {"mask": tokenizer.roles["mask"], "tokens": rows}


# ---- texts


@router.post("/v1/write")
async def write(request: Request, body: WriteBody) -> Response:
    """Write a text as events, one per token: its id, the text it adds, and the likeliest tokens at its position.

    The text begins with `tokens`. Random numbers belong to positions, so the tokens after them are drawn with the same
    random numbers as without them.
    """
    return await respond(request, body, _write_request, whole=None, events=_write_events)


def _write_request(server: Server, model: ServedModel, body: WriteBody) -> TextRequest:
    run, (prompt, source) = model.run, _prompt(model, body)
    defaults = {key: value for key, value in run.defaults.items() if key in Rules.model_fields}
    forced = (*body.tokens, *_forced(run.defaults.get("forced", ()), prompt, source=source, written=len(body.tokens)))
    rules = {"forced": forced, "logprobs": body.top}
    requested = requested_settings(body, server.limits, max_tokens=body.max_tokens, **rules)
    settings = sampling(**with_defaults(requested, defaults))
    return TextRequest(model=model, prompts=[prompt], texts=[body.input], settings=settings, source=source)


async def _write_events(body: WriteBody, generation: TextGeneration) -> Events:
    model = generation.request.model
    yield event({"model": model.name, "prompt_tokens": generation.request.prompt_tokens})
    async for delta in generation.deltas():
        for chunk in delta.chunks:
            assert chunk.logprob is not None
            ids, values = [chunk.id, *(id for id, _ in chunk.top)], [chunk.logprob, *(p for _, p in chunk.top)]
            row, *top = _token_rows(views.reading.pieces(model.run.tokenizer, ids), ids, values)
            yield event({**row, "adds": chunk.text, "top": top, "finish": chunk.finish, "slid": chunk.slid})
    yield DONE


@model_route(router, "/v1/beams")
def beams(model: ServedModel, body: BeamsBody) -> dict[str, Any]:
    """Return the best texts that beam search finds after a text and tokens, with log p and the score, which allows for
    the length. Without settings, the first is the one that `/v1/translate` returns."""
    run, (prompt, source) = model.run, _prompt(model, body)
    settings = run.decoding["translate"] if source is not None else beam(**with_defaults({}, run.beam_defaults))
    assert isinstance(settings, Beam)
    max_tokens = min(body.max_tokens or settings.max_tokens, model.loaded_thread.limits.max_tokens)
    if source is not None and body.max_tokens is None:
        max_tokens = min(max_tokens, max_answer_tokens(source.tokens.shape[1], LENGTH_RATIO))
    number = body.beams or settings.beams
    # all beams, unless the search ends before as many texts have ended: then the best one would be another
    n = max(1, min(number, int((settings.patience or 1) * number)))
    max_tokens = max(1, max_tokens - len(body.tokens))
    forced = _forced(settings.forced, prompt, source=source, written=len(body.tokens))
    limits = {"max_tokens": max_tokens, "min_tokens": min(settings.min_tokens, max_tokens)}
    settings = settings.replace(beams=number, n=n, forced=forced, **limits)
    prompt = replace(prompt, ids=[*prompt.ids, *body.tokens])
    return {"texts": as_json(beam_search(run.model, [prompt], settings, source=source)[0])}


# ---- tokenizations


@router.post("/v1/tokenizers")
def tokenizers(request: Request, body: TokenizersBody) -> Response:
    """Tokenize a text with every distinct tokenizer on this server, and with those that need no training."""
    text = body.input
    by_fingerprint: dict[str, tuple[list[str], Tokenizer]] = {}
    library = server_of(request).library
    for model in list(library.models.values()):
        folder = model.folder
        for path, name in ((folder.path, model.name), (folder.source_tokenizer, f"{model.name} (source)")):
            with suppress(WeftError, OSError):  # the run may be gone, and few have a source tokenizer
                library.check_links(folder.path)
                tokenizer = _load_tokenizer(path, (path / FILE).stat().st_mtime_ns)
                by_fingerprint.setdefault(tokenizer.fingerprint, ([], tokenizer))[0].append(name)
    rows = [{"models": names, **_tokenization(tokenizer, text)} for names, tokenizer in by_fingerprint.values()]
    untrained = [build_tokenizer(kind, [text, "a"]) for kind in (Byte(), Char(), Word(split="punctuation"))]
    rows += [{"models": [], **_tokenization(tokenizer, text)} for tokenizer in untrained]
    return encoded_response({"tokenizers": rows})


@lru_cache(maxsize=64)
def _load_tokenizer(path: Path, _modified: int) -> Tokenizer:
    return Tokenizer.load(path)


def _tokenization(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    facts = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "unknown": tokenizer.unk_id}
    try:
        spans = tokenizer.token_spans(text)
    except WeftError as error:
        return {**facts, "error": str(error), "count": 0, "tokens": []}
    return {**facts, "count": len(spans), "tokens": _span_rows(tokenizer, spans[:MAX_LISTED_TOKENS])}


def _span_rows(tokenizer: Tokenizer, spans: Sequence[TokenSpan]) -> list[dict[str, Any]]:
    """Return the tokens of a text with their spelling and their bytes."""
    rows = zip(spans, _vocabulary_entries(tokenizer, [span.id for span in spans]), strict=True)
    return [{**span._asdict(), "text": text, "bytes": tokenizer.token_bytes(span.id).hex()} for span, text in rows]
