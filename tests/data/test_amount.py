"""How much text there is, from the files without reading them."""

import csv
import gzip
import json
import random
import sys
import time
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zstandard

from weft.data import amount as module
from weft.data.amount import Amount, amount
from weft.data.config import NoSplit, TailSplit, TextSource
from weft.data.sources import read
from weft.data.split import split_sections
from weft.data.table import RowSource, read_rows
from weft.errors import DataError
from weft.storage.files import utf8_size

WORDS = ["weft", "warp", "loom", "thread", "größer", "漢字", "cloth", "🎈"]


@cache
def texts(count: int, seed: int = 0) -> list[str]:
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(3, 60))) for _ in range(count)]


def in_truth(source: str, column: str = "text") -> int:
    return sum(utf8_size(document.text) for document in read([source], column=column))


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables.write_table(pyarrow.Table.from_pylist(rows), path)


def write(path: Path, rows: list[str]) -> str:
    """The rows in the format of the path's suffix, with a number and a label beside them."""
    made = [{"id": number, "text": text, "label": "a label"} for number, text in enumerate(rows)]
    kind = path.name.split(".")[1]
    if kind in ("csv", "tsv"):
        raw = path.with_suffix(".raw")
        with raw.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["id", "text", "label"], delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(made)
        data = raw.read_bytes()
    elif kind == "parquet":
        parquet(path, made)
        return str(path)
    else:
        data = {
            "txt": "\n".join(rows).encode(),
            "jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made).encode(),
            "json": json.dumps(made, indent=2).encode(),
        }[kind]
    if path.suffix == ".gz":
        data = gzip.compress(data, 1)
    elif path.suffix == ".zst":
        data = zstandard.compress(data)
    path.write_bytes(data)
    return str(path)


TABLES = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.csv.zst"]
FORMATS = ["a.txt", "a.txt.gz", "a.txt.zst", *TABLES]


@pytest.mark.parametrize("name", FORMATS)
def test_a_small_file_is_known_exactly(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, texts(40))
    found = amount([source])
    assert found.exact and found.bytes == in_truth(source)


@pytest.mark.parametrize("name", FORMATS)
def test_a_large_file_is_known_nearly(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, texts(6_000))
    began = time.perf_counter()
    found = amount([source])
    assert time.perf_counter() - began < 1.5  # seconds, on a busy machine; some milliseconds else
    assert found.exact == (name == "a.txt")
    assert found.bytes == pytest.approx(in_truth(source), rel=0.05)


def test_only_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", texts(6_000))
    lines, read_lines = module.lines, []

    def counted(*given: str) -> Any:
        for line in lines(*given):
            read_lines.append(line)
            yield line

    monkeypatch.setattr(module, "lines", counted)
    assert not amount([source]).exact
    assert sum(map(utf8_size, read_lines)) < 2 * module.SAMPLE


def test_packed_files_of_several_parts(tmp_path: Path) -> None:
    """The size that a gzip file notes at its end is that of its last part alone."""
    parts = ["\n".join(texts(3000, seed)).encode() for seed in range(6)]
    (tmp_path / "a.txt.gz").write_bytes(b"".join(gzip.compress(part, 1) for part in parts))
    (tmp_path / "b.txt.zst").write_bytes(b"".join(map(zstandard.compress, parts)))
    for name in ("a.txt.gz", "b.txt.zst"):
        found = amount([str(tmp_path / name)])
        assert not found.exact and found.bytes == pytest.approx(sum(map(len, parts)), rel=0.1)


def test_columns(tmp_path: Path) -> None:
    rows = [{"source": "ab", "target": "cdé", "more": "x" * 100} for _ in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.tsv").write_text("0\tab\n1\tcd\n")
    chat = [{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}]
    (tmp_path / "c.json").write_text(json.dumps(chat))
    assert amount([str(tmp_path / "a.jsonl")], ["source", "target"]) == Amount(60)
    assert amount([str(tmp_path / "b.tsv")], ["1"]) == Amount(4)
    assert amount([str(tmp_path / "c.json")], ["messages"]) == Amount(len("user hello assistant hi") - 3)


def test_folders_patterns_and_several(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.jsonl"):
        write(tmp_path / name, texts(30))
    each = [amount([str(tmp_path / name)]).bytes for name in ("a.txt", "b.txt", "c.jsonl")]
    assert amount([str(tmp_path)]) == Amount(sum(each))
    assert amount([str(tmp_path / "*.txt")]) == Amount(each[0] + each[1])
    assert amount([str(tmp_path / "a.txt")] * 3) == Amount(each[0])  # a file counts once, as it is read
    assert amount([]) == Amount(0)
    with pytest.raises(DataError, match="no such file"):
        amount([str(tmp_path / "d.txt")])


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert amount([str(tmp_path / "a.txt")]) == Amount(3)


def test_built_in_texts() -> None:
    python = amount(["builtin:python"])
    assert python.exact and python.bytes == in_truth("builtin:python")
    dates = amount(["builtin:dates"], ["source", "target"])
    rows = [row.values for row in read_rows(RowSource(["builtin:dates"], {"source": "text", "target": "text"}))]
    assert len(rows) == 20_000
    assert dates.bytes == pytest.approx(sum(len(row["source"]) + len(row["target"]) for row in rows), rel=0.1)


def test_the_hub_as_far_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [("data/train.jsonl", 1000), ("data/test.jsonl", 500), ("README.md", 70), ("data/train-2.txt", None)]
    siblings = [types.SimpleNamespace(rfilename=name, size=size) for name, size in listed]
    info = types.SimpleNamespace(siblings=siblings)
    hub = types.SimpleNamespace(HfApi=lambda: types.SimpleNamespace(dataset_info=lambda name, files_metadata: info))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert amount(["hub:a/b"]) == Amount(1000, exact=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert amount(["hub:a/b"]) == Amount(0, exact=False)


def test_what_is_wrong_is_for_the_reader_to_say(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": ')
    (tmp_path / "b.txt.gz").write_bytes(b"no gzip at all")
    (tmp_path / "c.json").write_text("[1, 2")
    (tmp_path / "d.csv").write_text("")
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    for path in sorted(tmp_path.iterdir()):
        found = amount([str(path)])
        assert found.bytes >= 0 and (not found.exact or not path.stat().st_size)
    assert amount(["-"]) == Amount(0, exact=False)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("split", [TailSplit(fraction=0.25), TailSplit(bytes=3000)])
def test_a_tail_needs_no_second_reading(
    tmp_path: Path, name: str, split: TailSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / name, texts(2000))
    whole = "".join(section.text for section in split_sections(TextSource([source], NoSplit())))
    opened: list[Any] = []
    monkeypatch.setattr("weft.data.split.read", lambda *args, **more: opened.append(args) or read(*args, **more))
    sides = dict.fromkeys(("train", "validation"), "")
    for section in split_sections(TextSource([source], split)):
        sides[section.side] += section.text
    assert sides["train"] + sides["validation"] == whole
    wanted = len(whole.encode()) // 4 if split.bytes is None else split.bytes
    assert len(sides["validation"].encode()) == pytest.approx(wanted, abs=4)
    assert len(opened) == 1
