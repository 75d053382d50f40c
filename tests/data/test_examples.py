"""Examples on disk: written in one pass, memory-mapped, checked."""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data import held
from tests.data.held import write_examples

from weft.data.examples import Examples, Labels, encode_rows, label_names, write_sides
from weft.data.shards import Side
from weft.data.table import Row
from weft.errors import DataError

IDS = st.lists(st.integers(0, 70_000), max_size=9)
ROWS = st.lists(st.fixed_dictionaries({"a": IDS, "b": IDS, "score": st.floats(-5, 5)}), min_size=1, max_size=12)
FEW: list[dict[str, Any]] = [{"a": [1, 2, 3], "label": 1}, {"a": [], "label": 0}, {"a": [4], "label": 1}]


@settings(max_examples=25, deadline=None)
@given(ROWS)
def test_examples_are_read_as_written(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("examples") / "train.safetensors"
    examples = write_examples(path, rows, notes={"labels": ["ä"], "tokenizer": "abc"})
    assert len(examples) == len(rows) and set(examples.fields) == {"a", "b", "score"}
    assert examples.notes == {"labels": ["ä"], "tokenizer": "abc"}
    assert examples.values("score").tolist() == [row["score"] for row in rows]
    for field in ("a", "b"):
        assert [examples.ids(field, n).tolist() for n in range(len(rows))] == [row[field] for row in rows]
        assert examples.lengths(field).tolist() == [len(row[field]) for row in rows]
        assert examples.ids(field, 0).dtype == np.int64


def test_safetensors_can_read_the_file(tmp_path: Path) -> None:
    write_examples(tmp_path / "a.safetensors", FEW)
    tensors = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert tensors["a.ids"].dtype == np.uint16
    assert tensors["a.ids"].tolist() == [1, 2, 3, 4]
    assert tensors["a.offsets"].tolist() == [0, 3, 3, 4]
    assert tensors["label.values"].tolist() == [1, 0, 1]


def test_ids_have_the_narrowest_dtype(tmp_path: Path) -> None:
    for ids, dtype in (([65_535], "uint16"), ([65_536], "int32"), ([-1, 5], "int32"), ([], "uint16")):
        write_examples(tmp_path / "a", [{"x": ids}])
        assert safetensors.numpy.load_file(tmp_path / "a")["x.ids"].dtype == dtype
        assert Examples.open(tmp_path / "a").ids("x", 0).tolist() == ids


def test_the_fingerprint_is_of_the_content() -> None:
    fingerprint = held.examples(FEW).fingerprint
    assert held.examples(FEW).fingerprint == fingerprint
    assert held.examples([*FEW[:2], {"a": [5], "label": 1}]).fingerprint != fingerprint
    assert held.examples(FEW, notes={"labels": ["x"]}).fingerprint != fingerprint


def test_both_sides_are_written_in_one_pass(tmp_path: Path) -> None:
    paths: dict[Side, Path] = {"train": tmp_path / "data" / "train", "validation": tmp_path / "data" / "validation"}
    rows: list[tuple[Side, dict[str, Any]]] = [
        ("validation" if n % 3 == 0 else "train", {"a": [n], "label": n}) for n in range(10)
    ]
    stream, notes = iter(rows), {"labels": ["x"]}
    both = write_sides(paths, stream, notes=notes)
    assert next(stream, None) is None
    for side, path in paths.items():
        single = write_examples(tmp_path / "single", [row for of, row in rows if of == side], notes=notes)
        assert path.read_bytes() == (tmp_path / "single").read_bytes()
        assert both[side].fingerprint == single.fingerprint
    train = write_sides({"train": tmp_path / "t"}, rows)["train"]
    assert train.values("label").tolist() == [1, 2, 4, 5, 7, 8]


def test_nothing_is_written_if_a_side_has_no_examples(tmp_path: Path) -> None:
    paths: dict[Side, Path] = {"train": tmp_path / "train", "validation": tmp_path / "validation"}
    with pytest.raises(DataError, match="validation: there is no example to write"):
        write_sides(paths, (("train", row) for row in FEW))
    assert not os.listdir(tmp_path)


def test_a_failure_leaves_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_examples(path, FEW)
    before = path.read_bytes()

    def failing() -> Iterator[dict[str, Any]]:
        yield from FEW
        raise DataError("row 4 is wrong")

    with pytest.raises(DataError, match="row 4"):
        write_examples(path, failing())
    with pytest.raises(DataError, match=r"a\.safetensors: there is no example to write"):
        write_examples(path, [])
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.safetensors"]
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    with pytest.raises(DataError, match="cannot be written"):
        write_examples(path / "inside", FEW)


def test_damage_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_examples(path, FEW, notes={"labels": ["no", "yes"]})
    content = path.read_bytes()
    for size in (0, 5, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match=r"a\.safetensors: (damaged|not a file of examples)"):
            Examples.open(path)
    path.write_bytes(content + b"x")
    with pytest.raises(DataError, match=r"damaged: .* bytes instead of"):
        Examples.open(path)
    with pytest.raises(DataError, match="no such file of examples"):
        Examples.open(tmp_path / "b")
    safetensors.numpy.save_file({"x": np.zeros(3)}, path)
    with pytest.raises(DataError, match="not a file of examples"):
        Examples.open(path)


def test_rows_are_encoded_in_chunks() -> None:
    rows = [Row({"n": n}, "x", "validation" if n % 3 == 0 else "train") for n in range(2500)]
    chunks: list[int] = []

    def make(chunk: Sequence[Row]) -> Iterator[dict[str, Any]]:
        chunks.append(len(chunk))
        return ({"n": row.values["n"]} for row in chunk)

    assert list(encode_rows(iter(rows), make)) == [(row.side, {"n": row.values["n"]}) for row in rows]
    assert chunks == [1024, 1024, 452]


def test_labels_are_sorted() -> None:
    assert label_names(["b", "a", "b"]) == ["a", "b"]
    assert label_names(["10", "2", "-1"]) == ["-1", "2", "10"]


def labelled(*rows: tuple[Side, str]) -> list[Row]:
    return [Row({"kind": label}, f"x:{n}", side) for n, (side, label) in enumerate(rows)]


@pytest.mark.parametrize("names", [None, ["b", "a", "c"]])
def test_labels_are_numbered_in_one_pass(tmp_path: Path, names: list[str] | None) -> None:
    rows = labelled(("validation", "c"), ("train", "b"), ("train", "c"), ("train", "a"), ("validation", "a"))
    kind, tags = Labels("kind", names), Labels("tags", names)
    paths: dict[Side, Path] = {"train": tmp_path / "train", "validation": tmp_path / "validation"}

    def make(chunk: Sequence[Row]) -> list[dict[str, Any]]:
        return [
            {"label": kind.number(row.values["kind"], row), "tags": [-1, tags.number(row.values["kind"], row)]}
            for row in chunk
        ]

    sides = write_sides(paths, encode_rows(iter(rows), make), labels={"label": kind, "tags": tags})
    order = names or ["a", "b", "c"]
    assert kind.names == tags.names == order
    for side, examples in sides.items():
        expected = [order.index(row.values["kind"]) for row in rows if row.side == side]
        assert examples.values("label").tolist() == expected
        assert [examples.ids("tags", n).tolist() for n in range(len(examples))] == [[-1, n] for n in expected]


def test_a_label_that_no_training_row_has_is_refused() -> None:
    labels = Labels("kind")
    for row in labelled(("validation", "c"), ("train", "b"), ("validation", "d"), ("train", "c")):
        labels.number(row.values["kind"], row)
    with pytest.raises(DataError, match=r"^x:2: 'kind' is 'd', which no training row has; known: b, c$"):
        _ = labels.names
    (row,) = labelled(("train", "x"))
    with pytest.raises(DataError, match=r"^x:0: 'kind' is 'x', which no training row has; known: b, a$"):
        Labels("kind", ["b", "a"]).number("x", row)
