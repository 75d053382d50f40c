"""Runs are made by training: the same small ones as there."""

from tests.training.conftest import corpus, evaluate, recipe  # noqa: F401
