"""A document is encoded as one text, independent of sections, sides, processes and parts; all bytes are counted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.spread import spread
from tests.text.test_fragments import KINDS

from weft.data import encode
from weft.data.config import HashSplit, NoSplit, NumberedPart, Split, TailSplit, TextSource
from weft.data.prepare import merge, prepare
from weft.data.shards import Shards
from weft.data.split import split_sections
from weft.text.tokenizer import Tokenizer

# includes stretches without a split point: a long word, and lines of a script without spaces
PARAGRAPHS = [
    "The frog sat by  the river.\n\n  It's said that die Kröte sang, 12345 times.\r\n",
    "漢字" * 90 + "。\n",
    "x" * 300,
    "\n\n\n- one\n- two\t\n",
]
TEXT = "".join(PARAGRAPHS[n % 4] + f" {n} " for n in range(24))
# split points at lines, at spaces, anywhere and nowhere; prefixes, and text dropped at the ends
TOKENIZERS = ["own-bpe", "llama-2", "llama-3", "t5", "own-wordpiece", "own-byte", "one-word", "added-strips"]


def build(kind: str, *, opens: bool = False) -> Tokenizer:
    tokenizer = KINDS[kind][0]()
    if not opens:
        return tokenizer
    backend: Any = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.post_processor = tokenizers.processors.TemplateProcessing("<eos> $A", special_tokens=[("<eos>", 1)])
    roles: Any = {"bos": "<eos>", "eos": "<unk>"}
    return Tokenizer.from_json(backend.to_str(), roles)


def in_reading_order(text: TextSource, shards: Shards) -> tuple[list[int], int]:
    """Ids of all sections, each from its side, and the sum of their bytes."""
    ids: list[int] = []
    sides = {"train": shards.train, "validation": shards.validation}
    tables = {side: iter(tokens.sections.T.tolist()) for side, tokens in sides.items() if tokens is not None}
    ends = {side: [*tokens.sections[0, 1:].tolist(), len(tokens)] for side, tokens in sides.items() if tokens}
    size = 0
    for section in split_sections(text, log=lambda line: None):
        tokens, (start, section_bytes, _) = sides[section.side], next(tables[section.side])
        assert tokens is not None
        ids += tokens.read(start, ends[section.side].pop(0) - start).tolist()
        size += section_bytes
    return ids, size


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("split", [NoSplit(), HashSplit(fraction=0.3), TailSplit(fraction=0.4)], ids=lambda s: s.kind)
def test_sections_divide_the_ids_and_not_the_text(tmp_path: Path, kind: str, split: Split) -> None:
    tokenizer = build(kind)
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    text = TextSource([str(tmp_path / "a.txt")], split)
    ids, size = in_reading_order(text, prepare(text, tmp_path / "out", tokenizer))
    assert ids == [*tokenizer.encode(TEXT), *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]
    assert size == len(TEXT.encode())


def test_the_bytes_of_a_side_do_not_depend_on_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    text = TextSource([str(tmp_path / "a.txt")], HashSplit(fraction=0.3))
    expected = sum(section.size for section in split_sections(text) if section.side == "validation")
    for kind in TOKENIZERS:
        validation = prepare(text, tmp_path / kind, build(kind)).validation
        assert validation is not None and validation.bytes == expected
        assert (validation.sections[1] >= 0).all()


@pytest.mark.parametrize("kind", spread(["own-bpe", "llama-2", "one-word"], 1))
def test_processes_parts_and_stops_change_no_token(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "MAX_FRAGMENT_BYTES", 2000)  # some fragments end between split points
    monkeypatch.setattr(encode, "BATCH", 500)
    tokenizer = build(kind)
    (tmp_path / "a.txt").write_bytes(TEXT.encode() * 3)
    rows = [TEXT[n * 50 : n * 61] for n in range(1, 30)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    text = TextSource([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], HashSplit(fraction=0.2))
    whole = prepare(text, tmp_path / "whole", tokenizer, shard_tokens=700)
    assert len(whole.of("train")) > 3
    parts = []
    for number in (1, 2, 3):
        part = replace(text, part=NumberedPart(number, 3))
        prepare(part, tmp_path / str(number), tokenizer, shard_tokens=700)
        parts.append(tmp_path / str(number))
    assert merge(parts, tmp_path / "merged").fingerprint == whole.fingerprint
    if kind == "llama-2":
        assert prepare(text, tmp_path / "two", tokenizer, shard_tokens=700, jobs=1).fingerprint == whole.fingerprint
    index = json.loads((tmp_path / "whole" / "index.json").read_text())
    kept = [json.dumps(shard) for shard in index["shards"] if shard["name"] in ("train-00000", "validation-00000")]
    (tmp_path / "whole" / "journal.jsonl").write_text("\n".join(kept) + "\n")
    (tmp_path / "whole" / "index.json").unlink()
    assert prepare(text, tmp_path / "whole", tokenizer, shard_tokens=700).fingerprint == whole.fingerprint


def test_documents_begin_with_bos_if_the_tokenizer_adds_it(tmp_path: Path) -> None:
    tokenizer = build("llama-2", opens=True)
    (tmp_path / "a.jsonl").write_text('{"text": "the frog"}\n{"text": "a river"}\n')
    tokens = prepare(TextSource([str(tmp_path / "a.jsonl")], NoSplit()), tmp_path / "out", tokenizer).train
    one, two = tokenizer.encode("the frog"), tokenizer.encode("a river")
    assert tokens.read(0, len(tokens)).tolist() == [1, *one, 0, 1, *two, 0]
    assert tokens.documents(0, len(tokens)).tolist() == [0] * (len(one) + 2) + [1] * (len(two) + 2)
    assert tokens.sections[1].tolist() == [8, 7]


def test_folders_of_weft_0_1_are_continued_with_separate_sections(tmp_path: Path) -> None:
    tokenizer = build("llama-2", opens=True)
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    text = TextSource([str(tmp_path / "a.txt")], NoSplit(), separate_sections=True)
    tokens = prepare(text, tmp_path / "out", tokenizer).train
    sections = [tokenizer.encode(section.text) for section in split_sections(text)]
    assert tokens.read(0, len(tokens)).tolist() == [*(id for ids in sections for id in ids), 0]
    np.testing.assert_array_equal(tokens.sections[0], np.cumsum([0, *map(len, sections[:-1])]))
    (tmp_path / "out" / "index.json").unlink()  # unfinished
    continued = prepare(TextSource(text.sources, NoSplit()), tmp_path / "out", tokenizer).train
    assert continued.read(0, len(continued)).tolist() == tokens.read(0, len(tokens)).tolist()
