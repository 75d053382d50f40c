"""Training reads its text at most twice, for the tokenizer and for the tokens; once if the tokenizer is finished."""

import builtins
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.command import Patch
from tests.spread import slow

import weft
from weft.data import amount, streams

MAX_SAMPLED = 0.9  # share of a file read in addition: its beginning is read to estimate the amount of text
TINY = ["steps=1", "batch.size=2", "batch.length=16", "evaluate.tokens=64", "model.layers=1", "model.d_model=16"]
TINY += ["model.attention.heads=2", "model.feedforward.d_ff=16"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sentences as running text, as documents and as rows."""
    folder, pick = tmp_path_factory.mktemp("sources"), random.Random(0)
    words = ["".join(pick.choices("abcdefghij", k=6)) for _ in range(200)]
    lines = [" ".join(pick.choices(words, k=40)) + "." for _ in range(500)]
    (folder / "book.txt").write_text("\n".join(lines))
    documents = [" ".join(lines[at : at + 5]) for at in range(0, len(lines), 5)]
    (folder / "documents.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents))
    # more characters than the vocabulary size that would be chosen
    signs = [chr(0x4E00 + pick.randrange(700)) for _ in range(50_000)]
    (folder / "signs.txt").write_text("\n".join("".join(signs[at : at + 60]) for at in range(0, len(signs), 60)))
    rows = [{"text": text, "label": number % 2, "source": text, "target": text} for number, text in enumerate(lines)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def count_reads(monkeypatch: Patch, file: Path) -> list[int]:
    """Record the sizes of all further reads of a file."""
    sizes: list[int] = []
    plain = builtins.open

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            read = super().readinto(buffer)
            sizes.append(read or 0)
            return read

        def readall(self) -> bytes:
            read = super().readall()
            sizes.append(len(read))
            return read

    def counted_open(name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(name, str | Path) and Path(name) == file:
            assert mode == "rb", "a source is read as bytes, with a buffer"
            return io.BufferedReader(Counted(name, "rb"))
        return plain(name, mode, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", counted_open)
    monkeypatch.setattr(streams, "BLOCK", 1 << 14)  # so that a sample is a small part of the file
    monkeypatch.setattr(amount, "SAMPLE", 1 << 14)
    return sizes


@pytest.mark.parametrize(
    ("recipe", "name", "changes", "passes"),
    [
        ("gpt-tiny", "book.txt", [], 2),
        slow(("gpt-tiny", "book.txt", ["data.validation.kind=tail"], 2)),
        ("gpt-tiny", "book.txt", ["tokenizer=byte"], 1),
        slow(("gpt-tiny", "documents.jsonl", [], 2)),
        slow(("gpt-tiny", "documents.jsonl", ["data.validation.kind=tail"], 2)),
        slow(("bert-tiny", "signs.txt", ["objective=masked"], 2)),
        ("bert-tiny", "documents.jsonl", ["objective=masked+next", "batch.length=32"], 2),
        slow(("bert-tiny", "rows.jsonl", ["objective=classify"], 2)),
        ("bert-tiny", "rows.jsonl", ["objective=classify", "data.validation.kind=tail"], 2),
        slow(("vaswani-tiny", "rows.jsonl", ["tokenizer.vocab_size=300"], 2)),
        ("vaswani-tiny", "rows.jsonl", ["tokenizer=byte"], 1),
    ],
)
def test_passes_over_the_text(
    recipe: str, name: str, changes: list[str], passes: int, sources: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    file = sources / name
    sizes = count_reads(monkeypatch, file)
    weft.train(recipe, data=str(file), run=tmp_path / "run", changes=[*TINY, *changes], log=lambda line: None)
    assert passes <= sum(sizes) / file.stat().st_size < passes + MAX_SAMPLED


def test_a_finished_tokenizer_needs_no_text(monkeypatch: Patch, tmp_path: Path, sources: Path) -> None:
    options: dict[str, Any] = {"data": str(sources / "book.txt"), "log": lambda line: None}
    first = weft.train("gpt-tiny", run=tmp_path / "first", changes=TINY, **options)
    sizes = count_reads(monkeypatch, sources / "book.txt")
    weft.train("gpt-tiny", run=tmp_path / "run", changes=[*TINY, f"init={first.path}"], **options)
    assert 1 <= sum(sizes) / (sources / "book.txt").stat().st_size < 1 + MAX_SAMPLED
