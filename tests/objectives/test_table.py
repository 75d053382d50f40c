"""The table of objectives: one class for each kind of settings, found by it."""

import pytest

from weft.objectives import table
from weft.objectives.next_token import NextToken
from weft.recipe.objective import OBJECTIVES
from weft.recipe.resolve import resolve
from weft.runs.folder import RunFolder
from weft.training.objective import Objective

PRESETS = {"next-token": "gpt-tiny", "chat": "gpt-tiny", "pairs": "vaswani-tiny", "spans": "vaswani-tiny"}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_settings_find_their_objective(kind: str) -> None:
    recipe = resolve(PRESETS.get(kind, "bert-tiny"), [f"objective={kind}"])
    recipe.objective.check(recipe.model)
    found = table.build(recipe, RunFolder("nowhere"))
    assert type(found).__name__ == OBJECTIVES[kind].__name__
    assert found.settings is recipe.objective
    assert found.usage.startswith("weft ")


def test_no_two_share_their_settings() -> None:
    assert set(Objective.declared) == set(OBJECTIVES.values())
    assert len(set(Objective.declared.values())) == len(OBJECTIVES)


def test_a_variant_does_not_take_its_place() -> None:
    class Variant(NextToken):
        pass

    assert issubclass(Variant, NextToken)
    assert type(table.build(resolve("gpt-tiny"), RunFolder("nowhere"))) is NextToken
