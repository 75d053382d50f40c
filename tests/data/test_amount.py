"""The amount of text in sources, estimated without reading them completely."""

import csv
import gzip
import io
import json
import random
import sys
import time
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import zstandard
from tests.spread import spread

from weft.data import amount as module
from weft.data import streams
from weft.data.amount import Amount, amount
from weft.data.config import NoSplit, TailSplit, TextSource
from weft.data.sources import read_documents
from weft.data.split import split_sections
from weft.data.table import RowSource, read_rows
from weft.errors import DataError
from weft.storage.files import utf8_size

WORDS = ["weft", "warp", "loom", "thread", "größer", "漢字", "cloth", "🎈"]


@cache
def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 60))) for _ in range(count)]


def exact_size(source: str) -> int:
    return sum(utf8_size(document.text) for document in read_documents([source]))


def write(path: Path, texts: list[str]) -> str:
    """Write texts in the format of the path's suffix, each with a number and a label."""
    rows = [{"id": number, "text": text, "label": "a label"} for number, text in enumerate(texts)]
    kind = path.name.split(".")[1]
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return str(path)
    if kind in ("csv", "tsv"):
        stream = io.StringIO(newline="")
        writer = csv.DictWriter(stream, ["id", "text", "label"], delimiter="," if kind == "csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
        data = stream.getvalue().encode()
    else:
        data = {
            "txt": "\n".join(texts).encode(),
            "jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(),
            "json": json.dumps(rows, indent=2).encode(),
        }[kind]
    if path.suffix == ".gz":
        data = gzip.compress(data, 1)
    elif path.suffix == ".zst":
        data = zstandard.compress(data)
    path.write_bytes(data)
    return str(path)


KINDS = ("txt", "txt.gz", "txt.zst", "jsonl", "json", "csv", "tsv", "parquet", "jsonl.gz", "csv.zst")
FORMATS = [f"a.{kind}" for kind in KINDS]


@pytest.mark.parametrize("name", FORMATS)
def test_the_amount_of_a_small_file_is_exact(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, texts(40))
    assert amount([source]) == Amount(exact_size(source))


@pytest.mark.parametrize("name", spread(FORMATS, 4))
def test_the_amount_of_a_large_file_is_estimated(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, texts(6_000))
    began = time.perf_counter()
    estimate = amount([source])
    assert time.perf_counter() - began < 1.5  # seconds, on a busy machine; usually milliseconds
    assert estimate.exact == (name == "a.txt")
    assert estimate.bytes == pytest.approx(exact_size(source), rel=0.05)


def test_only_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", texts(6_000))
    read: list[str] = []

    def record(name: str, encoding: str) -> Iterator[str]:
        for line in streams.lines(name, encoding):
            read.append(line)
            yield line

    monkeypatch.setattr(module, "lines", record)
    assert not amount([source]).exact
    assert sum(map(utf8_size, read)) < 2 * module.SAMPLE


def test_compressed_files_of_several_frames(tmp_path: Path) -> None:
    """The size that a gzip file records at its end is that of its last member only."""
    parts = ["\n".join(texts(3000, seed)).encode() for seed in range(6)]
    (tmp_path / "a.txt.gz").write_bytes(b"".join(gzip.compress(part, 1) for part in parts))
    (tmp_path / "b.txt.zst").write_bytes(b"".join(map(zstandard.compress, parts)))
    for name in ("a.txt.gz", "b.txt.zst"):
        estimate = amount([str(tmp_path / name)])
        assert not estimate.exact and estimate.bytes == pytest.approx(sum(map(len, parts)), rel=0.1)


def test_columns(tmp_path: Path) -> None:
    rows = [{"source": "ab", "target": "cdé", "more": "x" * 100} for _ in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.tsv").write_text("0\tab\n1\tcd\n")
    chat = [{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}]
    (tmp_path / "c.json").write_text(json.dumps(chat))
    assert amount([str(tmp_path / "a.jsonl")], ["source", "target"]) == Amount(60)
    assert amount([str(tmp_path / "b.tsv")], ["1"]) == Amount(4)
    assert amount([str(tmp_path / "c.json")], ["messages"]) == Amount(len("user hello assistant hi") - 3)


def test_folders_and_patterns(tmp_path: Path) -> None:
    sizes = [amount([write(tmp_path / name, texts(30))]).bytes for name in ("a.txt", "b.txt", "c.jsonl")]
    assert amount([str(tmp_path)]) == Amount(sum(sizes))
    assert amount([str(tmp_path / "*.txt")]) == Amount(sizes[0] + sizes[1])
    assert amount([str(tmp_path / "a.txt")] * 3) == Amount(sizes[0])  # a file is read once
    assert amount([]) == Amount(0)
    with pytest.raises(DataError, match="no such file"):
        amount([str(tmp_path / "d.txt")])


def test_a_byte_order_mark_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert amount([str(tmp_path / "a.txt")]) == Amount(3)


def test_built_in_texts() -> None:
    python = amount(["builtin:python"])
    assert python.exact and python.bytes == exact_size("builtin:python")
    dates = amount(["builtin:dates"], ["source", "target"])
    rows = [row.values for row in read_rows(RowSource(["builtin:dates"], {"source": "text", "target": "text"}))]
    assert len(rows) == 20_000
    assert dates.bytes == pytest.approx(sum(len(row["source"]) + len(row["target"]) for row in rows), rel=0.1)


def test_hub_datasets_have_the_sizes_that_the_hub_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [("data/train.jsonl", 1000), ("data/test.jsonl", 500), ("README.md", 70), ("data/train-2.txt", None)]
    siblings = [types.SimpleNamespace(rfilename=name, size=size) for name, size in listed]
    info = types.SimpleNamespace(siblings=siblings)
    hub = types.SimpleNamespace(HfApi=lambda: types.SimpleNamespace(dataset_info=lambda name, files_metadata: info))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert amount(["hub:a/b"]) == Amount(1000, exact=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert amount(["hub:a/b"]) == Amount(0, exact=False)


def test_damaged_files_raise_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": ')
    (tmp_path / "b.txt.gz").write_bytes(b"no gzip at all")
    (tmp_path / "c.json").write_text("[1, 2")
    (tmp_path / "d.csv").write_text("")
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    for path in sorted(tmp_path.iterdir()):
        estimate = amount([str(path)])
        assert estimate.bytes >= 0 and (not estimate.exact or not path.stat().st_size)
    assert amount(["-"]) == Amount(0, exact=False)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("split", [TailSplit(fraction=0.25), TailSplit(bytes=3000)])
def test_a_tail_split_reads_once(tmp_path: Path, name: str, split: TailSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / name, texts(2000))
    text = "".join(section.text for section in split_sections(TextSource([source], NoSplit())))
    reader = Mock(side_effect=read_documents)
    monkeypatch.setattr("weft.data.split.read_documents", reader)
    sides = dict.fromkeys(("train", "validation"), "")
    for section in split_sections(TextSource([source], split)):
        sides[section.side] += section.text
    assert sides["train"] + sides["validation"] == text
    expected = len(text.encode()) // 4 if split.bytes is None else split.bytes
    assert len(sides["validation"].encode()) == pytest.approx(expected, abs=4)
    assert reader.call_count == 1
