import csv
import gzip
import io
import json
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data import sources, streams
from weft.data.config import FilesSplit, TextSource
from weft.data.sources import Document, files, read
from weft.data.split import split_sections
from weft.errors import DataError

many = settings(max_examples=60, deadline=None)

TEXT = st.text(
    st.sampled_from("ab é漢🎈 \t\n\r") | st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")
)


def left_out(sources: list[str], column: str | None = None) -> list[str]:
    lines: list[str] = []
    files(sources, column, tell=lines.append)
    return lines


def texts(*sources: Path | str, column: str = "text") -> list[str]:
    return [document.text for document in read([str(source) for source in sources], column=column)]


# ---- sections


@many
@given(TEXT, st.integers(16, 64), st.integers(1, 50))
def test_sections_concatenate_to_the_text(text: str, section: int, block: int) -> None:
    raw = text.encode()
    blocks = [raw[i : i + block] for i in range(0, len(raw), block)]
    cut = list(sources._cut(blocks, "x", section))
    assert "".join(d.text for d in cut) == text
    assert all(0 < len(d.text.encode()) <= section for d in cut)
    assert [d.ends for d in cut] == [False] * (len(cut) - 1) + [True] * bool(cut)
    for before, after in pairwise(cut):
        assert not (before.text.endswith("\r") and after.text.startswith("\n"))


def test_sections_of_long_text_do_not_depend_on_blocks() -> None:
    raw = ("word " * 5000).encode()
    whole = list(sources._cut([raw], "x", 1024))
    assert whole == list(sources._cut([raw[i : i + 7] for i in range(0, len(raw), 7)], "x", 1024))


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
def test_a_section_ends_at_the_best_place(text: str, first: str) -> None:
    assert next(sources._cut([text.encode()], "x", 32)).text == first


def test_one_long_line_is_read_in_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "line.txt"
    file.write_bytes(b"x" * 5_000_000)
    longest = total = 0
    for document in read([str(file)]):
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
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_documents(tmp_path: Path, kind: str, packer: str) -> None:
    file = tmp_path / f"rows.{kind}{packer}"
    file.write_bytes(PACKERS[packer](FORMATS[kind]()))
    assert list(read([str(file)])) == [Document(row, True) for row in ROWS]


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("kind", ["txt", "md", "", "py", "log", "tex", "html", "rst", "any-thing"])
def test_text_files_are_one_document(tmp_path: Path, kind: str, packer: str) -> None:
    file = tmp_path / (f"text.{kind}{packer}" if kind else f"text{packer}")
    text = "a line\r\n\n" * 5000
    file.write_bytes(PACKERS[packer](text.encode()))
    found = list(read([str(file)]))
    assert "".join(d.text for d in found) == text
    assert [d.ends for d in found].count(True) == 1
    assert found[-1].ends


def test_tsv_takes_quotation_marks_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('sentence\tlabel\n"so it goes\t1\nwell\t0\n')
    assert texts(tmp_path / "a.tsv", column="sentence") == ['"so it goes', "well"]


def test_json_may_be_strings_or_objects_in_a_row(tmp_path: Path) -> None:
    (tmp_path / "strings.json").write_text('["one", "two"]')
    (tmp_path / "objects.json").write_text('{"text": "one"}\n\n{"text": "two"}')
    assert texts(tmp_path / "strings.json") == texts(tmp_path / "objects.json") == ["one", "two"]


def test_a_json_list_on_one_line_is_parsed_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BLOCK", 7)
    (tmp_path / "a.json").write_text(json.dumps([{"text": f"é {n}"} for n in range(50)], ensure_ascii=False))
    assert texts(tmp_path / "a.json") == [f"é {n}" for n in range(50)]


def test_rows_without_text_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n\n{"text": ""}\n{"text": "x"}')
    assert texts(tmp_path / "a.jsonl") == ["x"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbftext\nhello\n")
    assert texts(tmp_path / "a.txt", tmp_path / "b.csv") == ["hello", "hello"]


def test_zstd_frames_follow_each_other(tmp_path: Path) -> None:
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "a.txt.zst").write_bytes(pack(b"one ") + pack(b"two"))
    assert texts(tmp_path / "a.txt.zst") == ["one two"]


# ---- sources


def test_folders_and_globs_are_sorted_and_take_what_is_text(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/2.txt", "a.md", "c.jsonl.gz", "x.png", "b/.hidden.txt"):
        (tmp_path / name).write_bytes(b"\x89PNG\0" if name == "x.png" else b"")
    found = [os.path.relpath(name, tmp_path) for name in files([str(tmp_path)])]
    assert found == ["a.md", "b/2.txt", "c.jsonl.gz"]
    assert files([str(tmp_path / "**" / "*.txt")]) == [str(tmp_path / "b/2.txt")]


def test_an_empty_file_in_a_folder_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("text")
    assert texts(tmp_path) == ["text"]


def test_a_plan_that_cannot_be_opened_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "plan.json").symlink_to("nowhere.json")
    assert texts(tmp_path) == ["text"]
    assert left_out([str(tmp_path)]) == [f"{tmp_path}: left out plan.json (not a file)"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    assert texts("-") == ["from a pipe"]


def test_the_builtin_corpus() -> None:
    found = read(["builtin:python"])
    assert len("".join(next(found).text for _ in range(20))) > 1000


# ---- what can't be read


BROKEN = {
    "absent.txt": (None, "no such file"),
    "empty.txt": (b"", "contains no text"),
    "blank.txt": (b" \n\n", "no text at all"),
    "nul.txt": (b"text\0text", "looks binary.* NUL byte at byte 4"),
    "image.txt": (b"\x89PNG\r\n\x1a\n\x01\x02\x03\x04\x05", "looks like a PNG image, not text$"),
    "latin.txt": (b"plain text, caf\xe9 au lait", r"not valid UTF-8 at byte 15 \(0xe9\)"),
    "wide.txt": ("text".encode("utf-16"), "UTF-16"),
    "data.pdf": (b"%PDF-1.7\n%\xe2\xe3", "looks like a PDF, not text$"),
    "noise.bin": (bytes(range(1, 256)), "looks binary: 25 of its first 255 bytes are control characters, not text$"),
    "damaged.txt": ("é à ü ö ß\n".encode() * 3 + b"\xe9 x", "at byte 45 .*, though the text around it is; put"),
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
    "truncated.txt.zst": (zstandard.ZstdCompressor().compress(bytes(range(1, 256)) * 9)[:-9], "zstd"),
    "other.txt.zst": (b"not zstd", "damaged zstd"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_errors_say_what_and_where_in_one_line(tmp_path: Path, name: str) -> None:
    content, message = BROKEN[name]
    assert isinstance(message, str)
    if content is not None:
        (tmp_path / name).write_bytes(content() if callable(content) else content)
    with pytest.raises(DataError, match=message) as caught:
        texts(tmp_path / name, column="body" if name == "column.parquet" else "text")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_over_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_ROW_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "' + "x" * (1 << 21) + '"}\n')
    with pytest.raises(DataError, match="line 2 is longer than 1 MiB"):
        texts(tmp_path / "a.jsonl")


def test_sources_that_stand_for_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no text"):
        files([str(tmp_path)])
    with pytest.raises(DataError, match="no file matches"):
        files([str(tmp_path / "*.txt")])
    with pytest.raises(DataError, match="no such built-in corpus"):
        texts("builtin:pyton")
    (tmp_path / "shakespeare.txt").write_text("x")
    with pytest.raises(DataError, match=r"did you mean '.*shakespeare\.txt'"):
        files([str(tmp_path / "shakespear.txt")])


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, mode: str) -> None:
        raise PermissionError(13, "Permission denied", name)

    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(streams, "open", refuse, raising=False)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        texts(tmp_path / "a.txt")


def test_hub_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert files(["owner/name", "hub:a/b"]) == ["hub:owner/name", "hub:a/b"]
    (tmp_path / "owner").mkdir()
    with pytest.raises(DataError, match="no such file"):  # the folder is here: a mistyped path
        files(["owner/name"])
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"weft\[hub\]"):
        texts("hub:a/b")


def test_hub_datasets_are_read_file_by_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import types

    (tmp_path / "train.jsonl").write_bytes(as_jsonl())
    names = ["README.md", "dataset_infos.json", "test.jsonl", "train.jsonl"]
    hub = types.SimpleNamespace(
        HfApi=lambda: types.SimpleNamespace(list_repo_files=lambda name, repo_type: names),
        hf_hub_download=lambda name, file, repo_type: str(tmp_path / file),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert texts("hub:a/b") == ROWS

    def unreachable(name: str, repo_type: str) -> list[str]:
        raise ConnectionError("no route to host\nand a long story")

    hub.HfApi = lambda: types.SimpleNamespace(list_repo_files=unreachable)
    with pytest.raises(DataError, match=r"no such file here, and weft couldn't reach the hub$"):
        texts("hub:a/b")


def test_parquet_without_pyarrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(as_parquet())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"weft\[parquet\]"):
        texts(tmp_path / "a.parquet")


# ---- what a folder holds besides


def test_what_a_folder_leaves_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert files([str(folder)]) == [str(folder / name) for name in texts]
    for _ in range(2):  # said once, however often it is read
        assert len(list(read([str(folder)]))) == len(texts)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"weft: {folder}: left out a.png, b.so, deeper/d.txt, deeper/packed.dat.gz (not text); gone.txt (not a file)"
    )
    assert "; linked (a link to a folder; name it as well)" in line
    assert "; run (made by weft)" in line
    assert "hidden" not in line and ".git" not in line


def test_many_files_left_out_are_counted(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.pyc").write_bytes(b"\xa7\r\r\n\0\0")
    (tmp_path / "a.txt").write_text("text\n")
    (line,) = left_out([str(tmp_path), "builtin:python", "-"])
    assert line.endswith("00.pyc, 01.pyc, 02.pyc, 03.pyc, 04.pyc and 35 more (not text)")
    pattern = str(tmp_path / "*")
    assert files([pattern]) == [str(tmp_path / "a.txt")]
    assert "and 35 more (not text)" in left_out([pattern])[0]
    with pytest.raises(DataError, match=r"\*\.pyc: no file that matches is text$"):
        files([str(tmp_path / "*.pyc")])


def test_a_folder_whose_files_are_all_read_is_not_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / ".notes").write_text("mine\n")
    files([str(tmp_path)])
    assert capsys.readouterr().err == ""


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
def test_the_encoding_that_fits_is_named_and_reads_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, text: str, kind: str
) -> None:
    rows = [f"{number} {text}" for number in range(20)]
    written = {
        "txt": "\n".join(rows),
        "csv": "text,n\n" + "".join(f'"{row}",1\n' for row in rows),
        "jsonl": "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows),
        "json": json.dumps(rows, ensure_ascii=False),
    }[kind]
    file = tmp_path / f"old.{kind}"
    file.write_bytes(written.encode(encoding))
    with pytest.raises(
        DataError, match=rf"data\.encoding={encoding} .*--encoding {encoding}\).* iconv -f \S+ -t utf-8"
    ):
        texts(file)
    monkeypatch.setattr(streams, "BLOCK", 61)  # which cuts characters
    found = [document.text for document in read([str(file)], encoding=encoding)]
    assert found == ([written] if kind == "txt" else rows)


def test_bytes_that_an_encoding_does_not_have_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text " * 100 + b"\xff")
    with pytest.raises(DataError, match=r"a\.txt: not valid ascii at byte 500; is data\.encoding its encoding\?$"):
        list(read([str(tmp_path / "a.txt")], encoding="ascii"))
    (tmp_path / "odd.txt").write_bytes("text".encode("utf-16") + b"x")
    with pytest.raises(DataError, match=r"odd\.txt: not valid utf-16 at byte 10"):
        list(read([str(tmp_path / "odd.txt")], encoding="utf-16"))
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(DataError, match=r"a\.png: looks like a PNG image, not text$"):
        list(read([str(tmp_path / "a.png")], encoding="latin1"))


def test_tables_without_the_column_are_left_out_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program's settings and figures among its code; named alone, or where nothing else is there, they are errors."""
    (tmp_path / "app.py").write_text("print('on')\n")
    (tmp_path / "prices.csv").write_text("item,price\napple,1\n")
    (tmp_path / "settings.json").write_text('{"debug": true}')
    (tmp_path / "tsconfig.json").write_text("// comment\n{}")
    (tmp_path / "said.csv").write_text("text\nhello\n")
    assert texts(tmp_path) == ["print('on')\n", "hello"]
    why = "prices.csv, settings.json (no column 'text'; data.column names another); tsconfig.json (no rows of text)"
    assert left_out([str(tmp_path)], "text") == [f"{tmp_path}: left out {why}"]
    assert why in " ".join(capsys.readouterr().err.split())
    assert (
        len(files([str(tmp_path)])) == 5 and not capsys.readouterr().err
    )  # rows of other columns are looked for elsewhere
    with pytest.raises(DataError, match=r"no column 'text'; its columns: item, price"):
        texts(tmp_path / "prices.csv")
    for name in ("app.py", "said.csv", "tsconfig.json"):
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match=r"prices\.csv: no column 'text'; its columns: item, price"):
        texts(tmp_path)


# ---- the same file by several names


def test_a_pattern_reads_each_file_once_though_links_lead_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d/sub/deep").mkdir(parents=True)
    for name in ("a", "sub/b", "sub/deep/c", "sub/deep/.hidden"):
        (tmp_path / f"d/{name}.txt").write_text(name)
    for name in ("loop", "sub/loop", "sub/deep/again", "0"):  # followed as they stand there are more ways than atoms
        (tmp_path / f"d/{name}").symlink_to(tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    names = ["d/a.txt", "d/sub/b.txt", "d/sub/deep/c.txt"]
    for pattern in ("d/**/*.txt", "**/*.txt", "**", "d/**/**", f"{tmp_path}/**/?.txt"):
        assert [os.path.relpath(name) for name in files([pattern])] == names
    assert files(["d/**/loop/*.txt"]) == ["d/loop/a.txt"]  # a link that is named is followed
    assert files(["d/*/*.txt"]) == ["d/0/a.txt", "d/sub/b.txt"]
    assert "d/loop/a.txt (the same file as another that is read)" in left_out(["d/*/*.txt"])[0]
    already = "(a link to a folder that is read already)"
    assert left_out(["d/**/*.txt"]) == [f"d/**/*.txt: left out d/0, d/loop, d/sub/deep/again, d/sub/loop {already}"]
    assert texts("d/**/*.txt", "d", "d/loop") == ["a", "sub/b", "sub/deep/c"]


def test_a_file_with_several_names_is_read_once_and_the_others_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to("text.txt")
    os.link(tmp_path / "text.txt", tmp_path / "z.txt")
    (tmp_path / "copy.txt").write_text("a")  # as a file it is another
    assert files([str(tmp_path)]) == [str(tmp_path / "copy.txt"), str(tmp_path / "text.txt")]
    assert left_out([str(tmp_path)]) == [
        f"{tmp_path}: left out z.txt, link.txt (the same file as another that is read)"
    ]
    assert texts(tmp_path / "z.txt", tmp_path / "link.txt") == ["a"]
    assert files(["builtin:python", "-"], held_out=["builtin:python", "-"]) == ["builtin:python", "-"]


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 1000)
    (tmp_path / "b.txt").write_text("b" * 1000)
    (tmp_path / "link.txt").symlink_to("b.txt")
    lines: list[str] = []
    held_out = [str(tmp_path / "link.txt")]
    assert files([str(tmp_path)], tell=lines.append, held_out=held_out) == [str(tmp_path / "a.txt")]
    assert lines == [f"{tmp_path}: left out b.txt, link.txt (held out for validation)"]
    with pytest.raises(DataError, match="held out for validation, all of it; name other text to train on"):
        files([str(tmp_path / "b.txt")], held_out=held_out)
    text = TextSource([str(tmp_path)], FilesSplit(sources=tuple(held_out)))
    sides = {(section.side, section.text[0]) for section in split_sections(text)}
    assert sides == {("train", "a"), ("validation", "b")}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", ["", ".txt", ".jsonl", ".parquet", ".gz"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, suffix: str) -> None:
    """The text is read more than once: what was read first was missing then, and a second reading waited for ever."""
    pipe = tmp_path / f"pipe{suffix}"
    os.mkfifo(pipe)
    for name in (pipe, Path("/dev/zero")):
        with pytest.raises(DataError, match=f"^{name}: a pipe or a device, which can't be read twice"):
            list(read([str(name)]))
    (tmp_path / "text.txt").write_text("text")
    assert files([str(tmp_path)]) == [str(tmp_path / "text.txt")]


def test_columns_without_end_are_a_short_line(tmp_path: Path) -> None:
    table = tmp_path / "wide.csv"
    for header in (",".join(f"column{number}" for number in range(1_000_000)), "x" * 10_000_000):
        table.write_text(f"{header}\n1\n")
        with pytest.raises(DataError, match=r"no column 'text'; its columns: .*…") as raised:
            list(read([str(table)]))
        assert len(str(raised.value)) < 2000


def test_what_becomes_much_text_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(streams, "ANNOUNCED_BYTES", 1 << 21)
    (tmp_path / "little.gz").write_bytes(gzip.compress(b"a line of text\n" * 1000))
    (tmp_path / "much.txt.zst").write_bytes(zstandard.compress(b"a line of text\n" * 300_000))
    for name in ("little.gz", "much.txt.zst"):
        assert all(streams.blocks(str(tmp_path / name)))
    size = (tmp_path / "much.txt.zst").stat().st_size
    told = f"weft: {tmp_path}/much.txt.zst: its {size:,} bytes become more than 2 MiB of text; unpacking all\n"
    assert capsys.readouterr().err == told
