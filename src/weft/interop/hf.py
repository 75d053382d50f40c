"""Hugging Face model folders in and out: config.json, safetensors, tokenizer, and what belongs to them.

What was read can be written back as it was: tensors under their own names with their own bits, and every setting,
also those that weft does not have. Nothing in a folder is executed, which is why `pytorch_model.bin` is refused.
"""

import re
from collections import Counter
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from weft.config import Tree
from weft.errors import InteropError
from weft.interop import safetensors
from weft.interop.bundle import LazyWeights, ModelBundle, fitting, lazily, named_tokenizer
from weft.interop.families.base import Family
from weft.interop.families.known import family_of
from weft.interop.hf_tokenizer import TOKENIZER_FILES, read_tokenizer
from weft.interop.safetensors import DTYPES, FLOATS, Stored
from weft.interop.settings import Flat, Settings, Transformer
from weft.interop.untrusted import read_bytes, read_object, read_text
from weft.interop.weight_map import Conversion, conversions, their_names, to_ours

CONFIG, GENERATION = "config.json", "generation_config.json"
# small files that belong to a model and are written again as they were
KEPT = (
    CONFIG,
    GENERATION,
    safetensors.INDEX,
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
POOLING = {"cls_token": "first", "mean_tokens": "mean", "lasttoken": "last"}  # sentence-transformers' word → ours


def recognises(path: Path) -> bool:
    """Whether a path is a folder with a config.json."""
    return (path / CONFIG).is_file()


def read(folder: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The model in a folder, with the tokenizer at another path if one is given."""
    tree = read_object(folder / CONFIG)
    settings = Settings(tree, str(folder / CONFIG))
    family, architecture = family_of(tree, settings.where)
    found = safetensors.model_tensors(folder)
    model = family.read(settings, architecture, _known(folder, family, architecture, found))
    _check_problem(settings, model)
    deepest = max(model.layers, getattr(model, "encoder_layers", None) or 0)
    if deepest > len(found):  # or else a mistyped number would have weft build that many layers
        raise InteropError(f"{settings.where}: {deepest} layers, but the files hold {len(found)} tensors in all")
    model, table, tensors = _match(family, model, found)
    weights, unused, notes = _weights(family, model, table, tensors, str(folder))
    if tokenizer is None:
        own, source = read_tokenizer(folder, tree, model)
        for each, size in ((own, model.vocab_size), (source, getattr(model, "source_vocab_size", None))):
            if each is not None:
                fitting(each, size or model.vocab_size, str(folder))
    else:
        own, source = named_tokenizer(tokenizer, model.vocab_size), None
    kept = KEPT if tokenizer is not None else (*KEPT, *TOKENIZER_FILES)
    return ModelBundle(
        model=model,
        weights=weights,
        tokenizer=own,
        origin=f"{folder} ({family.title}, Hugging Face)",
        notes={"format": "hf", "family": family.kind, "config": tree, **notes},
        unused=unused,
        files={name: read_bytes(folder / name) for name in kept if (folder / name).is_file()},
        labels=_labels(tree, model),
        source_tokenizer=source,
    )


# ---- settings


def _known(folder: Path, family: Family, architecture: str, names: Mapping[str, Any]) -> Flat:
    """Settings that stand in the weights or in other files than config.json."""
    known: Flat = {key: there(names) for key, there in family.by_weights.items()}
    return known | _pooling(folder) if family.architectures[architecture] == "embedding" else known


def _pooling(folder: Path) -> Flat:
    """How a sentence encoder makes one vector of many, by the files of sentence-transformers where they are."""
    path = folder / "1_Pooling/config.json"
    if not path.is_file():
        return {}
    tree = read_object(path)
    modes = [key.removeprefix("pooling_mode_") for key, on in tree.items() if key.startswith("pooling_mode_") and on]
    if len(modes) != 1 or modes[0] not in POOLING:
        raise InteropError(
            f"{path}: pooling by {' and '.join(modes) or 'nothing'}; weft has mean, first (cls) and last"
        )
    listing = folder / "modules.json"
    modules = read_text(listing) if listing.is_file() else ""
    return {"head.pooling": POOLING[modes[0]], "head.normalise": "Normalize" in modules}


def _check_problem(settings: Settings, model: Transformer) -> None:
    """Refuse outputs that are neither one of several labels nor a single number."""
    kind, labels = settings.get("problem_type"), getattr(model.head, "labels", None)
    if labels is None or kind is None:
        return
    if kind == "multi_label_classification" or (kind == "regression") != (labels == 1):
        raise settings.refusal("problem_type", f"with {labels} labels; weft gives a text one label, or one number")


# ---- weights


def _match(
    family: Family, model: Transformer, found: Mapping[str, Stored]
) -> tuple[Transformer, list[Conversion], dict[str, Stored]]:
    """The model, its conversions, and the stored tensors by the names that the family has for them today.

    An output table that should be the embeddings', but is stored and differs, makes the model an untied one.
    """
    table = conversions(family.rules(model), model)
    wanted = their_names(table)
    tensors = _by_present_names(family, model, wanted, found)
    for copy, original in family.copies(model).items():
        if copy not in tensors or original not in tensors or copy in wanted:
            continue
        if not safetensors.equal(tensors, copy, original):
            untied: Transformer = model.replace(head=model.head.model_copy(update={"tied": False}).model_dump())
            table = conversions(family.rules(untied), untied)
            if copy not in their_names(table):
                names = tensors[copy].name, tensors[original].name
                raise InteropError(f"'{names[0]}' differs from '{names[1]}', which it should repeat")
            return untied, table, tensors
    return model, table, tensors


def _by_present_names(
    family: Family, model: Transformer, wanted: set[str], found: Mapping[str, Stored]
) -> dict[str, Stored]:
    """The tensors by their present names: old endings replaced, the whole model's prefix in front."""
    copies = family.copies(model)
    present = {name: _present(family, name, {*wanted, *copies}) for name in found}
    here = set(present.values())
    for name, known in present.items():  # a tied table may be stored only under another of its names
        original = copies.get(known)
        if original in wanted and original not in here and known not in wanted:
            present[name] = original
            here.add(original)
    tensors: dict[str, Stored] = {}
    for name, known in present.items():
        if known in tensors:
            folder = found[name].file.parent
            raise InteropError(f"{folder}: '{tensors[known].name}' and '{name}' are names of the same tensor")
        tensors[known] = found[name]
    return tensors


def _present(family: Family, name: str, known: set[str]) -> str:
    for old, new in family.renames.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return next((each for each in (name, family.prefix + name) if each in known or _is_unused(family, each)), name)


def _is_unused(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in family.unused)


def _weights(
    family: Family, model: Transformer, table: list[Conversion], tensors: Mapping[str, Stored], where: str
) -> tuple[LazyWeights, LazyWeights, Tree]:
    """Our weights, what weft has no place for, and the notes by which an export reproduces names and dtypes."""
    wanted, copies, read = their_names(table), family.copies(model), safetensors.reader(tensors)
    used = {name: stored for name, stored in tensors.items() if name in wanted}
    others = [name for name in tensors if name not in wanted and name not in copies]
    unused = [name for name in others if _is_unused(family, name)]
    for stored in used.values():
        if stored.dtype not in FLOATS:
            raise InteropError(f"{stored.file}: '{stored.name}' holds {stored.dtype}; weights are {FLOATS}")
    shapes = {name: tensors[name].shape for name in (*used, *others) if name not in unused}
    weights = to_ours(table, shapes, read, where)
    types = {name: stored.dtype for name, stored in used.items()}
    notes: Tree = {
        "dtype": Counter(types.values()).most_common(1)[0][0],
        "dtypes": _widened(table, types),
        "names": {name: stored.name for name, stored in tensors.items() if name != stored.name},
        "copies": {name: original for name, original in copies.items() if name in tensors and name not in wanted},
        "headers": safetensors.headers(tensors),
    }
    return weights, lazily(read, unused), notes


def _widened(table: list[Conversion], types: Mapping[str, str]) -> dict[str, str]:
    """The own dtypes of tensors that become wider when they are joined with others."""
    narrow: dict[str, str] = {}
    for conversion in table:
        joined = reduce(torch.promote_types, (DTYPES[types[part.name]] for part in conversion.parts))
        narrow |= {part.name: types[part.name] for part in conversion.parts if DTYPES[types[part.name]] != joined}
    return narrow


# ---- what else is in the folder


def _labels(tree: Tree, model: Transformer) -> tuple[str, ...] | None:
    """A classifier's label names, in order."""
    count, named = getattr(model.head, "labels", None), tree.get("id2label")
    if count is None:
        return None
    usual = tuple(f"LABEL_{number}" for number in range(count))  # which transformers does not write down
    if not isinstance(named, dict):
        return usual
    names = tuple(str(named.get(str(number), name)) for number, name in enumerate(usual))
    return names if len(set(names)) == count else usual
