"""Configs: read, merged, overridden, saved, and refused with a one-line message."""

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


def message_for(tree: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(Drawing, tree)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- errors name the key, its value, what was expected and the nearest valid name


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"titel": "x"}, "titel: unknown key; did you mean 'title'?"),
        ({"shape": {"kind": "square", "sides": 3}}, "shape.sides: unknown key; did you mean 'shape.side'?"),
        ({"colour": {"zzz": 1}}, "colour.zzz: unknown key; the keys here are name"),
        ({"shape": {"kind": "round", "radius": -1}}, "shape.radius = -1: expected a number greater than 0"),
        ({"shape": {"kind": "round", "radius": float("nan")}}, "shape.radius = nan: expected a finite number"),
        ({"title": 3}, "title = 3: expected text"),
        ({"colour": {"name": "gren"}}, "colour.name = 'gren': did you mean 'green'?"),
        ({"parts": [{}, {"name": "blue"}]}, "parts.1.name = 'blue': available: green, red"),
        ({"shape": "round"}, "shape = 'round': expected a table; its kind is set as shape.kind=round"),
        ({"colour": "green"}, "colour = 'green': expected a table"),
        ({"parts": "green"}, "parts = 'green': expected a list, such as ['green']"),
        ({"shape": {"kind": "sqare"}}, "shape.kind = 'sqare': unknown kind; did you mean 'square'?"),
        ({"shape": {"side": 5}}, "shape.kind: missing; it chooses the variant"),
        ({"titel": "x", "title": 3}, "title = 3: expected text; titel: unknown key; did you mean 'title'?"),
    ],
)
def test_invalid_settings_are_reported_in_one_line(tree: dict[str, object], message: str) -> None:
    assert message_for(tree) == message


def test_variants_are_chosen_by_kind() -> None:
    assert validate(Drawing, {"shape": {"kind": "square", "side": 5}}).shape == Square(side=5)


def test_errors_begin_with_the_source() -> None:
    with pytest.raises(ConfigError, match=r"^draw\.toml: titel"):
        validate(Drawing, {"titel": "x"}, "draw.toml")


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
def test_malformed_assignments_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"key=value|value is missing"):
        assignments([word])


def test_the_last_assignment_wins() -> None:
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


@settings(max_examples=25)
@given(deep, deep)
def test_merge_keeps_all_keys_and_is_idempotent(below: dict[str, object], above: dict[str, object]) -> None:
    merged = merge(below, above)
    assert merge(merged, above) == merged
    assert set(merged) == set(below) | set(above)
    assert merge({}, above) == above
    assert merge(below, {}) == below


# ---- files


def test_toml_round_trip(tmp_path: Path) -> None:
    config = Drawing(title='quotes " and ünïcode', shape=Square(side=7), parts=(Colour(name="green"),))
    path = tmp_path / "draw.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert validate(Drawing, read_toml(path)) == config


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"a = ", "not valid TOML"), (b"a = 1\na = 2", "not valid TOML"), (b"\xff\xfe", "not UTF-8 text")],
)
def test_invalid_toml_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        read_toml(path)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such recipe"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path)


def test_configs_are_frozen_and_replace_validates() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Drawing().title = "x"  # type: ignore[misc]
    assert Drawing().replace(title="x").title == "x"
    with pytest.raises(ValueError, match="titel"):
        Drawing().replace(titel="x")


def test_the_json_schema_has_every_variant() -> None:
    assert {"Round", "Square"} <= set(Drawing.model_json_schema()["$defs"])


def test_suggestions_are_near_names_or_the_first_few() -> None:
    assert suggestion("lyers", ["layers", "heads"]) == "did you mean 'layers'?"
    assert suggestion("xyz", ["layers", "heads"]) == "available: heads, layers"
    assert suggestion("xyz", map(str, range(20))).endswith(", …")
    assert suggestion("xyz", []) == ""
