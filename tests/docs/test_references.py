"""What pages point at: found if it is there, an error if it isn't; and reference pages that leave nothing out."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from ext import generated, references
from ext.pages import ROOT
from weft.recipe.config import Recipe


def line(path: str, number: int) -> str:
    return (ROOT / path).read_text(encoding="utf-8").splitlines()[number - 1]


@pytest.mark.parametrize(
    ("target", "path", "begins"),
    [
        ("weft/nn/attention.py:SelfAttention.forward", "src/weft/nn/attention.py", "    def forward"),
        ("weft/models/presets.py:PRESETS", "src/weft/models/presets.py", "PRESETS"),
        ("lectures/gpt.py:Layer", "lectures/gpt.py", "class Layer"),
        ("tests/test_floors.py", "tests/test_floors.py", '"""'),
    ],
)
def test_a_source_is_a_file_and_a_line(target: str, path: str, begins: str) -> None:
    found, number = references.source(target)
    assert found == path and line(found, number).startswith(begins)


@pytest.mark.parametrize(
    ("find", "text", "said"),
    [
        (references.source, "weft/nn/nothing.py", "no such file"),
        (references.source, "weft/nn/attention.py:SelfAttention.backward", "no 'SelfAttention.backward'"),
        (references.fact, "F28", "F1 to F27"),
        (references.fact, "F0", "F1 to F27"),
        (references.setting, "optimizer.learning_rate", "no such setting"),
        (references.command, "weft trian", "no such command"),
        (references.command, "weft train --greedy", "has no option --greedy"),
    ],
)
def test_what_is_not_there_is_an_error(find: Any, text: str, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        find(text)


def test_facts_are_their_tests() -> None:
    assert references.fact("F5") == "tests/lectures/test_f05_perplexity.py"
    assert references.fact("F27") == "tests/lectures/test_f27_gradients.py"


@pytest.mark.parametrize(
    ("text", "anchor"),
    [
        ("steps", "setting"),
        ("steps=60", "setting"),
        ("optimizer", "setting-optimizer"),
        ("optimizer=muon", "setting-optimizer-muon"),
        ("optimizer.lr", "setting-optimizer-adamw"),
        ("optimizer.rounds=3", "setting-optimizer-muon"),
        ("model.attention.heads", "setting-model-attention"),
        ("model.cell", "setting-model-recurrent"),
        ("model.pattern.position.pairs", "setting-model-position-rotary"),
        ("source_tokenizer.vocab_size", "setting-tokenizer-word"),
        ("data.mixture.weight", "setting-data-mixture"),
        ("adapter.rank", "setting-adapter"),
    ],
)
def test_a_setting_has_a_place_on_its_page(text: str, anchor: str) -> None:
    assert references.setting(text).startswith(anchor)
    assert f"({references.setting(text)})=" in generated.settings()


def test_commands_have_a_place_on_their_page() -> None:
    page = generated.commands()
    for name in references.commands():
        assert f"({references.command(name)})=" in page
    assert references.command("weft config show") == "weft-config-show"
    assert references.command("weft train --resume runs/x") == "weft-train"


def schema_keys(schema: dict[str, Any], node: dict[str, Any], inside: str = "") -> Iterator[str]:
    """Every dotted key that the JSON Schema of recipes allows."""
    parts = [*node.get("anyOf", ()), *node.get("oneOf", ())] + ([node["items"]] if "items" in node else [])
    for part in parts:
        yield from schema_keys(schema, part, inside)
    if "$ref" in node:
        yield from schema_keys(schema, schema["$defs"][node["$ref"].rpartition("/")[2]], inside)
    for name, its in node.get("properties", {}).items():
        yield f"{inside}{name}"
        yield from schema_keys(schema, its, f"{inside}{name}.")


def test_no_key_of_the_recipe_is_missing() -> None:
    schema = Recipe.model_json_schema()
    assert set(schema_keys(schema, schema)) == set(references.keys())


def test_every_key_says_what_it_means() -> None:
    silent = []
    for name, kinds in references.tables().items():
        for kind in kinds if references.first(name) == name else ():
            assert kind.__doc__, f"{kind.__name__} has no docstring"
            for key, its in kind.model_fields.items():
                if key != "kind" and not (its.description or generated.about(f"{name}.{key}".lstrip("."))):
                    silent.append(f"{kind.__name__}.{key}")
    assert not silent


def test_every_command_has_an_example() -> None:
    page = generated.commands()
    sections = dict(re.findall(r"^### `([^`]+)`\n(.*?)(?=^##|\Z)", page, re.M | re.S))
    examples = {name: "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S)) for name, text in sections.items()}
    assert [name for name, text in sections.items() if "[OPTIONS]" in text and name not in examples[name]] == []


def test_variables_that_are_read_are_documented() -> None:
    read = set()
    for file in (ROOT / "src" / "weft").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        read |= set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', text))
        for name in re.findall(r"environ(?:\.get\(|\[)([A-Z]\w*)", text):
            read |= set(re.findall(rf'^{name} = "(\w+)"', text, re.M))
        for several in re.findall(r"environ\.get\(key.*for key in \(([^)]*)\)", text):
            read |= set(re.findall(r'"(\w+)"', several))
    assert {"WEFT_CACHE", "WEFT_LIMITS", "WEFT_PATIENCE", "MASTER_PORT"} <= read
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    assert read - {"PYTHONPATH"} <= set(re.findall(r"`(\w+)`", page))  # which is handed on
