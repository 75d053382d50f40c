"""Documents of all kinds of sources, in sections; errors that name file and line."""

import csv
import gzip
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data import sources, streams
from weft.data.config import FilesSplit, TextSource
from weft.data.sources import Document, find_files, read_documents
from weft.data.split import split_sections
from weft.errors import DataError

many = settings(max_examples=25, deadline=None)

TEXT = st.text(
    st.sampled_from("ab é漢🎈 \t\n\r") | st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")
)


def skipped(sources: list[str], column: str | None = None, held_out: Sequence[str] = ()) -> list[str]:
    """Log lines about skipped files."""
    lines: list[str] = []
    find_files(sources, column, log=lines.append, held_out=held_out)
    return lines


def texts(*sources: Path | str, column: str = "text") -> list[str]:
    return [document.text for document in read_documents([str(source) for source in sources], column=column)]


# ---- sections


@many
@given(TEXT, st.integers(16, 64), st.integers(1, 50))
def test_sections_concatenate_to_the_text(text: str, section: int, block: int) -> None:
    raw = text.encode()
    blocks = [raw[i : i + block] for i in range(0, len(raw), block)]
    sections = list(sources._divide(blocks, "x", section))
    assert "".join(s.text for s in sections) == text
    assert all(0 < len(s.text.encode()) <= section for s in sections)
    assert [s.ends for s in sections] == [False] * (len(sections) - 1) + [True] * bool(sections)
    for before, after in pairwise(sections):
        assert not (before.text.endswith("\r") and after.text.startswith("\n"))


def test_sections_of_long_text_do_not_depend_on_blocks() -> None:
    raw = ("word " * 5000).encode()
    small = [raw[i : i + 7] for i in range(0, len(raw), 7)]
    assert list(sources._divide([raw], "x", 1024)) == list(sources._divide(small, "x", 1024))


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a" * 20 + "\n\n" + "b\nc d" * 10, "a" * 20 + "\n\n"),
        ("a" * 20 + "\r\n\r\n" + "b\nc d" * 10, "a" * 20 + "\r\n\r\n"),
        ("a" * 20 + "\n" + "b c" + "d" * 30, "a" * 20 + "\n"),
        ("a" * 20 + " b" + "d" * 30, "a" * 20),
        ("é" * 40, "é" * 16),
        ("x" + "é" * 40, "x" + "é" * 15),
        ("🎈" * 3 + "xyz" + "🎈" * 40, "🎈" * 3 + "xyz" + "🎈" * 4),
        ("a" * 31 + "\r\n" + "a" * 9, "a" * 31),
    ],
)
def test_a_section_ends_at_a_paragraph_a_line_or_a_word(text: str, first: str) -> None:
    assert next(sources._divide([text.encode()], "x", 32)).text == first


def test_one_long_line_is_read_in_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "line.txt"
    file.write_bytes(b"x" * 5_000_000)
    longest = total = 0
    for document in read_documents([str(file)]):
        longest, total = max(longest, len(document.text)), total + len(document.text)
    assert (longest, total) == (sources.SECTION, 5_000_000)


# ---- formats


ROWS = ["first", 'second, with "quotes"\nand a line', "dritte Zeile: äöü 漢 🎈"]


def as_jsonl() -> bytes:
    return "".join(json.dumps({"text": row, "n": 1}) + "\n" for row in ROWS).encode()


def as_csv() -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows([["n", "text"], *([1, row] for row in ROWS)])
    return out.getvalue().encode()


def as_parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": ROWS, "n": [1, 2, 3]}), out)
    return out.getvalue()


FORMATS: dict[str, Callable[[], bytes]] = {
    "jsonl": as_jsonl,
    "ndjson": as_jsonl,
    "json": lambda: json.dumps([{"text": row} for row in ROWS], indent=1).encode(),
    "csv": as_csv,
    "parquet": as_parquet,
}
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_documents(tmp_path: Path, kind: str, compression: str) -> None:
    file = tmp_path / f"rows.{kind}{compression}"
    file.write_bytes(COMPRESSORS[compression](FORMATS[kind]()))
    assert list(read_documents([str(file)])) == [Document(row, True) for row in ROWS]


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("suffix", ["", *[".txt", ".md", ".py", ".log", ".tex", ".html", ".rst", ".any-thing"]])
def test_text_files_are_one_document(tmp_path: Path, suffix: str, compression: str) -> None:
    file, text = tmp_path / f"text{suffix}{compression}", "a line\r\n\n" * 5000
    file.write_bytes(COMPRESSORS[compression](text.encode()))
    sections = list(read_documents([str(file)]))
    assert "".join(s.text for s in sections) == text
    assert [s.ends for s in sections] == [False] * (len(sections) - 1) + [True]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("quote.tsv", b'text\tlabel\n"so it goes\t1\nwell\t0\n', ['"so it goes', "well"]),  # not a quoted field
        ("strings.json", b'["one", "two"]', ["one", "two"]),
        ("objects.json", b'{"text": "one"}\n\n{"text": "two"}', ["one", "two"]),
        ("empty_rows.jsonl", b'{"text": null}\n\n{"text": ""}\n{"text": "x"}', ["x"]),
        ("mark.txt", b"\xef\xbb\xbfhello", ["hello"]),
        ("mark.csv", b"\xef\xbb\xbftext\nhello\n", ["hello"]),
        ("frames.txt.zst", zstandard.compress(b"one ") + zstandard.compress(b"two"), ["one two"]),
    ],
)
def test_variants_of_formats(tmp_path: Path, name: str, content: bytes, expected: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == expected


def test_a_json_list_on_one_line_is_parsed_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BLOCK", 7)
    (tmp_path / "a.json").write_text(json.dumps([{"text": f"é {n}"} for n in range(50)], ensure_ascii=False))
    assert texts(tmp_path / "a.json") == [f"é {n}" for n in range(50)]


# ---- sources


def test_text_files_of_folders_and_globs_are_sorted(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/2.txt", "a.md", "c.jsonl.gz", "x.png", "b/.hidden.txt"):
        (tmp_path / name).write_bytes(b"\x89PNG\0" if name == "x.png" else b"")
    found = [os.path.relpath(name, tmp_path) for name in find_files([str(tmp_path)])]
    assert found == ["a.md", "b/2.txt", "c.jsonl.gz"]
    assert find_files([str(tmp_path / "**" / "*.txt")]) == [str(tmp_path / "b/2.txt")]


def test_empty_files_and_unreadable_plans_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "plan.json").symlink_to("nowhere.json")
    assert texts(tmp_path) == ["text"]
    assert skipped([str(tmp_path)]) == [f"{tmp_path}: skipped plan.json (not a file)"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    assert texts("-") == ["from a pipe"]


def test_the_builtin_corpus() -> None:
    documents = read_documents(["builtin:python"])
    assert len("".join(next(documents).text for _ in range(20))) > 1000


# ---- unreadable files


BROKEN: dict[str, tuple[bytes | Callable[[], bytes] | None, str]] = {
    "absent.txt": (None, "no such file"),
    "empty.txt": (b"", "contains no text"),
    "blank.txt": (b" \n\n", "no text at all"),
    "nul.txt": (b"text\0text", "looks binary.* NUL byte at byte 4"),
    "image.txt": (b"\x89PNG\r\n\x1a\n\x01\x02\x03\x04\x05", "looks like a PNG image, not text$"),
    "latin.txt": (b"plain text, caf\xe9 au lait", r"not valid UTF-8 at byte 15 \(0xe9\)"),
    "wide.txt": ("text".encode("utf-16"), "UTF-16"),
    "data.pdf": (b"%PDF-1.7\n%\xe2\xe3", "looks like a PDF, not text$"),
    "noise.bin": (bytes(range(1, 256)), "looks binary: 25 of its first 255 bytes are control characters, not text$"),
    "damaged.txt": ("é à ü ö ß\n".encode() * 3 + b"\xe9 x", "at byte 45 .*, although the text around it is; correct"),
    "line.jsonl": (b'{"text": "a"}\n{"text": \n', "jsonl:2: is not valid JSON"),
    "column.jsonl": (b'{"content": "a", "id": 1}', "no column 'text'; its columns: content, id"),
    "number.jsonl": (b'{"text": 3}', "jsonl:1: 'text' holds int"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}', "lone surrogate"),
    "deep.jsonl": (b"[" * 100_000, "jsonl:1: is not valid JSON"),
    "list.json": (b'[{"text": "a"},\n{"text": "b"}', "line 2 is not valid JSON: ',' or ']' expected"),
    "comma.json": (b'["a"\n"b"]', "line 2 is not valid JSON"),
    "cut.json": (b'["a",\n{"text": "b', "line 2 is not valid JSON"),
    "after.json": (b'["a"] x', "after the end of the list"),
    "column.csv": (b"id,body\n1,x\n", "no column 'text'; its columns: id, body"),
    "fields.csv": (b"text,n\na,1\nb\n", "csv:3: has 1 field, the header has 2"),
    "quote.csv": (b'text\n"never closed\n', "line 2 cannot be read as a table"),
    "column.parquet": (as_parquet, "no column 'body'"),
    "damaged.parquet": (lambda: as_parquet()[:-20], "not a readable Parquet file"),
    "truncated.txt.gz": (gzip.compress(b"text" * 1000)[:-12], "truncated or damaged gzip"),
    "other.txt.gz": (b"not gzip", "truncated or damaged gzip"),
    "truncated.txt.zst": (zstandard.compress(bytes(range(1, 256)) * 9)[:-9], "zstd"),
    "other.txt.zst": (b"not zstd", "damaged zstd"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_errors_name_the_problem_and_its_location_in_one_line(tmp_path: Path, name: str) -> None:
    content, message = BROKEN[name]
    if content is not None:
        (tmp_path / name).write_bytes(content() if callable(content) else content)
    with pytest.raises(DataError, match=message) as caught:
        texts(tmp_path / name, column="body" if name == "column.parquet" else "text")
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_row_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_ROW_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "' + "x" * (1 << 21) + '"}\n')
    with pytest.raises(DataError, match="line 2 is longer than 1 MiB"):
        texts(tmp_path / "a.jsonl")


def test_sources_without_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no text"):
        find_files([str(tmp_path)])
    with pytest.raises(DataError, match="no file matches"):
        find_files([str(tmp_path / "*.txt")])
    with pytest.raises(DataError, match="no such built-in corpus"):
        texts("builtin:pyton")
    (tmp_path / "shakespeare.txt").write_text("x")
    with pytest.raises(DataError, match=r"did you mean '.*shakespeare\.txt'"):
        find_files([str(tmp_path / "shakespear.txt")])


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(streams, "open", Mock(side_effect=PermissionError(13, "Permission denied")), raising=False)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        texts(tmp_path / "a.txt")


def test_hub_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_files(["owner/name", "hub:a/b"]) == ["hub:owner/name", "hub:a/b"]
    (tmp_path / "owner").mkdir()
    with pytest.raises(DataError, match="no such file"):  # the folder is here: a mistyped path
        find_files(["owner/name"])
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"weft\[hub\]"):
        texts("hub:a/b")


def test_hub_datasets_are_read_file_by_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(as_jsonl())
    names = ["README.md", "dataset_infos.json", "test.jsonl", "train.jsonl"]
    list_files = Mock(return_value=names)
    hub = SimpleNamespace(
        HfApi=lambda: SimpleNamespace(list_repo_files=list_files),
        hf_hub_download=lambda name, file, repo_type: str(tmp_path / file),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert texts("hub:a/b") == ROWS
    list_files.side_effect = ConnectionError("no route to host\nand more lines")
    with pytest.raises(DataError, match=r"no such file here, and weft couldn't reach the hub$"):
        texts("hub:a/b")


def test_parquet_without_pyarrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(as_parquet())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"weft\[parquet\]"):
        texts(tmp_path / "a.parquet")


# ---- files that are not text


def test_skipped_files_of_a_folder_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    (folder / ".git").mkdir()
    texts = ("a.py", "b.txt", "deeper/LICENSE", "deeper/c.unknown")
    for name in (*texts, ".hidden.txt", ".git/x.py"):
        (folder / name).write_text("some text\n")
    for name in ("a.png", "b.so", "deeper/d.txt", "deeper/packed.dat.gz"):
        (folder / name).write_bytes((gzip.compress if name.endswith(".gz") else bytes)(b"\x7fELF\0\1\2"))
    (folder / "gone.txt").symlink_to("nowhere.txt")
    (tmp_path / "elsewhere").mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "run").mkdir()
    for name in ("config.toml", "tokenizer.json"):
        (folder / "run" / name).write_text("")
    assert find_files([str(folder)]) == [str(folder / name) for name in texts]
    for _ in range(2):  # warned about once, even if read more often
        assert len(list(read_documents([str(folder)]))) == len(texts)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"weft: {folder}: skipped a.png, b.so, deeper/d.txt, deeper/packed.dat.gz (not text); gone.txt (not a file)"
    )
    assert "; linked (a link to a folder; name it as well)" in line
    assert "; run (made by weft)" in line
    assert "hidden" not in line and ".git" not in line


def test_many_skipped_files_are_counted(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.pyc").write_bytes(b"\xa7\r\r\n\0\0")
    (tmp_path / "a.txt").write_text("text\n")
    (line,) = skipped([str(tmp_path), "builtin:python", "-"])
    assert line.endswith("00.pyc, 01.pyc, 02.pyc, 03.pyc, 04.pyc and 35 more (not text)")
    pattern = str(tmp_path / "*")
    assert find_files([pattern]) == [str(tmp_path / "a.txt")]
    assert "and 35 more (not text)" in skipped([pattern])[0]
    with pytest.raises(DataError, match=r"\*\.pyc: no file that matches is text$"):
        find_files([str(tmp_path / "*.pyc")])


def test_nothing_is_logged_if_only_hidden_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / ".notes").write_text("mine\n")
    assert skipped([str(tmp_path)]) == []


# ---- other encodings


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "Le café était fermé à cause de l’été. Où vas-tu, élève ?"),
        ("cp1250", "Był piękny dzień, więc poszliśmy na spacer; słońce świeciło mocno."),
        ("mac_roman", "Le café était fermé à cause de l’été. Où vas-tu, élève ?"),
        ("cp1251", "Привет, мир! Это простой текст на русском языке."),
        ("koi8_r", "Привет, мир! Это простой текст на русском языке."),
        ("cp1253", "Καλημέρα κόσμε, αυτό είναι ένα κείμενο."),
        ("shift_jis", "吾輩は猫である。名前はまだ無い。"),
        ("euc_jp", "吾輩は猫である。名前はまだ無い。"),
        ("euc_kr", "이것은 한국어 문장입니다. 수도는 서울이다."),
        ("gb18030", "天下大势，分久必合，合久必分。话说周末七国分争，并入于秦。"),
        ("big5", "天下大勢，分久必合，合久必分。話說周末七國分爭，並入於秦。"),
        ("utf-16", "any text"),
        ("utf-16-le", "any text"),
    ],
)
@pytest.mark.parametrize("kind", ["txt", "csv", "jsonl", "json"])
def test_the_suggested_encoding_reads_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, text: str, kind: str
) -> None:
    rows = [f"{number} {text}" for number in range(20)]
    content = {
        "txt": "\n".join(rows),
        "csv": "text,n\n" + "".join(f'"{row}",1\n' for row in rows),
        "jsonl": "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows),
        "json": json.dumps(rows, ensure_ascii=False),
    }[kind]
    file = tmp_path / f"old.{kind}"
    file.write_bytes(content.encode(encoding))
    with pytest.raises(
        DataError, match=rf"data\.encoding={encoding} .*--encoding {encoding}\).* iconv -f \S+ -t utf-8"
    ):
        texts(file)
    monkeypatch.setattr(streams, "BLOCK", 61)  # ends inside characters
    documents = [document.text for document in read_documents([str(file)], encoding=encoding)]
    assert documents == ([content] if kind == "txt" else rows)


@pytest.mark.parametrize(
    ("name", "content", "encoding", "message"),
    [
        ("a.txt", b"text " * 100 + b"\xff", "ascii", "not valid ascii at byte 500; is data.encoding its encoding?"),
        ("odd.txt", "text".encode("utf-16") + b"x", "utf-16", "not valid utf-16 at byte 10"),
        ("a.png", b"\x89PNG\r\n", "latin1", "looks like a PNG image, not text"),
    ],
)
def test_bytes_invalid_in_an_encoding(tmp_path: Path, name: str, content: bytes, encoding: str, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: {re.escape(message)}"):
        list(read_documents([str(tmp_path / name)], encoding=encoding))


def test_tables_without_the_column_are_skipped_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a program's settings beside its code. As the only sources, they are errors."""
    (tmp_path / "app.py").write_text("print('on')\n")
    (tmp_path / "prices.csv").write_text("item,price\napple,1\n")
    (tmp_path / "settings.json").write_text('{"debug": true}')
    (tmp_path / "tsconfig.json").write_text("// comment\n{}")
    (tmp_path / "said.csv").write_text("text\nhello\n")
    assert texts(tmp_path) == ["print('on')\n", "hello"]
    why = "prices.csv, settings.json (no column 'text'; data.column names another); tsconfig.json (no rows of text)"
    assert skipped([str(tmp_path)], "text") == [f"{tmp_path}: skipped {why}"]
    assert why in " ".join(capsys.readouterr().err.split())
    assert len(find_files([str(tmp_path)])) == 5  # without a column, tables are not examined
    with pytest.raises(DataError, match=r"no column 'text'; its columns: item, price"):
        texts(tmp_path / "prices.csv")
    for name in ("app.py", "said.csv", "tsconfig.json"):
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match=r"prices\.csv: no column 'text'; its columns: item, price"):
        texts(tmp_path)


# ---- files with several names


def test_a_pattern_reads_each_file_once_despite_cyclic_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d/sub/deep").mkdir(parents=True)
    for name in ("a", "sub/b", "sub/deep/c", "sub/deep/.hidden"):
        (tmp_path / f"d/{name}.txt").write_text(name)
    for name in ("loop", "sub/loop", "sub/deep/again", "0"):  # followed naively, there are endless paths
        (tmp_path / f"d/{name}").symlink_to(tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    names = ["d/a.txt", "d/sub/b.txt", "d/sub/deep/c.txt"]
    for pattern in ("d/**/*.txt", "**/*.txt", "**", "d/**/**", f"{tmp_path}/**/?.txt"):
        assert [os.path.relpath(name) for name in find_files([pattern])] == names
    assert find_files(["d/**/loop/*.txt"]) == ["d/loop/a.txt"]  # a link named in the pattern is followed
    assert find_files(["d/*/*.txt"]) == ["d/0/a.txt", "d/sub/b.txt"]
    assert "d/loop/a.txt (the same file as another that is read)" in skipped(["d/*/*.txt"])[0]
    already = "(a link to a folder that is read already)"
    assert skipped(["d/**/*.txt"]) == [f"d/**/*.txt: skipped d/0, d/loop, d/sub/deep/again, d/sub/loop {already}"]
    assert texts("d/**/*.txt", "d", "d/loop") == ["a", "sub/b", "sub/deep/c"]


def test_a_file_with_several_names_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to("text.txt")
    os.link(tmp_path / "text.txt", tmp_path / "z.txt")
    (tmp_path / "copy.txt").write_text("a")  # equal content, but another file
    assert find_files([str(tmp_path)]) == [str(tmp_path / "copy.txt"), str(tmp_path / "text.txt")]
    assert skipped([str(tmp_path)]) == [f"{tmp_path}: skipped z.txt, link.txt (the same file as another that is read)"]
    assert texts(tmp_path / "z.txt", tmp_path / "link.txt") == ["a"]
    assert find_files(["builtin:python", "-"], held_out=["builtin:python", "-"]) == ["builtin:python", "-"]


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 1000)
    (tmp_path / "b.txt").write_text("b" * 1000)
    (tmp_path / "link.txt").symlink_to("b.txt")
    held_out = [str(tmp_path / "link.txt")]
    assert find_files([str(tmp_path)], held_out=held_out) == [str(tmp_path / "a.txt")]
    expected = f"{tmp_path}: skipped b.txt, link.txt (held out for validation)"
    assert skipped([str(tmp_path)], held_out=held_out) == [expected]
    with pytest.raises(DataError, match="held out for validation, all of it; name other text to train on"):
        find_files([str(tmp_path / "b.txt")], held_out=held_out)
    text = TextSource([str(tmp_path)], FilesSplit(sources=tuple(held_out)))
    sides = {(section.side, section.text[0]) for section in split_sections(text)}
    assert sides == {("train", "a"), ("validation", "b")}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", ["", ".txt", ".jsonl", ".parquet", ".gz"])
def test_a_pipe_is_refused_without_blocking(tmp_path: Path, suffix: str) -> None:
    """Text is read more than once: a second pass over a pipe would miss the beginning or block."""
    pipe = tmp_path / f"pipe{suffix}"
    os.mkfifo(pipe)
    for name in (pipe, Path("/dev/zero")):
        with pytest.raises(DataError, match=f"^{name}: a pipe or a device, but text is read more than once"):
            list(read_documents([str(name)]))
    (tmp_path / "text.txt").write_text("text")
    assert find_files([str(tmp_path)]) == [str(tmp_path / "text.txt")]


def test_many_or_long_columns_make_a_short_message(tmp_path: Path) -> None:
    table = tmp_path / "wide.csv"
    for header in (",".join(f"column{number}" for number in range(1_000_000)), "x" * 10_000_000):
        table.write_text(f"{header}\n1\n")
        with pytest.raises(DataError, match=r"no column 'text'; its columns: .*…") as raised:
            list(read_documents([str(table)]))
        assert len(str(raised.value)) < 2000


def test_a_large_decompressed_size_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(streams, "ANNOUNCED_BYTES", 1 << 21)
    (tmp_path / "little.gz").write_bytes(gzip.compress(b"a line of text\n" * 1000))
    (tmp_path / "much.txt.zst").write_bytes(zstandard.compress(b"a line of text\n" * 300_000))
    for name in ("little.gz", "much.txt.zst"):
        assert all(streams.blocks(str(tmp_path / name)))
    size = (tmp_path / "much.txt.zst").stat().st_size
    message = f"{size:,} compressed bytes contain more than 2 MiB of text; decompressing all of it"
    assert capsys.readouterr().err == f"weft: {tmp_path}/much.txt.zst: {message}\n"
