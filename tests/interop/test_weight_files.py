"""pytorch_model.bin and its shards give the weights that were saved, and run nothing; what is no model is named."""

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
from torch import nn

from weft.errors import InteropError
from weft.interop import formats, torch_file
from weft.interop.formats import read_model
from weft.interop.hf import hf

transformers = Later("transformers")

GPT_TABLE, GPT_OUTPUT = "transformer.wte.weight", "lm_head.weight"


def pickled(model: nn.Module, folder: Path, shards: int = 1, **how: Any) -> Path:
    """The model as older versions of transformers saved it: shared tables under all of their names."""
    model.save_pretrained(folder)  # type: ignore[operator]
    (folder / "model.safetensors").unlink()
    state = dict(model.state_dict())
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin", **how)
        return folder
    placed = {name: f"pytorch_model-{number % shards + 1:05}-of-{shards:05}.bin" for number, name in enumerate(state)}
    for file in sorted(set(placed.values())):
        torch.save({name: state[name] for name in state if placed[name] == file}, folder / file, **how)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


@pytest.mark.parametrize(
    ("name", "settings", "how"),
    [
        ("GPT2LMHeadModel", GPT2, "zip"),
        ("GPT2LMHeadModel", GPT2, "old"),
        ("T5ForConditionalGeneration", T5, "zip"),  # whose one table has four names
        ("T5ForConditionalGeneration", T5, "shards"),
    ],
)
def test_the_same_as_from_safetensors(name: str, settings: dict[str, Any], how: str, tmp_path: Path) -> None:
    model = theirs(name, settings)
    options = {"_use_new_zipfile_serialization": False} if how == "old" else {}
    bundle = hf.read(pickled(model, tmp_path / "bin", 3 if how == "shards" else 1, **options))
    model.save_pretrained(tmp_path / "safe")  # type: ignore[operator]
    wanted = hf.read(tmp_path / "safe")
    assert bundle.model == wanted.model
    assert set(bundle.weights) == set(wanted.weights)
    for key in wanted.weights:
        assert torch.equal(bundle.weights[key](), wanted.weights[key]())
    (tmp_path / "out").mkdir()
    hf.write(bundle, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.bin*"))
    again = getattr(transformers, name).from_pretrained(tmp_path / "out")
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_half_precision_and_slices_keep_their_numbers(tmp_path: Path) -> None:
    big = torch.randn(6, 8).half()
    torch.save({"rows": big[1:3], "columns": big[3:].T, "mask": torch.ones(2, dtype=torch.bool)}, tmp_path / "x.bin")
    found = torch_file.list_tensors(tmp_path / "x.bin")
    assert torch.equal(found["rows"].read(), big[1:3])
    assert torch.equal(found["columns"].read(), big[3:].T)
    assert found["columns"].read().is_contiguous()
    assert [found[name].dtype for name in sorted(found)] == ["F16", "BOOL", "F16"]


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
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


def index(placed: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "pytorch_model.bin").rename(folder / "a.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))

    return write


def repeated(state: dict[str, Any]) -> None:
    for layer in range(9):
        state[f"transformer.h.{layer}.mlp.c_fc.weight"] = state["transformer.h.0.mlp.c_fc.weight"]


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (first_bytes(9000), r"pytorch_model\.bin: not a file of torch\.save, or truncated$"),
    "empty": (first_bytes(0), r"pytorch_model\.bin: not a file of torch\.save, or truncated$"),
    "no table": (
        lambda folder: torch.save([1], folder / "pytorch_model.bin"),
        r"it contains no dictionary of tensors$",
    ),
    "no tensor": (changed(lambda s: s.update(x="text")), r"'x' is str; expected a dense tensor of numbers$"),
    "no name": (changed(lambda s: s.update({3: torch.ones(1)})), r"3 is not the name of a tensor$"),
    "sparse": (
        changed(lambda s: s.update(x=torch.ones(2, 2).to_sparse())),
        r"'x' is torch\._utils\._rebuild_sparse_tensor; expected a dense tensor",
    ),
    "more than there is": (
        changed(lambda s: s.update(x=torch.ones(1).expand(10**9))),
        r"'x' is \[1000000000\], but the file holds too few values for it",
    ),
    "one tensor many times": (changed(repeated), r"mlp\.c_fc\.weight' is \[32, 128\], but the file holds too few"),
    "missing": (changed(lambda s: s.pop("transformer.ln_f.bias")), r"'transformer\.ln_f\.bias' \[32\] is missing$"),
    "path in the index": (index({"x": "../out.bin"}), r"'\.\./out\.bin' is not the name of a \.bin file beside it$"),
    "another kind in the index": (index({"x": "a.pt"}), r"'a\.pt' is not the name of a \.bin file beside it$"),
    "absent shard": (index({"x": "b.bin"}), r"b\.bin: missing, though pytorch_model\.bin\.index\.json names it$"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pickled(theirs("GPT2LMHeadModel", GPT2), tmp_path_factory.mktemp("bin") / "m")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_in_one_line(case: str, whole: Path, tmp_path: Path) -> None:
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change, message = BROKEN[case]
    change(tmp_path)
    with pytest.raises(InteropError, match=message) as caught:
        read_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_code_of_the_file_is_run(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    torch.save({"x": torch.ones(1), "y": Bomb(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InteropError, match="refused: it holds more than tensors and plain values"):
        read_model(tmp_path)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)  # what the file is made for
    assert (tmp_path / "ran").exists()


# ---- what is no model, called what it is

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548118077\n"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "m.gguf", "m.bin", "m.pt", "m.argosmodel", "tokenizer.json"]
)
def test_pointers_of_git_lfs(name: str, whole: Path, tmp_path: Path) -> None:
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(POINTER)
    alone = name.startswith("m.")
    message = rf"{name.replace('.', '[.]')}: a Git LFS pointer, not the file itself; fetch it with git lfs pull$"
    with pytest.raises(ValueError, match=message):
        read_model(tmp_path / name if alone else tmp_path)


def test_one_file_of_a_model_names_its_folder(whole: Path) -> None:
    with pytest.raises(InteropError, match=rf"name the folder that it is in: weft import {whole} RUN$"):
        read_model(whole / "pytorch_model.bin")


def test_a_name_on_the_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")

    class ConnectError(Exception):
        pass

    def fails(*given: Any, **more: Any) -> None:
        raise ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    message = "org/name: no such folder here; taken for a name on the hub, and weft couldn't reach the hub$"
    with pytest.raises(InteropError, match=message):
        read_model("org/name")


def test_an_older_model_on_the_hub_is_fetched_with_its_pickle(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked: list[list[str]] = []

    def fetch(repository: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        for pattern in allow_patterns:
            for file in whole.glob(pattern):
                (tmp_path / file.name).write_bytes(file.read_bytes())
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert read_model("org/name").model == hf.read(whole).model
    assert asked == [formats.HUB_FILES, ["pytorch_model*.bin"]]
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InteropError, match=r"model\.safetensors: not a complete safetensors file"):
        read_model("org/name")
    assert len(asked) == 3  # the second time nothing more was asked for


def test_an_unknown_architecture_lists_those_that_are_read(tmp_path: Path) -> None:
    name, word = b"general.architecture", b"llama4"
    key = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(word)) + word
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)
    with pytest.raises(InteropError, match=r"architecture = 'llama4': weft reads bloom, .*, llama, .*, starcoder2$"):
        read_model(tmp_path / "m.gguf")
