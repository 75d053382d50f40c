"""A recipe while its open settings are chosen, with the choices made so far."""

from dataclasses import dataclass
from typing import Any

from weft.config import Tree, merge, nested, validate
from weft.recipe.config import Recipe


@dataclass(frozen=True)
class ChosenSetting:
    """Setting that the recipe left open, with the chosen value and the reason."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.why}"


class Draft:
    """A recipe while it is settled, with the choices made so far."""

    def __init__(self, recipe: Recipe):
        self.tree: Tree = recipe.model_dump(mode="json", exclude_none=True)
        self.choices: list[ChosenSetting] = []
        self.recipe = recipe

    def choose(self, key: str, value: Any, why: str) -> Any:
        """Set `key` if the recipe leaves it open; return its value."""
        current: Any = self.tree
        for part in key.split("."):
            current = current.get(part) if isinstance(current, dict) else None
        if current is None:
            self.set(key, value, why)
        return value if current is None else current

    def set(self, key: str, value: Any, why: str = "") -> None:
        """Set `key`; with a reason, it is listed as a choice."""
        if why:
            self.choices.append(ChosenSetting(key, value["kind"] if isinstance(value, dict) else value, why))
        self.tree = merge(self.tree, nested(key, value))
        self.recipe = validate(Recipe, self.tree)
