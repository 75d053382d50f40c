"""Explanatory texts of the views (texts.toml)."""

from weft.figures.prose import prose

TEXTS = prose(__file__)
