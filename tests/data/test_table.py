"""Rows with named columns: formats, invalid rows, the held-out split and decompression bombs."""

import contextlib
import gzip
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data import rows as rows_module
from weft.data import streams
from weft.data.config import FilesSplit, HashSplit, NoSplit, TailSplit
from weft.data.shards import SIDES
from weft.data.split import split_rows
from weft.data.table import Kind, Row, RowSource, SkippedRows, read_rows
from weft.errors import DataError

Columns = Mapping[str, Kind]
PAIRS: Columns = {"source": "text", "target": "text"}


def put(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def values(*sources: str, columns: Columns, skipped: SkippedRows | None = None, **options: Any) -> list[dict[str, Any]]:
    return [row.values for row in read_rows(RowSource(sources, columns, **options), skipped=skipped)]


# ---- formats


def test_rows_of_a_table_have_line_numbers(tmp_path: Path) -> None:
    name = put(tmp_path / "a.tsv", 'text\tlabel\n"so it goes \tsad\n\nwell \tglad\n')
    rows = list(read_rows(RowSource([name], {"label": "label", "text": "text"})))
    assert rows == [
        Row({"label": "sad", "text": '"so it goes'}, f"{name}:2"),
        Row({"label": "glad", "text": "well"}, f"{name}:4"),
    ]


def test_integers_index_the_columns_of_a_table_without_a_header(tmp_path: Path) -> None:
    name = put(tmp_path / "a.tsv", "x\t1\t\tone\ny\t0\t*\ttwo\n")
    assert values(name, columns={"3": "text", "1": "label"}) == [{"3": "one", "1": "1"}, {"3": "two", "1": "0"}]
    with pytest.raises(DataError, match=r"a\.tsv: no column '4'; its columns: 0, 1, 2, 3"):
        values(name, columns={"4": "text"})
    uneven = put(tmp_path / "b.tsv", "a\t1\nb\n")
    with pytest.raises(DataError, match=r"b\.tsv:2: does not have the 2 fields of the first line"):
        values(uneven, columns={"0": "text"})


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json"])
def test_all_formats_have_the_same_rows(tmp_path: Path, suffix: str, compression: str) -> None:
    rows = [{"source": "a, b", "target": "ä"}, {"source": "c", "target": "d"}]
    content = {
        ".csv": 'id,target,source\n1,ä,"a, b"\n2,d,c\n',
        ".tsv": "source\tid\ttarget\na, b\t1\tä\nc\t2\td\n",
        ".jsonl": "\n".join(json.dumps(row | {"id": 1}) for row in rows),
        ".json": json.dumps(rows, indent=1),
    }[suffix].encode()
    compressors: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}
    content = compressors.get(compression, bytes)(content)
    assert values(put(tmp_path / f"a{suffix}{compression}", content), columns=PAIRS) == rows


def test_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    name = str(tmp_path / "a.parquet")
    table = pyarrow.table({"text": ["a", "b"], "score": [0.5, 2], "words": [["x"], ["y", "z"]]})
    parquet.write_table(table, name)
    rows = list(read_rows(RowSource([name], {"text": "text", "score": "number", "words": "words", "more": "optional"})))
    assert rows[1] == Row({"text": "b", "score": 2.0, "words": ["y", "z"], "more": ""}, f"{name}:2")
    with pytest.raises(DataError, match="no column 'scores'; did you mean 'score'"):
        values(name, columns={"scores": "text"})


def test_parallel_files_of_any_suffix(tmp_path: Path) -> None:
    source, target = put(tmp_path / "a.en", "one\r\ntwo\n"), put(tmp_path / "a.de", "eins\nzwei")
    rows = list(read_rows(RowSource([source], PAIRS, [target])))
    assert [row.values for row in rows] == [{"source": "one", "target": "eins"}, {"source": "two", "target": "zwei"}]
    assert rows[1].where == f"{source}:2, {target}:2"


def test_parallel_files_must_be_equally_long(tmp_path: Path) -> None:
    source, target = put(tmp_path / "a.en", "one\ntwo\nthree\n"), put(tmp_path / "a.de", "eins\n")
    with pytest.raises(DataError, match=r"a\.en has 3 lines, .*a\.de has 1"):
        values(source, columns=PAIRS, targets=[target])
    with pytest.raises(DataError, match="2 source files and 1 target files"):
        values(source, source, columns=PAIRS, targets=[target])
    with pytest.raises(DataError, match=r"no such file; did you mean '.*a\.de'"):
        values(source, columns=PAIRS, targets=[str(tmp_path / "a.dd")])
    with pytest.raises(DataError, match="has both sides in its columns"):
        values(source, columns=PAIRS, targets=[put(tmp_path / "a.tsv", "x")])


def test_a_text_file_has_one_row_per_line(tmp_path: Path) -> None:
    assert values(put(tmp_path / "a.txt", "one\ntwo\n"), columns={"text": "text"}) == [{"text": "one"}, {"text": "two"}]


def test_built_in_tasks_have_their_own_split() -> None:
    rows = list(split_rows(RowSource(["builtin:reverse"], PAIRS), HashSplit()))
    train, validation = ({row.values["source"] for row in rows if row.side == side} for side in SIDES)
    assert train and validation and not train & validation
    assert rows[0].where == "builtin:reverse:1"
    with pytest.raises(DataError, match="no such task or corpus; did you mean 'reverse'"):
        values("builtin:revers", columns=PAIRS)


# ---- invalid rows


WRONG = {
    '{"text": "a", "label": ': "is not valid JSON",
    '{"text": "a", "lable": 1}': r"no column 'label'; did you mean 'lable'\? its columns: text, lable",
    '{"text": " ", "label": 1}': "'text' is empty",
    '{"text": null, "label": 1}': "'text' is empty",
    '{"text": 3, "label": 1}': "'text' holds int, not text",
    '{"text": "a", "label": ""}': "'label' is empty",
    '{"text": "a", "label": [1]}': "'label' holds list",
    '{"text": "a", "label": 1.5}': "'label' holds float",
    '{"text": "\\ud800", "label": 1}': "'text' contains a NUL character or a lone surrogate",
    "7": "a row is an object with columns: this one is int",
}


@pytest.mark.parametrize(("line", "message"), WRONG.items())
def test_an_invalid_row_is_reported_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    name = put(tmp_path / "a.jsonl", f'{{"text": "fine", "label": true}}\n\n{line}\n{{"text": "z", "label": 0}}\n')
    columns: Columns = {"text": "text", "label": "label"}
    with pytest.raises(DataError, match=rf"^.*a\.jsonl:3: {message}") as caught:
        values(name, columns=columns)
    assert "\n" not in str(caught.value)
    skipped = SkippedRows()
    valid = values(name, columns=columns, on_error="skip", skipped=skipped)
    assert valid == [{"text": "fine", "label": "true"}, {"text": "z", "label": "0"}]
    assert skipped.total == 1
    assert str(skipped).startswith("1 row was skipped: 1 × ") and "a.jsonl:3" in str(skipped)


@pytest.mark.parametrize("number", ["x", "nan", "inf", "", "1e999"])
def test_numbers_must_be_finite(tmp_path: Path, number: str) -> None:
    name = put(tmp_path / "a.csv", f"id,score\n1,0.25\n2,{number}\n")
    with pytest.raises(DataError, match=r"a\.csv:3: 'score' is (not a finite number|empty)"):
        values(name, columns={"score": "number"})
    assert values(name, columns={"score": "number"}, on_error="skip") == [{"score": 0.25}]


def test_reasons_are_counted_without_details(tmp_path: Path) -> None:
    name = put(tmp_path / "a.csv", "id,score\n1,a\n2,b\n3,\n4,1\n")
    skipped = SkippedRows()
    list(read_rows(RowSource([name], {"score": "number"}, on_error="skip"), skipped=skipped))
    assert skipped.counts == {"'score' is not a finite number": 2, "'score' is empty": 1}


def test_files_without_valid_rows_are_refused(tmp_path: Path) -> None:
    name = put(tmp_path / "a.jsonl", "{}\n")
    with pytest.raises(DataError, match="no rows at all; 1 row was skipped: 1 × no column 'text'"):
        values(name, columns={"text": "text"}, on_error="skip")
    with pytest.raises(DataError, match=r"no rows at all$"):
        values(put(tmp_path / "b.jsonl", ""), columns={"text": "text"})
    twice = put(tmp_path / "c.csv", "a,a\n1,2\n")
    with pytest.raises(DataError, match="two columns are called 'a'"):
        values(twice, columns={"a": "text"})


def test_words_and_conversations(tmp_path: Path) -> None:
    name = put(tmp_path / "a.jsonl", '{"words": ["New", "York"], "tags": [1, 1]}\n{"words": "a b", "tags": "x y"}\n')
    assert values(name, columns={"words": "words", "tags": "words"}) == [
        {"words": ["New", "York"], "tags": ["1", "1"]},
        {"words": ["a", "b"], "tags": ["x", "y"]},
    ]
    chat = put(tmp_path / "c.csv", "instruction,output\nAdd 1 and 1.,2\nSay nothing.,\n")
    with pytest.raises(DataError, match=r"c\.csv:3: empty content: message 2 of role assistant"):
        values(chat, columns={"messages": "messages"})
    messages = [{"role": "user", "content": "Add 1 and 1."}, {"role": "assistant", "content": "2"}]
    assert values(chat, columns={"messages": "messages"}, on_error="skip") == [{"messages": messages}]


# ---- training and validation


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=60), st.randoms())
def test_hashes_are_of_inputs_only(tmp_path_factory: pytest.TempPathFactory, texts: list[str], random: Random) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"

    def sides_of(order: list[str]) -> dict[str, set[str]]:
        put(path, "".join(json.dumps({"text": text, "label": n}) + "\n" for n, text in enumerate(order)))
        sides: dict[str, set[str]] = {}
        rows = split_rows(RowSource([str(path)], {"text": "text", "label": "label"}), HashSplit(fraction=0.5))
        with contextlib.suppress(DataError):  # raised at the end, if all rows are on one side
            for row in rows:
                sides.setdefault(row.values["text"], set()).add(row.side)
        assert sides.keys() == set(order)
        return sides

    first = sides_of(texts)
    assert all(len(sides) == 1 for sides in first.values())
    shuffled = [*texts, "something new"]
    random.shuffle(shuffled)
    assert {text: sides for text, sides in sides_of(shuffled).items() if text in first} == first


def test_the_fraction_that_is_held_out(tmp_path: Path) -> None:
    name = put(tmp_path / "a.jsonl", "".join(f'{{"text": "row {n}"}}\n' for n in range(2000)))
    source = RowSource([name], {"text": "text"})
    counts = Counter(row.side for row in split_rows(source, HashSplit(fraction=0.2)))
    assert 320 < counts["validation"] < 480
    for split, count in ((TailSplit(fraction=0.1), 200), (TailSplit(bytes=9), 2)):
        sides = [row.side for row in split_rows(source, split)]
        assert sides == ["train"] * (2000 - count) + ["validation"] * count
    assert {row.side for row in split_rows(source, NoSplit())} == {"train"}


def test_a_tail_needs_no_second_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = put(tmp_path / "a.jsonl", "".join(f'{{"text": "row {n}"}}\n' for n in range(100)))
    lines = Mock(side_effect=streams.lines)
    monkeypatch.setattr(rows_module, "lines", lines)
    rows = list(split_rows(RowSource([name], {"text": "text"}), TailSplit()))
    assert [row.values["text"] for row in rows] == [f"row {n}" for n in range(100)]
    assert [row.side for row in rows] == ["train"] * 90 + ["validation"] * 10
    assert lines.call_count == 1
    pair = [put(tmp_path / f"a.{language}", "one\ntwo\n" * 10) for language in ("en", "de")]
    parallel = RowSource(pair[:1], PAIRS, pair[1:])
    assert [row.side for row in split_rows(parallel, TailSplit())] == ["train"] * 18 + ["validation"] * 2


def test_parallel_files_are_read_once_and_never_if_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lines in {"a.en": "one\n", "a.de": "eins\n", "b.en": "two\n", "b.de": "zwei\n"}.items():
        put(tmp_path / name, lines)
    split = FilesSplit(sources=(str(tmp_path / "b.en"),), targets=(str(tmp_path / "b.de"),))
    expected = [("train", "eins"), ("validation", "zwei")]
    rows = split_rows(RowSource([str(tmp_path / "a.en")], PAIRS, [str(tmp_path / "a.de")]), split)
    assert [(row.side, row.values["target"]) for row in rows] == expected
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "back").symlink_to(tmp_path)
    sources, targets = ([f"{tmp_path}/{folder}/*.{side}" for folder in ("**", "*")] for side in ("en", "de"))
    rows = split_rows(RowSource(sources, PAIRS, targets), split)
    assert [(row.side, row.values["target"]) for row in rows] == expected
    log = capsys.readouterr().err
    assert "loop/a.en" in log and "(the same files as others that are read)" in log
    assert f"{tmp_path}/b.en, {tmp_path}/b.de: skipped (held out for validation)" in log


def test_too_few_rows_to_split_are_refused(tmp_path: Path) -> None:
    name = put(tmp_path / "a.jsonl", '{"text": "a"}\n')
    with pytest.raises(DataError, match=r"1 row, of which none is left for \w+ \(data\.validation\.kind = 'hash'\)"):
        list(split_rows(RowSource([name], {"text": "text"}), HashSplit()))
    with pytest.raises(DataError, match=r"data\.validation\.bytes = 99: the rows have 1 byte;"):
        list(split_rows(RowSource([name], {"text": "text"}), TailSplit(bytes=99)))


# ---- decompression bombs


def dictionary(path: Path, text: str, rows: int, listed: bool = False) -> str:
    """Write a Parquet file that stores a text once and refers to it from every row, or many times from one row."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array([text]))
    if listed:
        column = pyarrow.ListArray.from_arrays(pyarrow.array([0, rows], pyarrow.int32()), column)
    parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd", store_schema=not listed)
    return str(path)


def test_a_repeated_text_of_a_parquet_file_is_in_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_BATCH_BYTES", 1 << 18)
    name = dictionary(tmp_path / "a.parquet", "a" * 250_000, 200)
    tracemalloc.start()
    rows = read_rows(RowSource([name], {"text": "text"}))
    assert sum(len(row.values["text"]) for row in rows) == 50_000_000
    assert tracemalloc.get_traced_memory()[1] < 5_000_000  # without Arrow, which holds the text once
    tracemalloc.stop()


@pytest.mark.parametrize("listed", [False, True])
def test_a_small_parquet_file_with_gigabytes_of_text_is_refused(listed: bool, tmp_path: Path) -> None:
    name = dictionary(tmp_path / "a.parquet", "a" * 5_000_000, 256, listed)
    assert Path(name).stat().st_size < 10_000
    with pytest.raises(DataError, match=r"compressed bytes contain more than 1,024 MiB; .*WEFT_LIMITS=2"):
        list(read_rows(RowSource([name], {"text": "words" if listed else "text"})))


@pytest.mark.parametrize("suffix", [".parquet.gz", ".jsonl.gz", ".txt.zst"])
def test_implausible_compression_is_refused(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_DECOMPRESSED_BYTES", 1 << 22)
    compress = gzip.compress if suffix.endswith("gz") else zstandard.compress
    name = put(tmp_path / f"a{suffix}", compress((b'"' + b"a" * 65533 + b'"\n') * 128))
    with pytest.raises(DataError, match=r": [\d,]+ compressed bytes contain more than 4 MiB; the bound"):
        values(name, columns={"text": "text"})
    monkeypatch.setenv("WEFT_LIMITS", "100")
    if suffix == ".txt.zst":
        assert len(values(name, columns={"text": "text"})) == 128


@pytest.mark.parametrize("suffix", [".txt.gz", ".txt.zst"])
def test_an_implausible_file_is_refused_before_any_of_its_text_is_read(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_DECOMPRESSED_BYTES", 1 << 23)
    compress = gzip.compress if suffix.endswith("gz") else zstandard.compress
    name = put(tmp_path / f"a{suffix}", compress(b"a tale\n" * (1 << 21)))
    with pytest.raises(DataError, match="contain more than 8 MiB"):
        next(streams.blocks(name))


@pytest.mark.parametrize("row", ["[" * 100_000, '{"text": ' * 100_000, '{"text": ' + "1" * 10_000 + "}"])
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_pathological_json_is_reported_in_one_line(row: str, suffix: str, tmp_path: Path) -> None:
    name = put(tmp_path / f"a.{suffix}", row + "\n")
    with pytest.raises(DataError, match="valid JSON") as caught:
        values(name, columns={"text": "text"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("column", ["number", "label", "text"])
def test_long_numbers_raise_no_other_error(column: Kind, tmp_path: Path) -> None:
    name = put(tmp_path / "a.csv", f"x\n{'9' * 5000}\n")
    with contextlib.suppress(DataError):
        assert len(values(name, columns={"x": column})) == 1
