"""Models of one family in other sizes: as many parameters as a budget is best spent on, or a ladder of them."""

import math

from weft.compare.config import Budget
from weft.costs.count import count, orthogonal_flops
from weft.errors import ConfigError
from weft.models.config import Decoder, Encoder, Model, NGram, Recurrent, TransformerConfig
from weft.recipe.config import SettledRecipe

TOKENS_PER_PARAMETER = 20  # where compute is best spent (Hoffmann et al. 2022, table 3)
STEP = 8  # of widths
NEAR = 1.6  # times as many parameters as wanted are about as many


class TooSmallError(ConfigError):
    """A budget pays for less than a step of so many `tokens`, or for no size: the smallest has `parameters`, about."""

    def __init__(self, line: str, tokens: int = 0, parameters: float = 0.0):
        super().__init__(line)
        self.tokens, self.parameters = tokens, parameters


def flops_per_step(recipe: SettledRecipe) -> float:
    """Operations of a training step, with those of Muon's update, which small batches don't make small."""
    cost, tokens = (
        count(recipe.model, recipe.batch.length, recipe.adapter),
        (recipe.batch.size or 1) * recipe.batch.length,
    )
    update = orthogonal_flops(recipe.model, getattr(recipe.optimizer, "rounds", 0), recipe.adapter)
    return cost.training(recipe.batch.recompute) * tokens + update


def resized(model: Model, width: int) -> Model:
    """The model with about `width` numbers a token, everything else in proportion to its width.

    A Transformer keeps its ratio of width to depth, about the size of its heads, and how much wider its feed-forward
    layer is; a recurrent model keeps its layers.
    """
    if isinstance(model, Recurrent):
        changes = {"d_model": width}
        if model.d_embedding is not None:
            changes["d_embedding"] = max(1, round(model.d_embedding * width / model.d_model))
        return model.replace(**changes)
    if not isinstance(model, TransformerConfig):
        raise ConfigError(f"a '{model.kind}' model has no width to choose")
    attention, feedforward, changed = model.attention, model.feedforward, dict[str, int]()
    heads = max(1, round(width * attention.heads / model.d_model))
    while attention.kv_heads is not None and heads % attention.kv_heads:
        heads += 1
    d_model = heads * max(2, 2 * round(width / heads / 2))  # rotary positions come in pairs
    d_ff = max(8, 8 * round(feedforward.d_ff * d_model / model.d_model / 8))
    if isinstance(model, Encoder | Decoder) and model.d_embedding is not None:
        changed["d_embedding"] = max(2, 2 * round(model.d_embedding * d_model / model.d_model / 2))
    if isinstance(model, Encoder) and model.distinct_layers is not None:
        changed["distinct_layers"] = max(1, round(model.distinct_layers * d_model / model.d_model))
    layers = changed.get("distinct_layers", 0) * model.sharing or max(1, round(model.layers * d_model / model.d_model))
    return model.replace(
        d_model=d_model,
        **changed,
        layers=layers,
        attention=attention.replace(heads=heads).model_dump(),
        feedforward=feedforward.replace(d_ff=d_ff).model_dump(),
    )


def multiplied(model: Model) -> int:
    """The parameters that a token is multiplied by: all but n-grams, and embeddings that aren't the head's too."""
    tied = getattr(getattr(model, "head", None), "tied", getattr(model, "tied", False))
    width = getattr(model, "d_embedding", None) or getattr(model, "d_model", None) or 0
    return count(model).multiplied - (0 if tied else int(getattr(model, "vocab_size", 0) * width))


def sized(model: Model, wanted: float) -> Model:
    """The size of the family whose parameters come nearest to `wanted`, by their ratio; none is an error."""
    best, distance = model, math.inf
    for width in range(STEP, 1024 * STEP, STEP):
        other = resized(model, width)
        found = abs(math.log(multiplied(other) / wanted))
        if found > distance:
            break
        best, distance = other, found
    if distance > math.log(NEAR):
        small = multiplied(best) > wanted
        advice = "a larger budget, or a smaller vocabulary such as tokenizer=char" if small else "a smaller budget"
        line = (
            f"no model of this family has about {wanted:,.0f} parameters with a vocabulary of {best.vocab_size:,}: the "
            f"nearest has {multiplied(best):,}; give {advice}"
        )
        raise TooSmallError(line, parameters=multiplied(best) / NEAR) if small else ConfigError(line)
    return best


def sized_for(budget: Budget, model: Model) -> Model:
    """The size that the budget is best spent on by Hoffmann et al.'s rule of thumb; `weft scale` measures it."""
    if isinstance(model, NGram):
        return model
    if budget.axis == "minutes":
        raise ConfigError("sizes = budget: minutes don't say how many operations there are; give --flops or --tokens")
    by_flops = math.sqrt(budget.amount / (6 * TOKENS_PER_PARAMETER))
    return sized(model, by_flops if budget.tokens is None else budget.tokens / TOKENS_PER_PARAMETER)
