"""Recipes: read, merged, overridden, refused with a line that says what is wrong, and saved again."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from weft.config import Config, assignments, merge, read_toml, to_toml, validate
from weft.errors import ConfigError, suggestion


class Round(Config):
    kind: Literal["round"] = "round"
    radius: float = Field(default=1.0, gt=0)


class Square(Config):
    kind: Literal["square"] = "square"
    side: int = 2


class Colour(Config):
    name: Literal["red", "green"] = "red"


class Drawing(Config):
    title: str = "untitled"
    shape: Annotated[Round | Square, Field(discriminator="kind")] = Round()
    colour: Colour = Colour()
    parts: tuple[Colour, ...] = ()
    note: str | None = None


def fails(tree: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(Drawing, tree)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- errors name the key, the value, what was expected and the nearest name


def test_unknown_keys_are_refused_with_the_nearest_name() -> None:
    assert fails({"titel": "x"}) == "titel: unknown key; did you mean 'title'?"
    assert fails({"shape": {"kind": "square", "sides": 3}}) == "shape.sides: unknown key; did you mean 'shape.side'?"
    assert fails({"colour": {"zzz": 1}}) == "colour.zzz: unknown key; the keys here are name"


def test_values_out_of_place_are_told_with_what_was_expected() -> None:
    assert fails({"shape": {"kind": "round", "radius": -1}}) == "shape.radius = -1: expected a number greater than 0"
    assert fails({"title": 3}) == "title = 3: expected text"
    assert fails({"colour": {"name": "gren"}}) == "colour.name = 'gren': did you mean 'green'?"
    assert "parts.1.name" in fails({"parts": [{}, {"name": "blue"}]})
    assert fails({"shape": "round"}) == "shape = 'round': expected a table; its kind is set as shape.kind=round"
    assert fails({"colour": "green"}) == "colour = 'green': expected a table"
    assert fails({"parts": "green"}) == "parts = 'green': expected a list, such as ['green']"


def test_variants_are_chosen_by_kind() -> None:
    assert validate(Drawing, {"shape": {"kind": "square", "side": 5}}).shape == Square(side=5)
    assert fails({"shape": {"kind": "sqare"}}) == "shape.kind = 'sqare': unknown kind; did you mean 'square'?"
    assert fails({"shape": {"side": 5}}).startswith("shape.kind: missing")


def test_several_mistakes_are_told_in_one_line() -> None:
    message = fails({"titel": "x", "colour": {"name": "blue"}})
    assert "titel" in message
    assert "colour.name" in message


def test_a_source_is_named_first() -> None:
    with pytest.raises(ConfigError, match=r"^draw\.toml: titel"):
        validate(Drawing, {"titel": "x"}, "draw.toml")


def test_infinite_and_nan_are_no_settings() -> None:
    assert "shape.radius" in fails({"shape": {"kind": "round", "radius": float("nan")}})


# ---- overrides


def test_assignments_are_toml_values_or_bare_strings() -> None:
    words = ["a.b=3", "a.c=true", "name=two words", 'list=["x", "y"]', "rate=1e-3", "path=/tmp/x=y"]
    assert assignments(words) == {
        "a": {"b": 3, "c": True},
        "name": "two words",
        "list": ["x", "y"],
        "rate": 1e-3,
        "path": "/tmp/x=y",
    }


@pytest.mark.parametrize("word", ["layers", "=3", "a..b=3", ".a=3", "a=", "a.=1"])
def test_words_that_assign_nothing_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"key=value|value is missing"):
        assignments([word])


def test_the_last_assignment_counts() -> None:
    assert assignments(["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}


def test_another_kind_replaces_the_table_below_it() -> None:
    below = {"shape": {"kind": "round", "radius": 2.0}, "title": "t"}
    assert merge(below, {"shape": {"kind": "square", "side": 1}}) == {
        "shape": {"kind": "square", "side": 1},
        "title": "t",
    }
    assert merge(below, {"shape": {"radius": 3.0}})["shape"] == {"kind": "round", "radius": 3.0}
    assert below["shape"] == {"kind": "round", "radius": 2.0}


values = st.integers() | st.sampled_from(["", "text"]) | st.booleans()
tables = st.dictionaries(st.sampled_from("abc"), values, max_size=3)
trees = st.dictionaries(st.sampled_from("abc"), values | tables, max_size=3)
deep = st.dictionaries(st.sampled_from("abc"), values | trees, max_size=3)


@settings(max_examples=40)
@given(deep, deep)
def test_merging_keeps_everything_above(below: dict[str, object], above: dict[str, object]) -> None:
    merged = merge(below, above)
    assert merge(merged, above) == merged
    assert set(merged) == set(below) | set(above)
    assert merge({}, above) == above
    assert merge(below, {}) == below


# ---- files


def test_a_saved_config_reads_back_equal(tmp_path: Path) -> None:
    config = Drawing(title='quotes " and ünïcode', shape=Square(side=7), parts=(Colour(name="green"),))
    path = tmp_path / "draw.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert validate(Drawing, read_toml(path)) == config


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"a = ", "not valid TOML"), (b"\xff\xfe", "not valid TOML"), (b"a = 1\na = 2", "not valid TOML")],
)
def test_files_that_are_no_recipes_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_toml(path)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such recipe"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path)


def test_configs_are_frozen_and_replaced_with_checks() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Drawing().title = "x"  # type: ignore[misc]
    assert Drawing().replace(title="x").title == "x"
    with pytest.raises(ValueError, match="titel"):
        Drawing().replace(titel="x")


def test_the_schema_knows_every_variant() -> None:
    assert {"Round", "Square"} <= set(Drawing.model_json_schema()["$defs"])


def test_suggestions_show_near_names_or_a_few() -> None:
    assert suggestion("lyers", ["layers", "heads"]) == "did you mean 'layers'?"
    assert suggestion("xyz", ["layers", "heads"]) == "available: heads, layers"
    assert suggestion("xyz", map(str, range(20))).endswith(", …")
    assert suggestion("xyz", []) == ""
