"""Tensors are read from files with the same bits, verified chunk by chunk, on CPU and GPU."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.devices import DEVICES
from torch import Tensor

from weft.errors import DamageError, RunError
from weft.storage import files, tensors
from weft.storage.safetensors_header import read_header


def sample_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "wide": torch.randn(300, 70),
        "narrow": torch.randn(129, 3).bfloat16(),
        "numbers": torch.arange(1000),
        "one": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "flags": torch.rand(77) < 0.5,
    }


def assert_same(loaded: dict[str, Tensor], saved: dict[str, Tensor], device: str) -> None:
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert loaded[name].device.type == device and loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].cpu(), tensor)


def test_saved_tensors_are_loaded(tmp_path: Path) -> None:
    saved = sample_tensors()
    tensors.save(tmp_path / "file", saved)
    assert_same(tensors.load(tmp_path / "file"), saved, "cpu")
    assert tensors.common_dtype(tmp_path / "file") == torch.float32


def test_an_invalid_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not tensors at all")
    with pytest.raises(RunError, match="cannot be read"):
        tensors.load(tmp_path / "file")


def flip(path: Path, name: str) -> None:
    """Change a byte of one tensor."""
    info = read_header(path).tensors[name]
    data = bytearray(path.read_bytes())
    data[(info.begin + info.end) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [1000, 1 << 25])
def test_verified_loading_keeps_the_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, device: str
) -> None:
    monkeypatch.setattr(files, "CHECKSUM_BYTES", chunk)
    saved, path = sample_tensors(), tmp_path / "file"
    tensors.save(path, saved)
    assert_same(dict(tensors.load_verified(path, torch.device(device), files.checksums(path))), saved, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("damaged", ["wide", "flags"])
def test_a_damaged_tensor_is_named_and_not_yielded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str, device: str
) -> None:
    monkeypatch.setattr(files, "CHECKSUM_BYTES", 64)
    path = tmp_path / "file"
    tensors.save(path, sample_tensors())
    sums = files.checksums(path)
    flip(path, damaged)
    yielded: list[str] = []
    with pytest.raises(DamageError, match=rf"the checksum is wrong (in|between) .*\b{damaged}\b"):
        yielded.extend(name for name, _ in tensors.load_verified(path, torch.device(device), sums))
    assert damaged not in yielded


@pytest.mark.parametrize("device", DEVICES)
def test_checksums_of_another_file_are_refused(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHECKSUM_BYTES", 1000)
    path = tmp_path / "file"
    tensors.save(path, sample_tensors())
    sums = files.checksums(path)
    for wrong in (sums[:-1], [*sums, sums[0]], []):
        with pytest.raises(DamageError, match="the checksum is wrong"):
            list(tensors.load_verified(path, torch.device(device), wrong))


def test_lazy_tensors_of_mixed_dtypes_are_aligned(tmp_path: Path) -> None:
    """In an order in which offsets would not be multiples of the item size."""
    saved = {
        "a": torch.randn(3).half(),
        "b": torch.randn(2, 2),
        "c": torch.arange(3),
        "d": torch.tensor(True),
        "e": torch.randn(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
    }
    tensors.write(tmp_path / "file", {name: partial(saved.__getitem__, name) for name in saved})
    assert_same(load_file(tmp_path / "file"), saved, "cpu")
    assert tensors.list_tensors(tmp_path / "file")["b"].shape == (2, 2)


def test_weights_replaced_by_a_link_after_the_check_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, outside = tmp_path / "run" / "weights", tmp_path / "outside"
    path.parent.mkdir()
    tensors.save(path, {"a": torch.zeros(2)})
    tensors.save(outside, {"a": torch.ones(2)})
    safe_open = tensors.safe_open

    def replace_and_open(*arguments: Any) -> Any:
        path.unlink(missing_ok=True)
        path.symlink_to(outside)
        return safe_open(*arguments)

    assert files.link_out(path.parent, tmp_path) is None
    monkeypatch.setattr(tensors, "safe_open", replace_and_open)
    assert tensors.load(path)["a"].tolist() == [0, 0]
    with pytest.raises(RunError, match="A link out of its folder"):
        tensors.load(path)
