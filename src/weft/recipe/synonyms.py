"""What other programs call the settings of a recipe, by synonyms.toml: the name there → the key here."""

import tomllib
from pathlib import Path

_ELSEWHERE: dict[str, str] = tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))
SYNONYMS = {name: key for key, names in _ELSEWHERE.items() for name in names.split()}
