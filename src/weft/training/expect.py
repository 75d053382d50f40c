"""What to expect of a run, said before it starts: the loss at the beginning, and about where runs of this size end."""

import math

import torch

from weft.explain.count import count
from weft.models.base import LanguageModel
from weft.recipe.config import Recipe
from weft.recipe.objective import NextToken
from weft.training.throughput import device_name


def expectations(recipe: Recipe, model: LanguageModel, step: int, device: torch.device) -> list[str]:
    """Lines for a person, before the first step or the one after `step`."""
    parameters = sum(p.numel() for p in model.parameters())
    vocab_size = recipe.model.vocab_size
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    where = f"from step {step}" if step else f"from {recipe.init}" if recipe.init else "from fresh weights"
    some = f"{trained:,} of {parameters:,}" if trained < parameters else f"{parameters:,}"
    assert recipe.steps is not None and recipe.batch.length is not None
    if not isinstance(recipe.objective, NextToken):
        chance = recipe.objective.chance(vocab_size)
        known = math.isfinite(chance) and not recipe.init and not step
        beginning = f"; knowing nothing, the loss is {chance:.2f}" if known else ""
        return [f"training {some} parameters {where} on {device_name(device)}{beginning}"]
    assert recipe.batch.size is not None
    begun = f"training {some} parameters {where} on {device_name(device)}"
    if recipe.init:  # what those weights have learned before can't be told from here
        return [begun]
    tokens = recipe.steps * recipe.batch.size * recipe.batch.length
    work = count(recipe.model, recipe.batch.length).training() * tokens
    first = f"; the loss should begin near ln {vocab_size} = {math.log(vocab_size):.2f} and fall"
    return [
        begun + ("" if step else first),
        f"{work:.1e} operations in all; runs of this size on English text end near "
        f"{usual_bits_per_byte(work):.1f} bits per byte, give or take a fifth, if there is text enough",
    ]


def usual_bits_per_byte(flops: float) -> float:
    """What held-out English text costs after a training of this many operations, by a rule of thumb.

    A power law through two published runs: nanoGPT's processor recipe for Shakespeare (0.8 M parameters, 1.5 M tokens:
    7e12 operations, 1.88 nats a character = 2.7 bits per byte) and its GPT-2 124M (300 G tokens: 2.2e20 operations,
    2.85 nats a token of 4.4 bytes = 0.93). LLaMA 7B (4e22 operations, near 0.65) lies on it too. It supposes a sensible
    recipe and text that isn't read over and over; code and tables are easier, old or mixed languages harder.
    """
    return min(8.0, 2.7 * (flops / 7e12) ** -0.062)
