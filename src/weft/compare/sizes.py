"""Resize a family of models: to a number of parameters, or to the size that suits a budget."""

import math

from weft.compare.config import TOKENS_PER_PARAMETER, Budget
from weft.config import Config
from weft.costs.count import count, orthogonal_flops
from weft.errors import ConfigError
from weft.models.config import Bengio, Decoder, Encoder, Model, NGram, Recurrent, TransformerConfig
from weft.nn.config import NoFeedForward, NormalInit
from weft.nn.feedforward_config import with_width
from weft.nn.position_config import Sinusoidal
from weft.recipe.config import SettledRecipe

# widths that are tried: small models differ much from one width to the next
WIDTHS = (*range(2, 64, 2), *range(64, 8192, 8))
PAST = 4.0  # end the search at a model with this many times the requested parameters
MAX_SIZE_RATIO = 1.6  # refuse a family whose nearest size differs from the requested one by more than this factor


class TooSmallError(ConfigError):
    """Budget that pays for less than a step of `tokens`, or for no model: the smallest has about `parameters`."""

    def __init__(self, message: str, tokens: int = 0, parameters: float = 0.0):
        super().__init__(message)
        self.tokens, self.parameters = tokens, parameters


def flops_per_step(recipe: SettledRecipe) -> float:
    """Return the FLOPs of a training step, including Muon's update, whose cost doesn't depend on the batch size."""
    cost = count(recipe.model, recipe.batch.length, recipe.adapter)
    tokens = (recipe.batch.size or 1) * recipe.batch.length
    update = orthogonal_flops(recipe.model, getattr(recipe.optimizer, "rounds", 0), recipe.adapter)
    return cost.training(recipe.batch.recompute) * tokens + update


def resize(model: Model, width: int) -> Model:
    """Return the model with a d_model of about `width`, and everything else in proportion.

    A Transformer keeps its ratios of width to depth and of d_ff to d_model, roughly its d_head, and the products of
    √d_model with the standard deviation of its initial weights and with the amplitude of its sinusoids. A recurrent
    model keeps its number of layers, a neural n-gram its order.
    """
    if isinstance(model, Recurrent | Bengio):
        changes = {"d_model": width}
        for key in ("d_embedding", "d_last"):
            if (other := getattr(model, key, None)) is not None:
                changes[key] = max(1, round(other * width / model.d_model))
        return model.replace(**changes)
    if not isinstance(model, TransformerConfig):
        raise ConfigError(f"a '{model.kind}' model has no width to vary")
    attention, feedforward, changed = model.attention, model.feedforward, dict[str, int]()
    heads = max(1, round(width * attention.heads / model.d_model))
    while attention.kv_heads is not None and heads % attention.kv_heads:
        heads += 1
    d_model = heads * max(2, 2 * round(width / heads / 2))  # rotary positions rotate pairs
    d_ff = max(8, 8 * round(feedforward.d_ff * d_model / model.d_model / 8))
    if isinstance(model, Encoder | Decoder) and model.d_embedding is not None:
        changed["d_embedding"] = max(2, 2 * round(model.d_embedding * d_model / model.d_model / 2))
    if isinstance(model, Encoder) and model.distinct_layers is not None:
        changed["distinct_layers"] = max(1, round(model.distinct_layers * d_model / model.d_model))
    layers = changed.get("distinct_layers", 0) * model.sharing or max(1, round(model.layers * d_model / model.d_model))
    parts: dict[str, Config] = {"attention": attention.replace(heads=heads)}
    parts |= {} if isinstance(feedforward, NoFeedForward) else {"feedforward": with_width(feedforward, d_ff)}
    wider = math.sqrt(d_model / model.d_model)
    if isinstance(model.init, NormalInit):
        parts["init"] = model.init.replace(std=model.init.std / wider)
    if isinstance(model.position, Sinusoidal) and not model.embedding_scale:
        parts["position"] = model.position.replace(amplitude=model.position.amplitude / wider)
    tables = {name: part.model_dump() for name, part in parts.items()}
    return model.replace(d_model=d_model, **changed, layers=layers, **tables)


def multiplied(model: Model) -> int:
    """Return the number of parameters that a token is multiplied by: no n-grams, untied embeddings, idle experts."""
    tied = getattr(getattr(model, "head", None), "tied", getattr(model, "tied", False))
    width = getattr(model, "d_embedding", None) or getattr(model, "d_model", None) or 0
    cost = count(model)
    return (
        cost.multiplied + cost.active - cost.parameters - (0 if tied else int(getattr(model, "vocab_size", 0) * width))
    )


def resize_to(model: Model, parameters: float) -> Model:
    """Return the model of the family whose number of parameters is nearest to `parameters`, by ratio."""
    best, distance = model, math.inf
    for width in WIDTHS:
        candidate = resize(model, width)
        ratio = multiplied(candidate) / parameters
        if abs(math.log(ratio)) < distance:
            best, distance = candidate, abs(math.log(ratio))
        if ratio > PAST:
            break
    if distance > math.log(MAX_SIZE_RATIO):
        too_small = multiplied(best) > parameters
        hint = "a larger budget, or a smaller vocabulary such as tokenizer=char" if too_small else "a smaller budget"
        sizes = f"{parameters:,.0f} parameters with a vocabulary of {best.vocab_size:,}"
        message = f"no model of this family has about {sizes}: the nearest has {multiplied(best):,}; give {hint}"
        if too_small:
            raise TooSmallError(message, parameters=multiplied(best) / MAX_SIZE_RATIO)
        raise ConfigError(message)
    return best


def resize_for(budget: Budget, model: Model) -> Model:
    """Return the compute-optimal size for a budget by Hoffmann et al.'s rule of thumb; `weft scale` measures it."""
    if isinstance(model, NGram):
        return model
    if budget.unit == "minutes":
        raise ConfigError("sizes = budget: a budget in minutes has no known FLOPs; give --flops or --tokens")
    by_flops = math.sqrt(budget.amount / (6 * TOKENS_PER_PARAMETER))
    return resize_to(model, by_flops if budget.tokens is None else budget.tokens / TOKENS_PER_PARAMETER)
