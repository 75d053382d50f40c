"""Refuse settings that have no effect with a recipe's objective and model, so that none is silently ignored."""

from collections.abc import Iterator

from weft.data.config import FilesSplit, HashSplit, NoSplit
from weft.errors import ConfigError, suggestion
from weft.models.config import NGram, StaticVectors, TransformerConfig
from weft.recipe.config import Recipe, SettledRecipe
from weft.recipe.objective import Pairs, TokenObjective

MAX_SEED = 2**62 - 1  # torch's generators take 64 bits; evaluations and rollbacks add to the seed


def refuse_unread(recipe: Recipe) -> None:
    """Raise a ConfigError for the first setting that would have no effect."""
    for problem in _unread(recipe):
        raise ConfigError(problem)


def _unread(recipe: Recipe) -> Iterator[str]:
    yield from _unread_data(recipe)
    yield from _unread_evaluation(recipe)
    if isinstance(recipe.model, NGram):
        yield from _unread_by_ngrams(recipe)
    if isinstance(recipe.model, StaticVectors):
        yield from _unread_by_word_vectors(recipe)
    objective, adapter = recipe.objective, recipe.adapter
    if isinstance(objective, Pairs) and objective.r_drop and getattr(recipe.model, "dropout", 0.0) == 0.0:
        yield f"objective.r_drop = {objective.r_drop}: two passes differ by their dropout alone; set model.dropout"
    if recipe.source_tokenizer is not None and not objective.has_source:
        yield f"source_tokenizer: objective '{objective.kind}' has no separate source text; leave it out"
    if adapter is not None and isinstance(recipe.model, TransformerConfig) and adapter.rank > recipe.model.d_model:
        yield f"adapter.rank = {adapter.rank}: no matrix of this model has a higher rank than {recipe.model.d_model}"
    if recipe.batch.carry and not recipe.can_carry:
        carrying = "a recurrent model with objective 'next-token', one text and no data.document_mask"
        yield f"batch.carry: only {carrying} carries states from row to row; leave it out"
    if recipe.seed > MAX_SEED:
        yield f"seed = {recipe.seed}: expected at most {MAX_SEED}"


def _unread_data(recipe: Recipe) -> Iterator[str]:
    data, objective = recipe.data, recipe.objective
    name = f"objective '{objective.kind}'"
    validation_targets = data.validation.targets if isinstance(data.validation, FilesSplit) else ()
    if objective.reads != "rows":
        if data.targets or validation_targets:
            key = "data.targets" if data.targets else "data.validation.targets"
            yield f"{key}: {name} learns from text only; targets are for objective=pairs"
        if data.on_error != "stop":
            yield f"data.on_error = '{data.on_error}': {name} reads running text, which has no rows to skip"
    elif data.column != "text":
        yield f"data.column = '{data.column}': {name} names its columns in the objective's keys"
    if objective.reads != "text" and (data.prepared is not None or data.mixture):
        key = "data.prepared" if data.prepared is not None else "data.mixture"
        yield f"{key}: {name} reads {objective.reads}; name their files in data.sources"
    if data.tokens is not None and objective.reads != "text":
        yield f"data.tokens = {data.tokens}: {name} reads {objective.reads}; leave it out"
    if data.document_mask and (objective.reads != "text" or objective.kind == "spans"):
        yield f"data.document_mask: {name} doesn't pack documents into rows; leave it out"
    if data.parts and all(part.prepared is not None for part in data.parts):
        if data.validation != HashSplit():
            yield "data.validation: a prepared folder has its own held-out split; leave it out"
        if data.encoding != "utf-8":
            yield f"data.encoding = '{data.encoding}': a prepared folder holds tokens; pass --encoding to weft prepare"


def _unread_evaluation(recipe: Recipe) -> Iterator[str]:
    metric, objective = recipe.evaluate.metric, recipe.objective
    if metric not in objective.metrics:
        known = suggestion(metric, objective.metrics)
        yield f"evaluate.metric = '{metric}': objective '{objective.kind}' has no such metric; {known}"
    if not isinstance(recipe.data.validation, NoSplit) or isinstance(recipe, SettledRecipe):
        return  # a settled recipe has a value for every setting
    none = "nothing is held out to evaluate on (data.validation.kind = 'none')"
    values = {key: getattr(recipe.evaluate, key) for key in ("every", "tokens", "patience")}
    yield from (f"evaluate.{key} = {value}: {none}" for key, value in values.items() if value is not None)
    if metric != "loss":
        yield f"evaluate.metric = '{metric}': {none}"
    if recipe.checkpoint.average:
        yield f"checkpoint.average = {recipe.checkpoint.average}: {none}"


def _unread_by_ngrams(recipe: Recipe) -> Iterator[str]:
    counted = "an n-gram model is counted in one pass"
    if recipe.init is not None:
        yield f"init = '{recipe.init}': {counted}, from scratch; train on both texts instead"
    if recipe.steps not in (None, 1):
        yield f"steps = {recipe.steps}: {counted}; leave it out"
    if isinstance(recipe.objective, TokenObjective) and (recipe.objective.smoothing or recipe.objective.z_loss):
        key = "smoothing" if recipe.objective.smoothing else "z_loss"
        yield f"objective.{key}: {counted}; counts are smoothed by model.smoothing"
    if recipe.evaluate.patience is not None:
        yield f"evaluate.patience: {counted}; leave it out"
    if recipe.checkpoint.average:
        yield f"checkpoint.average: {counted}, so there are no checkpoints to average"
    if recipe.data.mixture:
        yield "data.mixture: an n-gram model counts one text; give sources or a prepared folder"


def _unread_by_word_vectors(recipe: Recipe) -> Iterator[str]:
    kind = f"'{recipe.model.kind}'"
    if recipe.init is not None:
        yield f"init = '{recipe.init}': a model of kind {kind} is trained from scratch; train on both texts instead"
    if recipe.optimizer is not None and not isinstance(recipe, SettledRecipe):
        yield f"optimizer: a model of kind {kind} has its learning rate in model.lr; leave it out"
    if recipe.evaluate.patience is not None:
        yield f"evaluate.patience: a model of kind {kind} is not evaluated in training; leave it out"
    if recipe.checkpoint.average:
        yield f"checkpoint.average: a model of kind {kind} keeps no checkpoints to average; leave it out"
    if recipe.data.mixture:
        yield f"data.mixture: a model of kind {kind} reads one text; give sources or a prepared folder"
    if recipe.data.document_mask:
        yield f"data.document_mask: windows of a model of kind {kind} end with a document anyway; leave it out"
