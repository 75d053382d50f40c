"""The weights of a Hugging Face folder: safetensors where there are some, else files of torch.save, read as data.

The latter are pickles, programs that may run code when Python reads them. Here they make tensors and plain values, and
nothing else (`torch_file.py`); torch's own `weights_only` calls more than that.
"""

from pathlib import Path

from torch import Tensor

from weft.errors import InteropError
from weft.interop import safetensors, torch_file
from weft.interop.safetensors import NAMES, Stored

PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
NAMES_OF_ONE = 4  # that a tensor may have in a file: T5's one table has four


def model_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's model: of its one file, or of the shards that its index names."""
    if (folder / safetensors.SINGLE).is_file():
        return safetensors.listing(folder / safetensors.SINGLE)
    if (folder / safetensors.INDEX).is_file():
        return safetensors.sharded(folder / safetensors.INDEX, safetensors.listing)
    if (folder / PICKLED).is_file():
        return listing(folder / PICKLED)
    if (folder / PICKLED_INDEX).is_file():
        return safetensors.sharded(folder / PICKLED_INDEX, listing)
    raise InteropError(f"{folder}: it has none of {safetensors.SINGLE}, {PICKLED} and their .index.json")


def listing(file: Path) -> dict[str, Stored]:
    """Every tensor of one file of torch.save, which stays on the disk until it is used."""
    table = torch_file.read(file)
    if not isinstance(table, dict) or not table:
        raise InteropError(f"{file}: it holds no table of tensors")
    tensors: dict[str, Tensor] = {}
    for name, value in table.items():
        if not isinstance(name, str) or not name.isprintable():
            raise InteropError(f"{file}: {name!r:.60} is not the name of a tensor")
        if not isinstance(value, Tensor) or value.dtype not in NAMES:
            what = getattr(value, "name", None) or str(getattr(value, "dtype", type(value).__name__))
            raise InteropError(f"{file}: '{name}' is {what.replace(' ', '.')}; expected a dense tensor of numbers")
        tensors[name] = value
    torch_file.check_claims(file, tensors, NAMES_OF_ONE)
    return {name: Stored(file, name, tuple(t.shape), NAMES[t.dtype], t) for name, t in sorted(tensors.items())}
