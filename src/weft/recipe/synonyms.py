"""Other programs' names for settings of a recipe, from synonyms.toml: the name there → the key here."""

import tomllib
from pathlib import Path

_NAMES_BY_KEY: dict[str, str] = tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))
SYNONYMS = {name: key for key, names in _NAMES_BY_KEY.items() for name in names.split()}
