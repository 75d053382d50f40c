"""Objectives: their metrics are in the table, and names of earlier versions are read and logged."""

from pathlib import Path

import pytest

from weft.recipe.metrics import METRICS, metric
from weft.recipe.objective import OBJECTIVES, upgrade
from weft.recipe.resolve import resolve


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_metrics_are_known(kind: str) -> None:
    assert OBJECTIVES[kind].metrics[0] == "loss"
    assert set(OBJECTIVES[kind].metrics) <= METRICS.keys()


def test_an_unknown_metric_is_titled_by_its_name() -> None:
    unknown = metric("words_per_minute")
    assert unknown.title == "words per minute" and not unknown.lower_is_better
    assert metric("loss").lower_is_better and metric("bits_per_byte").lower_is_better


@pytest.mark.parametrize(("old", "new"), [("score", "regress"), ("twins", "contrastive")])
def test_a_renamed_objective_is_accepted_with_a_message(old: str, new: str) -> None:
    tree, notes = upgrade({"steps": 3, "objective": {"kind": old, "second": "b"}})
    assert tree == {"steps": 3, "objective": {"kind": new, "second": "b"}}
    assert notes == [f"objective.kind = '{old}' is now called '{new}'; write that instead"]
    assert upgrade({"objective": old})[0] == {"objective": new}


@pytest.mark.parametrize("tree", [{}, {"objective": {"kind": "pairs"}}, {"objective": 3}, {"objective": {"kind": [1]}}])
def test_everything_else_stays_unchanged(tree: dict[str, object]) -> None:
    assert upgrade(tree) == (tree, [])


def test_a_recipe_keeps_its_columns(tmp_path: Path) -> None:
    file, lines = tmp_path / "old.toml", list[str]()
    file.write_text('model = "bert-tiny"\n[objective]\nkind = "score"\ntext = "review"\nscore = "stars"\n')
    objective = resolve(str(file), log=lines.append).objective
    assert (objective.kind, objective.text, objective.score) == ("regress", "review", "stars")  # type: ignore[attr-defined]
    assert lines == ["objective.kind = 'score' is now called 'regress'; write that instead"]
    resolve("bert-tiny", ["objective=contrastive"], log=lines.append)
    assert len(lines) == 1
