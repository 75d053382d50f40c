"""Tensors come back from files as they were, hashed piece by piece, on a GPU as on a processor."""

from pathlib import Path

import pytest
import torch
from tests.devices import DEVICES
from torch import Tensor

from weft.errors import DamageError, RunError
from weft.storage import files, tensors
from weft.storage.safetensors_header import read_header


def some() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "wide": torch.randn(300, 70),
        "narrow": torch.randn(129, 3).bfloat16(),
        "numbers": torch.arange(1000),
        "one": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "flags": torch.rand(77) < 0.5,
    }


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    given = some()
    tensors.save(tmp_path / "file", given)
    found = tensors.load(tmp_path / "file")
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert tensors.common_type(tmp_path / "file") == torch.float32


def test_what_is_no_tensor_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not tensors at all")
    with pytest.raises(RunError, match="cannot be read"):
        tensors.load(tmp_path / "file")


def flip(path: Path, name: str) -> None:
    """Change a byte of one tensor."""
    place = read_header(path).tensors[name]
    data = bytearray(path.read_bytes())
    data[(place.begin + place.end) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece", [1000, 1 << 25])
def test_a_device_gets_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, device: str) -> None:
    monkeypatch.setattr(files, "CHECKSUM_BYTES", piece)
    given, path = some(), tmp_path / "file"
    tensors.save(path, given)
    found = dict(tensors.placed(path, torch.device(device), files.checksums(path)))
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].device.type == device and found[name].dtype == tensor.dtype
        assert torch.equal(found[name].cpu(), tensor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hit", ["wide", "flags"])
def test_a_damaged_tensor_is_named_and_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hit: str, device: str
) -> None:
    monkeypatch.setattr(files, "CHECKSUM_BYTES", 64)
    path = tmp_path / "file"
    tensors.save(path, some())
    sums = files.checksums(path)
    flip(path, hit)
    given = []
    with pytest.raises(DamageError, match=rf"the checksum is wrong (in|between) .*\b{hit}\b"):
        given.extend(name for name, _ in tensors.placed(path, torch.device(device), sums))
    assert hit not in given


@pytest.mark.parametrize("device", DEVICES)
def test_checksums_of_another_file_are_refused(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHECKSUM_BYTES", 1000)
    path = tmp_path / "file"
    tensors.save(path, some())
    sums = files.checksums(path)
    for others in (sums[:-1], [*sums, sums[0]], []):
        with pytest.raises(DamageError, match="the checksum is wrong"):
            list(tensors.placed(path, torch.device(device), others))
