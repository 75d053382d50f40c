"""weft's own routes: what a model has learned beside writing, how it reads a text, and what can be seen inside."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.run import Run
from weft.api.settings import translation_beam
from weft.explain import views
from weft.figures.page import as_json
from weft.objectives.frame import LanguagePair
from weft.serve.errors import RefusedError
from weft.serve.events import answered, client_of, server_of
from weft.serve.schema import (
    Body,
    ClassifyBody,
    DetokenizeBody,
    ExplainBody,
    ReadingBody,
    ScoreBody,
    StepBody,
    TokenizeBody,
    TranslateBody,
    WithoutHeadsBody,
)
from weft.serve.writing import cuts

View = Literal["attention", "heads", "lens", "saliency", "search", "surprise"]
OPTIONS = {"saliency": ("target", "place"), "search": ("settings",)}  # of a view, where it is not a target alone
MAX_EXPLAINED = 4000  # characters of a text that is looked at: maps of attention grow with its square

router = APIRouter()


async def ask(request: Request, body: Body, function: Callable[[Run], Any]) -> Response:
    """A question to the model that the body names."""

    async def work() -> dict[str, Any]:
        async with server_of(request).library.lent(body.model) as shelf:
            assert shelf.worker is not None
            answer = await shelf.worker.ask(partial(function, shelf.run), client_of(request))
            return {"model": shelf.name, **answer}

    return await answered(request, work())


def _listed(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


@router.post("/v1/translate")
async def translate(request: Request, body: TranslateBody) -> Response:
    """What the model writes from each text."""

    def function(run: Run) -> dict[str, Any]:
        languages = LanguagePair(body.source, body.target)
        settings = None
        if body.beams is not None:
            length = getattr(run.objective, "length", 128)
            settings = translation_beam(length, {**run.beam_defaults, "beams": body.beams})
        return {"translations": run.translate(_listed(body.input), settings, languages)}

    return await ask(request, body, function)


@router.post("/v1/classify")
async def classify(request: Request, body: ClassifyBody) -> Response:
    """The probability of each label for each text, the likeliest first."""
    texts, second = _listed(body.input), None if body.second is None else _listed(body.second)
    if second is not None and len(second) != len(texts):
        raise RefusedError(400, f"second: {len(second)} texts beside {len(texts)}", param="second")
    return await ask(request, body, lambda run: {"labels": run.classify(texts, second)})


@router.post("/v1/tokenize")
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """The tokens of a text, with the places where they begin and end in it."""

    def function(run: Run) -> dict[str, Any]:
        spans = run.tokenizer.token_spans(body.input)
        return {"tokens": [each.id for each in spans], "spans": [[each.start, each.end] for each in spans]}

    return await ask(request, body, function)


@router.post("/v1/detokenize")
async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """The text that tokens make."""

    def function(run: Run) -> dict[str, Any]:
        size = run.tokenizer.vocab_size
        if body.tokens and max(body.tokens) >= size:
            raise RefusedError(400, f"tokens: {max(body.tokens)} is no token's id; there are {size}", param="tokens")
        return {"text": run.tokenizer.decode(body.tokens)}

    return await ask(request, body, function)


@router.post("/v1/score")
async def score(request: Request, body: ScoreBody) -> Response:
    """The surprisal of each token of a text, −log p in nats, and the text's perplexity."""

    def function(run: Run) -> dict[str, Any]:
        scored = run.surprisal(body.input)
        nats = [each.nats for each in scored if each.nats is not None]
        mean = sum(nats) / len(nats) if nats else None
        perplexity = math.exp(mean) if mean is not None and mean < 700 else None
        return {"tokens": as_json(scored), "perplexity": perplexity}

    return await ask(request, body, function)


@router.post("/v1/explain/text")
async def text(request: Request, body: Body) -> Response:
    """A text that the run held out, or was trained on, to look at, and where it is from."""
    return await ask(request, body, lambda run: dict(zip(("text", "origin"), run.explain.own_text(), strict=True)))


@router.post("/v1/explain/step")
async def step(request: Request, body: StepBody) -> Response:
    """One token's way through a model, with the numbers of every stage."""
    _check_length(body)

    def function(run: Run) -> dict[str, Any]:
        given = {"place": body.place, "layer": body.layer, **cuts(body)}
        if body.temperature is not None:
            given["temperature"] = body.temperature
        return {"step": run.explain.step(body.input, target=body.target, **given).answer()}

    return await ask(request, body, function)


@router.post("/v1/explain/maps")
async def maps(request: Request, body: ReadingBody) -> Response:
    """The attention of all heads, packed as a page needs it, and those that do one thing, by name."""
    return await _of_reading(request, body, lambda reading: {"maps": views.heads.named_maps(reading).packed()})


@router.post("/v1/explain/without_heads")
async def without_heads(request: Request, body: WithoutHeadsBody) -> Response:
    """The surprise of each token of a text while some heads give zeros, and what the model writes then."""

    def function(reading: "views.reading.Reading") -> dict[str, Any]:
        return {"without_heads": views.ablation.without_heads(reading, body.heads)}

    return await _of_reading(request, body, function)


async def _of_reading(
    request: Request, body: ReadingBody, function: "Callable[[views.reading.Reading], dict[str, Any]]"
) -> Response:
    _check_length(body)
    return await ask(request, body, lambda run: as_json(function(run.explain.reading(body.input, body.target))))


def _check_length(body: ReadingBody) -> None:
    for name in ("input", "target"):
        if len(getattr(body, name) or "") > MAX_EXPLAINED:
            raise RefusedError(400, f"{name}: at most {MAX_EXPLAINED} characters can be looked at", param=name)


@router.post("/v1/explain/{view}")
async def explain(request: Request, view: View, body: ExplainBody) -> Response:
    """What `weft explain` shows of a model and a text, as numbers."""
    _check_length(body)

    options = {"target": body.target, "place": body.place, "settings": body.settings}
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in OPTIONS.get(view, ("target",)):
            raise RefusedError(400, f"{name}: {view} has none", param=name)
    return await ask(request, body, lambda run: {view: getattr(run.explain, view)(body.input, **given).data()})
