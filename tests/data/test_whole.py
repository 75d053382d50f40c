"""A document is encoded as one text, whatever its sections, sides, processes and parts; its bytes are all counted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.text.test_fragments import KINDS

from weft.data import encode
from weft.data.config import HashSplit, NoSplit, NumberedPart, Split, TailSplit, TextSource
from weft.data.prepare import merge, prepare
from weft.data.shards import Shards
from weft.data.split import split_sections
from weft.text.tokenizer import Tokenizer

# no joint in the middle: a long word, and lines of a script without spaces
PARAGRAPHS = [
    "The frog sat by  the river.\n\n  It's said that die Kröte sang, 12345 times.\r\n",
    "漢字" * 90 + "。\n",
    "x" * 300,
    "\n\n\n- one\n- two\t\n",
]
TEXT = "".join(PARAGRAPHS[n % 4] + f" {n} " for n in range(24))
# joints at lines, at spaces, anywhere and nowhere; with what is put before a text, and what is dropped at its ends
SOME = ["own-bpe", "llama-2", "llama-3", "t5", "own-wordpiece", "own-byte", "one-word", "added-strips"]


def made(kind: str, *, opens: bool = False) -> Tokenizer:
    tokenizer = KINDS[kind][0]()
    if not opens:
        return tokenizer
    backend: Any = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.post_processor = tokenizers.processors.TemplateProcessing("<eos> $A", special_tokens=[("<eos>", 1)])
    roles: Any = {"bos": "<eos>", "eos": "<unk>"}
    return Tokenizer.from_json(backend.to_str(), roles)


def in_reading_order(text: TextSource, shards: Shards) -> tuple[list[int], int]:
    """The ids of all sections, each from its side, and their bytes."""
    ids: list[int] = []
    sides = {"train": shards.train, "validation": shards.validation}
    tables = {side: None if tokens is None else tokens.sections for side, tokens in sides.items()}
    taken, size = {"train": 0, "validation": 0}, 0
    for section in split_sections(text, log=lambda line: None):
        tokens, table, number = sides[section.side], tables[section.side], taken[section.side]
        assert tokens is not None and table is not None
        stop = table[0, number + 1] if number + 1 < table.shape[1] else len(tokens)
        ids += tokens.read(int(table[0, number]), int(stop - table[0, number])).tolist()
        size += int(table[1, number])
        taken[section.side] += 1
    return ids, size


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("split", [NoSplit(), HashSplit(fraction=0.3), TailSplit(fraction=0.4)], ids=lambda s: s.kind)
def test_sections_divide_ids_and_not_the_text(tmp_path: Path, kind: str, split: Split) -> None:
    tokenizer = made(kind)
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    text = TextSource([str(tmp_path / "a.txt")], split)
    ids, size = in_reading_order(text, prepare(text, tmp_path / "out", tokenizer))
    assert ids == [*tokenizer.encode(TEXT), *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]
    assert size == len(TEXT.encode())


def test_each_side_has_the_same_bytes_whatever_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    text = TextSource([str(tmp_path / "a.txt")], HashSplit(fraction=0.3))
    found = [prepare(text, tmp_path / kind, made(kind)) for kind in SOME]
    held = [shards.validation for shards in found]
    wanted = sum(section.size for section in split_sections(text) if section.side == "validation")
    assert [each and each.bytes for each in held] == [wanted] * len(SOME)
    for each in held:
        assert each is not None
        assert (each.sections[1] >= 0).all()


@pytest.mark.parametrize("kind", ["own-bpe", "llama-2", "one-word"])
def test_processes_parts_and_interruptions_change_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "MAX_PIECE_BYTES", 2000)  # without joints, pieces end all the same
    monkeypatch.setattr(encode, "BATCH", 500)
    tokenizer = made(kind)
    (tmp_path / "a.txt").write_bytes(TEXT.encode() * 3)
    rows = [TEXT[n * 50 : n * 61] for n in range(1, 30)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    text = TextSource([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], HashSplit(fraction=0.2))
    whole = prepare(text, tmp_path / "whole", tokenizer, shard_tokens=700)
    assert len(whole.of("train")) > 3
    parts = []
    for number in (1, 2, 3):
        part = TextSource(text.sources, text.validation, part=NumberedPart(number, 3))
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


def test_documents_begin_with_bos_where_the_tokenizer_puts_it(tmp_path: Path) -> None:
    tokenizer = made("llama-2", opens=True)
    (tmp_path / "a.jsonl").write_text('{"text": "the frog"}\n{"text": "a river"}\n')
    tokens = prepare(TextSource([str(tmp_path / "a.jsonl")], NoSplit()), tmp_path / "out", tokenizer).train
    one, two = tokenizer.encode("the frog"), tokenizer.encode("a river")
    assert tokens.read(0, len(tokens)).tolist() == [1, *one, 0, 1, *two, 0]
    assert tokens.documents(0, len(tokens)).tolist() == [0] * (len(one) + 2) + [1] * (len(two) + 2)
    assert tokens.sections[1].tolist() == [8, 7]


def test_sections_are_encoded_apart_as_before(tmp_path: Path) -> None:
    """Weft 0.1 encoded each section as a text: its folders are continued so, and its runs prepare so again."""
    tokenizer = made("llama-2", opens=True)
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    text = TextSource([str(tmp_path / "a.txt")], NoSplit(), apart=True)
    tokens = prepare(text, tmp_path / "out", tokenizer).train
    each = [tokenizer.encode(section.text) for section in split_sections(text)]
    assert tokens.read(0, len(tokens)).tolist() == [*(id for ids in each for id in ids), 0]
    np.testing.assert_array_equal(tokens.sections[0], np.cumsum([0, *map(len, each[:-1])]))
    (tmp_path / "out" / "index.json").unlink()  # stopped before its end
    again = prepare(TextSource(text.sources, NoSplit()), tmp_path / "out", tokenizer).train
    assert again.read(0, len(again)).tolist() == tokens.read(0, len(tokens)).tolist()
