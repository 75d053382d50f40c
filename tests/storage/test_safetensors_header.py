"""The header of a safetensors file: read as the library reads it, and checked against the file."""

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

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3),
    "a": torch.zeros(3, dtype=torch.int64),
    "none": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "flags": torch.ones(5, dtype=torch.bool),
}


def test_a_header_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    save_file(TENSORS, file, metadata={"format": "pt"})
    header, content = read_header(file), file.read_bytes()
    assert header.metadata == {"format": "pt"} and header.end == len(content)
    with safe_open(file, "pt") as opened:
        assert list(header.tensors) == opened.offset_keys()
        for name, info in header.tensors.items():
            expected = opened.get_slice(name)
            assert info.shape == tuple(expected.get_shape()) and info.dtype == expected.get_dtype()
            raw = TENSORS[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert content[info.begin : info.end] == raw
    assert content[8 : header.begin].decode() == header.text
    assert parse_header(header.text.encode()) == header


def file_of(tree: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "seven bytes": (b"\0" * 7, "truncated"),
    "header longer than the file": (file_of({}, length=100), "truncated"),
    "absurd header length": (file_of({}, length=2**63), "truncated"),
    "not JSON": (file_of(b"{nothing"), "header is damaged"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "header is damaged"),
    "not an object": (file_of([1]), "header is damaged"),
    "deeply nested": (file_of(b"[" * 100_000), "header is damaged"),
    "not an entry": (file_of({"x": 3}), "header is damaged"),
    "no offsets": (file_of({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)), "header is damaged"),
    "offset not an integer": (file_of({"x": entry(offsets=["0", 8])}, bytes(8)), "header is damaged"),
    "negative size": (file_of({"x": entry(shape=[-2])}, bytes(8)), "header is damaged"),
    "boolean size": (file_of({"x": entry(shape=[True, 2])}, bytes(8)), "header is damaged"),
    "many dimensions": (file_of({"x": entry(shape=[9] * 100_000)}, bytes(8)), "header is damaged"),
    "large size": (file_of({"x": entry(shape=[2**64])}, bytes(8)), "header is damaged"),
    "metadata not text": (file_of({"__metadata__": {"a": 1}}), "must map strings to strings"),
    "length not that of the shape": (file_of({"x": entry(shape=[3])}, bytes(8)), "'x' has 8 bytes"),
    "end before the beginning": (file_of({"x": entry(offsets=[8, 0])}, bytes(8)), "'x' has -8 bytes"),
    "gap": (file_of({"x": entry(offsets=[4, 12])}, bytes(12)), "not contiguous: 'x'"),
    "overlap": (file_of({"x": entry(), "y": entry(offsets=[4, 12])}, bytes(12)), "not contiguous: 'y'"),
    "too short": (file_of({"x": entry()}, bytes(7)), "bytes instead of"),
    "too long": (file_of({"x": entry()}, bytes(9)), "bytes instead of"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_header_is_refused(tmp_path: Path, case: str) -> None:
    data, reason = BAD[case]
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=reason) as caught:
        read_header(tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_an_unknown_dtype_is_left_to_the_caller(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(file_of({"x": entry("F128", [2])}, bytes(8)))
    assert read_header(tmp_path / "file").tensors["x"].dtype == "F128"
    assert MAX_HEADER_BYTES == 100_000_000


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_header_is_accepted_that_the_library_refuses(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """After any bit flip: if we read a header, the library reads the same one."""
    file = tmp_path_factory.mktemp("flip") / "file"
    save_file(TENSORS, file)
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    try:
        ours = read_header(file).tensors
    except ValueError:
        return
    if all(info.dtype in BITS for info in ours.values()):
        with safe_open(file, "pt") as opened:
            theirs = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.offset_keys()}
        assert {name: info.shape for name, info in ours.items()} == theirs
