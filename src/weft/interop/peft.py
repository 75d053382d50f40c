"""Read and write low-rank adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors.

PEFT stores an adapter for each matrix of transformers, `….q_proj.lora_A.weight` (rank, in) and `….lora_B.weight` (out,
rank). In weft, matrices with the same input are joined, each part with its A and B (`LowRank`). An adapter of only one
of three joined matrices is therefore 0 for the others, and an adapter of a matrix that transformers joins too has the
same A three times. If these have diverged, they are written as one adapter of three times the rank.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.config import Tree, validate
from weft.errors import InteropError
from weft.interop.bundle import ModelBundle
from weft.interop.hf import hf, weights
from weft.interop.hf.tokenizer import json_bytes
from weft.interop.license import license_of_folder
from weft.interop.settings import Settings, Transformer
from weft.interop.weight_map import Conversions, TensorPart, conversions, their_shapes, to_ours, to_theirs
from weft.models.build import build
from weft.models.config import EncoderDecoder
from weft.nn.block import block_linears
from weft.nn.config import LoRA
from weft.nn.init import empty_weights
from weft.nn.linear import Linear
from weft.storage.safetensors_header import parse_header
from weft.storage.tensors import FLOATS, NAMES, LazyWeights, write_with_header
from weft.storage.tensors import write as write_tensors
from weft.storage.untrusted import read_bytes, read_object

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
LOW_RANK = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
# settings that change the output of an adapter → the only value that weft supports
ONLY = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "use_qalora": False, "lora_bias": False,
    "layer_replication": None,
}  # fmt: skip
TASKS = {"lm": "CAUSAL_LM", "sequence": "SEQ_CLS", "token": "TOKEN_CLS", "span": "QUESTION_ANS"}


@dataclass(frozen=True)
class Adapter:
    """An adapter by weft's names: `….a`, `….b` and, if it trained the head, `output.…`."""

    settings: LoRA
    weights: Mapping[str, Tensor]
    files: Mapping[str, bytes] = field(default_factory=dict)  # verbatim, for an export
    notes: Tree = field(default_factory=dict)


def recognises(path: Path) -> bool:
    """Return whether a path is a folder with an adapter."""
    return (path / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """Name of the base model in an adapter's settings; InteropError if weft can't use the adapter."""
    name = _read_config(folder).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else "a model that it does not name"


def _read_config(folder: Path) -> Settings:
    settings = Settings(read_object(folder / CONFIG), str(folder / CONFIG))
    settings.only(**ONLY)
    return settings


def read(folder: Path, base: ModelBundle) -> Adapter:
    """Read the adapter of a folder for the model `base`."""
    settings = _read_config(folder)
    tensors = weights.list_weights(folder, WEIGHTS, PICKLED)
    table = _conversions(base)
    our_names = {part.name: name for name, parts in table.items() for part in parts}
    pairs: dict[str, dict[str, Tensor]] = {}  # matrix → its A and B
    head: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        known = name.removeprefix(PREFIX)
        match = LOW_RANK.fullmatch(known)
        target = f"{match[1]}.weight" if match else known
        fits = target in our_names and (match is not None or our_names[target].startswith("output."))
        if not fits or stored.dtype not in FLOATS:
            raise InteropError(f"{stored.file}: '{name}' {list(stored.shape)} fits no matrix of the base model")
        if match:
            pairs.setdefault(target, {})[match[2]] = stored.read()
        else:
            head[known] = stored.read()
    lora = _read_settings(settings, pairs, trains_head=bool(head))
    ours: dict[str, Tensor] = {}
    linears = _linears(base)
    for name in dict.fromkeys(our_names[target] for target in pairs):
        parts = {part: pairs[part.name] for part in table[name] if part.name in pairs}
        layer = name.removesuffix(".weight")
        if layer not in linears:
            raise InteropError(f"{folder / WEIGHTS}: '{next(iter(parts)).name}': only layers in blocks have adapters")
        ours[f"{layer}.a"], ours[f"{layer}.b"] = _join(parts, linears[layer], lora, settings=settings)
    adapted = [name.removesuffix(".a") for name in ours if name.endswith(".a")]
    patterns = tuple(_shorten(adapted, linears, lambda name: re.sub(r"^.*\.blocks\.\d+\.", "*.", name)))
    if not patterns:
        raise InteropError(f"{folder / WEIGHTS}: it contains no adapter")
    if head:
        ours |= _read_head(table, base, head, location=str(folder / WEIGHTS))
    notes = {"config": dict(settings.tree), "headers": weights.headers(tensors)}
    return Adapter(
        lora.replace(targets=patterns),
        ours,
        files={CONFIG: read_bytes(folder / CONFIG)},
        notes={"peft": notes, "license": license_of_folder(folder)},
    )


def _read_settings(settings: Settings, pairs: Mapping[str, Mapping[str, Tensor]], *, trains_head: bool) -> LoRA:
    for target, pair in pairs.items():
        if len(pair) != 2 or pair["A"].dim() != 2 or pair["B"].dim() != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            shapes = {kind: list(tensor.shape) for kind, tensor in pair.items()}
            raise InteropError(f"{settings.location}: '{target}' has {shapes}; expected an A and a B of one rank")
    rank = max((len(pair["A"]) for pair in pairs.values()), default=1)
    alpha, dropout = _scale(settings) * rank, settings.number("lora_dropout", 0.0)
    return validate(LoRA, {"rank": rank, "alpha": alpha, "dropout": dropout, "head": trains_head}, settings.location)


def _scale(settings: Settings, module: str = "", rank: int | None = None) -> float:
    """Factor of the product B A of a module: alpha/rank, or with rslora alpha/√rank (Kalajdzievski 2023)."""
    alpha, rank = settings.number("lora_alpha", 8.0), rank or settings.integer("r", 8)
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise settings.error("alpha_pattern", "expected a table of modules with a number each")
    for pattern, value in patterns.items():
        # regular expressions in peft, but one of an untrusted file may take exponential time: only names are read
        name = pattern.removeprefix("^").removesuffix("$")
        if not re.fullmatch(r"[\w.]+", name):
            raise settings.error("alpha_pattern", "weft reads names of modules there, not expressions")
        if module == name or module.endswith(f".{name}"):
            alpha = Settings({name: value}, f"{settings.location}: alpha_pattern").number(name)
    return alpha / (rank**0.5 if settings.flag("use_rslora", False) else rank)


def _join(
    parts: Mapping[TensorPart, Mapping[str, Tensor]], linear: Linear, lora: LoRA, *, settings: Settings
) -> tuple[Tensor, Tensor]:
    """A and B of one of our layers, from those of the parts of it that have an adapter."""
    width, like = linear.in_features, next(iter(parts.values()))["A"]
    a, b = like.new_zeros(len(linear.heights) * lora.rank, width), like.new_zeros(linear.out_features, lora.rank)
    start = 0
    for number, height in enumerate(linear.heights):
        for part, pair in parts.items():
            if not part.start <= start < part.stop:
                continue
            rank, up = len(pair["A"]), pair["B"]
            if len(up) != part.stop - part.start or pair["A"].shape[1] != width:
                shapes = [list(pair[kind].shape) for kind in "AB"]
                raise InteropError(f"{settings.location}: '{part.name}' {list(part.shape)} has an adapter of {shapes}")
            factor = _scale(settings, part.name.removesuffix(".weight"), rank) / (lora.alpha / lora.rank)
            up = part.layout.to_ours(up) if _keeps_rows(part) else up
            rows = up[start - part.start : start - part.start + height]
            a[number * lora.rank : number * lora.rank + rank] = pair["A"]
            b[start : start + height, :rank] = rows if abs(factor - 1) < 1e-9 else rows * factor
        start += height
    return a, b


def _keeps_rows(part: TensorPart) -> bool:
    """Return whether rows stay rows in the layout; the adapter of a transposed matrix is not transposed."""
    return part.layout.shape((part.stop - part.start, 3)) == (part.stop - part.start, 3)


def _shorten(names: list[str], every: Iterable[str], short: Callable[[str], str]) -> list[str]:
    """Shorten the names unless the short form also matches others of `every`."""
    others = {short(name) for name in every if name not in names}
    return list(dict.fromkeys(name if short(name) in others else short(name) for name in names))


def _read_head(
    table: Conversions, base: ModelBundle, saved: Mapping[str, Tensor], *, location: str
) -> dict[str, Tensor]:
    """Head that was trained with the adapter; tensors that were not saved are the base's."""
    original = to_theirs(table, base.weights)
    head = {name: parts for name, parts in table.items() if name.startswith("output.")}
    shapes = their_shapes(head) | {name: tuple(tensor.shape) for name, tensor in saved.items()}
    lazy = to_ours(head, shapes, lambda n: saved[n] if n in saved else original[n](), location=location)
    return {name: read() for name, read in lazy.items()}


def _conversions(base: ModelBundle) -> Conversions:
    family = hf.choose(base)
    assert isinstance(base.model, Transformer)
    return conversions(family.rules(base.model), base.model)


def _linears(base: ModelBundle) -> dict[str, Linear]:
    with empty_weights():
        return block_linears(build(base.model))


def write(folder: Path, base: ModelBundle, adapter: Adapter, *, base_name: str) -> int:
    """Write an adapter of the model `base` to an empty folder for `peft`; return its number of parameters.

    An adapter that was imported from such a folder and has the same sizes gets back its names, dtypes and settings.
    """
    table, linears, scale = _conversions(base), _linears(base), adapter.settings.alpha / adapter.settings.rank
    low_rank: dict[str, tuple[Tensor, Tensor]] = {}
    head: dict[str, Tensor] = {}
    for name, a in adapter.weights.items():
        if name.endswith(".a") and name.removesuffix(".a") in linears:
            layer = name.removesuffix(".a")
            pair = a, adapter.weights[f"{layer}.b"]
            low_rank |= _split(table[f"{layer}.weight"], linears[layer].heights, pair)
        elif name.startswith("output."):
            head |= {part.name: part.of(a) for part in table[name]}
    heads = _module_names(head)
    tensors = {f"{PREFIX}{name}": tensor for name, tensor in head.items()}
    for name, (a, b) in low_rank.items():
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    lazy: LazyWeights = {name: partial(Tensor.contiguous, tensor) for name, tensor in tensors.items()}
    notes = adapter.notes.get("peft", {})
    ranks = {name: len(a) for name, (a, _) in low_rank.items()}
    count = sum(tensor.numel() for tensor in tensors.values())
    if notes.get("headers") and _is_unchanged(notes, tensors, ranks, scale=scale):
        write_with_header(folder / WEIGHTS, next(iter(notes["headers"].values())), lazy)
        (folder / CONFIG).write_bytes(adapter.files[CONFIG])
        return count
    write_tensors(folder / WEIGHTS, lazy)
    usual = max(ranks.values(), key=lambda rank: list(ranks.values()).count(rank))
    other = {name: rank for name, rank in ranks.items() if rank != usual}
    names = [part.name.removesuffix(".weight") for parts in table.values() for part in parts]
    transposed = any(not _keeps_rows(part) for parts in table.values() for part in parts if part.name[:-7] in low_rank)
    kind = base.model.head.kind  # type: ignore[union-attr]
    task = "SEQ_2_SEQ_LM" if isinstance(base.model, EncoderDecoder) else TASKS.get(kind, "FEATURE_EXTRACTION")
    tree: Tree = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": usual,
        "lora_alpha": scale * usual,
        "lora_dropout": adapter.settings.dropout,
        "target_modules": _shorten(list(low_rank), names, lambda name: name.rpartition(".")[2]),
        "rank_pattern": other,
        "alpha_pattern": {name: scale * rank for name, rank in other.items()},
        "modules_to_save": heads or None,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "use_rslora": False,
        "use_dora": False,
    }
    (folder / CONFIG).write_bytes(json_bytes(tree))
    return count


def _split(
    parts: Iterable[TensorPart], heights: list[int], pair: tuple[Tensor, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each part of a layer; parts without an adapter, or whose adapter is zero, are omitted."""
    downs, ups = pair[0].chunk(len(heights)), pair[1].split(heights)
    begins = [sum(heights[:number]) for number in range(len(heights))]
    adapters: dict[str, tuple[Tensor, Tensor]] = {}
    for part in parts:
        pairs = [(d, u) for begin, d, u in zip(begins, downs, ups, strict=True) if part.start <= begin < part.stop]
        if all(torch.equal(down, pairs[0][0]) for down, _ in pairs):
            down, up = pairs[0][0], torch.cat([up for _, up in pairs])
        else:
            down, up = torch.cat([down for down, _ in pairs]), torch.block_diag(*(up for _, up in pairs))
        used = down.any(dim=1) | up.any(dim=0)
        if used.any():
            rows = part.layout.to_theirs(up[:, used]) if _keeps_rows(part) else up[:, used]
            adapters[part.name.removesuffix(".weight")] = down[used], rows
    return adapters


def _is_unchanged(notes: Tree, tensors: Mapping[str, Tensor], ranks: Mapping[str, int], *, scale: float) -> bool:
    """Return whether tensors have the names, dtypes, shapes and scales of the imported adapter."""
    infos = parse_header(next(iter(notes["headers"].values())).encode()).tensors
    stored = {name: (info.dtype, info.shape) for name, info in infos.items()}
    same = stored == {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    scales = [_scale(Settings(notes["config"], CONFIG), name, rank) for name, rank in ranks.items()]
    return same and all(abs(module_scale - scale) < 1e-9 * scale for module_scale in scales)


def _module_names(head: Iterable[str]) -> list[str]:
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in head))
    for name in modules:
        if not name or any(other.startswith(f"{name}.") for other in modules):
            what = f"a parameter of '{name or 'the model'}'"
            raise InteropError(f"the head trained {what}, but PEFT saves whole modules; use --to hf")
    return modules
