"""The header of a safetensors file: as the library reads it, and nothing believed that is not so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from weft.storage.safetensors_header import BITS, MAX_HEADER_BYTES, parse_header, read_header

GIVEN = {
    "b": torch.arange(6.0).reshape(2, 3),
    "a": torch.zeros(3, dtype=torch.int64),
    "none": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "flags": torch.ones(5, dtype=torch.bool),
}


def test_a_header_says_what_the_library_says(tmp_path: Path) -> None:
    file = tmp_path / "file"
    save_file(GIVEN, file, metadata={"format": "pt"})
    header, whole = read_header(file), file.read_bytes()
    assert header.metadata == {"format": "pt"} and header.end == len(whole)
    with safe_open(file, "pt") as opened:
        assert list(header.tensors) == opened.offset_keys()
        for name, place in header.tensors.items():
            part = opened.get_slice(name)
            assert place.shape == tuple(part.get_shape()) and place.dtype == part.get_dtype()
            raw = GIVEN[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert whole[place.begin : place.end] == raw
    assert whole[8 : header.begin].decode() == header.text
    assert parse_header(header.text.encode()) == header


def made(tree: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "seven bytes": (b"\0" * 7, "cut short"),
    "a header longer than the file": (made({}, length=100), "cut short"),
    "a header of absurd size": (made({}, length=2**63), "cut short"),
    "no JSON": (made(b"{nothing"), "header is damaged"),
    "no UTF-8": (made(b'{"\xff": 1}'), "header is damaged"),
    "no object": (made([1]), "header is damaged"),
    "deeply nested": (made(b"[" * 100_000), "header is damaged"),
    "no entry": (made({"x": 3}), "header is damaged"),
    "no offsets": (made({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)), "header is damaged"),
    "offsets that are no numbers": (made({"x": entry(offsets=["0", 8])}, bytes(8)), "header is damaged"),
    "a negative size": (made({"x": entry(shape=[-2])}, bytes(8)), "header is damaged"),
    "a true size": (made({"x": entry(shape=[True, 2])}, bytes(8)), "header is damaged"),
    "many dimensions": (made({"x": entry(shape=[9] * 100_000)}, bytes(8)), "header is damaged"),
    "a large size": (made({"x": entry(shape=[2**64])}, bytes(8)), "header is damaged"),
    "metadata that is no text": (made({"__metadata__": {"a": 1}}), "not text by name"),
    "another length than its shape's": (made({"x": entry(shape=[3])}, bytes(8)), "'x' has 8 bytes"),
    "an end before the beginning": (made({"x": entry(offsets=[8, 0])}, bytes(8)), "'x' has -8 bytes"),
    "a gap": (made({"x": entry(offsets=[4, 12])}, bytes(12)), "don't follow each other: 'x'"),
    "an overlap": (made({"x": entry(), "y": entry(offsets=[4, 12])}, bytes(12)), "don't follow each other: 'y'"),
    "too short": (made({"x": entry()}, bytes(7)), "bytes instead of"),
    "too long": (made({"x": entry()}, bytes(9)), "bytes instead of"),
}


@pytest.mark.parametrize("how", BAD)
def test_what_is_no_header_is_refused(tmp_path: Path, how: str) -> None:
    data, reason = BAD[how]
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=reason) as caught:
        read_header(tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_a_type_that_nobody_knows_is_left_to_the_reader(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(made({"x": entry("F128", [2])}, bytes(8)))
    assert read_header(tmp_path / "file").tensors["x"].dtype == "F128"
    assert MAX_HEADER_BYTES == 100_000_000


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_the_library_refuses_is_refused(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Whatever bit flips: where we read a header, the library reads the same one."""
    file = tmp_path_factory.mktemp("flip") / "file"
    save_file(GIVEN, file)
    whole = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(whole)
    try:
        ours = read_header(file).tensors
    except ValueError:
        return
    if all(place.dtype in BITS for place in ours.values()):
        with safe_open(file, "pt") as opened:
            theirs = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.offset_keys()}
        assert {name: place.shape for name, place in ours.items()} == theirs
