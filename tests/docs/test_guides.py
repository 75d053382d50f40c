"""Pages that list the parts of weft are complete, and each guide states its result and its duration."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from weft.explain.views import VIEWS
from weft.interop.families.known import FAMILIES
from weft.recipe.objective import OBJECTIVES
from weft.recipe.resolve import recipe_names

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = sorted(path for path in (DOCS / "guides").glob("*.md") if path.name != "README.md")
ADDED = ("position", "tokenizer", "objective", "view", "family")


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def test_every_recipe_has_a_row() -> None:
    missing = [name for name in recipe_names() if f"| `weft train {name}" not in text("recipes.md")]
    assert not missing


def test_every_comparison_has_a_row() -> None:
    studies = Path(__file__).parents[2].glob("src/weft/recipes/compare/*.toml")
    assert all(f"| `weft compare {study.stem}" in text("recipes.md") for study in studies)


def test_every_objective_is_named() -> None:
    assert [kind for kind in OBJECTIVES if f"`{kind}`" not in text("guides/bert.md")] == []


def test_every_view_is_named() -> None:
    assert [view for view in VIEWS if f"`{view}`" not in text("guides/attention.md")] == []


def test_every_family_is_named() -> None:
    page = text("guides/import-export.md").lower()
    titles = {family.title.lower() for family in FAMILIES.values()}
    assert {title for title in titles if re.split(r"[ -]", title)[0] not in page} == set()


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_begins_with_its_result_and_its_duration(page: Path) -> None:
    beginning = page.read_text(encoding="utf-8").split("\n## ")[0]
    assert "**What you'll have at the end:**" in beginning and "**Time:**" in beginning
    assert f"({page.name})" in text("guides/README.md")


@pytest.mark.parametrize("part", ADDED)
def test_the_page_on_adding_a_part_runs_it(part: str) -> None:
    page = text(f"design/add-{part}.md")
    assert "```sh" in page and "PYTHONPATH=src python -m weft" in page
    assert f"add-{part}" in text("design/README.md") and f"add-{part}" in (DOCS.parent / "CONTRIBUTING.md").read_text()
    for command in re.findall(r"^sed -i (.*)$", page.replace("\\\n", " "), re.MULTILINE):
        *scripts, file = (part for part in shlex.split(command) if part != "-e")
        for script in scripts:
            pattern = re.match(r"s?/((?:[^/\\]|\\.)*)/", script)
            assert pattern is not None, script
            assert subprocess.run(["grep", "-q", pattern[1], DOCS.parent / file], check=False).returncode == 0, script
