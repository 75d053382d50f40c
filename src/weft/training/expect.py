"""What to expect of a run, logged before it starts: the loss at the beginning, and about where such runs end."""

import math

import torch

from weft.explain.count import count
from weft.models.base import LanguageModel
from weft.recipe.config import SettledRecipe
from weft.recipe.objective import NextToken
from weft.training.worker import device_name


def expectations(recipe: SettledRecipe, model: LanguageModel, step: int, device: torch.device) -> list[str]:
    """Lines for a person, before the first step or the one after `step`."""
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    where = f"from step {step}" if step else f"from {recipe.init}" if recipe.init else "from fresh weights"
    some = f"{trained:,} of {parameters:,}" if trained < parameters else f"{parameters:,}"
    begun = f"training {some} parameters {where} on {device_name(device)}"
    vocab_size = recipe.model.vocab_size
    chance = recipe.objective.chance(vocab_size)
    if recipe.init or step or not math.isfinite(chance):  # what the weights have learned before is not known here
        first = ""
    elif isinstance(recipe.objective, NextToken):
        first = f"; the loss should begin near ln {vocab_size} = {chance:.2f} and fall"
    else:
        first = f"; a model that has learned nothing has a loss of {chance:.2f}"
    if not isinstance(recipe.objective, NextToken) or recipe.init or recipe.batch.size is None:
        return [begun + first]
    tokens = recipe.steps * recipe.batch.size * recipe.batch.length
    work = count(recipe.model, recipe.batch.length).training() * tokens
    return [
        begun + first,
        f"{work:.1e} operations in all; runs of this size on English text end near "
        f"{usual_bits_per_byte(work):.1f} bits per byte, give or take a fifth, given enough text",
    ]


def usual_bits_per_byte(flops: float) -> float:
    """What held-out English text costs after a training of this many operations, by a rule of thumb.

    A power law through two published runs: nanoGPT's processor recipe for Shakespeare (0.8 M parameters, 1.5 M tokens:
    7e12 operations, 1.88 nats a character = 2.7 bits per byte) and its GPT-2 124M (300 G tokens: 2.2e20 operations,
    2.85 nats a token of 4.4 bytes = 0.93). LLaMA 7B (4e22 operations, near 0.65) lies on it too. It supposes a sensible
    recipe and text that isn't read over and over; code and tables are easier, old or mixed languages harder.
    """
    return min(8.0, 2.7 * (flops / 7e12) ** -0.062)
