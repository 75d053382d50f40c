"""pytorch_model.bin and its shards: the saved weights are read, no code runs; other files are refused by name."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.hf_models import GPT2, T5, theirs
from tests.later import Later

from weft.errors import InteropError
from weft.interop import formats, torch_file
from weft.interop.formats import read_model
from weft.interop.hf import hf

transformers = Later("transformers")

GPT_TABLE, GPT_OUTPUT = "transformer.wte.weight", "lm_head.weight"


def save_pickled(model: Any, folder: Path, shards: int = 1, **options: Any) -> Path:
    """Save as older versions of transformers did: shared tensors under all of their names."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    state = dict(model.state_dict())
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin", **options)
        return folder
    files = {name: f"pytorch_model-{number % shards + 1:05}-of-{shards:05}.bin" for number, name in enumerate(state)}
    for file in sorted(set(files.values())):
        torch.save({name: state[name] for name in state if files[name] == file}, folder / file, **options)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.mark.parametrize(
    ("name", "settings", "form"),
    [
        ("GPT2LMHeadModel", GPT2, "zip"),
        ("GPT2LMHeadModel", GPT2, "old"),
        ("T5ForConditionalGeneration", T5, "zip"),  # its embeddings have four names
        ("T5ForConditionalGeneration", T5, "shards"),
    ],
)
def test_weights_equal_those_of_safetensors(name: str, settings: dict[str, Any], form: str, tmp_path: Path) -> None:
    model: Any = theirs(name, settings)
    options = {"_use_new_zipfile_serialization": False} if form == "old" else {}
    bundle = hf.read(save_pickled(model, tmp_path / "bin", 3 if form == "shards" else 1, **options))
    model.save_pretrained(tmp_path / "safe")
    expected = hf.read(tmp_path / "safe")
    assert bundle.model == expected.model
    assert set(bundle.weights) == set(expected.weights)
    for key in expected.weights:
        assert torch.equal(bundle.weights[key](), expected.weights[key]())
    (tmp_path / "out").mkdir()
    hf.write(bundle, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.bin*"))
    again = getattr(transformers, name).from_pretrained(tmp_path / "out")
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_half_precision_and_slices_keep_their_values(tmp_path: Path) -> None:
    big = torch.randn(6, 8).half()
    torch.save({"rows": big[1:3], "columns": big[3:].T, "mask": torch.ones(2, dtype=torch.bool)}, tmp_path / "x.bin")
    tensors = torch_file.list_tensors(tmp_path / "x.bin")
    assert torch.equal(tensors["rows"].read(), big[1:3])
    assert torch.equal(tensors["columns"].read(), big[3:].T)
    assert tensors["columns"].read().is_contiguous()
    assert [tensors[name].dtype for name in sorted(tensors)] == ["F16", "BOOL", "F16"]


class Bomb:
    """Creates a folder when it is unpickled without restrictions."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def changed(change: Callable[[dict[Any, Any]], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        state = dict(theirs("GPT2LMHeadModel", GPT2).state_dict())
        change(state)
        torch.save(state, folder / "pytorch_model.bin")

    return write


def first_bytes(count: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / "pytorch_model.bin"
        file.write_bytes(file.read_bytes()[:count])

    return write


def index(files: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "pytorch_model.bin").rename(folder / "a.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))

    return write


def repeat_a_tensor(state: dict[Any, Any]) -> None:
    for layer in range(9):
        state[f"transformer.h.{layer}.mlp.c_fc.weight"] = state["transformer.h.0.mlp.c_fc.weight"]


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (first_bytes(9000), r"pytorch_model\.bin: not a file of torch\.save, or truncated$"),
    "empty": (first_bytes(0), r"pytorch_model\.bin: not a file of torch\.save, or truncated$"),
    "no dictionary": (
        lambda folder: torch.save([1], folder / "pytorch_model.bin"),
        r"it contains no dictionary of tensors$",
    ),
    "not a tensor": (changed(lambda s: s.update(x="text")), r"'x' is str; expected a dense tensor of numbers$"),
    "not a name": (changed(lambda s: s.update({3: torch.ones(1)})), r"3 is not the name of a tensor$"),
    "sparse": (
        changed(lambda s: s.update(x=torch.ones(2, 2).to_sparse())),
        r"'x' is torch\._utils\._rebuild_sparse_tensor; expected a dense tensor",
    ),
    "too few values": (
        changed(lambda s: s.update(x=torch.ones(1).expand(10**9))),
        r"'x' is \[1000000000\], but the file holds too few values for it",
    ),
    "one tensor many times": (
        changed(repeat_a_tensor),
        r"mlp\.c_fc\.weight' is \[32, 128\], but the file holds too few",
    ),
    "missing": (changed(lambda s: s.pop("transformer.ln_f.bias")), r"'transformer\.ln_f\.bias' \[32\] is missing$"),
    "path in the index": (index({"x": "../out.bin"}), r"'\.\./out\.bin' is not the name of a \.bin file beside it$"),
    "another kind in the index": (index({"x": "a.pt"}), r"'a\.pt' is not the name of a \.bin file beside it$"),
    "absent shard": (index({"x": "b.bin"}), r"b\.bin: missing, though pytorch_model\.bin\.index\.json names it$"),
}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pickled(theirs("GPT2LMHeadModel", GPT2), tmp_path_factory.mktemp("bin") / "m")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_in_one_line(case: str, complete: Path, tmp_path: Path) -> None:
    for file in complete.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change, message = BROKEN[case]
    change(tmp_path)
    with pytest.raises(InteropError, match=message) as caught:
        read_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_code_of_the_file_is_run(complete: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((complete / "config.json").read_bytes())
    torch.save({"x": torch.ones(1), "y": Bomb(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InteropError, match="refused: it holds more than tensors and plain values"):
        read_model(tmp_path)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)  # the code does run elsewhere
    assert (tmp_path / "ran").exists()


# ---- files that are not models, and models that are not files

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548118077\n"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "m.gguf", "m.bin", "m.pt", "m.argosmodel", "tokenizer.json"]
)
def test_pointers_of_git_lfs(name: str, complete: Path, tmp_path: Path) -> None:
    for file in complete.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(POINTER)
    message = rf"{name.replace('.', '[.]')}: a Git LFS pointer, not the file itself; fetch it with git lfs pull$"
    with pytest.raises(ValueError, match=message):
        read_model(tmp_path / name if name.startswith("m.") else tmp_path)


def test_one_file_of_a_model_names_its_folder(complete: Path) -> None:
    with pytest.raises(InteropError, match=rf"name the folder that it is in: weft import {complete} RUN$"):
        read_model(complete / "pytorch_model.bin")


def test_a_name_on_the_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")

    class ConnectError(Exception):
        pass

    def fail(*arguments: Any, **options: Any) -> None:
        raise ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = "org/name: no such folder here; taken for a name on the hub, and weft couldn't reach the hub$"
    with pytest.raises(InteropError, match=message):
        read_model("org/name")


def test_an_older_model_on_the_hub_is_fetched_with_its_pickle(
    complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    requests: list[list[str]] = []

    def fetch(repository: str, allow_patterns: list[str]) -> str:
        requests.append(allow_patterns)
        for pattern in allow_patterns:
            for file in complete.glob(pattern):
                (tmp_path / file.name).write_bytes(file.read_bytes())
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert read_model("org/name").model == hf.read(complete).model
    assert requests == [formats.HUB_FILES, ["pytorch_model*.bin"]]
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InteropError, match=r"model\.safetensors: not a complete safetensors file"):
        read_model("org/name")
    assert len(requests) == 3  # safetensors exist: no second request


def test_an_unknown_architecture_lists_those_that_are_read(tmp_path: Path) -> None:
    name, value = b"general.architecture", b"mamba"
    key = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(value)) + value
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)
    with pytest.raises(InteropError, match=r"architecture = 'mamba': weft reads bloom, .*, llama, .*, starcoder2$"):
        read_model(tmp_path / "m.gguf")
