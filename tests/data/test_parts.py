"""Several processes, or several machines with parts of a text, write the same bytes as one process."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.spread import slow, spread

from weft.data import encode
from weft.data import folder as folders
from weft.data.config import FilesSplit, HashSplit, NoSplit, NumberedPart, Split, TailSplit, TextSource
from weft.data.prepare import merge, parts_of_files, prepare
from weft.data.shards import Shard, Shards
from weft.errors import DataError, TokenizerError
from weft.text.config import Byte, Specials, Word
from weft.text.tokenizer import build_tokenizer
from weft.workers import Child

BYTES = build_tokenizer(Byte(), ["x"])
TOKENS = 16_000  # in a shard


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long file, a table of short and long rows, small files, an empty file; and a file to validate on."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    words = ["weft", "warp", "loom", "größer", "漢字", "thread", "🎈"]

    def text(count: int) -> str:
        return "\n\n".join(" ".join(words[i] for i in rng.integers(0, 7, rng.integers(4, 30))) for _ in range(count))

    inside = folder / "texts"
    inside.mkdir()
    (inside / "a.txt").write_text(text(300), encoding="utf-8")
    rows = [text(1 + 20 * (n % 50 == 0)) if n % 7 else "" for n in range(400)]
    (inside / "b.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    for number in range(5):
        (inside / f"c{number}.txt").write_text(text(2), encoding="utf-8")
    (inside / "d.txt").write_text("")
    (folder / "held.txt").write_text(text(40), encoding="utf-8")
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.name[0] != "."
    }


def in_parts(text: TextSource, folder: Path, count: int, shard_tokens: int = TOKENS) -> list[Path]:
    """Prepare all parts."""
    return [one_part(text, folder, NumberedPart(number + 1, count), shard_tokens) for number in range(count)]


def one_part(text: TextSource, folder: Path, part: NumberedPart, shard_tokens: int = TOKENS) -> Path:
    out = folder / f"part-{part.number}"
    prepare(replace(text, part=part), out, BYTES, shard_tokens=shard_tokens)
    return out


# ---- parts


@pytest.mark.parametrize(("kind", "count"), [("hash", 3), slow(("hash", 9)), ("files", 5), ("none", 1)])
def test_merged_parts_are_the_bytes_of_one_machine(tmp_path: Path, corpus: Path, kind: str, count: int) -> None:
    splits: dict[str, Split] = {"hash": HashSplit(fraction=0.2), "none": NoSplit()}
    splits["files"] = FilesSplit(sources=(str(corpus / "held.txt"),))
    text = TextSource([str(corpus / "texts")], splits[kind])
    whole = prepare(text, tmp_path / "whole", BYTES, shard_tokens=TOKENS)
    assert len(whole.of("train")) > 3
    parts = in_parts(text, tmp_path, count)
    merged = merge(list(reversed(parts)), tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")  # the plan too
    assert merged.fingerprint == Shards.open(tmp_path / "merged").fingerprint == whole.fingerprint
    if count == 3:  # every part has its share only
        sizes = [sum(shard.bytes for shard in Shards.open(part, "part.json").index.shards) for part in parts]
        assert sum(sizes) == sum(shard.bytes for shard in whole.index.shards)
        assert min(sizes) > 0
    assert merge(parts, tmp_path / "merged").fingerprint == whole.fingerprint  # once more


def test_files_are_divided_by_size() -> None:
    assert parts_of_files([10, 10, 10, 10], 2) == [range(1), range(1), range(1, 2), range(1, 2)]
    assert parts_of_files([100], 3) == [range(3)]
    assert parts_of_files([10, 0, 80, 10, 0], 4) == [range(1), range(1), range(4), range(3, 4), range(3, 4)]
    assert parts_of_files([0, 0], 2) == [range(1), range(1)]
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 1000, 500).tolist()
    owners = parts_of_files(sizes, 16)
    assert {part for parts in owners for part in parts} == set(range(16))
    for n in range(16):
        exclusive = sum(size for size, parts in zip(sizes, owners, strict=True) if parts == range(n, n + 1))
        assert exclusive > sum(sizes) / 16 - 2000  # all but the files at the boundaries


def test_machines_may_have_the_files_in_different_folders(tmp_path: Path, corpus: Path) -> None:
    shutil.copytree(corpus / "texts", tmp_path / "copied", copy_function=shutil.copyfile)
    texts = [TextSource([str(corpus / "texts")]), TextSource([str(tmp_path / "copied")])]
    parts = [one_part(text, tmp_path / str(n), NumberedPart(n + 1, 2)) for n, text in enumerate(texts)]
    merged = merge(parts, tmp_path / "merged")
    assert merged.fingerprint == prepare(texts[0], tmp_path / "whole", BYTES, shard_tokens=TOKENS).fingerprint


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[list[Path], Path]:
    """A text in two parts, and prepared by one machine."""
    folder, text = tmp_path_factory.mktemp("halves"), TextSource([str(corpus / "texts")])
    prepare(text, folder / "whole", BYTES, shard_tokens=TOKENS)
    return in_parts(text, folder, 2), folder / "whole"


@pytest.mark.parametrize("stop", spread([0, 2, 4], 1))
def test_an_interrupted_merge_continues(
    tmp_path: Path, halves: tuple[list[Path], Path], monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    parts, whole = halves
    record, left = folders.record_shard, iter(range(stop))

    def interrupt(out: Path, shard: Shard) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        record(out, shard)

    monkeypatch.setattr(folders, "record_shard", interrupt)
    with pytest.raises(KeyboardInterrupt):
        merge(parts, tmp_path / "merged")
    monkeypatch.undo()
    with pytest.raises(DataError, match="unfinished"):
        Shards.open(tmp_path / "merged")
    merge(parts, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(whole)


def test_parts_of_different_texts_are_refused(tmp_path: Path, corpus: Path) -> None:
    text = TextSource([str(corpus / "texts")])
    one, two, three = in_parts(text, tmp_path, 3)

    def refused(parts: list[Path], message: str) -> None:
        with pytest.raises(DataError, match=message) as error:
            merge(parts, tmp_path / "merged")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "merged").exists()

    refused([one, three], "of 3 parts 2 is missing")
    refused([three], "of 3 parts 1, 2 are missing")
    refused([one, two, two, three], "part 2/3 is given twice: .*part-2 and .*part-2")
    other = one_part(text, tmp_path / "four", NumberedPart(4, 4))
    refused([one, two, three, other], "part-4 is part 4/4, but .*part-1 is part 1/3")
    larger = one_part(text, tmp_path / "larger", NumberedPart(2, 3), shard_tokens=9000)
    refused([one, larger, three], "larger/part-2: was made with another shard_tokens than .*part-1")
    unheld = one_part(TextSource(text.sources, NoSplit()), tmp_path / "unheld", NumberedPart(2, 3))
    refused([one, unheld, three], "another validation")
    fewer = one_part(TextSource([str(corpus / "texts" / "a.txt")]), tmp_path / "fewer", NumberedPart(2, 3))
    refused([one, fewer, three], "other sources")
    words = build_tokenizer(Word(), ["weft warp loom"])
    where = tmp_path / "words"
    prepare(TextSource(text.sources, part=NumberedPart(2, 3)), where, words, shard_tokens=TOKENS)
    refused([one, where, three], "words: was made with another tokenizer than")
    prepare(text, tmp_path / "whole", BYTES)
    refused([one, tmp_path / "whole", three], "whole: prepared as a whole")
    refused([one, corpus, three], "not a folder that `weft prepare --part` wrote")
    refused([one, tmp_path / "nowhere", three], "nowhere: no such folder")
    with pytest.raises(DataError, match="part-1: a part of a text; merge all parts"):
        Shards.open(one)
    raw = (three / "train-00000.tokens").read_bytes()
    (three / "train-00000.tokens").write_bytes(raw[:-2] + b"\0\0")
    refused([one, two, three], r"part-3/train-00000\.tokens: damaged")
    (three / "part.json").unlink()
    refused([one, two, three], "part 3/3 is unfinished; run the same")
    (two / "plan.json").write_text((two / "plan.json").read_text().replace('"part": [\n  2', '"part": [\n  null'))
    refused([one, two, three], "damaged: its plan doesn't say which part")
    tokenizer = one / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text()[:-9])
    refused([one], "of 3 parts")


def test_a_damaged_tokenizer_is_detected(tmp_path: Path, corpus: Path) -> None:
    (only,) = in_parts(TextSource([str(corpus / "texts")]), tmp_path, 1)
    (only / "tokenizer.json").write_text((only / "tokenizer.json").read_text()[:-9])
    with pytest.raises(DataError, match="part-1: damaged: "):
        merge([only], tmp_path / "merged")
    build_tokenizer(Word(), ["weft warp"]).save(only)
    with pytest.raises(DataError, match="its tokenizer is not the one in its plan"):
        merge([only], tmp_path / "merged")


def test_a_file_that_changed_between_parts_is_detected(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = ["a", "b" * 99] * 300
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, _ = in_parts(TextSource([str(file)]), tmp_path / "first", 2)
    empty = ["" if n < 100 else row for n, row in enumerate(rows)]
    changed = "".join(json.dumps(row) + "\n" for row in empty)
    file.write_text(changed + " " * (file.stat().st_size - len(changed)))
    _, two = in_parts(TextSource([str(file)]), tmp_path / "second", 2)
    with pytest.raises(DataError, match="the parts don't fit together"):
        merge([one, two], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("source", "split", "message"),
    [("-", NoSplit(), "standard input can't be read by every machine"), ("a", TailSplit(), "known only at its end")],
)
def test_some_texts_cannot_be_divided(tmp_path: Path, corpus: Path, source: str, split: Split, message: str) -> None:
    source = source if source == "-" else str(corpus / "texts")
    with pytest.raises(DataError, match=message):
        prepare(TextSource([source], split, part=NumberedPart(1, 2)), tmp_path / "out", BYTES)
    assert not (tmp_path / "out").exists()


# ---- processes


def test_processes_write_the_bytes_of_one(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TextSource([str(corpus / "texts")])
    prepare(text, tmp_path / "one", BYTES, shard_tokens=TOKENS)
    monkeypatch.setattr(encode, "BATCH", 3000)  # many batches, several in flight
    prepare(text, tmp_path / "two", BYTES, shard_tokens=TOKENS, jobs=2)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    known = build_tokenizer(Word(specials=Specials(pad="<pad>")), ["weft warp loom"])
    with pytest.raises(TokenizerError, match="is not in the vocabulary"):  # raised in the child process
        prepare(text, tmp_path / "words", known, jobs=1)
    assert not (tmp_path / "words").exists()


def test_a_dead_process_is_reported_in_one_line(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, request, calls = TextSource([str(corpus / "texts")]), Child.request, count(1)

    def kill_and_request(child: Child, pieces: Any) -> dict[str, Any]:
        if next(calls) == 12:
            child.process.kill()
        return request(child, pieces)

    monkeypatch.setattr(encode, "BATCH", 3000)
    monkeypatch.setattr(Child, "request", kill_and_request)
    with pytest.raises(DataError, match=r"a process that encodes text died: it was killed, .* fewer --jobs") as error:
        prepare(text, tmp_path / "out", BYTES, shard_tokens=TOKENS, jobs=1)
    assert "\n" not in str(error.value)
    assert (tmp_path / "out" / "journal.jsonl").read_text().count("\n") >= 1  # finished shards are kept
    prepare(text, tmp_path / "out", BYTES, shard_tokens=TOKENS)
    prepare(text, tmp_path / "whole", BYTES, shard_tokens=TOKENS)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


KILLED = """
import os, signal, sys
from weft.data import encode, folder
from weft.data.config import TextSource
from weft.data.prepare import prepare
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer
from weft.workers import Child

encode.BATCH = 3000
start = Child.__init__

def start_and_print(child, *arguments):
    start(child, *arguments)
    print(child.process.pid, flush=True)

Child.__init__ = start_and_print
folder.record_shard = lambda out, shard: os.kill(os.getpid(), signal.SIGKILL)
prepare(TextSource([sys.argv[1]]), sys.argv[2], build_tokenizer(Byte(), ["x"]), shard_tokens=2000, jobs=2)
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
def test_child_processes_end_with_their_parent(tmp_path: Path, corpus: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(corpus / "texts"), str(tmp_path / "out")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    children = [int(line) for line in done.stdout.split()]
    assert len(children) == 2
    end = time.monotonic() + 20
    while any(map(is_running, children)):
        assert time.monotonic() < end, "a child is still running"
        time.sleep(0.05)
    with pytest.raises(DataError, match="unfinished"):
        Shards.open(tmp_path / "out")


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
