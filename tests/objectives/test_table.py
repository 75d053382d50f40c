"""The table of objectives: one class for each kind of settings."""

import pytest

from weft.objectives import table
from weft.recipe.objective import OBJECTIVES
from weft.recipe.resolve import resolve
from weft.runs.folder import RunFolder

PRESETS = {
    "next-token": "gpt-tiny",
    "chat": "gpt-tiny",
    "pairs": "vaswani-tiny",
    "spans": "vaswani-tiny",
    "word-vectors": "word2vec",
    "bidirectional": "elmo-tiny",
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_settings_find_their_objective(kind: str) -> None:
    recipe = resolve(PRESETS.get(kind, "bert-tiny"), [f"objective={kind}"])
    recipe.objective.check(recipe.model)
    objective = table.build(recipe, RunFolder("nowhere"))
    assert type(objective).__name__ == OBJECTIVES[kind].__name__
    assert objective.settings is recipe.objective
    assert objective.usage.startswith("weft ")


def test_every_kind_of_settings_has_a_class_of_its_own() -> None:
    assert set(table.OBJECTIVES) == set(OBJECTIVES.values())
    assert len(set(table.OBJECTIVES.values())) == len(OBJECTIVES)
