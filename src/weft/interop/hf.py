"""Hugging Face model folders in and out: config.json, safetensors, tokenizer, and what belongs to them.

What was read can be written back as it was: tensors under their own names with their own bits, and every setting,
also those that weft has no word for. Nothing in a folder is run; `pytorch_model.bin` is refused for that.
"""

import re
from collections import Counter
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from weft.config import Tree, validate
from weft.errors import InteropError, WeftError
from weft.interop import safetensors
from weft.interop.bundle import LazyWeights, ModelBundle, lazily, named_tokenizer
from weft.interop.families.base import Family, Settings, Transformer
from weft.interop.families.known import family_of
from weft.interop.hf_tokenizer import TOKENIZER_FILES, read_tokenizer
from weft.interop.safetensors import DTYPES, FLOATS, Stored, read_json
from weft.interop.weight_map import Conversion, conversions, to_ours
from weft.models.config import EmbeddingHead, Encoder, Model
from weft.text.tokenizer import Tokenizer

CONFIG, GENERATION = "config.json", "generation_config.json"
# small files that belong to a model and are given back as they were
KEPT = (
    CONFIG,
    GENERATION,
    safetensors.INDEX,
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
LARGEST_KEPT = 64 << 20


def recognises(path: Path) -> bool:
    """Whether a path is a folder with a config.json."""
    return (path / CONFIG).is_file()


def read(folder: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The model in a folder, with the tokenizer at another path if one is given."""
    tree = read_json(folder / CONFIG)
    where = str(folder / CONFIG)
    family, architecture = family_of(tree, where)
    found = safetensors.stored(folder)
    settings = Settings(tree, where)
    try:
        model = family.read(settings, architecture, found)
    except ValueError as error:  # sizes that do not fit together
        if isinstance(error, WeftError):
            raise
        raise InteropError(f"{where}: {first_reason(error)}") from None
    _check_problem(settings, model)
    if isinstance(model, Encoder) and isinstance(model.head, EmbeddingHead):
        model = model.replace(head=_pooling(folder))
    deepest = max(model.layers, getattr(model, "encoder_layers", None) or 0)
    if deepest > len(found):  # or else a mistyped number would have weft build that many layers
        raise InteropError(f"{where}: {deepest} layers, but the files hold {len(found)} tensors in all")
    model, table, named = _named(family, model, found)
    weights, unused, notes = _weights(family, model, table, named, found, str(folder))
    if tokenizer is None:
        own, source = read_tokenizer(folder, tree, model)
        _check_vocabulary(model, own, source, str(folder))
    else:
        own, source = named_tokenizer(tokenizer, model.vocab_size), None
    kept = KEPT if tokenizer is not None else (*KEPT, *TOKENIZER_FILES)
    files = {name: _bytes(folder / name) for name in kept if (folder / name).is_file()}
    return ModelBundle(
        model=model,
        weights=weights,
        tokenizer=own,
        origin=f"{folder} ({family.title}, Hugging Face)",
        notes={"format": "hf", "family": family.kind, "config": tree, **notes},
        unused=unused,
        files=files,
        labels=_labels(tree, model),
        source_tokenizer=source,
    )


def _check_problem(settings: Settings, model: Any) -> None:
    """Refuse answers that are no probabilities of labels that exclude each other, and no single number."""
    kind, labels = settings.tree.get("problem_type"), getattr(model.head, "labels", None)
    if labels is None or kind is None:
        return
    if kind == "multi_label_classification" or (kind == "regression") != (labels == 1):
        raise settings.refusal("problem_type", f"with {labels} answers; weft's give a text one label, or one number")


def first_reason(error: ValueError) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        return f"{key}: {first['msg']}" if key else str(first["msg"])
    return " ".join(str(error).split())


def _pooling(folder: Path) -> EmbeddingHead:
    """How a sentence encoder makes one vector of many, by the files of sentence-transformers where they are."""
    path = folder / "1_Pooling/config.json"
    if not path.is_file():
        return EmbeddingHead()
    tree = read_json(path)
    modes = [key.removeprefix("pooling_mode_") for key, on in tree.items() if key.startswith("pooling_mode_") and on]
    ours = {"mean_tokens": "mean", "cls_token": "first", "lasttoken": "last"}
    if len(modes) != 1 or modes[0] not in ours:
        raise InteropError(
            f"{path}: pooling by {' and '.join(modes) or 'nothing'}; weft has mean, first (cls) and last"
        )
    listing = folder / "modules.json"
    modules = listing.read_text(encoding="utf-8", errors="replace") if listing.is_file() else ""
    return validate(EmbeddingHead, {"pooling": ours[modes[0]], "normalise": "Normalize" in modules})


def _named(
    family: Family, model: Any, found: Mapping[str, Stored]
) -> tuple[Transformer, list[Conversion], dict[str, str]]:
    """The model, its table, and the present name of every stored tensor (stored name → present name).

    An output table that is said to be the embeddings', but is stored and differs, makes the model an untied one.
    """
    table = conversions(family.rules(model), model)
    named = _present(family, model, table, found)
    stored_as = {present: name for name, present in named.items()}
    for copy, original in family.copies(model).items():
        if copy in stored_as and original in stored_as and copy not in _wanted(table):
            if safetensors.equal(found, stored_as[copy], stored_as[original]):
                continue
            untied = model.replace(head=model.head.model_copy(update={"tied": False}).model_dump())
            again = conversions(family.rules(untied), untied)
            if copy not in _wanted(again):
                raise InteropError(f"'{stored_as[copy]}' differs from '{stored_as[original]}', which it should repeat")
            return untied, again, named
    return model, table, named


def _wanted(table: list[Conversion]) -> set[str]:
    return {part.name for conversion in table for part in conversion.parts}


def _present(family: Family, model: Model, table: list[Conversion], found: Mapping[str, Stored]) -> dict[str, str]:
    """Stored names as the family's present names: old endings replaced, the prefix of the whole model put in front."""
    wanted, copies = _wanted(table), family.copies(model)
    named: dict[str, str] = {}
    for name in found:
        present = name
        for old, new in family.renames.items():
            present = present.removesuffix(old) + new if present.endswith(old) else present
        for spelled in (present, family.prefix + present):
            if spelled in wanted or spelled in copies or _idle(family, spelled):
                present = spelled
                break
        named[name] = present
    here = set(named.values())
    for name, present in named.items():  # a tied table may be stored under another of its names alone
        original = copies.get(present)
        if original in wanted and original not in here and present not in wanted:
            named[name] = original
            here.add(original)
    doubled = [present for present, times in Counter(named.values()).items() if times > 1]
    if doubled:
        both = [name for name, present in named.items() if present == doubled[0]]
        raise InteropError(f"{found[both[0]].file.parent}: '{both[0]}' and '{both[1]}' are the same tensor's names")
    return named


def _idle(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in family.idle)


def _weights(
    family: Family,
    model: Model,
    table: list[Conversion],
    named: Mapping[str, str],
    found: Mapping[str, Stored],
    where: str,
) -> tuple[LazyWeights, LazyWeights, Tree]:
    """Our weights, what weft has no place for, and the notes that give back names and types."""
    wanted, copies = _wanted(table), family.copies(model)
    stored_as = {present: name for name, present in named.items()}
    read = safetensors.reader(found)
    used = {present: found[name].shape for present, name in stored_as.items() if present in wanted}
    repeated = [present for present in stored_as if present in copies and present not in wanted]
    idle = [p for p in stored_as if p not in wanted and p not in repeated and _idle(family, p)]
    rest = {p: found[n].shape for p, n in stored_as.items() if p not in wanted and p not in repeated and p not in idle}
    for present in used:
        stored = found[stored_as[present]]
        if stored.dtype not in FLOATS:
            raise InteropError(f"{stored.file}: '{stored_as[present]}' holds {stored.dtype}; weights are {FLOATS}")
    weights = to_ours(table, used | rest, lambda present: read(stored_as[present]), where)
    types = Counter(found[stored_as[present]].dtype for present in used)
    common = types.most_common(1)[0][0]
    notes: Tree = {
        "dtype": common,
        "dtypes": _widened(table, {present: found[stored_as[present]].dtype for present in used}),
        "names": {present: name for name, present in named.items() if present != name},
        "copies": {present: copies[present] for present in repeated},
        "headers": safetensors.headers(found),
    }
    return weights, lazily(read, {present: stored_as[present] for present in idle}), notes


def _widened(table: list[Conversion], types: Mapping[str, str]) -> dict[str, str]:
    """The own types of tensors that become wider when they are joined with others."""
    narrow: dict[str, str] = {}
    for conversion in table:
        joined = reduce(torch.promote_types, (DTYPES[types[part.name]] for part in conversion.parts))
        narrow |= {part.name: types[part.name] for part in conversion.parts if DTYPES[types[part.name]] != joined}
    return narrow


def _check_vocabulary(model: Any, tokenizer: Tokenizer | None, source: Tokenizer | None, where: str) -> None:
    for side, size, given in (
        ("tokenizer", model.vocab_size, tokenizer),
        ("source tokenizer", getattr(model, "source_vocab_size", None) or model.vocab_size, source),
    ):
        if given is not None and given.vocab_size > size:
            raise InteropError(
                f"{where}: the {side} has {given.vocab_size} entries, but the model knows {size}; they don't fit"
            )


def _labels(tree: Tree, model: Any) -> tuple[str, ...] | None:
    """The names of a classifier's answers, in order."""
    count, named = getattr(model.head, "labels", None), tree.get("id2label")
    if count is None:
        return None
    usual = tuple(f"LABEL_{number}" for number in range(count))  # which transformers does not write down
    if not isinstance(named, dict):
        return usual
    names = tuple(str(named.get(str(number), name)) for number, name in enumerate(usual))
    return names if len(set(names)) == count else usual


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST_KEPT:
            raise InteropError(f"{path}: {path.stat().st_size} bytes are too many for a settings file")
        return path.read_bytes()
    except OSError as error:
        raise InteropError(f"{path}: cannot be read: {error.strerror}") from None
