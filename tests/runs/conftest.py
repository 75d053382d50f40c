"""Runs are made by training: the same small ones as there."""

from tests.training.conftest import corpus, evaluator, recipe, tokenizer  # noqa: F401
