"""A text that several processes encode, or several machines prepare in parts: always the bytes of one process."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.data import encode
from weft.data import folder as folders
from weft.data.config import FilesSplit, HashSplit, NoSplit, NumberedPart, Split, TailSplit, TextSource
from weft.data.prepare import merge as put_together
from weft.data.prepare import prepare, shares
from weft.data.shards import Shards
from weft.errors import DataError, TokenizerError
from weft.text.config import Byte, Specials, Word
from weft.text.tokenizer import build_tokenizer
from weft.workers import Child

BYTES = build_tokenizer(Byte(), ["x"])
TOKENS = 16_000  # of a shard


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long file, a table of short and long rows, small files, an empty one; and one to validate on."""
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
    """Every part, prepared one after the other."""
    return [one_part(text, folder, NumberedPart(number + 1, count), shard_tokens) for number in range(count)]


def one_part(text: TextSource, folder: Path, part: NumberedPart, shard_tokens: int = TOKENS) -> Path:
    place = folder / f"part-{part.number}"
    text = TextSource(text.sources, text.validation, text.column, text.encoding, part)
    prepare(text, place, BYTES, shard_tokens=shard_tokens)
    return place


# ---- parts


@pytest.mark.parametrize(("kind", "count"), [("hash", 3), ("hash", 9), ("files", 5), ("none", 1)])
def test_parts_put_together_are_the_bytes_of_one_machine(tmp_path: Path, corpus: Path, kind: str, count: int) -> None:
    splits: dict[str, Split] = {"hash": HashSplit(fraction=0.2), "none": NoSplit()}
    splits["files"] = FilesSplit(sources=(str(corpus / "held.txt"),))
    text = TextSource([str(corpus / "texts")], splits[kind])
    whole = prepare(text, tmp_path / "whole", BYTES, shard_tokens=TOKENS)
    assert len(whole.of("train")) > 3
    parts = in_parts(text, tmp_path, count)
    merged = put_together(list(reversed(parts)), tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")  # the plan too
    assert merged.fingerprint == Shards.open(tmp_path / "merged").fingerprint == whole.fingerprint
    if count == 3:  # each has its share, and no other text
        sizes = [sum(shard.bytes for shard in Shards.open(part, "part.json").index.shards) for part in parts]
        assert sum(sizes) == sum(shard.bytes for shard in whole.index.shards)
        assert min(sizes) > 0
    again = put_together(parts, tmp_path / "merged")
    assert again.fingerprint == whole.fingerprint


def test_files_are_shared_out_by_their_sizes() -> None:
    assert shares([10, 10, 10, 10], 2) == [range(1), range(1), range(1, 2), range(1, 2)]
    assert shares([100], 3) == [range(3)]
    assert shares([10, 0, 80, 10, 0], 4) == [range(1), range(1), range(4), range(3, 4), range(3, 4)]
    assert shares([0, 0], 2) == [range(1), range(1)]
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 1000, 500).tolist()
    found = shares(sizes, 16)
    assert {part for parts in found for part in parts} == set(range(16))
    alone = [sum(size for size, parts in zip(sizes, found, strict=True) if parts == range(n, n + 1)) for n in range(16)]
    assert min(alone) > sum(sizes) / 16 - 2000  # but for the files at the borders


def test_another_machine_has_the_files_elsewhere(tmp_path: Path, corpus: Path) -> None:
    texts = [TextSource([str(corpus / "texts")])]
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in (corpus / "texts").iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    texts.append(TextSource([str(copied)]))
    made = [one_part(text, tmp_path / str(n), NumberedPart(n + 1, 2)) for n, text in enumerate(texts)]
    merged = put_together(made, tmp_path / "merged")
    assert merged.fingerprint == prepare(texts[0], tmp_path / "whole", BYTES, shard_tokens=TOKENS).fingerprint


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[list[Path], Path]:
    """A text in two parts, and as a whole."""
    folder, text = tmp_path_factory.mktemp("halves"), TextSource([str(corpus / "texts")])
    prepare(text, folder / "whole", BYTES, shard_tokens=TOKENS)
    return in_parts(text, folder, 2), folder / "whole"


@pytest.mark.parametrize("stop", [0, 2, 4])
def test_a_merge_that_was_stopped_continues(
    tmp_path: Path, halves: tuple[list[Path], Path], monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    parts, whole = halves
    finish, left = folders.Writers._finish, [stop]

    def stopping(writers: folders.Writers, side: str) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        finish(writers, side)  # type: ignore[arg-type]

    monkeypatch.setattr(folders.Writers, "_finish", stopping)
    with pytest.raises(KeyboardInterrupt):
        put_together(parts, tmp_path / "merged")
    monkeypatch.undo()
    with pytest.raises(DataError, match="unfinished"):
        Shards.open(tmp_path / "merged")
    put_together(parts, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(whole)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, corpus: Path) -> None:
    text = TextSource([str(corpus / "texts")])
    one, two, three = in_parts(text, tmp_path, 3)

    def refused(parts: list[Path], message: str) -> None:
        with pytest.raises(DataError, match=message) as error:
            put_together(parts, tmp_path / "merged")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "merged").exists()

    refused([one, three], "of 3 parts 2 is missing")
    refused([three], "of 3 parts 1, 2 are missing")
    refused([one, two, two, three], "part 2/3 is given twice: .*part-2 and .*part-2")
    other = one_part(text, tmp_path / "four", NumberedPart(4, 4))
    refused([one, two, three, other], "part-4 is part 4/4, but .*part-1 part 1/3")
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
    with pytest.raises(DataError, match="part-1: a part of a text; put all parts together"):
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


def test_a_damaged_tokenizer_is_found(tmp_path: Path, corpus: Path) -> None:
    (only,) = in_parts(TextSource([str(corpus / "texts")]), tmp_path, 1)
    (only / "tokenizer.json").write_text((only / "tokenizer.json").read_text()[:-9])
    with pytest.raises(DataError, match="part-1: damaged: "):
        put_together([only], tmp_path / "merged")
    build_tokenizer(Word(), ["weft warp"]).save(only)
    with pytest.raises(DataError, match="its tokenizer is not what was written"):
        put_together([only], tmp_path / "merged")


def test_a_file_that_changed_between_parts_is_noticed(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = ["a", "b" * 99] * 300
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, _ = in_parts(TextSource([str(file)]), tmp_path / "first", 2)
    empty = ["" if n < 100 else row for n, row in enumerate(rows)]
    changed = "".join(json.dumps(row) + "\n" for row in empty)
    file.write_text(changed + " " * (file.stat().st_size - len(changed)))
    _, two = in_parts(TextSource([str(file)]), tmp_path / "second", 2)
    with pytest.raises(DataError, match="the parts don't fit together"):
        put_together([one, two], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("source", "split", "message"),
    [("-", NoSplit(), "standard input can't be read by every machine"), ("a", TailSplit(), "known at its end")],
)
def test_what_cannot_be_divided(tmp_path: Path, corpus: Path, source: str, split: Split, message: str) -> None:
    source = source if source == "-" else str(corpus / "texts")
    with pytest.raises(DataError, match=message):
        prepare(TextSource([source], split, part=NumberedPart(1, 2)), tmp_path / "out", BYTES)
    assert not (tmp_path / "out").exists()


# ---- processes


def test_processes_write_the_bytes_of_one(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TextSource([str(corpus / "texts")])
    prepare(text, tmp_path / "one", BYTES, shard_tokens=TOKENS)
    monkeypatch.setattr(encode, "BATCH", 3000)  # many batches, of which many are under way
    prepare(text, tmp_path / "two", BYTES, shard_tokens=TOKENS, jobs=2)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    known = build_tokenizer(Word(specials=Specials(pad="<pad>")), ["weft warp loom"])
    with pytest.raises(TokenizerError, match="is not in the vocabulary"):  # said by the process that met it
        prepare(text, tmp_path / "words", known, jobs=1)
    assert not (tmp_path / "words").exists()


def test_a_process_that_dies_is_one_line(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, asked, left = TextSource([str(corpus / "texts")]), Child.request, [12]

    def dying(child: Child, pieces: Any) -> dict[str, Any]:
        left[0] -= 1
        if not left[0]:
            child.process.kill()
        return asked(child, pieces)

    monkeypatch.setattr(encode, "BATCH", 3000)
    monkeypatch.setattr(Child, "request", dying)
    with pytest.raises(
        DataError, match=r"out: a process that encodes text died: it was killed, .* fewer --jobs"
    ) as error:
        prepare(text, tmp_path / "out", BYTES, shard_tokens=TOKENS, jobs=1)
    assert "\n" not in str(error.value)
    assert (tmp_path / "out" / "journal.jsonl").read_text().count("\n") >= 1  # what was done is kept
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

def starting(child, *rest):
    start(child, *rest)
    print(child.process.pid, flush=True)

def noting(out, shard):
    os.kill(os.getpid(), signal.SIGKILL)

Child.__init__ = starting
folder.note = noting
prepare(TextSource([sys.argv[1]]), sys.argv[2], build_tokenizer(Byte(), ["x"]), shard_tokens=2000, jobs=2)
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
def test_processes_end_with_the_one_that_started_them(tmp_path: Path, corpus: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(corpus / "texts"), str(tmp_path / "out")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    started = [int(line) for line in done.stdout.split()]
    assert len(started) == 2
    end = time.monotonic() + 20
    while any(map(_lives, started)):
        assert time.monotonic() < end, "a process goes on"
        time.sleep(0.05)
    with pytest.raises(DataError, match="unfinished"):
        Shards.open(tmp_path / "out")


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
