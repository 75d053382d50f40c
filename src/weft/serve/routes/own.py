"""weft's own routes: other tasks than writing, how a model reads a text, and views of its inside."""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, get_type_hints

from fastapi import APIRouter, Request
from fastapi.encoders import jsonable_encoder
from starlette.responses import Response

from weft.api.run import Run
from weft.decode.config import parameters
from weft.evaluate.abilities.tasks import TASKS
from weft.explain import views
from weft.figures.page import as_json
from weft.models.base import device_of
from weft.models.config import TransformerConfig
from weft.objectives.frame import LanguagePair
from weft.progress import pause
from weft.serve import schema
from weft.serve.errors import RefusedError, logged
from weft.serve.events import json_response
from weft.serve.input_size import as_list, check_ids, check_size
from weft.serve.library import ServedModel
from weft.serve.server import client_of, server_of
from weft.serve.text_request import filters

View = Literal["attention", "experts", "heads", "lens", "patch", "saliency", "search", "surprise"]
VIEW_OPTIONS = {
    "saliency": ("target", "place"),
    "search": ("settings",),
    "patch": ("target", "other", "answer"),
}  # other views take a target only
MAX_EXPLAINED = 4000  # characters of a text to explain: attention maps grow with its square
MIN_EXPLAINED_TOKENS = 64
MAX_MAP_ELEMENTS = 1 << 23  # attention probabilities of all heads in one response, packed
MAX_JSON_ELEMENTS = 1 << 21  # the same, as numbers in JSON
PASS_FLOPS, PASS_FLOPS_ON_CUDA = 10**11, 10**13  # that take about a second
PATCH_SECONDS, MIN_PATCHED_TOKENS = 20, 16  # time that patching may take, and tokens that it always takes
MAX_STEPS = 1024  # tokens that a recurrent model reads in about a second, one after another
ModelFunction = TypeVar("ModelFunction", bound=Callable[[ServedModel, Any], dict[str, Any]])

router = APIRouter()


def model_route(router: APIRouter, path: str, *, uses_model: bool = True) -> Callable[[ModelFunction], ModelFunction]:
    """Serve a function of a model and a body at `path`; unless it `uses_model`, it needs no turn of the model's."""

    def register(function: ModelFunction) -> ModelFunction:
        async def endpoint(request: Request, body: Any) -> Response:
            return await call_model(request, body, function, uses_model=uses_model)

        endpoint.__name__, endpoint.__doc__ = function.__name__, function.__doc__
        endpoint.__annotations__["body"] = get_type_hints(function)["body"]
        router.post(path)(endpoint)
        return function

    return register


async def call_model(
    request: Request, body: schema.Body, function: ModelFunction, *, uses_model: bool = True
) -> Response:
    """Respond with the result of a function of the model that the body names."""

    async def work() -> dict[str, Any]:
        async with server_of(request).library.use(body.model) as model:
            await check_size(body, model.run.tokenizer, server_of(request).limits)
            if uses_model:
                result = await model.loaded_thread.call(partial(function, model, body), client_of(request))
            else:
                result = await asyncio.to_thread(_refusing(function), model, body)
            return {"model": model.name, **result}

    return await json_response(request, work())


def _refusing(function: Callable[[ServedModel, Any], dict[str, Any]]) -> Callable[[ServedModel, Any], dict[str, Any]]:
    """Return a function whose errors are refusals; a panic in a Rust library is not an Exception."""

    def call(model: ServedModel, body: Any) -> dict[str, Any]:
        try:
            return function(model, body)
        except BaseException as error:
            raise logged(model.name, error) from None

    return call


@router.get("/v1/settings")
async def settings(request: Request, model: schema.Name | None = None) -> dict[str, Any]:
    """Describe the settings of generation: name, default, bounds, description, and the option of `weft generate`.

    With a `model`, `decoding` has its default settings, by the command that uses them.
    """
    described = {"data": [jsonable_encoder(parameter._asdict(), exclude={"type"}) for parameter in parameters()]}
    if model is None:
        return described
    async with server_of(request).library.use(model) as served:
        decoding = await asyncio.to_thread(lambda: served.run.decoding)
    return {**described, "decoding": {command: each.model_dump(mode="json") for command, each in decoding.items()}}


@model_route(router, "/v1/translate")
def translate(model: ServedModel, body: schema.TranslateBody) -> dict[str, Any]:
    """Translate texts, or generate whatever else the model has learned to generate from a text."""
    run, search = model.run, model.run.decoding.get("translate")
    if body.beams is not None and search is not None:
        search = search.replace(beams=body.beams)
    languages = LanguagePair(body.source, body.target)
    return {"translations": run.translate(as_list(body.input), search, languages)}


@model_route(router, "/v1/classify")
def classify(model: ServedModel, body: schema.ClassifyBody) -> dict[str, Any]:
    """Return the probability of each label for each text, the likeliest first."""
    texts, second = as_list(body.input), None if body.second is None else as_list(body.second)
    if second is not None and len(second) != len(texts):
        raise RefusedError(400, f"second: {len(second)} texts, but input has {len(texts)}", param="second")
    return {"labels": model.run.classify(texts, second)}


@model_route(router, "/v1/tokenize", uses_model=False)
def tokenize(model: ServedModel, body: schema.TextBody) -> dict[str, Any]:
    """Return the tokens of a text, and where each begins and ends in it."""
    spans = model.run.tokenizer.token_spans(body.input)
    return {"tokens": [span.id for span in spans], "spans": [[span.start, span.end] for span in spans]}


@model_route(router, "/v1/detokenize", uses_model=False)
def detokenize(model: ServedModel, body: schema.DetokenizeBody) -> dict[str, Any]:
    """Return the text of a list of tokens."""
    check_ids([body.tokens], model.run.tokenizer.vocab_size, "tokens")
    return {"text": model.run.tokenizer.decode(body.tokens)}


@model_route(router, "/v1/score")
def score(model: ServedModel, body: schema.TextBody) -> dict[str, Any]:
    """Return the surprisal of each token of a text, −log p in nats, and the text's perplexity."""
    tokens = []
    for token in model.run.surprisal(body.input):
        pause()
        tokens.append(as_json(token))
    nats = [token["nats"] for token in tokens if token["nats"] is not None]
    mean = sum(nats) / len(nats) if nats else None
    perplexity = math.exp(mean) if mean is not None and mean < 700 else None
    return {"tokens": tokens, "perplexity": perplexity}


@router.get("/v1/abilities")
async def abilities() -> dict[str, Any]:
    """List the abilities that can be tested."""
    return {"data": [task._asdict() for task in TASKS.values()]}


@model_route(router, "/v1/abilities")
def ability(model: ServedModel, body: schema.AbilityBody) -> dict[str, Any]:
    """Return how often a model finds the right continuation likeliest, by distance, for one ability."""
    result = model.run.abilities([body.ability], questions=body.questions)
    return as_json({**result.record()["abilities"][0], "plots": result.data()["plots"], "remarks": result.remarks})


@model_route(router, "/v1/explain/text")
def text(model: ServedModel, body: schema.Body) -> dict[str, Any]:
    """Return a text to look at, from the run's held-out or training data, and its origin."""
    return dict(zip(("text", "origin"), model.run.explain.own_text(), strict=True))


@model_route(router, "/v1/explain/pair")
def pair(model: ServedModel, body: schema.Body) -> dict[str, Any]:
    """Return two texts of the run's data that differ in one token, and their answers, for the view `patch`."""
    return {"pair": model.run.explain.example_pair()}


@model_route(router, "/v1/explain/prediction")
def prediction(model: ServedModel, body: schema.PredictionBody) -> dict[str, Any]:
    """Return what a classifier, tagger, regression model, answer finder or embedding model predicts, and why."""
    _check_length(model, body)
    return {"prediction": model.run.explain.prediction(body.input, body.second, output=body.output)}


@model_route(router, "/v1/explain/step")
def step(model: ServedModel, body: schema.StepBody) -> dict[str, Any]:
    """Follow one token through a model, with the values of every stage."""
    _check_length(model, body)
    options: dict[str, Any] = {"layer": body.layer, "threads": body.threads, **filters(body)}
    options["place"] = (body.place, body.source_place)
    if body.temperature is not None:
        options["temperature"] = body.temperature
    return {"step": model.run.explain.step(body.input, target=body.target, **options).answer()}


@model_route(router, "/v1/explain/maps")
def maps(model: ServedModel, body: schema.ReadingBody) -> dict[str, Any]:
    """Return the attention of all heads, packed for the page, and the heads with a recognised role, by name."""
    return as_json({"maps": views.heads.named_maps(_reading(model, body)).packed()})


@model_route(router, "/v1/explain/without_heads")
def without_heads(model: ServedModel, body: schema.WithoutHeadsBody) -> dict[str, Any]:
    """Return the surprisal of each token of a text with some heads zeroed, and what the model then writes."""
    return as_json({"without_heads": views.ablation.without_heads(_reading(model, body), body.heads)})


def _reading(model: ServedModel, body: schema.ReadingBody) -> "views.reading.Reading":
    _check_length(model, body)
    return model.run.explain.reading(body.input, body.target)


def _check_length(
    model: ServedModel, body: schema.ReadingBody | schema.PredictionBody, limit: int | None = None
) -> None:
    """Refuse a text that a view reads for seconds: its pass is captured whole, and other requests wait for it."""
    run, limit = model.run, limit or max_explained_tokens(model.run)
    source = run.objective.tokenizers.source
    for name, tokenizer in (("input", source), ("second", source), ("other", source), ("target", run.tokenizer)):
        text = getattr(body, name, None) or ""
        if len(text) > MAX_EXPLAINED:
            raise RefusedError(400, f"{name}: longer than {MAX_EXPLAINED} characters", param=name)
        tokens = len(tokenizer.encode(text))
        if tokens > limit:
            message = f"{name}: {tokens:,} tokens; a view of this model takes at most {limit:,}"
            raise RefusedError(400, message, param=name)


def max_explained_tokens(run: Run, map_elements: int = MAX_MAP_ELEMENTS) -> int:
    """Return the number of tokens of a text to explain, whose pass takes about a second, with all attention maps."""
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    flops = PASS_FLOPS_ON_CUDA if device_of(run.model).type == "cuda" else PASS_FLOPS
    config = run.model.config
    most = MAX_STEPS
    if isinstance(config, TransformerConfig):
        most = math.isqrt(map_elements // (config.layers * config.attention.heads))
    return max(MIN_EXPLAINED_TOKENS, min(flops // max(1, 2 * parameters), most))


def _max_patched_tokens(run: Run) -> int:
    """Return the number of tokens of a text whose every position is patched in every layer in some seconds."""
    per_token = (
        sum(parameter.numel() for parameter in run.model.parameters()) * 8 * getattr(run.config.model, "layers", 1)
    )
    flops = PATCH_SECONDS * (PASS_FLOPS_ON_CUDA if device_of(run.model).type == "cuda" else PASS_FLOPS)
    return max(MIN_PATCHED_TOKENS, min(max_explained_tokens(run), math.isqrt(flops // max(1, per_token))))


MAX_TOKENS: dict[str, Callable[[Run], int]] = {  # of a text, for views that take less than others
    "attention": partial(max_explained_tokens, map_elements=MAX_JSON_ELEMENTS),
    "patch": _max_patched_tokens,
}


@router.post("/v1/explain/{view}")
async def explain(request: Request, view: View, body: schema.ExplainBody) -> Response:
    """Return the values of a view of `weft explain`, for a model and a text."""
    fields = body.model_dump(include={"target", "place", "other", "answer"}) | {"settings": body.settings}
    options = {name: value for name, value in fields.items() if value is not None}
    for name in options:
        if name not in VIEW_OPTIONS.get(view, ("target",)):
            raise RefusedError(400, f"{name}: the view '{view}' has no such option; leave it out", param=name)
    await asyncio.to_thread(getattr, views, view)  # its module may take seconds to import

    def function(model: ServedModel, body: schema.ExplainBody) -> dict[str, Any]:
        _check_length(model, body, MAX_TOKENS.get(view, max_explained_tokens)(model.run))
        return {view: getattr(model.run.explain, view)(body.input, **options).data()}

    return await call_model(request, body, function)
