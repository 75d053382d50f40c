"""The weights of a Hugging Face folder, read and written under the names that its family has for them.

They are safetensors where there are some, else files of torch.save. These are pickles, programs that may run code when
Python reads them; here they make tensors and plain values, and nothing else (`torch_file.py`).
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


def listing(folder: Path, single: str = SINGLE, pickled: str = PICKLED) -> dict[str, StoredTensor]:
    """Every tensor of a folder's model: of its one file, or of the shards that its index names."""
    for name, read in ((single, tensor_files.list_tensors), (pickled, torch_file.list_tensors)):
        if (folder / name).is_file():
            return read(folder / name)
        if (folder / f"{name}.index.json").is_file():
            return _sharded(folder / f"{name}.index.json", read)
    raise InteropError(f"{folder}: it has none of {single}, {pickled} and their .index.json")


def _sharded(index: Path, read: Callable[[Path], dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    folder, ending = index.parent, Path(index.name.removesuffix(".index.json")).suffix
    placed = read_object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise InteropError(f"{index}: 'weight_map' does not say which tensor is in which file")
    found: dict[str, StoredTensor] = {}
    for name in sorted({str(name) for name in placed.values()}):
        if not is_shard(name, ending):
            raise InteropError(f"{index}: '{name}' is not the name of a {ending} file beside it")
        if not (folder / name).is_file():
            raise InteropError(f"{folder / name}: missing, though {index.name} names it")
        for tensor, stored in read(folder / name).items():
            if tensor in found:
                raise InteropError(f"{folder / name}: '{tensor}' is in {found[tensor].file.name} too")
            found[tensor] = stored
    files = {tensor: stored.file.name for tensor, stored in found.items()}
    for tensor in {**placed, **files}:
        if tensor not in placed:
            raise InteropError(f"{found[tensor].file}: '{tensor}' is not in {index.name}")
        if placed[tensor] != files.get(tensor):
            raise InteropError(f"{index}: '{tensor}' is not in {placed[tensor]}, where it should be")
    return found


def is_shard(name: str, ending: str = ".safetensors") -> bool:
    """Whether a name is that of a file beside its index; any other path could lead outside the model."""
    return re.fullmatch(r"[\w][\w.-]*", name) is not None and name.endswith(ending)


def headers(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """The header of each safetensors file that tensors are in, by the file's name; with it the file is reproduced."""
    files = {tensor.file for tensor in tensors.values() if tensor.mapped is None}
    return {file.name: read_header(file).text for file in sorted(files)}


def _by_present_names(
    family: Family, copies: Mapping[str, str], wanted: set[str], found: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors by the family's names today: old endings replaced, the whole model's prefix in front."""
    present = {name: _present(family, name, {*wanted, *copies}) for name in found}
    here = set(present.values())
    for name, known in present.items():  # a tied table may be stored only under another of its names
        original = copies.get(known)
        if original in wanted and original not in here and known not in wanted:
            present[name] = original
            here.add(original)
    tensors: dict[str, StoredTensor] = {}
    for name, known in present.items():
        if known in tensors:
            folder = found[name].file.parent
            raise InteropError(f"{folder}: '{tensors[known].name}' and '{name}' are names of the same tensor")
        tensors[known] = found[name]
    return tensors


def _present(family: Family, name: str, known: set[str]) -> str:
    for old, new in family.renames.items():
        if old.endswith("."):  # a beginning
            name = new + name.removeprefix(old) if name.startswith(old) else name
        else:
            name = name.removesuffix(old) + new if name.endswith(old) else name
    return next((each for each in (name, family.prefix + name) if each in known or _is_unused(family, each)), name)


def _is_unused(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in family.unused)


def read(
    family: Family, model: Transformer, found: Mapping[str, StoredTensor], place: str
) -> tuple[Transformer, LazyWeights, LazyWeights, Tree]:
    """The model, our weights, what weft has no place for, and the notes by which an export reproduces names and dtypes.

    An output table that should be the embeddings', but is stored and differs, makes the model an untied one.
    """
    table, copies = conversions(family.rules(model), model), family.copies(model)
    wanted = their_shapes(table)
    tensors = _by_present_names(family, copies, set(wanted), found)
    for copy, original in copies.items():
        both = copy in tensors and original in tensors and copy not in wanted
        if both and not tensors[copy].equals(tensors[original]):
            model = model.replace(head=model.head.model_copy(update={"tied": False}).model_dump())
            table = conversions(family.rules(model), model)
            wanted = their_shapes(table)
            if copy not in wanted:
                differs = f"'{tensors[copy].name}' differs from '{tensors[original].name}'"
                raise InteropError(f"{differs}, which it should repeat, whatever tie_word_embeddings says")
            break
    used = {name: check_floats(stored) for name, stored in tensors.items() if name in wanted}
    others = [name for name in tensors if name not in wanted and name not in copies]
    unused = [name for name in others if _is_unused(family, name)]
    shapes = {name: tensors[name].shape for name in (*used, *others) if name not in unused}
    weights = to_ours(table, shapes, lambda name: tensors[name].read(), place)
    narrow: dict[str, str] = {}  # the own dtypes of tensors that become wider when they are joined with others
    for parts in table.values():
        joined = reduce(torch.promote_types, (DTYPES[used[part.name].dtype] for part in parts))
        narrow |= {part.name: used[part.name].dtype for part in parts if DTYPES[used[part.name].dtype] != joined}
    notes: Tree = {
        "dtypes": narrow,
        "names": {name: stored.name for name, stored in tensors.items() if name != stored.name},
        "copies": {name: original for name, original in copies.items() if name in tensors and name not in wanted},
        "headers": headers(tensors),
    }
    return model, weights, {name: tensors[name].read for name in unused}, notes


def check_floats(stored: StoredTensor) -> StoredTensor:
    """Refuse a tensor that can't be a weight."""
    if stored.dtype not in FLOATS:
        raise InteropError(f"{stored.file}: '{stored.name}' holds {stored.dtype}; weights are {', '.join(FLOATS)}")
    return stored


def theirs(bundle: ModelBundle, family: Family, kept: Tree) -> dict[str, Callable[[], Tensor]]:
    """The family's tensors; by the notes `kept`, with the names, dtypes, copies and extra tensors they came with."""
    assert isinstance(bundle.model, Transformer)
    weights = dict(to_theirs(conversions(family.rules(bundle.model), bundle.model), bundle.weights))
    weights |= {name: as_dtype(weights[name], DTYPES[kind]) for name, kind in kept.get("dtypes", {}).items()}
    weights |= {copy: weights[original] for copy, original in kept.get("copies", {}).items()}
    if kept:
        weights |= bundle.unused
    first = next(iter(weights.values()))
    for name, make in family.fillers(bundle.model).items():
        weights.setdefault(name, as_dtype(make, first().dtype))
    names = kept.get("names", {})
    return {names.get(name, name): make for name, make in weights.items()}
