"""Preparing text: every byte once, resumable to the same bytes, damage detected."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from weft.data import folder as folders
from weft.data import prepare as preparing
from weft.data.config import FilesSplit, HashSplit, NoSplit, Split, TailSplit, TextSource
from weft.data.prepare import prepare
from weft.data.shards import SIDES, Shard, Shards, Tokens
from weft.data.split import split_sections, train_texts
from weft.errors import DataError
from weft.text.config import BPE, Byte
from weft.text.tokenizer import Tokenizer, build_tokenizer

BYTES = build_tokenizer(Byte(), ["x"])


def paragraphs(count: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    words = ["weft", "warp", "loom", "größer", "漢字", "thread", "🎈"]
    return "\n\n".join(" ".join(words[i] for i in rng.integers(0, 7, rng.integers(4, 30))) for _ in range(count))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(paragraphs(200), encoding="utf-8")
    return file


def contents(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "plan.json"
    }


def decoded(tokens: Tokens, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(tokens.read(0, len(tokens)).tolist())


# ---- output


@pytest.mark.parametrize("split", [NoSplit(), HashSplit(fraction=0.3), TailSplit(fraction=0.2), TailSplit(bytes=999)])
def test_both_sides_hold_all_text_once(tmp_path: Path, text: Path, split: Split) -> None:
    original = text.read_text(encoding="utf-8")
    shards = prepare(TextSource([str(text)], split), tmp_path / "out", BYTES, shard_tokens=1000)
    sides = [shards.train] + ([shards.validation] if shards.validation is not None else [])
    assert sum(side.bytes for side in sides) == len(original.encode())
    assert sum(len(side) for side in sides) == len(original.encode()) + 1  # bytes are tokens; one eos
    assert sum(len(decoded(side, BYTES)) for side in sides) == len(original)
    assert len(shards.of("train")) > 3
    for shard in shards.index.shards:
        for file, checksum in (("tokens", shard.tokens_sha256), ("sections", shard.sections_sha256)):
            content = (tmp_path / "out" / f"{shard.name}.{file}").read_bytes()
            assert hashlib.sha256(content).hexdigest() == checksum
    if isinstance(split, TailSplit):
        assert decoded(sides[0], BYTES) + decoded(sides[1], BYTES) == original
    assert sum(s.documents for s in shards.of("train")) == shards.train.documents(0, len(shards.train))[-1] + 1


@pytest.mark.parametrize("finished", [True, False])
def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path, text: Path, finished: bool) -> None:
    out = tmp_path / "out"
    prepare(TextSource([str(text)], NoSplit()), out, BYTES)
    before = sorted(out.iterdir())
    if not finished:
        (out / "index.json").unlink()
    for name in (".journal.jsonl.0123abcd", ".train-00000.sections.0123abcd", ".tokenizer.json.89abcdef"):
        (out / name).touch()
    prepare(TextSource([str(text)], NoSplit()), out, BYTES)
    assert sorted(out.iterdir()) == before


def test_the_tail_split_is_exact_to_a_character(tmp_path: Path, text: Path) -> None:
    shards = prepare(TextSource([str(text)], TailSplit(fraction=0.1)), tmp_path / "a", BYTES)
    assert 0 <= int(text.stat().st_size * 0.9) - shards.train.bytes <= 3
    validation = prepare(TextSource([str(text)], TailSplit(bytes=1234)), tmp_path / "b", BYTES).validation
    assert validation is not None and 1234 <= validation.bytes <= 1237


def test_the_hash_split_does_not_depend_on_order(tmp_path: Path) -> None:
    rows = [{"text": f"document {n}"} for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, reversed(rows))))
    texts = [TextSource([str(tmp_path / name)]) for name in ("a.jsonl", "b.jsonl")]
    one, other = ({section.text for section in split_sections(text) if section.side == "validation"} for text in texts)
    assert one == other
    assert 15 < len(one) < 50  # 30 are expected


def test_documents_end_with_eos_and_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n{"text": "def"}\n')
    tokens = prepare(TextSource([str(tmp_path / "a.jsonl")], NoSplit()), tmp_path / "out", BYTES, shard_tokens=3).train
    ids = [id for text in ("ab", "c", "def") for id in [*BYTES.encode(text), BYTES.eos_id]]
    assert tokens.read(0, len(tokens)).tolist() == ids
    assert tokens.documents(0, len(tokens)).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert tokens.bytes == 6
    assert tokens.read(2, 4).tolist() == ids[2:6]  # across shards
    assert tokens.documents(2, 4).tolist() == [0, 1, 1, 2]


def test_a_held_out_section_divides_its_document(text: Path) -> None:
    sections = list(split_sections(TextSource([str(text)], HashSplit(fraction=0.3))))
    for side in SIDES:
        numbered = [(at, section) for at, section in enumerate(sections) if section.side == side]
        for (at, before), (after, section) in pairwise(numbered):
            assert (section.document == before.document) == (after == at + 1)
    assert [section.ends for section in sections] == [False] * (len(sections) - 1) + [True]


def test_validation_from_separate_files(tmp_path: Path, text: Path) -> None:
    (tmp_path / "held.txt").write_text("held out")
    split = FilesSplit(sources=(str(tmp_path / "held.txt"),))
    shards = prepare(TextSource([str(text)], split), tmp_path / "out", BYTES)
    assert shards.validation is not None and decoded(shards.validation, BYTES) == "held out"
    assert "".join(train_texts(TextSource([str(text)], split))) == text.read_text(encoding="utf-8")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_the_tokens_decode_to_the_text(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    tokenizer = build_tokenizer(BPE(), train_texts(TextSource([str(text)], NoSplit())))
    if dtype == "uint32":
        monkeypatch.setattr(tokenizer, "vocab_size", 70_000)
    shards = prepare(TextSource([str(text)], NoSplit()), tmp_path / "out", tokenizer)
    assert shards.index.dtype == dtype
    assert decoded(shards.train, Tokenizer.load(shards.path)) == text.read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="smaps")
def test_windows_are_read_without_read_ahead(tmp_path: Path, text: Path) -> None:
    shards = prepare(TextSource([str(text)], NoSplit()), tmp_path / "out", BYTES)
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    mapped = [mapping for mapping in mappings if str(shards.path / "train-00000.tokens") in mapping]
    flags = [re.search("VmFlags: (.*)", mapping)[1].split() for mapping in mapped]  # type: ignore[index]
    assert sorted("rr" in of for of in flags) == [False, True]  # one for random, one for sequential access
    starts = np.array([5, 900, 17])
    for tokens in (shards.train, shards.train.first(2000)):
        assert tokens.windows(starts, 64).tolist() == [tokens.read(start, 64).tolist() for start in starts.tolist()]


@pytest.mark.parametrize("count", [1, 3, 4, 7, 10, 12, 15, 16, 99])
def test_the_first_tokens_have_their_documents_and_bytes(count: int) -> None:
    """Two shards of 10 and 6 tokens; sections begin at 0, 4 and at 0, 5; a token has 3 bytes."""
    tables = [np.array([[0, 4], [12, 18], [0, 1]]), np.array([[0, 5], [15, 3], [2, 3]])]
    tokens = Tokens([np.arange(10), np.arange(10, 16)], tables)
    first, count = tokens.first(count), min(count, 16)
    assert len(first) == count
    assert first.read(0, count).tolist() == list(range(count))
    assert first.documents(0, count).tolist() == tokens.documents(0, count).tolist()
    assert first.bytes == 3 * count


# ---- interruptions


def test_an_interruption_changes_no_byte(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(TextSource([str(text)]), tmp_path / "whole", BYTES, shard_tokens=5000)
    assert len(whole.index.shards) > 3
    record = folders.record_shard
    for stop in range(len(whole.index.shards)):
        out = tmp_path / f"stopped-{stop}"
        left = iter(range(stop))

        def interrupt(folder: Path, shard: Shard, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            record(folder, shard)

        monkeypatch.setattr(folders, "record_shard", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(TextSource([str(text)]), out, BYTES, shard_tokens=5000)
        with pytest.raises(DataError, match="unfinished"):
            Shards.open(out)
        monkeypatch.undo()
        prepare(TextSource([str(text)]), out, BYTES, shard_tokens=5000)
        assert contents(out) == contents(tmp_path / "whole")


KILLED = """
import os, signal, sys
from weft.data import folder, prepare as preparing
from weft.data.config import TextSource
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

record, left = folder.record_shard, iter(range(1))

def record_and_kill(out, shard):
    record(out, shard)
    if next(left, None) is None:
        with (out / "journal.jsonl").open("a") as journal:
            journal.write('{"name": "tra')
        os.kill(os.getpid(), signal.SIGKILL)

folder.record_shard = record_and_kill
preparing.prepare(TextSource([sys.argv[1]]), sys.argv[2], build_tokenizer(Byte(), ["x"]), shard_tokens=2000)
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
def test_a_killed_process_is_continued_to_the_same_bytes(tmp_path: Path, text: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(text), str(tmp_path / "killed")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len((tmp_path / "killed" / "journal.jsonl").read_text().splitlines()) == 3
    prepare(TextSource([str(text)]), tmp_path / "killed", BYTES, shard_tokens=2000)
    prepare(TextSource([str(text)]), tmp_path / "whole", BYTES, shard_tokens=2000)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_the_output_folder_may_be_inside_a_source(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    for name in ("config.toml", "tokenizer.json", "metrics.jsonl"):
        (run / name).write_text("{}")
    (tmp_path / "plan.json").write_text('["a separate document"]')
    first = prepare(TextSource([str(tmp_path)]), tmp_path / "out", BYTES)
    assert prepare(TextSource([str(tmp_path)]), tmp_path / "out", BYTES).fingerprint == first.fingerprint
    sizes = sum(shard.bytes for shard in first.index.shards)
    assert sizes == text.stat().st_size + len("a separate document")


def test_a_finished_folder_is_not_written_again(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
    monkeypatch.setattr(preparing, "FolderWriter", None)
    assert prepare(TextSource([str(text)]), tmp_path / "out", BYTES).fingerprint == first.fingerprint


# ---- other folders, and damage


def test_other_folders_are_refused(tmp_path: Path, text: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.doc").write_text("dear")
    with pytest.raises(DataError, match="already contains other files"):
        prepare(TextSource([str(text)]), tmp_path / "full", BYTES)
    with pytest.raises(DataError, match="is a file"):
        prepare(TextSource([str(text)]), text, BYTES)
    prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
    with pytest.raises(DataError, match="differs in: validation"):
        prepare(TextSource([str(text)], NoSplit()), tmp_path / "out", BYTES)
    text.write_text("other text " * 100)
    with pytest.raises(DataError, match="differs in: sources"):
        prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == ["letter.doc"]


def test_a_folder_is_locked_while_it_is_written(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare_twice(*args: Any, **options: Any) -> folders.FolderWriter:
        with pytest.raises(DataError, match="another `weft prepare` is writing"):
            prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
        return folders.FolderWriter(*args, **options)

    monkeypatch.setattr(preparing, "FolderWriter", prepare_twice)
    prepare(TextSource([str(text)]), tmp_path / "out", BYTES)


def test_invalid_text_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good text " * 1000 + b"\xff")
    with pytest.raises(DataError, match="not valid UTF-8 at byte 10000"):
        prepare(TextSource([str(tmp_path / "a.txt")]), tmp_path / "out", BYTES, shard_tokens=100)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.ShardWriter, "add", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(DataError, match="out: cannot be written: No space left on device"):
        prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
    monkeypatch.undo()
    shards = prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
    assert shards.fingerprint == prepare(TextSource([str(text)]), tmp_path / "other", BYTES).fingerprint


@pytest.mark.parametrize("split", [HashSplit(), TailSplit()])
def test_a_text_too_short_to_split_is_refused(tmp_path: Path, split: Split) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"only 1 byte of text in 1 section: nothing is left for (train|validation); "):
        prepare(TextSource([str(tmp_path / "a.txt")], split), tmp_path / "out", BYTES)
    with pytest.raises(DataError, match=r"data\.validation\.bytes = 5: the text has 1 byte;"):
        prepare(TextSource([str(tmp_path / "a.txt")], TailSplit(bytes=5)), tmp_path / "out", BYTES)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [5_000, 50_000])
def test_a_small_text_can_be_split(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_text(paragraphs(size // 100)[:size])
    shards = prepare(TextSource([str(tmp_path / "a.txt")]), tmp_path / "out", BYTES)
    assert shards.validation is not None and 0.02 < shards.validation.bytes / size < 0.3


def test_damage_is_detected(tmp_path: Path, text: Path) -> None:
    prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
    file = tmp_path / "out" / "train-00000.tokens"
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    with pytest.raises(DataError, match=rf"damaged: {len(raw) - 1} bytes instead of {len(raw)}"):
        Shards.open(tmp_path / "out")
    file.unlink()
    with pytest.raises(DataError, match="No such file"):
        Shards.open(tmp_path / "out")
    (tmp_path / "out" / "index.json").write_text('{"format": "weft tokens", "version": 9}')
    with pytest.raises(DataError, match=r"index\.json: not an index this weft reads: version"):
        Shards.open(tmp_path / "out")
    with pytest.raises(DataError, match="no such folder"):
        Shards.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match="not a folder that `weft prepare` wrote"):
        Shards.open(tmp_path)


def test_a_shard_may_not_name_a_file_in_another_folder(tmp_path: Path, text: Path) -> None:
    prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
    index = tmp_path / "out" / "index.json"
    index.write_text(index.read_text().replace('"train-00000"', '"../train-00000"'))
    with pytest.raises(DataError, match=r"shards\.0\.name"):
        Shards.open(tmp_path / "out")


def test_a_text_of_equal_sections_is_split_at_its_tail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("The same line again, 31 letters.\n" * 500)
    shards = prepare(TextSource([str(tmp_path / "a.txt")]), tmp_path / "out", BYTES)
    assert shards.validation is not None
    assert 0.05 < shards.validation.bytes / (shards.train.bytes + shards.validation.bytes) < 0.15
    assert capsys.readouterr().err.count("data.validation.kind=tail does") == 1
    train = "".join(train_texts(TextSource([str(tmp_path / "a.txt")])))
    assert len(train) == shards.train.bytes  # a tokenizer is trained on the same side
    assert capsys.readouterr().err == ""
