"""Files and commands in lectures/README.md exist."""

import re
import shlex

import pytest
from tests.lectures.textbook.lecture import LECTURES

from weft.cli.main import program
from weft.models.presets import PRESETS

FILES = ["ngram", "backprop", "bpe", "rnn", "bahdanau", "transformer", "bert", "gpt", "llama", "decoding", "megatron"]
TABLE = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (LECTURES / "README.md").read_text().splitlines()
    if re.match(r"\| \d", line)
]


def test_all_files_are_listed() -> None:
    assert {file.stem for file in LECTURES.glob("*.py")} == set(FILES)
    assert [re.findall(r"\((\w+)\.py\)", file) for _, file, _, _ in TABLE] == [[name] for name in FILES]


@pytest.mark.parametrize("row", TABLE, ids=FILES)
def test_wefts_files_exist(row: list[str]) -> None:
    named = re.findall(r"`([\w/]+\.py)`", row[2])
    assert named
    for path in named:
        assert (LECTURES.parent / "src" / "weft" / path).is_file(), path


@pytest.mark.parametrize("row", TABLE, ids=FILES)
def test_commands_can_be_parsed(row: list[str]) -> None:
    weft, name, *words = shlex.split(row[3].strip("`| "))
    assert weft == "weft"
    context = program.commands[name].make_context(name, list(words))  # type: ignore[attr-defined]
    if name == "train":
        assert words[0] in PRESETS and context.params["data"]
    if name == "explain":
        assert words[0] in (*PRESETS, "mlp", "parallel")
