"""Read and write the weights of a Hugging Face folder under the names of its family.

They are read from safetensors files or, if there are none, from files of torch.save. The latter are pickles, which may
run code when Python unpickles them; only tensors and plain values are read from them (`torch_file.py`).
"""

import re
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from weft.config import Tree
from weft.errors import InteropError
from weft.interop import torch_file
from weft.interop.bundle import ModelBundle, as_dtype
from weft.interop.families.base import Family
from weft.interop.settings import Transformer
from weft.interop.weight_map import conversions, their_shapes, to_ours, to_theirs
from weft.storage import tensors as tensor_files
from weft.storage.safetensors_header import read_header
from weft.storage.tensors import DTYPES, FLOATS, LazyWeights, StoredTensor
from weft.storage.untrusted import read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"


def list_weights(folder: Path, single: str = SINGLE, pickled: str = PICKLED) -> dict[str, StoredTensor]:
    """List the tensors of a folder's model: of its single file, or of the shards in its index."""
    for name, read in ((single, tensor_files.list_tensors), (pickled, torch_file.list_tensors)):
        if (folder / name).is_file():
            return read(folder / name)
        if (folder / f"{name}.index.json").is_file():
            return _list_shards(folder / f"{name}.index.json", read)
    raise InteropError(f"{folder}: it has none of {single}, {pickled} and their .index.json")


def _list_shards(index: Path, read: Callable[[Path], dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    folder, ending = index.parent, Path(index.name.removesuffix(".index.json")).suffix
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InteropError(f"{index}: 'weight_map' does not say which tensor is in which file")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted({str(file) for file in weight_map.values()}):
        if not is_shard(file, ending):
            raise InteropError(f"{index}: '{file}' is not the name of a {ending} file beside it")
        if not (folder / file).is_file():
            raise InteropError(f"{folder / file}: missing, though {index.name} names it")
        for name, stored in read(folder / file).items():
            if name in tensors:
                raise InteropError(f"{folder / file}: '{name}' is in {tensors[name].file.name} too")
            tensors[name] = stored
    files = {name: stored.file.name for name, stored in tensors.items()}
    for name in {**weight_map, **files}:
        if name not in weight_map:
            raise InteropError(f"{tensors[name].file}: '{name}' is not in {index.name}")
        if weight_map[name] != files.get(name):
            raise InteropError(f"{index}: '{name}' is not in {weight_map[name]}, where it should be")
    return tensors


def is_shard(name: str, ending: str = ".safetensors") -> bool:
    """Return whether a name is that of a file beside its index; another path could lead outside the folder."""
    return re.fullmatch(r"[\w][\w.-]*", name) is not None and name.endswith(ending)


def headers(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Headers of the safetensors files that hold these tensors, by file name; an export reproduces the files."""
    files = {tensor.file for tensor in tensors.values() if tensor.mapped is None}
    return {file.name: read_header(file).text for file in sorted(files)}


def _by_current_names(
    family: Family, stored: Mapping[str, StoredTensor], copies: Mapping[str, str], *, expected: set[str]
) -> dict[str, StoredTensor]:
    """Tensors by the family's current names: old prefixes and suffixes replaced, and the model's prefix added."""
    current = {name: _current_name(family, name, {*expected, *copies}) for name in stored}
    present = set(current.values())
    for name, known in current.items():  # a tied table may be stored only under another of its names
        original = copies.get(known)
        if original in expected and original not in present and known not in expected:
            current[name] = original
            present.add(original)
    tensors: dict[str, StoredTensor] = {}
    for name, known in current.items():
        if known in tensors:
            folder = stored[name].file.parent
            raise InteropError(f"{folder}: '{tensors[known].name}' and '{name}' are names of the same tensor")
        tensors[known] = stored[name]
    return tensors


def _current_name(family: Family, name: str, known: set[str]) -> str:
    for old, new in family.renames.items():
        if old.endswith("."):  # a prefix
            name = new + name.removeprefix(old) if name.startswith(old) else name
        else:
            name = name.removesuffix(old) + new if name.endswith(old) else name
    return next((full for full in (name, family.prefix + name) if full in known or family.is_unused(full)), name)


def read(
    family: Family, model: Transformer, stored: Mapping[str, StoredTensor], *, location: str
) -> tuple[Transformer, LazyWeights, LazyWeights, Tree]:
    """Return the model, our weights, tensors that weft does not use, and notes with which an export reproduces names
    and dtypes.

    If the LM head should be tied but is stored and differs from the embeddings, the returned model is untied.
    """
    table, copies = conversions(family.rules(model), model), family.copies(model)
    expected = their_shapes(table)
    tensors = _by_current_names(family, stored, copies, expected=set(expected))
    for copy, original in copies.items():
        both = copy in tensors and original in tensors and copy not in expected
        if both and not tensors[copy].equals(tensors[original]):
            model = model.replace(head=model.head.model_copy(update={"tied": False}).model_dump())
            table = conversions(family.rules(model), model)
            expected = their_shapes(table)
            if copy not in expected:
                differs = f"'{tensors[copy].name}' differs from '{tensors[original].name}'"
                raise InteropError(f"{differs}, which it must repeat even if tie_word_embeddings is false")
            break
    used = {name: check_floats(tensor) for name, tensor in tensors.items() if name in expected}
    others = [name for name in tensors if name not in expected and name not in copies]
    unused = [name for name in others if family.is_unused(name)]
    shapes = {name: tensors[name].shape for name in (*used, *others) if name not in unused}
    weights = to_ours(table, shapes, lambda name: tensors[name].read(), location=location)
    dtypes: dict[str, str] = {}  # of tensors that are promoted when they are joined with others
    for stored_parts in table.values():
        parts = [part for part in stored_parts if part.name]
        joined = reduce(torch.promote_types, (DTYPES[used[part.name].dtype] for part in parts))
        dtypes |= {part.name: used[part.name].dtype for part in parts if DTYPES[used[part.name].dtype] != joined}
    notes: Tree = {
        "dtypes": dtypes,
        "names": {name: tensor.name for name, tensor in tensors.items() if name != tensor.name},
        "copies": {name: original for name, original in copies.items() if name in tensors and name not in expected},
        "headers": headers(tensors),
    }
    return model, weights, {name: tensors[name].read for name in unused}, notes


def check_floats(stored: StoredTensor) -> StoredTensor:
    """Return the tensor; InteropError if its dtype cannot be that of a weight."""
    if stored.dtype not in FLOATS:
        raise InteropError(f"{stored.file}: '{stored.name}' has dtype {stored.dtype}; weights are {', '.join(FLOATS)}")
    return stored


def to_family(bundle: ModelBundle, family: Family, notes: Tree) -> dict[str, Callable[[], Tensor]]:
    """Tensors of the family; with the notes of an import, also its names, dtypes, copies and unused tensors."""
    assert isinstance(bundle.model, Transformer)
    weights = dict(to_theirs(conversions(family.rules(bundle.model), bundle.model), bundle.weights))
    weights |= {name: as_dtype(weights[name], DTYPES[kind]) for name, kind in notes.get("dtypes", {}).items()}
    weights |= {copy: weights[original] for copy, original in notes.get("copies", {}).items()}
    if notes:
        weights |= bundle.unused
    first = next(iter(weights.values()))
    for name, make in family.fillers(bundle.model).items():
        weights.setdefault(name, as_dtype(make, first().dtype))
    names = notes.get("names", {})
    return {names.get(name, name): make for name, make in weights.items()}
