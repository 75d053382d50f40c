"""A text as an objective reads it, and untrained models, which are quick to make with any tokenizer."""

from pathlib import Path
from typing import Any

import torch

from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.ngram import NGram
from weft.objectives.next_token import NextToken
from weft.recipe.resolve import resolve
from weft.runs.folder import RunFolder
from weft.text.tokenizer import build_tokenizer
from weft.training.run_data import Tokenizers

SMALL: dict[str, list[str]] = {
    "gpt-tiny": ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=16"],
    "lstm": ["model.layers=1", "model.d_model=8", "batch.carry=true"],
    "ngram-3": [],
}


def prepared(folder: Path, preset: str, kind: Any, changes: list[str]) -> tuple[NextToken, LanguageModel]:
    """Return the objective of a preset with its text in a folder, and a model with random weights or n-gram counts."""
    recipe = resolve(preset, [*SMALL[preset], "batch.length=32", *changes])
    tokenizer = build_tokenizer(kind, NextToken(recipe, RunFolder(folder)).texts())
    objective = NextToken(recipe, RunFolder(folder), Tokenizers(tokenizer, tokenizer))
    objective.prepare(lambda line: None)
    torch.manual_seed(0)
    model = build(recipe.model.replace(vocab_size=tokenizer.vocab_size))
    if isinstance(model, NGram):
        text = objective.training_text
        model.fit(text.read(0, len(text)))
    return objective, model
