"""References of pages: the target, or an error if it does not exist; and reference pages that are complete."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from ext import generated, references
from ext.pages import ROOT, page_names, page_path
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
    ("find", "text", "message"),
    [
        (references.source, "weft/nn/nothing.py", "no such file"),
        (references.source, "weft/nn/attention.py:SelfAttention.backward", "does not define 'SelfAttention.backward'"),
        (references.fact, "F28", "F1 to F27"),
        (references.fact, "F0", "F1 to F27"),
        (references.setting, "optimizer.learning_rate", "no such setting"),
        (references.command, "weft trian", "no such command"),
        (references.command, "weft train --greedy", "has no option --greedy"),
    ],
)
def test_a_missing_target_is_an_error(find: Any, text: str, message: str) -> None:
    with pytest.raises(LookupError, match=message):
        find(text)


def test_facts_are_their_tests() -> None:
    assert references.fact("F5") == "tests/lectures/test_f05_perplexity.py"
    assert references.fact("F27") == "tests/lectures/test_f27_gradients.py"


@pytest.mark.parametrize(
    ("text", "anchor"),
    [
        ("steps", "the-recipe"),
        ("steps=60", "the-recipe"),
        ("optimizer", "optimizer"),
        ("optimizer=muon", "optimizerkind--muon"),
        ("optimizer.lr", "optimizerkind--adamw"),
        ("optimizer.rounds=3", "optimizerkind--muon"),
        ("model.attention.heads", "modelattention"),
        ("model.cell", "modelkind--recurrent"),
        ("model.pattern.position.pairs", "modelpositionkind--rotary"),
        ("source_tokenizer.vocab_size", "tokenizerkind--word"),
        ("data.mixture.weight", "datamixture"),
        ("adapter.rank", "adapter"),
    ],
)
def test_a_setting_has_a_section_in_the_reference(text: str, anchor: str) -> None:
    assert references.find(text) in (("docs/reference/settings.md", anchor), None)
    assert references.setting(text) == anchor and anchor in anchors(generated.settings())


def anchors(page: str) -> set[str]:
    return {references.slug(heading) for heading in re.findall(r"^##+ (.*)$", page, re.M)}


@pytest.mark.parametrize("text", ["data.json", "steps", "x.y", 'data="book.txt"', "weft", "weft/", "nn/mask.py", "F5"])
def test_other_code_is_no_reference(text: str) -> None:
    assert references.find(text) is None


@pytest.mark.parametrize("page", [name for name in page_names() if name.startswith("reference/")])
def test_the_reference_is_that_of_the_code(page: str) -> None:
    """Otherwise: make record-docs PAGE=reference."""
    text = page_path(page).read_text(encoding="utf-8")
    assert generated.generated(text) == text


def test_every_command_has_a_section_in_the_reference() -> None:
    sections = anchors(generated.commands())
    for name in references.commands():
        assert references.command(name) in sections
    assert references.command("weft config show") == "weft-config-show"
    assert references.command("weft train --resume runs/x") == "weft-train"


def schema_keys(schema: dict[str, Any], node: dict[str, Any], inside: str = "") -> Iterator[str]:
    """Yield every dotted key that the JSON Schema of recipes allows."""
    parts = [*node.get("anyOf", ()), *node.get("oneOf", ())] + ([node["items"]] if "items" in node else [])
    for part in parts:
        yield from schema_keys(schema, part, inside)
    if "$ref" in node:
        yield from schema_keys(schema, schema["$defs"][node["$ref"].rpartition("/")[2]], inside)
    for name, field in node.get("properties", {}).items():
        yield f"{inside}{name}"
        yield from schema_keys(schema, field, f"{inside}{name}.")


def test_no_key_of_the_recipe_is_missing() -> None:
    schema = Recipe.model_json_schema()
    assert set(schema_keys(schema, schema)) == set(references.setting_anchors())


def test_every_key_has_a_description() -> None:
    missing = []
    for name, kinds in references.tables().items():
        for kind in kinds if references.described_at(name) == name else ():
            assert kind.__doc__, f"{kind.__name__} has no docstring"
            for key, field in kind.model_fields.items():
                if key != "kind" and not (field.description or generated.about_table(f"{name}.{key}".lstrip("."))):
                    missing.append(f"{kind.__name__}.{key}")
    assert not missing


def test_every_command_has_an_example() -> None:
    page = generated.commands()
    sections = dict(re.findall(r"^### `([^`]+)`\n(.*?)(?=^##|\Z)", page, re.M | re.S))
    examples = {name: "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S)) for name, text in sections.items()}
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
