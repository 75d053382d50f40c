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

import numpy as np
import pytest

from weft.data import folder as folders
from weft.data import prepare as preparing
from weft.data.config import FilesSplit, HashSplit, NoSplit, Split, TailSplit, TextSource
from weft.data.prepare import prepare
from weft.data.shards import Shards, Tokens
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


def spelled(tokens: Tokens, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(tokens.read(0, len(tokens)).tolist())


# ---- what is written


@pytest.mark.parametrize("split", [NoSplit(), HashSplit(fraction=0.3), TailSplit(fraction=0.2), TailSplit(bytes=999)])
def test_both_sides_hold_all_text_once(tmp_path: Path, text: Path, split: Split) -> None:
    whole = text.read_text(encoding="utf-8")
    shards = prepare(TextSource([str(text)], split), tmp_path / "out", BYTES, shard_tokens=1000)
    sides = [shards.train] + ([shards.validation] if shards.validation is not None else [])
    assert sum(side.bytes for side in sides) == len(whole.encode())
    assert sum(len(side) for side in sides) == len(whole.encode()) + 1  # bytes are tokens; one document end
    assert sum(len(spelled(side, BYTES)) for side in sides) == len(whole)
    assert len(shards.of("train")) > 3
    for shard in shards.index.shards:
        for file, checksum in (("tokens", shard.tokens_sha256), ("sections", shard.sections_sha256)):
            content = (tmp_path / "out" / f"{shard.name}.{file}").read_bytes()
            assert hashlib.sha256(content).hexdigest() == checksum
    if isinstance(split, TailSplit):
        assert spelled(sides[0], BYTES) + spelled(sides[1], BYTES) == whole
    assert sum(s.documents for s in shards.of("train")) == shards.train.documents(0, len(shards.train))[-1] + 1


@pytest.mark.parametrize("finished", [True, False])
def test_what_a_kill_left_is_swept_away(tmp_path: Path, text: Path, finished: bool) -> None:
    out = tmp_path / "out"
    prepare(TextSource([str(text)], NoSplit()), out, BYTES)
    before = sorted(out.iterdir())
    if not finished:
        (out / "index.json").unlink()
    for name in (".journal.jsonl.0123abcd", ".train-00000.sections.0123abcd", ".tokenizer.json.89abcdef"):
        (out / name).touch()
    prepare(TextSource([str(text)], NoSplit()), out, BYTES)
    assert sorted(out.iterdir()) == before


def test_the_tail_is_cut_at_the_byte(tmp_path: Path, text: Path) -> None:
    raw = text.read_bytes()
    shards = prepare(TextSource([str(text)], TailSplit(fraction=0.1)), tmp_path / "a", BYTES)
    assert 0 <= int(len(raw) * 0.9) - shards.train.bytes <= 3  # at most a character's bytes are moved over
    held = prepare(TextSource([str(text)], TailSplit(bytes=1234)), tmp_path / "b", BYTES).validation
    assert held is not None
    assert 1234 <= held.bytes <= 1237


def test_hash_split_does_not_depend_on_order(tmp_path: Path) -> None:
    rows = [{"text": f"document {n}"} for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, reversed(rows))))
    texts = [TextSource([str(tmp_path / name)]) for name in ("a.jsonl", "b.jsonl")]
    held = [{section.text for section in split_sections(text) if section.side == "validation"} for text in texts]
    assert held[0] == held[1]
    assert 15 < len(held[0]) < 50  # 30 are expected


def test_documents_end_with_eos_and_have_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n{"text": "def"}\n')
    tokens = prepare(TextSource([str(tmp_path / "a.jsonl")], NoSplit()), tmp_path / "out", BYTES, shard_tokens=3).train
    eos = BYTES.eos_id
    ids = [id for text in ("ab", "c", "def") for id in [*BYTES.encode(text), eos]]
    assert tokens.read(0, len(tokens)).tolist() == ids
    assert tokens.documents(0, len(tokens)).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert tokens.bytes == 6
    assert tokens.read(2, 4).tolist() == ids[2:6]  # over shard borders
    assert tokens.documents(2, 4).tolist() == [0, 1, 1, 2]


def test_a_document_is_broken_where_a_section_is_held_out(text: Path) -> None:
    sections = list(split_sections(TextSource([str(text)], HashSplit(fraction=0.3))))
    for side in ("train", "validation"):
        mine = [(at, section) for at, section in enumerate(sections) if section.side == side]
        for (at, before), (after, section) in pairwise(mine):
            assert (section.document == before.document) == (after == at + 1)
    assert [section.ends for section in sections] == [False] * (len(sections) - 1) + [True]


def test_validation_from_files_of_its_own(tmp_path: Path, text: Path) -> None:
    (tmp_path / "held.txt").write_text("held out")
    split = FilesSplit(sources=(str(tmp_path / "held.txt"),))
    shards = prepare(TextSource([str(text)], split), tmp_path / "out", BYTES)
    assert shards.validation is not None
    assert spelled(shards.validation, BYTES) == "held out"
    assert "".join(train_texts(TextSource([str(text)], split))) == text.read_text(encoding="utf-8")


def test_a_subword_tokenizer_spells_the_text(tmp_path: Path, text: Path) -> None:
    tokenizer = build_tokenizer(BPE(), train_texts(TextSource([str(text)], NoSplit())))
    shards = prepare(TextSource([str(text)], NoSplit()), tmp_path / "out", tokenizer)
    assert shards.index.dtype == "uint16"
    assert spelled(shards.train, Tokenizer.load(shards.path)) == text.read_text(encoding="utf-8")


def test_wide_ids_take_four_bytes(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BYTES, "vocab_size", 70_000)
    shards = prepare(TextSource([str(text)], NoSplit()), tmp_path / "out", BYTES)
    assert shards.index.dtype == "uint32"
    assert spelled(shards.train, BYTES) == text.read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="smaps")
def test_windows_read_nothing_around_them(tmp_path: Path, text: Path) -> None:
    shards = prepare(TextSource([str(text)], NoSplit()), tmp_path / "out", BYTES)
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    mine = [each for each in mappings if str(shards.path / "train-00000.tokens") in each]
    flags = [re.search("VmFlags: (.*)", each)[1].split() for each in mine]  # type: ignore[index]
    assert sorted("rr" in each for each in flags) == [False, True]  # one is read here and there, one in order
    starts = np.array([5, 900, 17])
    for few in (shards.train, shards.train.first(2000)):
        assert few.windows(starts, 64).tolist() == [few.read(start, 64).tolist() for start in starts.tolist()]


# ---- stopping and going on


def test_an_interrupted_run_goes_on_to_the_same_bytes(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(TextSource([str(text)]), tmp_path / "whole", BYTES, shard_tokens=5000)
    assert len(whole.index.shards) > 3
    note = folders.note
    for stop in range(len(whole.index.shards)):
        out = tmp_path / f"stopped-{stop}"
        left = iter(range(stop))

        def stopping(folder: Path, shard: object, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            note(folder, shard)  # type: ignore[arg-type]

        monkeypatch.setattr(folders, "note", stopping)
        with pytest.raises(KeyboardInterrupt):
            prepare(TextSource([str(text)]), out, BYTES, shard_tokens=5000)
        with pytest.raises(DataError, match="unfinished"):
            Shards.open(out)
        monkeypatch.setattr(folders, "note", note)
        prepare(TextSource([str(text)]), out, BYTES, shard_tokens=5000)
        assert contents(out) == contents(tmp_path / "whole")


KILLED = """
import os, signal, sys
from weft.data import folder as folders
from weft.data import folder, prepare as preparing
from weft.data.config import TextSource
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

note, left = folder.note, [2]

def noting(out, shard):
    note(out, shard)
    left[0] -= 1
    if not left[0]:
        with (out / "journal.jsonl").open("a") as journal:
            journal.write('{"name": "tra')
        os.kill(os.getpid(), signal.SIGKILL)

folder.note = noting
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


def test_the_folder_may_lie_among_the_sources(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    for name in ("config.toml", "tokenizer.json", "metrics.jsonl"):
        (run / name).write_text("{}")
    (tmp_path / "plan.json").write_text('["a document of its own"]')
    first = prepare(TextSource([str(tmp_path)]), tmp_path / "out", BYTES)
    assert prepare(TextSource([str(tmp_path)]), tmp_path / "out", BYTES).fingerprint == first.fingerprint
    sizes = sum(shard.bytes for shard in first.index.shards)
    assert sizes == text.stat().st_size + len("a document of its own")


def test_preparing_again_reads_what_is_there(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
    monkeypatch.setattr(preparing, "Writers", None)
    assert prepare(TextSource([str(text)]), tmp_path / "out", BYTES).fingerprint == first.fingerprint


# ---- folders that are something else, and damage


def test_other_folders_are_refused(tmp_path: Path, text: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.doc").write_text("dear")
    with pytest.raises(DataError, match="holds other files already"):
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


def test_a_second_process_is_kept_out(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*args: Any) -> folders.Writers:
        with pytest.raises(DataError, match="another `weft prepare` is writing"):
            prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
        return folders.Writers(*args)

    monkeypatch.setattr(preparing, "Writers", twice)
    prepare(TextSource([str(text)]), tmp_path / "out", BYTES)


def test_bad_text_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good text " * 1000 + b"\xff")
    with pytest.raises(DataError, match="not valid UTF-8 at byte 10000"):
        prepare(TextSource([str(tmp_path / "a.txt")]), tmp_path / "out", BYTES, shard_tokens=100)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.ShardWriter, "add", full)
    with pytest.raises(DataError, match="out: cannot be written: No space left on device"):
        prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
    monkeypatch.undo()
    shards = prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
    assert shards.fingerprint == prepare(TextSource([str(text)]), tmp_path / "other", BYTES).fingerprint


@pytest.mark.parametrize("split", [HashSplit(), TailSplit()])
def test_too_short_a_text(tmp_path: Path, split: Split) -> None:
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
    assert shards.validation is not None
    assert 0.02 < shards.validation.bytes / size < 0.3


def test_damage_is_found(tmp_path: Path, text: Path) -> None:
    shards = prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
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
    assert shards.index.version == 1


def test_a_shard_may_not_name_a_file_elsewhere(tmp_path: Path, text: Path) -> None:
    prepare(TextSource([str(text)]), tmp_path / "out", BYTES)
    index = tmp_path / "out" / "index.json"
    index.write_text(index.read_text().replace('"train-00000"', '"../train-00000"'))
    with pytest.raises(DataError, match=r"shards\.0\.name"):
        Shards.open(tmp_path / "out")


def test_a_text_whose_sections_are_alike_is_divided_at_its_tail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("The same line again, 31 letters.\n" * 500)
    shards = prepare(TextSource([str(tmp_path / "a.txt")]), tmp_path / "out", BYTES)
    assert 0.05 < shards.validation.bytes / (shards.train.bytes + shards.validation.bytes) < 0.15
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if "data.validation.kind=tail does" in line]) == 1
    kept = "".join(train_texts(TextSource([str(tmp_path / "a.txt")])))
    assert len(kept) == shards.train.bytes  # a tokenizer learns from the same side
    assert capsys.readouterr().err == ""
