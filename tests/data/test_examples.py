import os
import stat
from collections.abc import Iterator
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
SOME: list[dict[str, Any]] = [{"a": [1, 2, 3], "label": 1}, {"a": [], "label": 0}, {"a": [4], "label": 1}]


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_what_is_written_is_read(tmp_path_factory: Any, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("examples") / "train.safetensors"
    examples = write_examples(path, rows, notes={"labels": ["ä"], "tokenizer": "abc"})
    assert len(examples) == len(rows)
    assert set(examples.fields) == {"a", "b", "score"}
    assert examples.notes == {"labels": ["ä"], "tokenizer": "abc"}
    assert examples.values("score").tolist() == [row["score"] for row in rows]
    for field in ("a", "b"):
        assert [examples.ids(field, n).tolist() for n in range(len(rows))] == [row[field] for row in rows]
        assert examples.lengths(field).tolist() == [len(row[field]) for row in rows]
        assert examples.ids(field, 0).dtype == np.int64


def test_other_programs_can_read_the_file(tmp_path: Path) -> None:
    write_examples(tmp_path / "a.safetensors", SOME)
    tensors = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert tensors["a.ids"].dtype == np.uint16
    assert tensors["a.ids"].tolist() == [1, 2, 3, 4]
    assert tensors["a.offsets"].tolist() == [0, 3, 3, 4]
    assert tensors["label.values"].tolist() == [1, 0, 1]


def test_ids_are_narrow_where_they_can_be(tmp_path: Path) -> None:
    for ids, dtype in (([65_535], "uint16"), ([65_536], "int32"), ([-1, 5], "int32"), ([], "uint16")):
        write_examples(tmp_path / "a", [{"x": ids}])
        assert safetensors.numpy.load_file(tmp_path / "a")["x.ids"].dtype == dtype
        assert Examples.open(tmp_path / "a").ids("x", 0).tolist() == ids


def test_the_fingerprint_is_of_the_content() -> None:
    same = held.examples(SOME).fingerprint
    assert held.examples(SOME).fingerprint == same
    assert held.examples([*SOME[:2], {"a": [5], "label": 1}]).fingerprint != same
    assert held.examples(SOME, notes={"labels": ["x"]}).fingerprint != same


def test_both_sides_are_written_in_one_pass(tmp_path: Path) -> None:
    paths: dict[Side, Path] = {"train": tmp_path / "data" / "train", "validation": tmp_path / "data" / "validation"}
    sided: list[tuple[Side, dict[str, Any]]] = [
        ("validation" if n % 3 == 0 else "train", {"a": [n], "label": n}) for n in range(10)
    ]
    once = iter(sided)
    found = write_sides(paths, once, notes={"labels": ["x"]})
    assert next(once, None) is None
    for side, path in paths.items():
        alone = write_examples(
            tmp_path / "alone", [row for where, row in sided if where == side], notes={"labels": ["x"]}
        )
        assert path.read_bytes() == (tmp_path / "alone").read_bytes()
        assert found[side].fingerprint == alone.fingerprint
    train = write_sides({"train": tmp_path / "t"}, sided)["train"]
    assert train.values("label").tolist() == [1, 2, 4, 5, 7, 8]


def test_a_side_without_an_example_leaves_both_as_they_were(tmp_path: Path) -> None:
    paths: dict[Side, Path] = {"train": tmp_path / "train", "validation": tmp_path / "validation"}
    with pytest.raises(DataError, match="validation: there is no example to write"):
        write_sides(paths, (("train", row) for row in SOME))
    assert not os.listdir(tmp_path)


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_examples(path, SOME)
    before = path.read_bytes()

    def failing() -> Iterator[dict[str, Any]]:
        yield from SOME
        raise DataError("row 4 is wrong")

    with pytest.raises(DataError, match="row 4"):
        write_examples(path, failing())
    with pytest.raises(DataError, match=r"a\.safetensors: there is no example to write"):
        write_examples(path, [])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    with pytest.raises(DataError, match="cannot be written"):
        write_examples(path / "inside", SOME)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_examples(path, SOME, notes={"labels": ["no", "yes"]})
    whole = path.read_bytes()
    for cut in (0, 5, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.safetensors: (damaged|not a file of examples)"):
            Examples.open(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(DataError, match=r"damaged: .* bytes instead of"):
        Examples.open(path)
    with pytest.raises(DataError, match="no such file of examples"):
        Examples.open(tmp_path / "b")
    safetensors.numpy.save_file({"x": np.zeros(3)}, path)
    with pytest.raises(DataError, match="not a file of examples"):
        Examples.open(path)


def test_rows_become_examples_some_at_a_time() -> None:
    rows = [Row({"n": n}, "x", "validation" if n % 3 == 0 else "train") for n in range(2500)]
    chunks: list[int] = []

    def make(some: Any) -> Iterator[dict[str, Any]]:
        chunks.append(len(some))
        return ({"n": row.values["n"]} for row in some)

    found = list(encode_rows(iter(rows), make))
    assert found == [(row.side, {"n": row.values["n"]}) for row in rows]
    assert chunks == [1024, 1024, 452]


def test_labels_have_an_order() -> None:
    assert label_names(["b", "a", "b"]) == ["a", "b"]
    assert label_names(["10", "2", "-1"]) == ["-1", "2", "10"]


def labelled(*rows: tuple[Side, str]) -> list[Row]:
    return [Row({"kind": label}, f"x:{n}", side) for n, (side, label) in enumerate(rows)]


@pytest.mark.parametrize("names", [None, ["b", "a", "c"]])
def test_labels_are_numbered_in_one_pass(tmp_path: Path, names: list[str] | None) -> None:
    rows = labelled(("validation", "c"), ("train", "b"), ("train", "c"), ("train", "a"), ("validation", "a"))
    kind, tags = Labels("kind", names), Labels("tags", names)
    paths: dict[Side, Path] = {"train": tmp_path / "train", "validation": tmp_path / "validation"}

    def make(some: Any) -> list[dict[str, Any]]:
        return [
            {"label": kind.number(row.values["kind"], row), "tags": [-1, tags.number(row.values["kind"], row)]}
            for row in some
        ]

    found = write_sides(paths, encode_rows(iter(rows), make), labels={"label": kind, "tags": tags})
    order = names or ["a", "b", "c"]
    assert kind.names == tags.names == order
    for side, examples in found.items():
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
